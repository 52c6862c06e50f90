//! Checksums of the blocks of a transfer.

pub(crate) mod block_sums;
pub(crate) mod check;
pub(crate) mod crc;
pub(crate) mod host_memory;

use std::sync::Arc;

/// The use of the checksums of a transfer's blocks.
///
/// A block's checksum is the CRC-64/NVME of its bytes in canonical order
/// ([`Geometry::canonical_spans`](terrane_layout::Geometry::canonical_spans)). It does not depend
/// on the layout, so it is the same in every tier. If a transfer copies [some
/// tokens](crate::Transfer::tokens), the checksum is that of their bytes.
///
/// Checksums are in the order of the destination blocks, as they were given to
/// [`Transfer::blocks`](crate::Transfer::blocks).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Checksums {
    /// Compute the checksums for the report ([`Report::checksums`](crate::Report::checksums)).
    Compute,
    /// Compute the checksums, and fail with
    /// [`TransferError::ChecksumMismatch`](crate::TransferError::ChecksumMismatch) unless they
    /// equal these.
    Verify(Arc<[u64]>),
}

/// A block whose bytes have another checksum than the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumDifference {
    /// The block that was read.
    pub source_block: u32,
    /// The block that was written.
    pub destination_block: u32,
    /// The expected checksum.
    pub expected: u64,
    /// The checksum of the bytes.
    pub found: u64,
}

/// The engine ended the job without the checksums that it had promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the engine computed {found} of {wanted} checksums; correct its implementation of \
     CopyEngine::computes_checksums"
)]
pub(crate) struct ChecksumsMissing {
    pub(crate) found: usize,
    pub(crate) wanted: usize,
}
