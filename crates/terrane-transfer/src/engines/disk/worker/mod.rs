//! The thread that drives the queue.

pub(super) mod buffer_sums;
mod requests;
mod sums;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Receiver, TryRecvError};
use slab::Slab;
use terrane_core::convert::to_usize;
use terrane_core::{ByteCount, FileHandle};
use terrane_storage::{IoBuffer, IoCompletion, IoQueue, StorageError};

use super::bounce::{BounceBuffer, BounceBuffers};
use super::extents::{Extents, RunPart};
use super::options::DiskEngineOptions;
use super::rates::DiskRates;
use super::request::{BufferDirection, QueueFailed, describe, engine_failure, files_to_sync};
use super::route::{DiskRoute, FileFlow, REQUESTS};
use crate::engine::job::{CopyFailure, CopyJob};
use crate::hazard::notify::catch_foreign_panic;
use buffer_sums::copy_and_sum;
use sums::JobSums;
use terrane_core::Durability;

/// The thread's state.
///
/// The queue is the first field, so it drops first. It waits for requests in flight before the jobs
/// and the buffers release their memory.
pub(super) struct DiskWorker {
    queue: IoQueue,
    jobs: Slab<JobState>,
    /// The jobs with remaining requests, in turn.
    turns: VecDeque<usize>,
    /// The jobs with remaining checksums, in turn.
    summing: VecDeque<usize>,
    operations: Slab<Operation>,
    /// Operations between files whose bytes have been read, and must be written.
    to_write: VecDeque<usize>,
    /// Jobs that make a file durable once the queue has room.
    to_finish: VecDeque<usize>,
    bounce: BounceBuffers,
    request_bytes: u64,
    rates: Arc<DiskRates>,
    inbox: Receiver<CopyJob>,
    /// Reused for every request.
    buffers: Vec<IoBuffer>,
    spare_parts: Vec<Vec<RunPart>>,
}

/// A job in progress.
struct JobState {
    job: CopyJob,
    route: DiskRoute,
    extents: Extents,
    operations: usize,
    failure: Option<CopyFailure>,
    /// The files to make durable after the last write.
    to_sync: Vec<(FileHandle, Durability)>,
    /// The checksums to compute.
    sums: Option<JobSums>,
}

impl JobState {
    fn has_extents_left(&self) -> bool {
        !self.extents.is_empty(self.job.plan())
    }
}

/// The requests for the parts of one extent: one request, or a read and one or more writes.
struct Operation {
    job: usize,
    parts: Vec<RunPart>,
    buffer: Option<BounceBuffer>,
    stage: Stage,
}

enum Stage {
    Reading,
    /// `next` is the first part without a write request.
    Writing {
        next: usize,
        requests: usize,
    },
    Syncing,
}

/// The result of an attempt to make a request.
enum RequestOutcome {
    /// A request was made, and others remain. `copied`: bytes were copied into a buffer for it.
    Made { copied: bool },
    /// All extents have been requested.
    NothingLeft,
    /// All bounce buffers are in use. A completion changes that.
    Blocked,
}

impl DiskWorker {
    pub(super) fn new(
        queue: IoQueue,
        inbox: Receiver<CopyJob>,
        options: &DiskEngineOptions,
        rates: Arc<DiskRates>,
    ) -> Self {
        let request_bytes = options.request.max(ByteCount::new(REQUESTS.get()));
        let request = request_bytes.align_up(REQUESTS).unwrap_or(request_bytes);
        Self {
            jobs: Slab::new(),
            turns: VecDeque::new(),
            summing: VecDeque::new(),
            operations: Slab::new(),
            to_write: VecDeque::new(),
            to_finish: VecDeque::new(),
            bounce: BounceBuffers::new(request, options.bounce_buffers, queue.depth()),
            queue,
            request_bytes: request.get(),
            rates,
            inbox,
            buffers: Vec::new(),
            spare_parts: Vec::new(),
        }
    }

    /// Serves jobs until the engine has dropped and all of them have ended.
    pub(super) fn serve(mut self) {
        let mut completions = Vec::new();
        while self.accept() {
            self.fill_queue();
            let mut until = None;
            if !self.summing.is_empty() {
                // The disk works during the computation of a checksum.
                self.start();
                until = self.sum_one_block().then(Instant::now);
            }
            if let Err(error) = self.queue.wait(until, &mut completions) {
                return self.orphan(error);
            }
            for completion in completions.drain(..) {
                if self.has_buffer(&completion) {
                    // The disk works during the copy out of this buffer.
                    self.fill_queue();
                    self.start();
                }
                self.complete(completion);
            }
        }
    }

    /// Accepts new jobs. Waits for a job if there is no other work. Returns whether there is work.
    fn accept(&mut self) -> bool {
        if self.jobs.is_empty() {
            match self.inbox.recv() {
                Ok(job) => self.begin(job),
                Err(_) => return false,
            }
        }
        loop {
            match self.inbox.try_recv() {
                Ok(job) => self.begin(job),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return true,
            }
        }
    }

    fn begin(&mut self, job: CopyJob) {
        let route = match job.decision::<DiskRoute>() {
            Ok(&route) => route,
            Err(foreign) => return job.finish(Err(engine_failure(foreign))),
        };
        let extents = Extents::new(job.plan(), route.file_side());
        let to_sync = files_to_sync(&job);
        let mut sums = JobSums::of(&job, &route);
        let has_sums = sums.as_mut().and_then(JobSums::left_in_memory).is_some();
        let active = JobState { job, route, extents, operations: 0, failure: None, to_sync, sums };
        let key = self.jobs.insert(active);
        if has_sums {
            self.summing.push_back(key);
        }
        self.turns.push_back(key);
    }

    /// Makes requests, of one job after the other, until the queue is full or no requests remain.
    fn fill_queue(&mut self) {
        let mut blocked = 0;
        while self.queue.has_room() {
            if let Some(key) = self.to_finish.pop_front() {
                self.finish_if_done(key);
                continue;
            }
            if let Some(token) = self.to_write.pop_front() {
                self.write_on(token);
                continue;
            }
            if blocked == self.turns.len() {
                return;
            }
            let Some(key) = self.turns.pop_front() else { return };
            match self.advance(key) {
                Ok(RequestOutcome::Made { copied }) => {
                    blocked = 0;
                    self.turns.push_back(key);
                    if copied {
                        self.start();
                    }
                }
                Ok(RequestOutcome::Blocked) => {
                    blocked += 1;
                    self.turns.push_back(key);
                }
                Ok(RequestOutcome::NothingLeft) => {
                    blocked = 0;
                    self.finish_if_done(key);
                }
                Err(failure) => {
                    self.fail(key, failure);
                    self.finish_if_done(key);
                }
            }
        }
    }

    /// Submits the prepared requests before the thread copies. The next wait reports a failure.
    fn start(&mut self) {
        let _ = self.queue.flush();
    }

    fn has_buffer(&self, completion: &IoCompletion) -> bool {
        let operation = self.operations.get(to_usize(completion.token));
        operation.is_some_and(|operation| operation.buffer.is_some())
    }

    /// Handles the completion of a request.
    fn complete(&mut self, completion: IoCompletion) {
        let index = to_usize(completion.token);
        let Some(operation) = self.operations.get_mut(index) else { return };
        let key = operation.job;
        if let Stage::Writing { requests, .. } = &mut operation.stage {
            *requests -= 1;
        }
        let succeeded = completion.outcome.is_ok();
        let outcome = match (completion.outcome, self.jobs.get(key)) {
            (Ok(()), _) => self.continue_operation(index),
            (Err(failure), Some(active)) => {
                Err(describe(failure, &operation.parts, active.job.plan()))
            }
            (Err(_), None) => Ok(()),
        };
        if let Err(failure) = outcome {
            self.fail(key, failure);
        }
        self.end_if_done(index, succeeded);
        self.finish_if_done(key);
    }

    /// Continues an operation after a successful request: copies out of the buffer, or writes from
    /// it.
    fn continue_operation(&mut self, index: usize) -> Result<(), CopyFailure> {
        let Some(operation) = self.operations.get_mut(index) else { return Ok(()) };
        let Some(active) = self.jobs.get_mut(operation.job) else { return Ok(()) };
        if !matches!(operation.stage, Stage::Reading) || active.failure.is_some() {
            return Ok(());
        }
        match (active.route.flow, &operation.buffer) {
            (FileFlow::Read, Some(buffer)) => {
                let sums = active.sums.as_mut().and_then(JobSums::of_buffers);
                let direction = BufferDirection::OutOfBuffer;
                copy_and_sum(&active.job, sums, &operation.parts, buffer, direction)?;
            }
            (FileFlow::BetweenFiles, Some(buffer)) => {
                if let Some(sums) = active.sums.as_mut().and_then(JobSums::of_buffers) {
                    // SAFETY: the buffer has been read, and its operation has no request in flight.
                    unsafe { sums.add(&active.job, &operation.parts, buffer, 0) }?;
                }
                operation.stage = Stage::Writing { next: 0, requests: 0 };
                self.to_write.push_back(index);
            }
            _ => {}
        }
        Ok(())
    }

    /// Ends an operation without requests in flight and without remaining work.
    fn end_if_done(&mut self, index: usize, succeeded: bool) {
        let Some(operation) = self.operations.get(index) else { return };
        let failed = self.jobs.get(operation.job).is_none_or(|active| active.failure.is_some());
        let done = match operation.stage {
            Stage::Writing { next, requests } => {
                requests == 0 && (next == operation.parts.len() || failed)
            }
            Stage::Reading | Stage::Syncing => true,
        };
        if done {
            if succeeded && !failed {
                self.count(index);
            }
            self.end_operation(index);
        }
    }

    fn count(&mut self, index: usize) {
        let Some(operation) = self.operations.get(index) else { return };
        if let Some(active) = self.jobs.get_mut(operation.job) {
            let bytes = operation.parts.iter().map(|part| part.bytes).sum();
            active.job.progress().add(ByteCount::new(bytes));
            if let Some(sums) = active.sums.as_mut().and_then(JobSums::left_in_memory) {
                operation.parts.iter().for_each(|part| sums.arrived(active.job.plan(), part));
            }
        }
    }

    fn end_operation(&mut self, index: usize) {
        let Some(mut operation) = self.operations.try_remove(index) else { return };
        self.to_write.retain(|&waiting| waiting != index);
        if let Some(buffer) = operation.buffer.take() {
            self.bounce.give_back(buffer);
        }
        operation.parts.clear();
        self.spare_parts.push(operation.parts);
        if let Some(active) = self.jobs.get_mut(operation.job) {
            active.operations -= 1;
        }
    }

    fn fail(&mut self, key: usize, failure: CopyFailure) {
        if let Some(active) = self.jobs.get_mut(key) {
            active.failure.get_or_insert(failure);
        }
    }

    /// Makes a job's files durable after the last write, and then finishes the job. A failed job is
    /// finished once it has no requests in flight.
    fn finish_if_done(&mut self, key: usize) {
        let Some(active) = self.jobs.get_mut(key) else { return };
        if active.operations > 0 {
            return;
        }
        if active.failure.is_none() {
            if active.has_extents_left() {
                return;
            }
            if !active.to_sync.is_empty() && !self.queue.has_room() {
                return self.to_finish.push_back(key);
            }
            if let Some((file, durability)) = active.to_sync.pop() {
                match self.sync(key, &file, durability) {
                    Ok(()) => return,
                    Err(failure) => self.fail(key, failure),
                }
            } else if let Some(sums) = active.sums.as_mut().and_then(JobSums::left_in_memory) {
                return sums.all_arrived();
            }
        }
        // Only a job that failed half-way can still be in the queues, which can be long.
        if self.jobs.get(key).is_some_and(JobState::has_extents_left) {
            self.turns.retain(|&waiting| waiting != key);
        }
        let Some(JobState { job, route, failure, sums, .. }) = self.jobs.try_remove(key) else {
            return;
        };
        if sums.is_some() {
            self.summing.retain(|&other| other != key);
        }
        match failure {
            Some(failure) => job.finish(Err(failure)),
            None => {
                if sums.is_none() {
                    self.rates.of(&route).learn(job.plan().bytes(), job.running_for());
                }
                job.finish(Ok(()));
            }
        }
    }

    /// Handles a kernel that refuses `io_uring_enter`: every present and later job fails with that
    /// error.
    fn orphan(self, error: StorageError) {
        let Self { queue, mut jobs, inbox, .. } = self;
        // Waits for requests in flight, so that jobs can release their memory.
        drop(queue);
        // A subscriber that panics must not end the thread, which has jobs.
        catch_foreign_panic(|| tracing::error!(%error, "the disk engine's queue failed"));
        let error = Arc::new(error);
        for job in jobs.drain().map(|active| active.job).chain(inbox) {
            job.finish(Err(engine_failure(QueueFailed(Arc::clone(&error)))));
        }
    }
}
