//! Numbers of bytes and alignments.

pub(crate) mod alignment;
pub(crate) mod byte_count;
