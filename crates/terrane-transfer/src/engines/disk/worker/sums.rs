//! Checksums of the blocks of jobs, computed while requests are in flight.

use std::collections::VecDeque;
use std::ops::Range;

use terrane_core::convert::{to_u64, to_usize};

use super::super::extents::RunPart;
use super::super::request::{NotForFiles, engine_failure};
use super::super::route::{DiskRoute, FileFlow};
use super::DiskWorker;
use super::buffer_sums::BufferSums;
use crate::checksums::host_memory::block_sum;
use crate::engine::job::CopyJob;
use crate::plan::TransferPlan;
use crate::side::Side;

/// The remaining checksums of a job.
pub(super) enum JobSums {
    /// From the blocks in memory.
    OfMemory(MemorySums),
    /// From the bounce buffers, which contain the bytes in canonical order.
    OfBuffers(BufferSums),
}

/// The checksums of blocks in memory.
pub(super) struct MemorySums {
    /// The end that is in memory.
    side: Side,
    /// Pairs of blocks whose bytes are all in memory.
    ready: VecDeque<Range<usize>>,
    /// The bytes of each pair that have not been read; empty if bytes are not counted per pair.
    left: Vec<u64>,
    /// The number of remaining checksums.
    remaining: usize,
}

impl JobSums {
    pub(super) fn of(job: &CopyJob, route: &DiskRoute) -> Option<Self> {
        if job.checksums() == 0 {
            return None;
        }
        let of_buffers = BufferSums::of(job, route).map(Self::OfBuffers);
        Some(of_buffers.unwrap_or_else(|| Self::OfMemory(MemorySums::of(job, route.flow))))
    }

    /// The remaining checksums that are computed from memory.
    pub(super) fn left_in_memory(&mut self) -> Option<&mut MemorySums> {
        match self {
            Self::OfMemory(sums) => (sums.remaining > 0).then_some(sums),
            Self::OfBuffers(_) => None,
        }
    }

    pub(super) fn of_buffers(&mut self) -> Option<&mut BufferSums> {
        match self {
            Self::OfBuffers(sums) => Some(sums),
            Self::OfMemory(_) => None,
        }
    }
}

impl MemorySums {
    fn of(job: &CopyJob, flow: FileFlow) -> Self {
        let pairs = job.checksums();
        let mut sums =
            Self { side: Side::Source, ready: VecDeque::new(), left: Vec::new(), remaining: pairs };
        if flow == FileFlow::Write {
            sums.ready.push_back(0..pairs);
        } else {
            sums.side = Side::Destination;
            // Broken-up pieces have too many runs to count each.
            if !job.plan().breaks_pieces() {
                sums.left = vec![job.plan().bytes().get() / to_u64(pairs); pairs];
            }
        }
        sums
    }

    /// Records that the bytes of a part have been read.
    pub(super) fn arrived(&mut self, plan: &TransferPlan, part: &RunPart) {
        if self.left.is_empty() {
            return;
        }
        let bytes = part.offset..part.offset + part.bytes;
        plan.pairs_of(part.run, bytes, &mut |pair, bytes| {
            let pair = to_usize(pair.into());
            if let Some(left) = self.left.get_mut(pair) {
                *left -= bytes;
                if *left == 0 {
                    self.ready.push_back(pair..pair + 1);
                }
            }
        });
    }

    /// Records that all bytes have been copied.
    pub(super) fn all_arrived(&mut self) {
        if self.side == Side::Destination && self.left.is_empty() && self.ready.is_empty() {
            self.ready.push_back(0..self.remaining);
        }
    }

    /// The next pair whose bytes are in memory.
    fn next(&mut self) -> Option<usize> {
        let first = self.ready.front_mut()?;
        let pair = first.next()?;
        if first.start == first.end {
            self.ready.pop_front();
        }
        self.remaining -= 1;
        Some(pair)
    }
}

impl DiskWorker {
    /// Computes the checksum of one block, of one job after the other. Returns whether there was
    /// one.
    pub(super) fn sum_one_block(&mut self) -> bool {
        for _ in 0..self.summing.len() {
            let Some(key) = self.summing.pop_front() else { return false };
            let Some(active) = self.jobs.get_mut(key) else { continue };
            let sums = active.sums.as_mut().filter(|_| active.failure.is_none());
            let Some(sums) = sums.and_then(JobSums::left_in_memory) else { continue };
            let (side, pair) = (sums.side, sums.next());
            if sums.remaining > 0 {
                self.summing.push_back(key);
            }
            let Some(pair) = pair else { continue };
            // SAFETY: the job keeps both ends alive, and its claims exclude other writers. Its own
            // requests do not write this block: it is the source, or all of it has been read.
            match unsafe { block_sum(active.job.plan(), side, pair) } {
                Some(sum) => active.job.set_checksum(pair, sum),
                None => self.fail(key, engine_failure(NotForFiles)),
            }
            self.finish_if_done(key);
            return true;
        }
        false
    }
}
