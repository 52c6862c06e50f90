//! Checksums of the blocks of a transfer.

pub(crate) mod block_sums;
pub(crate) mod host_memory;

use std::ops::Range;
use std::sync::Arc;

use crate::error::TransferError;
use crate::plan::TransferPlan;
use crate::side::Side;

/// What a transfer does with the checksums of its blocks.
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
    /// Compute them for the report ([`Report::checksums`](crate::Report::checksums)).
    Compute,
    /// Compute them, and fail with
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

/// Checks that checksums can be computed for a transfer: it copies whole blocks, or some tokens of
/// them.
pub(crate) fn check(checksums: &Checksums, plan: &TransferPlan) -> Result<(), TransferError> {
    let blocks = plan.destination_blocks().len();
    match checksums {
        Checksums::Verify(sums) if sums.len() != blocks => {
            return Err(TransferError::UnequalChecksumCounts { sums: sums.len(), blocks });
        }
        Checksums::Verify(_) | Checksums::Compute => {}
    }
    for side in [Side::Source, Side::Destination] {
        let geometry = plan.end(side).layout().geometry();
        if layers(plan, side) != (0..geometry.num_layers()) {
            return Err(TransferError::ChecksumOfPart { part: "layers" });
        }
        let mut stated = geometry.sections().iter().filter_map(|section| section.shape().heads);
        if !plan.has_all_heads() && stated.any(|heads| plan.heads(side) != (0..heads)) {
            return Err(TransferError::ChecksumOfPart { part: "heads" });
        }
    }
    Ok(())
}

/// The copied layers, by their numbers at one end.
pub(crate) fn layers(plan: &TransferPlan, side: Side) -> Range<u32> {
    let layers = plan.layers();
    match side {
        Side::Source => layers,
        Side::Destination => {
            let first = plan.destination_first_layer();
            first..first + (layers.end - layers.start)
        }
    }
}
