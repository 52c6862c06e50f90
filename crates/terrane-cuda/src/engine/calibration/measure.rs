//! Measuring what paths cost.

use terrane_core::ByteCount;

use super::Calibration;
use crate::context::Context;
use crate::error::CudaError;

/// How a calibration is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CalibrationOptions {
    /// The memory of the device, and as much pinned memory, that is moved.
    pub bytes: ByteCount,
}

impl Default for CalibrationOptions {
    /// 128 MiB.
    fn default() -> Self {
        Self { bytes: ByteCount::mib(128) }
    }
}

pub(super) fn measure(
    _context: &Context,
    _options: &CalibrationOptions,
) -> Result<Calibration, CudaError> {
    Ok(Calibration::built_in())
}
