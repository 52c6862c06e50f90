//! Resources of failed jobs, kept while the driver does not say whether the device still uses them.

use std::mem::{self, ManuallyDrop};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use terrane_core::sync::lock;
use terrane_transfer::Orphaned;

use crate::engine::checksums::job_sums::JobSums;
use crate::engine::resources::block_lists::BlockLists;
use crate::engine::resources::device_mapping::MappedEnds;
use crate::engine::resources::job_streams::{JobStreams, StreamState};
use crate::engine::resources::scratch::Scratch;
use crate::engine::submit::direction_queue::DirectionQueue;
use crate::kernels::Kernels;

/// All resources of an orphaned job that the device may still use.
pub(crate) struct Orphan {
    pub(crate) streams: JobStreams,
    /// The buffer, with the direction that it returns to.
    pub(crate) scratch: Option<(Scratch, Arc<DirectionQueue>)>,
    pub(crate) lists: Option<BlockLists>,
    pub(crate) sums: Option<Box<JobSums>>,
    /// The memory at both ends, and the claims on its blocks.
    pub(crate) orphaned: Orphaned,
    pub(crate) ends: MappedEnds,
    pub(crate) kernels: Option<Kernels>,
}

impl Orphan {
    /// Releases the resources, once the device uses none of them.
    fn release(self) {
        let Self { streams, scratch, lists, sums, orphaned, ends, kernels } = self;
        drop((streams, lists, sums));
        if let Some((scratch, queue)) = scratch {
            queue.give_back(scratch);
        }
        drop((orphaned, ends, kernels));
    }
}

/// The orphaned jobs of an engine, which are checked from time to time.
#[derive(Default)]
pub(crate) struct Orphans {
    all: Mutex<Vec<Orphan>>,
    /// Their number, for callers that only check whether there are any.
    count: AtomicUsize,
}

impl Orphans {
    pub(crate) fn keep(&self, orphan: Orphan) {
        self.count.fetch_add(1, Ordering::Relaxed);
        lock(&self.all).push(orphan);
    }

    /// Releases the jobs whose streams are idle by now.
    pub(crate) fn check_again(&self) {
        // Relaxed: a job that is added just now is checked the next time.
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        // Queried without the lock, because the drops run foreign code.
        let all = mem::take(&mut *lock(&self.all));
        for mut orphan in all {
            self.count.fetch_sub(1, Ordering::Relaxed);
            match orphan.streams.state() {
                // Foreign code may panic here. The others must not drop, because that waits for
                // their work.
                StreamState::Idle => drop(catch_unwind(AssertUnwindSafe(|| orphan.release()))),
                StreamState::Busy | StreamState::Unknown(_) => self.keep(orphan),
            }
        }
    }
}

impl Drop for Orphans {
    fn drop(&mut self) {
        self.check_again();
        // The device may still write to this memory, so it is never freed.
        let all = mem::take(&mut *lock(&self.all));
        let _leaked = ManuallyDrop::new(all);
    }
}
