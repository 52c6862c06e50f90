//! The threads that submit large jobs, one chunk at a time.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use terrane_core::ByteCount;
use terrane_transfer::CopyFailure;

use crate::engine::complete::completion_queue::{CompletionThreads, Task};
use crate::engine::complete::failed_job::{FailedJob, engine_failure};
use crate::engine::complete::in_flight::DueTime;
use crate::engine::resources::scratch::ScratchMaker;
use crate::engine::shared::Shared;
use crate::engine::submit::direction_queue::{DirectionQueue, SubmittedChunk};
use crate::engine::submit::queued_job::QueuedJob;
use crate::engine::submit::submission::Submission;
use crate::error::CudaError;

/// The thread of one direction. It takes a chunk of each of its jobs in turn, so that a short job
/// does not wait for the end of a long one. It keeps a bounded number of chunks on the device.
pub(crate) struct SubmitThread {
    shared: Arc<Shared>,
    jobs: Receiver<QueuedJob>,
    completion_threads: CompletionThreads,
    queue: Arc<DirectionQueue>,
    scratch_maker: ScratchMaker,
    turns: VecDeque<QueuedJob>,
    /// Chunks on the device, in the order of their submission.
    pending: VecDeque<SubmittedChunk>,
}

impl SubmitThread {
    pub(crate) fn new(
        shared: Arc<Shared>,
        queue: Arc<DirectionQueue>,
        jobs: Receiver<QueuedJob>,
        completion_threads: CompletionThreads,
    ) -> Self {
        Self {
            scratch_maker: ScratchMaker::new(&shared.context, &shared.options),
            shared,
            jobs,
            completion_threads,
            queue,
            turns: VecDeque::new(),
            pending: VecDeque::new(),
        }
    }

    /// Serves jobs until no source of jobs is left, and all jobs are submitted.
    pub(crate) fn serve(mut self) {
        loop {
            let was_idle = self.turns.is_empty();
            if was_idle {
                match self.jobs.recv() {
                    Ok(queued) => self.turns.push_back(queued),
                    Err(_) => break,
                }
            }
            self.turns.extend(self.jobs.try_iter());
            let Some(queued) = self.turns.pop_front() else { continue };
            // Only foreign code can panic, such as a subscriber of `tracing`. The thread must
            // continue with other jobs. The job of the panic drops, which waits for its submitted
            // work.
            let turn = catch_unwind(AssertUnwindSafe(|| self.turn(queued, was_idle)));
            if let Ok(Some(queued)) = turn {
                self.turns.push_back(queued);
            }
        }
        // The buffers are freed with the queue, once the device no longer uses them.
        while self.retire_oldest() {}
    }

    /// Submits a chunk of a job. Returns the job if chunks are left.
    fn turn(&mut self, mut queued: QueuedJob, was_idle: bool) -> Option<QueuedJob> {
        if was_idle {
            self.retire_ended();
            let is_first = self.pending.is_empty() && self.turns.is_empty();
            queued.submission.sample_if(is_first && self.queue.is_alone(), &self.shared);
        }
        self.pending.extend(queued.begun.take());
        if queued.submission.is_submitted() {
            // A cancellation has no effect here: all bytes have been submitted.
            self.all_submitted(queued);
            return None;
        }
        if let Some(failure) = queued.submission.job().reason_to_stop() {
            self.fail(queued, failure);
            return None;
        }
        queued.submission.job().start();
        if let Err(error) = self.make_room(&mut queued.submission) {
            self.fail(queued, engine_failure(error));
            return None;
        }
        let shared = &*self.shared;
        // The context is bound once for all driver calls of a chunk.
        let stepped = shared.context.bound(|_| Ok(queued.submission.step(shared)));
        match stepped.unwrap_or_else(|error| Err(engine_failure(error))) {
            Ok(Some(submitted)) => {
                self.pending.push_back(submitted);
                if !queued.submission.is_submitted() {
                    return Some(queued);
                }
                // Reported at once, and not when another chunk fits: waiting threads must learn the
                // end while it is far off.
                self.all_submitted(queued);
                None
            }
            Ok(None) => {
                queued.submission.give_back_scratch();
                self.all_submitted(queued);
                None
            }
            Err(failure) => {
                self.fail(queued, failure);
                None
            }
        }
    }

    fn all_submitted(&self, mut queued: QueuedJob) {
        if !self.queue.is_alone() {
            queued.submission.sample_if(false, &self.shared);
        }
        let due = self.due(&queued);
        let QueuedJob { submission, slot, .. } = queued;
        drop(slot);
        // Completion threads exist as long as submit threads exist.
        self.completion_threads.send(Task::of_submitted(submission, due));
    }

    /// The predicted end of the chunks on the device, if no other job has chunks there.
    fn due(&self, queued: &QueuedJob) -> Option<DueTime> {
        let job = queued.submission.job();
        if !self.turns.is_empty() || job.layers().is_some() {
            return None;
        }
        let all: u64 = self.pending.iter().map(|chunk| chunk.bytes).sum();
        // The progress of the first chunk is unknown.
        let first = self.pending.front().map_or(0, |chunk| chunk.bytes);
        let time = |bytes: u64| {
            let share = bytes as f64 / job.plan().bytes().get().max(1) as f64;
            Duration::try_from_secs_f64(job.predicted().as_secs_f64() * share.min(1.0)).ok()
        };
        DueTime::after(Instant::now(), time(all - first)?..time(all)?)
    }

    /// Finishes a failed job once its submitted chunks complete.
    fn fail(&mut self, queued: QueuedJob, failure: CopyFailure) {
        let QueuedJob { submission, slot, .. } = queued;
        drop(slot);
        // Not on this thread, because other jobs wait for it. The wait may be long, and finishing a
        // job runs foreign code. Completion threads exist as long as submit threads exist.
        let failed = FailedJob::new(submission, failure);
        self.completion_threads.send(Task::Failed(failed));
        self.retire_ended();
    }

    /// Waits until another chunk may be submitted. Gives the job a buffer for it, if it needs one.
    ///
    /// # Errors
    ///
    /// The errors of the driver. If only memory for a buffer is missing, the job continues without.
    fn make_room(&mut self, submission: &mut Submission) -> Result<(), CudaError> {
        self.retire_ended();
        let most = ByteCount::new(self.shared.options.scratch_buffers.get().max(2).into());
        while self.pending.len() >= most.to_usize() {
            self.retire_oldest();
        }
        while submission.needs_scratch() {
            let free = self.queue.scratch().take_free();
            let scratch = match free {
                Some(scratch) => Ok(Some(scratch)),
                None => self.scratch_maker.make(),
            };
            match scratch {
                Ok(Some(scratch)) => {
                    submission.put_scratch(scratch, &self.queue);
                    break;
                }
                Ok(None) => self.await_scratch(submission)?,
                Err(error) if error.is_context_lost() => return Err(error),
                Err(error) => {
                    tracing::debug!(%error, "no memory for a buffer; the transfer continues without staging");
                    submission.do_without_scratch(&self.shared)?;
                }
            }
        }
        Ok(())
    }

    /// Waits for the buffer that becomes free first.
    ///
    /// # Errors
    ///
    /// As for [`do_without_scratch`](Submission::do_without_scratch).
    fn await_scratch(&self, submission: &mut Submission) -> Result<(), CudaError> {
        let next = self.queue.scratch().next_event();
        match next.map(|event| event.wait()) {
            Some(Ok(())) => {}
            Some(Err(_)) => {
                // The broken buffers drop without the lock.
                let broken = self.queue.scratch().take_broken();
                drop(broken);
            }
            // A failed job still has the buffer.
            None => return submission.do_without_scratch(&self.shared),
        }
        Ok(())
    }

    /// Removes the chunks that have ended.
    fn retire_ended(&mut self) {
        while let Some(submitted) = self.pending.front() {
            // The job's end also reports the failure.
            if matches!(submitted.event.is_complete(), Ok(false)) {
                return;
            }
            self.retire_oldest();
        }
    }

    /// Waits for the oldest chunk. Returns whether there was one.
    fn retire_oldest(&mut self) -> bool {
        let Some(submitted) = self.pending.pop_front() else { return false };
        if submitted.event.wait().is_ok()
            && let Some(count) = &submitted.count
        {
            count.add(submitted.bytes);
        }
        true
    }
}
