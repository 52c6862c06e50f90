//! The limits that a backend sets on regions.

use crate::bytes::alignment::Alignment;
use crate::bytes::byte_count::ByteCount;

/// The limits of an allocator, a registrar or a disk. Planning reads them once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The alignment of the beginning of every region.
    pub alignment: Alignment,
    /// The length of every region is rounded up to a multiple of this.
    pub granule: Alignment,
    /// The largest possible region. `None` if there is no such limit.
    pub largest_region: Option<ByteCount>,
}

impl Limits {
    /// No limits.
    pub const NONE: Self =
        Self { alignment: Alignment::BYTE, granule: Alignment::BYTE, largest_region: None };

    /// The limits that satisfy both sides.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            alignment: self.alignment.max(other.alignment),
            granule: self.granule.max(other.granule),
            largest_region: match (self.largest_region, other.largest_region) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stricter_of_each() {
        let disk = Limits { alignment: Alignment::PAGE, ..Limits::NONE };
        let driver = Limits {
            alignment: Alignment::SECTOR,
            granule: Alignment::HUGE_PAGE,
            largest_region: Some(ByteCount::gib(64)),
        };
        let both = disk.and(driver);
        assert_eq!(both, driver.and(disk));
        assert_eq!(both.alignment, Alignment::PAGE);
        assert_eq!(both.granule, Alignment::HUGE_PAGE);
        assert_eq!(both.largest_region, Some(ByteCount::gib(64)));
        assert_eq!(both.and(Limits::NONE), both);
    }
}
