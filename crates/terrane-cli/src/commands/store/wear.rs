//! The bytes that a store writes per day, from two readings of its records.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_store::tools::list;

use crate::error::Failure;

/// The bytes of the blocks that were written between two readings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Watched {
    bytes: u64,
    seconds: f64,
}

const DAY: f64 = 86_400.0;

/// Reads the records twice. A block that was written and removed in between does not count, so the
/// result is a lower bound.
pub(super) fn watch(directory: &Path, name: &str, time: Duration) -> Result<Watched, Failure> {
    let begun = Instant::now();
    let before = list(directory, name)?.as_of;
    thread::sleep(time);
    let after = list(directory, name)?;
    let new = after.blocks.iter().filter(|block| block.sequence > before);
    let bytes = new.fold(0_u64, |sum, block| sum.saturating_add(block.length));
    Ok(Watched { bytes, seconds: begun.elapsed().as_secs_f64() })
}

impl Watched {
    pub(super) fn bytes_a_day(&self) -> f64 {
        self.bytes as f64 / self.seconds * DAY
    }

    /// The years until the drive's endurance is used up; `None` if nothing was written.
    pub(super) fn years(&self, drive: ByteCount) -> Option<f64> {
        (self.bytes > 0).then(|| drive.get() as f64 / self.bytes_a_day() / 365.25)
    }
}

impl std::fmt::Display for Watched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = ByteCount::new(self.bytes);
        let day = self.bytes_a_day() / 1e9;
        write!(f, "written in {:.1} s: {bytes}, which are {day:.2} GB a day", self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_lasts_as_long_as_its_bytes() {
        // 1 GB in 1 s is 86.4 TB a day, so 600 TB last a week.
        let watched = Watched { bytes: 1_000_000_000, seconds: 1.0 };
        let years = watched.years(ByteCount::new(600_000_000_000_000)).unwrap();
        assert!((years * 365.25 - 6.944).abs() < 0.001, "{years}");
        assert_eq!(Watched { bytes: 0, seconds: 1.0 }.years(ByteCount::gib(1)), None);
    }
}
