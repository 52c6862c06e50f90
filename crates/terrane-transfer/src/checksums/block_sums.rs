//! The checksums of a job during their computation.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrane_core::convert::to_usize;

use super::{ChecksumDifference, Checksums, ChecksumsMissing};
use crate::error::TransferError;
use crate::plan::TransferPlan;

/// One checksum for each pair of blocks of a plan, in the order of the plan. Threads of an engine
/// set them in any order.
#[derive(Debug)]
pub(crate) struct BlockSums {
    found: Box<[BlockSum]>,
    /// The index of each block in the plan, in the order in which the caller named the blocks;
    /// `None` if the two orders are equal.
    order: Option<Box<[u32]>>,
    checksums: Checksums,
}

#[derive(Debug, Default)]
struct BlockSum {
    sum: AtomicU64,
    is_set: AtomicBool,
}

impl BlockSums {
    /// Creates the checksums of a plan, whose destinations the caller named in this order.
    pub(crate) fn new(checksums: Checksums, named: &[u32], plan: &TransferPlan) -> Self {
        let blocks = plan.destination_blocks();
        let index = |block: &u32| {
            let found = blocks.binary_search(block).unwrap_or(usize::MAX);
            u32::try_from(found).unwrap_or(u32::MAX)
        };
        let order = (named != blocks).then(|| named.iter().map(index).collect());
        let found = blocks.iter().map(|_| BlockSum::default()).collect();
        Self { found, order, checksums }
    }

    /// The number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.found.len()
    }

    /// Sets the checksum of a pair of blocks, by its index in the plan.
    pub(crate) fn set(&self, pair: usize, sum: u64) {
        if let Some(slot) = self.found.get(pair) {
            slot.sum.store(sum, Ordering::Relaxed);
            // The thread that ends the job loads it with `Acquire`.
            slot.is_set.store(true, Ordering::Release);
        }
    }

    /// The checksums in the order of the caller, once they have been verified.
    ///
    /// # Errors
    ///
    /// [`TransferError::ChecksumMismatch`], or an error of the `engine` that computed too few.
    pub(crate) fn end(
        &self,
        plan: &TransferPlan,
        engine: &'static str,
    ) -> Result<Box<[u64]>, TransferError> {
        let wanted = self.found.len();
        let is_set = |slot: &&BlockSum| slot.is_set.load(Ordering::Acquire);
        let found = self.found.iter().filter(is_set).count();
        if found < wanted {
            let source = Box::new(ChecksumsMissing { found, wanted });
            return Err(TransferError::Engine { engine, source });
        }
        let pair = |index: usize| match &self.order {
            Some(order) => order.get(index).map_or(usize::MAX, |&pair| to_usize(pair.into())),
            None => index,
        };
        let sum = |index: usize| {
            self.found.get(pair(index)).map_or(0, |slot| slot.sum.load(Ordering::Relaxed))
        };
        let sums: Box<[u64]> = (0..wanted).map(sum).collect();
        let Checksums::Verify(expected) = &self.checksums else { return Ok(sums) };
        let differs = |(index, (&found, &expected)): (usize, (&u64, &u64))| {
            let block = |blocks: &[u32]| blocks.get(pair(index)).copied().unwrap_or(u32::MAX);
            let source_block = block(plan.source_blocks());
            let destination_block = block(plan.destination_blocks());
            let difference =
                ChecksumDifference { source_block, destination_block, expected, found };
            (found != expected).then_some(difference)
        };
        let blocks: Vec<_> =
            sums.iter().zip(expected.iter()).enumerate().filter_map(differs).collect();
        if blocks.is_empty() { Ok(sums) } else { Err(TransferError::ChecksumMismatch { blocks }) }
    }
}
