//! The checksums of a transfer, computed from those of its chunks.

use std::ops::Range;

use terrane_core::convert::to_u64;

use crate::checksums::crc::combine;
use crate::engine::job::CopyJob;

/// The checksums of the layer groups of each pair of blocks. In canonical order, one group follows
/// the other: chunks are divided by layers only if all sections have layers.
pub(super) struct ChunkSums {
    /// The groups of the first pair, then those of the second pair, and so on.
    groups: Vec<Option<GroupSum>>,
    /// The number of groups of a pair.
    of_pair: usize,
}

#[derive(Clone, Copy)]
struct GroupSum {
    sum: u64,
    bytes: u64,
}

impl ChunkSums {
    pub(super) fn new(pairs: usize, groups: usize) -> Self {
        Self { groups: vec![None; pairs * groups], of_pair: groups.max(1) }
    }

    /// Adds the checksums of a chunk of `bytes` bytes: some pairs, and one group of their layers.
    pub(super) fn add(&mut self, pairs: Range<usize>, group: usize, sums: &[u64], bytes: u64) {
        let bytes = bytes.checked_div(to_u64(pairs.len())).unwrap_or(0);
        for (pair, &sum) in pairs.zip(sums) {
            if let Some(slot) = self.groups.get_mut(pair * self.of_pair + group) {
                *slot = Some(GroupSum { sum, bytes });
            }
        }
    }

    /// Sets the checksums of the job. Its destinations are copied in this order.
    pub(super) fn report(&self, job: &CopyJob, destinations: &[u32]) {
        let join = |first: GroupSum, next: GroupSum| GroupSum {
            sum: combine(first.sum, next.sum, next.bytes),
            bytes: first.bytes + next.bytes,
        };
        for (groups, block) in self.groups.chunks(self.of_pair).zip(destinations) {
            // `None` if the checksums of a chunk are missing, which ends the job with an error.
            let all: Option<Vec<GroupSum>> = groups.iter().copied().collect();
            let sum = all.and_then(|all| all.into_iter().reduce(join));
            let pair = job.plan().destination_blocks().binary_search(block);
            if let (Some(sum), Ok(pair)) = (sum, pair) {
                job.set_checksum(pair, sum.sum);
            }
        }
    }
}
