//! The part of a submission that runs on the caller's thread: the whole job if a few driver calls
//! suffice, otherwise its beginning.

pub(crate) mod batch;
pub(crate) mod capture;
pub(crate) mod direction_queue;
mod launch;
pub(crate) mod order_event;
pub(crate) mod queued_job;
pub(crate) mod submission;
pub(crate) mod submit_thread;

use std::sync::Arc;

use crossbeam_channel::Sender;
use terrane_transfer::calibration::Direction;
use terrane_transfer::{CopyFailure, CopyJob};

use crate::engine::DeviceEngine;
use crate::engine::complete::completion_queue::Task;
use crate::engine::complete::failed_job::{FailedJob, engine_failure};
use crate::engine::complete::in_flight::DueTime;
use crate::engine::path::quote::PathDecision;
use crate::engine::submit::direction_queue::DirectionQueue;
use crate::engine::submit::order_event::{OrderEvent, PendingOrder};
use crate::engine::submit::queued_job::{QueuedJob, WaitingJob};
use crate::engine::submit::submission::Submission;
use crate::error::CudaError;

impl DeviceEngine {
    /// Starts a job.
    ///
    /// # Errors
    ///
    /// The job, and the reason why it must end. None of its work has been submitted.
    pub(crate) fn dispatch(&self, job: CopyJob) -> Result<(), (CopyJob, CudaError)> {
        let shared = &*self.shared;
        let ends = match shared.mapping.ends(job.plan()) {
            Ok(ends) => ends,
            Err(error) => return Err((job, error)),
        };
        let decision = job.decision::<PathDecision>();
        let decision = decision.map(|found| (found.direction, found.path, found.packing));
        let (Ok((direction, path, packing)), Some(ends)) = (decision, ends) else {
            let device = shared.context.device().id;
            return Err((job, CudaError::NotReached { device }));
        };
        let order = job.options().device_order.as_ref();
        let pending = match PendingOrder::of(order, &shared.context, &shared.peers) {
            Ok(pending) => pending,
            Err(error) => return Err((job, error)),
        };
        let mut submission = Submission::new(shared, job, direction, path, packing, ends);
        match pending {
            Some(pending) => self.submit_later(direction, submission, pending),
            None if submission.job().plan().bytes().is_zero() => {
                self.send_task(Task::NotSubmitted(submission));
            }
            None if submission.is_small(shared) && submission.has_resources(shared) => {
                self.submit_now(submission, true)
            }
            None => self.enqueue(direction, submission),
        }
        Ok(())
    }

    /// Makes a job begin when its order is satisfied.
    #[inline(never)]
    fn submit_later(
        &self,
        direction: Direction,
        mut submission: Box<Submission>,
        pending: PendingOrder,
    ) {
        let shared = &*self.shared;
        let is_empty = submission.job().plan().bytes().is_zero();
        let waited = || -> Result<Option<OrderEvent>, CudaError> {
            if !is_empty && submission.is_small(shared) && submission.has_resources(shared) {
                // The whole job is then on the device. It begins without waking a thread.
                if let Some(stream) = shared.streams.take_to_wait()? {
                    return submission.wait_on(stream, &pending).map(|()| None);
                }
            }
            pending.into_order_event(&shared.context, &shared.order_streams).map(Some)
        };
        match waited() {
            Ok(None) => self.submit_now(submission, false),
            Ok(Some(order_event)) if is_empty => {
                submission.end_with(order_event);
                submission.job().start();
                self.all_submitted(submission, None);
            }
            Ok(Some(order_event)) => {
                let (Some((sender, queue)), Some(order_waits)) =
                    (self.queue_of(direction), &self.order_waits)
                else {
                    return;
                };
                let (sender, queue) = (sender.clone(), Arc::clone(queue));
                let waiting = Box::new(WaitingJob { order_event, submission, sender, queue });
                order_waits.send(Task::Waiting(waiting));
            }
            Err(error) => {
                self.send_failed(submission, engine_failure(error));
            }
        }
    }

    /// Submits all of a small job. The device begins it at once, or after its order.
    fn submit_now(&self, mut submission: Box<Submission>, at_once: bool) {
        submission.submit_whole();
        let started = submission.job().start();
        let predicted = submission.job().predicted();
        let due = if at_once { DueTime::after(started, predicted..predicted) } else { None };
        let mut is_left = true;
        while is_left {
            match submission.step(&self.shared) {
                Ok(chunk) => is_left = chunk.is_some() && !submission.is_submitted(),
                Err(failure) => return self.send_failed(submission, failure),
            }
        }
        self.all_submitted(submission, due);
    }

    /// Hands a job without further chunks to the completion threads.
    fn all_submitted(&self, submission: Box<Submission>, due: Option<DueTime>) {
        self.send_task(Task::of_submitted(submission, due));
    }

    fn queue_of(&self, direction: Direction) -> Option<&(Sender<QueuedJob>, Arc<DirectionQueue>)> {
        let [to_device, to_host, between] = self.queues.as_ref()?;
        Some(match direction {
            Direction::ToDevice => to_device,
            Direction::ToHost => to_host,
            Direction::WithinDevice | Direction::ToPeer | Direction::FromPeer => between,
        })
    }

    fn enqueue(&self, direction: Direction, mut submission: Box<Submission>) {
        let Some((sender, queue)) = self.queue_of(direction) else { return };
        // The count tells other callers that a buffer may be taken, until this job is submitted.
        let (slot, is_only) = queue.enter();
        let begins =
            is_only && submission.needs_scratch() && self.has_buffer(&mut submission, queue);
        if begins && submission.fits_one_buffer() {
            // Waking the submit thread would take as long as the submit.
            submission.in_one_chunk();
            return self.submit_now(submission, true);
        }
        let mut queued = QueuedJob { submission, begun: None, slot };
        if begins {
            // The wire stays busy while the submit thread wakes.
            queued = match self.begin(queued) {
                Some(queued) => queued,
                None => return,
            };
        }
        // If the threads have ended, the job is dropped here, which reports that the engine
        // stopped.
        drop(sender.send(queued));
    }

    /// Gives a job the buffer of its next chunk, if one is unused. Returns whether it has one.
    fn has_buffer(&self, submission: &mut Submission, queue: &Arc<DirectionQueue>) -> bool {
        let Some(scratch) = queue.scratch().take_free() else { return false };
        if submission.has_room_for_sums(&self.shared) {
            submission.put_scratch(scratch, queue);
            return true;
        }
        // The submit thread allocates the memory for checksums.
        queue.give_back(scratch);
        false
    }

    /// Submits the first chunk of a staged job, which has a buffer. Returns the job, unless the
    /// submission failed.
    #[inline(never)]
    fn begin(&self, mut queued: QueuedJob) -> Option<QueuedJob> {
        queued.submission.job().start();
        match queued.submission.step(&self.shared) {
            Ok(begun) => {
                queued.begun = begun;
                queued.submission.give_back_scratch();
                Some(queued)
            }
            Err(failure) => {
                self.send_failed(queued.submission, failure);
                None
            }
        }
    }

    /// Finishes a failed job once its submitted work completes.
    fn send_failed(&self, submission: Box<Submission>, failure: CopyFailure) {
        self.send_task(Task::Failed(FailedJob::new(submission, failure)));
    }

    pub(crate) fn send_task(&self, task: Task) {
        if let Some(completion_threads) = &self.completion_threads {
            completion_threads.send(task);
        }
    }
}
