//! Errors of calibration files.

use std::path::PathBuf;
use std::sync::Arc;

/// Why a calibration cannot be loaded or saved.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// The file could not be read or written, or its content is invalid.
    #[error("the calibration {} cannot be read or written; see the cause", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The calibration was measured on a different device model.
    #[error(
        "the calibration {} was measured on {measured_on}, but the device is {device}; measure it \
         again",
        .path.display()
    )]
    AnotherDevice {
        /// The file.
        path: PathBuf,
        /// The device model that it was measured on.
        measured_on: String,
        /// The model of the device.
        device: String,
    },
}
