//! The checksum itself, if this build has the feature `checksum`.

#[cfg(feature = "checksum")]
pub(crate) use terrane_core::checksum::{Crc64, Crc64Shift, combine, crc64};

/// Whether engines of this crate compute checksums. If not, they decline transfers that request
/// them.
pub(crate) const IS_COMPUTED: bool = cfg!(feature = "checksum");

#[cfg(not(feature = "checksum"))]
pub(crate) use absent::{Crc64, Crc64Shift, combine, crc64};

/// Never called, because all engines decline. These functions let every engine compile without the
/// feature.
#[cfg(not(feature = "checksum"))]
mod absent {
    pub(crate) struct Crc64;

    impl Crc64 {
        pub(crate) fn new() -> Self {
            Self
        }

        pub(crate) fn update(&mut self, _bytes: &[u8]) {}

        pub(crate) fn finish(&self) -> u64 {
            0
        }
    }

    pub(crate) struct Crc64Shift;

    impl Crc64Shift {
        pub(crate) fn of(_bytes: u64) -> Self {
            Self
        }

        pub(crate) fn apply(self, sum: u64) -> u64 {
            sum
        }
    }

    pub(crate) fn crc64(_bytes: &[u8]) -> u64 {
        0
    }

    pub(crate) fn combine(first: u64, _second: u64, _second_bytes: u64) -> u64 {
        first
    }
}
