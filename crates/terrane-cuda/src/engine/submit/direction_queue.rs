//! The jobs and the buffers of one direction.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use terrane_core::sync::lock;

use crate::engine::complete::progress::JobProgress;
use crate::engine::resources::scratch::{Scratch, ScratchPool};
use crate::runtime::event::Event;

/// The jobs and buffers of one direction, shared by its submit thread and the threads that enqueue
/// jobs.
#[derive(Debug)]
pub(crate) struct DirectionQueue {
    pub(crate) scratch: Mutex<ScratchPool>,
    /// Jobs that are enqueued, and are not completely submitted.
    jobs: AtomicUsize,
    /// The count of jobs in all directions of the engine.
    engine_jobs: Arc<AtomicUsize>,
}

impl DirectionQueue {
    pub(crate) fn new(engine_jobs: &Arc<AtomicUsize>) -> Arc<Self> {
        Arc::new(Self {
            scratch: Mutex::default(),
            jobs: AtomicUsize::new(0),
            engine_jobs: Arc::clone(engine_jobs),
        })
    }

    /// Adds a job to the count. Returns whether it is the only one of this direction.
    pub(crate) fn enter(self: &Arc<Self>) -> (QueueSlot, bool) {
        // Relaxed, here and below: the counts are hints.
        self.engine_jobs.fetch_add(1, Ordering::Relaxed);
        let is_only = self.jobs.fetch_add(1, Ordering::Relaxed) == 0;
        (QueueSlot(Arc::clone(self)), is_only)
    }

    /// Whether no direction has another job. Traffic in the other direction shares the wire.
    pub(crate) fn is_alone(&self) -> bool {
        self.engine_jobs.load(Ordering::Relaxed) <= 1
    }

    pub(crate) fn scratch(&self) -> MutexGuard<'_, ScratchPool> {
        lock(&self.scratch)
    }

    /// Takes back a buffer that the device uses until an event.
    pub(crate) fn lend(&self, mut scratch: Scratch, until: Event) {
        let former = scratch.in_use_until(until);
        self.scratch().lend(scratch);
        // An event drops without the lock.
        drop(former);
    }

    /// Takes back an unused buffer.
    pub(crate) fn give_back(&self, scratch: Scratch) {
        self.scratch().give_back(scratch);
    }
}

/// A job's entry in the count of a direction's jobs. Dropping it removes the entry.
#[derive(Debug)]
pub(crate) struct QueueSlot(Arc<DirectionQueue>);

impl Drop for QueueSlot {
    fn drop(&mut self) {
        self.0.jobs.fetch_sub(1, Ordering::Relaxed);
        self.0.engine_jobs.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A chunk of a job that is on a stream.
pub(crate) struct SubmittedChunk {
    pub(crate) event: Event,
    pub(crate) bytes: u64,
    /// Counts the bytes; `None` for a job that is submitted at once.
    pub(crate) count: Option<Arc<JobProgress>>,
}
