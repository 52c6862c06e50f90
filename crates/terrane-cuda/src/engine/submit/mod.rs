//! The part of a submission that runs on the caller's thread: the whole job if a few driver calls
//! suffice, otherwise its beginning.

pub(crate) mod batch;
pub(crate) mod capture;
pub(crate) mod direction_queue;
mod launch;
pub(crate) mod order_event;
pub(crate) mod queued_job;
mod submission;
pub(crate) mod submit_thread;

use std::sync::Arc;

use crossbeam_channel::Sender;
use terrane_transfer::CopyJob;
use terrane_transfer::calibration::Direction;

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
        let decision = job.decision::<PathDecision>().map(|found| (found.direction, found.path));
        let ends = match self.mapping(job.plan()) {
            Ok(ends) => ends,
            Err(error) => return Err((job, error)),
        };
        let (Ok((direction, path)), Some(ends)) = (decision, ends) else {
            let device = self.shared.context.device().id;
            return Err((job, CudaError::NotReached { device }));
        };
        let shared = &*self.shared;
        let order = job.options().device_order.as_ref();
        let pending = match PendingOrder::of(order, &shared.context, &shared.peers) {
            Ok(pending) => pending,
            Err(error) => return Err((job, error)),
        };
        let mut submission = Submission::new(shared, job, direction, path, ends);
        match pending {
            Some(pending) => self.submit_later(direction, submission, pending),
            None if submission.job().plan().bytes().is_zero() => {
                self.send_task(Task::NotSubmitted(submission.into_resources(None)));
            }
            None if submission.is_small(shared) && submission.has_resources(shared) => {
                self.submit_now(submission, true, None)
            }
            None => self.enqueue(direction, submission),
        }
        Ok(())
    }

    /// Makes a job begin when its order is satisfied.
    fn submit_later(
        &self,
        direction: Direction,
        mut submission: Submission,
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
            Ok(None) => self.submit_now(submission, false, None),
            Ok(Some(order_event)) if is_empty => {
                submission.end_with(order_event);
                submission.job().start();
                self.all_submitted(submission, None);
            }
            Ok(Some(order_event)) => {
                let (predicted, submission) = (submission.job().predicted(), Box::new(submission));
                let (Some((sender, queue)), Some(order_waits)) =
                    (self.queue_of(direction), &self.order_waits)
                else {
                    return;
                };
                let (sender, queue) = (sender.clone(), Arc::clone(queue));
                let waiting =
                    Box::new(WaitingJob { order_event, submission, predicted, sender, queue });
                order_waits.send(Task::Waiting(waiting));
            }
            Err(error) => {
                let failed = FailedJob::new(submission.into_resources(None), engine_failure(error));
                self.send_task(Task::Failed(failed));
            }
        }
    }

    /// Submits all of a small job. The device begins it at once, or after its order. Its buffer, if
    /// any, returns to its direction.
    fn submit_now(
        &self,
        mut submission: Submission,
        at_once: bool,
        queue: Option<&Arc<DirectionQueue>>,
    ) {
        submission.submit_whole();
        submission.job().start();
        let predicted = submission.job().predicted();
        let due = if at_once { DueTime::after(predicted..predicted) } else { None };
        let mut is_left = true;
        while is_left {
            match submission.step(&self.shared) {
                Ok(Some(chunk)) => {
                    drop(queue.map(|queue| queue.lend(chunk)));
                    is_left = !submission.is_submitted();
                }
                Ok(None) => is_left = false,
                Err(failure) => {
                    return self.send_task(Task::Failed(FailedJob::new(
                        submission.into_resources(queue),
                        failure,
                    )));
                }
            }
        }
        self.all_submitted(submission, due);
    }

    /// Hands a job without further chunks to the completion threads.
    fn all_submitted(&self, submission: Submission, due: Option<DueTime>) {
        let predicted = submission.job().predicted();
        match submission.into_in_flight(&self.shared, predicted, due) {
            Ok(in_flight) => {
                in_flight.invite();
                self.send_task(Task::InFlight(in_flight));
            }
            Err(resources) => self.send_task(Task::NotSubmitted(resources)),
        }
    }

    fn queue_of(&self, direction: Direction) -> Option<&(Sender<QueuedJob>, Arc<DirectionQueue>)> {
        let [to_device, to_host, between] = self.queues.as_ref()?;
        Some(match direction {
            Direction::ToDevice => to_device,
            Direction::ToHost => to_host,
            Direction::WithinDevice | Direction::ToPeer | Direction::FromPeer => between,
        })
    }

    fn enqueue(&self, direction: Direction, mut submission: Submission) {
        let Some((sender, queue)) = self.queue_of(direction) else { return };
        let predicted = submission.job().predicted();
        let (slot, is_idle) = queue.enter();
        let scratch = match is_idle && submission.needs_scratch() {
            true => queue.scratch().take_free(),
            false => None,
        };
        let begins = match scratch {
            Some(scratch) if submission.has_room_for_sums(&self.shared) => {
                submission.put_scratch(scratch);
                true
            }
            unused => {
                // The submit thread allocates the memory for checksums.
                queue.give_back(unused);
                false
            }
        };
        if begins && submission.fits_one_buffer() {
            // Waking the submit thread would take as long as the submit.
            submission.in_one_chunk();
            return self.submit_now(submission, true, Some(queue));
        }
        let submission = Box::new(submission);
        let mut queued = QueuedJob { submission, predicted, begun: None, slot };
        if begins {
            // The wire stays busy while the submit thread wakes.
            queued = match self.begin(queued, queue) {
                Some(queued) => queued,
                None => return,
            };
        }
        // If the threads have ended, the job is dropped here, which reports that the engine
        // stopped.
        drop(sender.send(queued));
    }

    /// Submits the first chunk of a staged job, which has a buffer. Returns the job, unless the
    /// submission failed.
    fn begin(&self, mut queued: QueuedJob, queue: &Arc<DirectionQueue>) -> Option<QueuedJob> {
        queued.submission.job().start();
        match queued.submission.step(&self.shared) {
            Ok(begun) => {
                queued.begun = begun.map(|submitted| queue.lend(submitted));
                queue.give_back(queued.submission.take_scratch());
                Some(queued)
            }
            Err(failure) => {
                let resources = queued.submission.into_resources(Some(queue));
                self.send_task(Task::Failed(FailedJob::new(resources, failure)));
                None
            }
        }
    }

    pub(crate) fn send_task(&self, task: Task) {
        if let Some(completion_threads) = &self.completion_threads {
            completion_threads.send(task);
        }
    }
}
