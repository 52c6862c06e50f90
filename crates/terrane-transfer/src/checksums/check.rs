//! Checks of transfers with checksums.

use super::Checksums;
use crate::error::TransferError;
use crate::plan::TransferPlan;
use crate::side::Side;

/// Checks that checksums can be computed for a transfer: it must copy whole blocks, or some tokens
/// of them.
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
        if plan.layers_of(side) != (0..geometry.num_layers()) {
            return Err(TransferError::ChecksumOfPart { part: "layers" });
        }
        let mut stated = geometry.sections().iter().filter_map(|section| section.shape().heads);
        if !plan.has_all_heads() && stated.any(|heads| plan.heads(side) != (0..heads)) {
            return Err(TransferError::ChecksumOfPart { part: "heads" });
        }
    }
    Ok(())
}
