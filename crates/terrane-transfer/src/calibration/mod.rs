//! The cost of each copy path of a device, as data: built in, saved and loaded.
//!
//! The device's engine measures the costs, and chooses its path by them.

mod error;
mod file;
mod path;

use std::path::Path;
use std::time::Duration;

pub use error::CalibrationError;
pub use path::{CopyPath, Direction};

/// The cost of a path: `fixed + pieces · per_piece_ns + bytes / bytes_per_second`.
///
/// A piece is the unit that the path handles: a run for driver copies, a cell for a kernel, or a
/// stretch of the packed end for the staged path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathCost {
    /// The fixed cost of a transfer of any size.
    pub fixed: Duration,
    /// The cost of each piece besides its bytes, in nanoseconds. It is often a small fraction of a
    /// nanosecond.
    pub per_piece_ns: f64,
    /// The same if pieces have fewer than 32 KiB on average.
    pub per_short_piece_ns: f64,
    /// The rate of the bytes.
    pub bytes_per_second: f64,
}

/// Pieces are short if they have fewer bytes on average.
const SHORT: u64 = 32 << 10;

impl PathCost {
    /// The predicted duration of a transfer, in seconds.
    #[must_use]
    #[inline]
    pub fn predict(&self, bytes: u64, pieces: u64) -> f64 {
        let is_short = bytes < SHORT.saturating_mul(pieces);
        let per_piece = if is_short { self.per_short_piece_ns } else { self.per_piece_ns };
        self.fixed.as_secs_f64()
            + per_piece * 1e-9 * pieces as f64
            + bytes as f64 / self.bytes_per_second
    }
}

/// The costs of the paths on a device, by direction.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    device: String,
    driver: String,
    costs: [[Option<PathCost>; CopyPath::ALL.len()]; Direction::ALL.len()],
}

impl Calibration {
    /// The figures of an H200 on PCIe 5, driver 580 (CUDA 13.0). Their proportions apply to every
    /// device whose copy engines and multiprocessors fill the wire. Without a measurement they are
    /// the best available figures.
    #[must_use]
    pub fn built_in() -> Self {
        use CopyPath::{Batched, Contiguous, CopyEach, Direct, Peer, Relayout, Staged};
        use Direction::{FromPeer, ToDevice, ToHost, ToPeer, WithinDevice};
        let (device, driver) = ("NVIDIA H200".to_owned(), "13.0".to_owned());
        let costs = [[None; CopyPath::ALL.len()]; Direction::ALL.len()];
        let mut built_in = Self { device, driver, costs };
        // Nanoseconds: fixed, per piece, per short piece; then gigabytes per second.
        let figures: [(Direction, CopyPath, [f64; 4]); 22] = [
            (ToDevice, Contiguous, [6e3, 2.1e3, 2.1e3, 55.0]),
            (ToDevice, CopyEach, [6e3, 2.1e3, 2.4e3, 55.0]),
            (ToDevice, Batched, [9e3, 0.4e3, 2.4e3, 55.0]),
            (ToDevice, Direct, [9e3, 1.0, 3.5, 51.0]),
            (ToDevice, Staged, [24e3, 0.4e3, 2.4e3, 54.6]),
            (ToHost, Contiguous, [6e3, 2.1e3, 2.1e3, 55.3]),
            (ToHost, CopyEach, [6e3, 2.1e3, 2.2e3, 55.3]),
            (ToHost, Batched, [9e3, 0.35e3, 0.35e3, 55.3]),
            (ToHost, Direct, [9e3, 1.0, 3.5, 52.0]),
            (ToHost, Staged, [24e3, 0.35e3, 0.35e3, 54.9]),
            (WithinDevice, Contiguous, [5e3, 2.0e3, 2.0e3, 2100.0]),
            (WithinDevice, CopyEach, [5e3, 2.0e3, 2.0e3, 2100.0]),
            (WithinDevice, Batched, [9e3, 0.5e3, 0.5e3, 1500.0]),
            (WithinDevice, Relayout, [5e3, 0.05, 0.05, 1950.0]),
            (ToPeer, Contiguous, [10e3, 3.0e3, 3.0e3, 390.0]),
            (ToPeer, CopyEach, [10e3, 3.0e3, 3.0e3, 390.0]),
            (ToPeer, Batched, [12e3, 1.0e3, 1.0e3, 390.0]),
            (ToPeer, Peer, [9e3, 0.05, 0.1, 350.0]),
            (FromPeer, Contiguous, [10e3, 3.0e3, 3.0e3, 390.0]),
            (FromPeer, CopyEach, [10e3, 3.0e3, 3.0e3, 390.0]),
            (FromPeer, Batched, [12e3, 1.0e3, 1.0e3, 390.0]),
            (FromPeer, Peer, [9e3, 0.05, 0.1, 366.0]),
        ];
        for (direction, path, [fixed, piece, short, rate]) in figures {
            built_in.set(
                direction,
                path,
                PathCost {
                    fixed: Duration::try_from_secs_f64(fixed * 1e-9).unwrap_or_default(),
                    per_piece_ns: piece,
                    per_short_piece_ns: short,
                    bytes_per_second: rate * 1e9,
                },
            );
        }
        built_in
    }

    /// Returns these costs, labelled with a device model, and with the CUDA version of its driver.
    #[must_use]
    pub fn of_device(self, device: impl Into<String>, driver: impl Into<String>) -> Self {
        Self { device: device.into(), driver: driver.into(), ..self }
    }

    /// Reads a calibration that was [saved](Self::save) on a device of this model. Paths that the
    /// file does not name keep the built-in costs.
    ///
    /// # Errors
    ///
    /// [`CalibrationError::File`] if it cannot be read or is invalid,
    /// [`CalibrationError::AnotherDevice`] if it was measured on another model.
    pub fn load(file: &Path, device: &str) -> Result<Self, CalibrationError> {
        let loaded = file::read(file)?;
        if loaded.device == device {
            return Ok(loaded);
        }
        Err(CalibrationError::AnotherDevice {
            path: file.to_owned(),
            measured_on: loaded.device,
            device: device.to_owned(),
        })
    }

    /// Writes the calibration to a file, as JSON. The previous contents of the file are replaced as
    /// a whole.
    ///
    /// # Errors
    ///
    /// [`CalibrationError::File`] if the file cannot be written.
    pub fn save(&self, file: &Path) -> Result<(), CalibrationError> {
        file::write(self, file)
    }

    /// The device model that it was measured on.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The CUDA version that the driver supported at that time.
    #[must_use]
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// The cost of a path; `None` if it does not serve the direction.
    #[must_use]
    #[inline]
    pub fn cost(&self, direction: Direction, path: CopyPath) -> Option<&PathCost> {
        self.costs[direction.index()][path.index()].as_ref()
    }

    /// Sets the cost of a path in a direction.
    pub fn set(&mut self, direction: Direction, path: CopyPath, cost: PathCost) {
        self.costs[direction.index()][path.index()] = Some(cost);
    }
}

impl Default for Calibration {
    fn default() -> Self {
        Self::built_in()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predictions_equal_measured_times() {
        let built_in = Calibration::built_in();
        let micros = |direction, path, bytes, pieces| {
            built_in.cost(direction, path).unwrap().predict(bytes, pieces) * 1e6
        };
        // A block of 94 layers with K and V of 4 KiB: 20 µs as one piece, 24 by the kernel, 32
        // staged, and 190 with a copy per piece.
        let block = 94 * 2 * 4096;
        let near = |found: f64, measured: f64| (0.8..1.25).contains(&(found / measured));
        assert!(near(micros(Direction::ToHost, CopyPath::Contiguous, block, 1), 20.0));
        assert!(near(micros(Direction::ToHost, CopyPath::Direct, block, 188), 24.0));
        assert!(near(micros(Direction::ToHost, CopyPath::Staged, block, 1), 36.0));
        assert!(near(micros(Direction::ToHost, CopyPath::CopyEach, block, 94), 230.0));
    }

    #[test]
    fn a_calibration_is_loaded_only_for_its_own_device_model() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("calibration.json");
        let measured = Calibration::built_in().of_device("this model", "13.1");
        measured.save(&path).unwrap();
        assert_eq!(Calibration::load(&path, "this model").unwrap(), measured);
        let error = Calibration::load(&path, "that model").unwrap_err();
        assert!(matches!(error, CalibrationError::AnotherDevice { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("this model") && text.contains("that model"), "{text}");
    }
}
