//! How blocks are packed and cut into chunks: pure arithmetic.

pub(crate) mod chunker;
pub(crate) mod packing;

/// A number as an index.
pub(crate) fn index(number: u32) -> usize {
    terrane_core::ByteCount::new(number.into()).to_usize()
}
