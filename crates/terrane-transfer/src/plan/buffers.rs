//! The lists of plans, which a planner reuses.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

use crossbeam_queue::ArrayQueue;
use terrane_core::OwnerProcess;

use super::block_sort::PairSorter;
use super::run::CopyRun;
use crate::side::Ends;
use crate::sync::{Mutex, lock};

/// The lists of a plan, reused by later plans.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// The blocks, as pairs in ascending order of the destination.
    pub(super) sources: Vec<u32>,
    pub(super) destinations: Vec<u32>,
    pub(super) sorter: PairSorter,
    /// Empty if no blocks can be joined: each pair is then one segment.
    pub(super) segments: Vec<Segment>,
    /// The runs, once the list is requested. Engines that compute addresses never request it.
    pub(super) listed_runs: OnceLock<Vec<CopyRun>>,
    /// The buffer for the list until then.
    pub(super) spare_runs: Mutex<Vec<CopyRun>>,
    /// The numbers of blocks in chunks, once they are requested.
    pub(super) chunked_blocks: OnceLock<Ends<Vec<u32>>>,
}

/// Consecutive blocks at both ends that are adjacent in memory at both ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) source: u32,
    pub(super) destination: u32,
    pub(super) blocks: u32,
    /// The index of the first block in the lists of blocks.
    pub(super) pair: u32,
}

/// The buffers of dropped plans. Boxed, because a plan is moved several times.
pub(super) type SpareBuffers = ArrayQueue<Box<Buffers>>;

/// The buffers of one plan, which return to the planner when this drops.
pub(super) struct PlanBuffers {
    buffers: ManuallyDrop<Box<Buffers>>,
    spare: Arc<SpareBuffers>,
    owner: OwnerProcess,
}

impl PlanBuffers {
    /// Takes spare buffers, or creates some.
    pub(super) fn take(spare: &Arc<SpareBuffers>, owner: OwnerProcess) -> Self {
        let buffers = ManuallyDrop::new(spare.pop().unwrap_or_default());
        Self { buffers, spare: Arc::clone(spare), owner }
    }
}

impl Deref for PlanBuffers {
    type Target = Buffers;

    fn deref(&self) -> &Buffers {
        &self.buffers
    }
}

impl DerefMut for PlanBuffers {
    fn deref_mut(&mut self) -> &mut Buffers {
        &mut self.buffers
    }
}

impl Drop for PlanBuffers {
    fn drop(&mut self) {
        // SAFETY: the field is not used after this.
        let mut buffers = unsafe { ManuallyDrop::take(&mut self.buffers) };
        // In a forked process, a thread of the parent may hold the list's lock.
        if self.owner.is_current() {
            buffers.clear();
            // If enough spare buffers are kept, these are freed.
            let _ = self.spare.push(buffers);
        }
    }
}

impl Buffers {
    fn clear(&mut self) {
        self.sources.clear();
        self.destinations.clear();
        self.segments.clear();
        if let Some(mut runs) = self.listed_runs.take() {
            runs.clear();
            *lock(&self.spare_runs) = runs;
        }
        self.chunked_blocks.take();
    }
}
