//! Jobs in the queue of a direction, and jobs that first wait for their order.

use std::sync::Arc;

use crossbeam_channel::Sender;

use crate::engine::complete::failed_job::engine_failure;
use crate::engine::submit::direction_queue::{DirectionQueue, QueueSlot, SubmittedChunk};
use crate::engine::submit::order_event::OrderEvent;
use crate::engine::submit::submission::Submission;
use crate::error::CudaError;

/// A job for the submit thread of its direction.
pub(crate) struct QueuedJob {
    pub(crate) submission: Box<Submission>,
    /// The first chunk, if it is already on the device.
    pub(crate) begun: Option<SubmittedChunk>,
    /// The job's entry in the count of jobs.
    pub(crate) slot: QueueSlot,
}

/// A job that is enqueued when its order is satisfied. Until then it has no stream to copy
/// on, no buffer and no entry in a direction's queue. A small job that found no stream to wait on
/// keeps its memory for block lists and checksums.
pub(crate) struct WaitingJob {
    pub(crate) order_event: OrderEvent,
    pub(crate) submission: Box<Submission>,
    pub(crate) sender: Sender<QueuedJob>,
    pub(crate) queue: Arc<DirectionQueue>,
}

impl WaitingJob {
    /// Enqueues the job for its direction.
    pub(crate) fn enqueue(self) {
        let Self { order_event, submission, sender, queue } = self;
        order_event.release();
        let (slot, _) = queue.enter();
        // If the submit thread has ended, the job is dropped here.
        drop(sender.send(QueuedJob { submission, begun: None, slot }));
    }

    /// Ends the job, without any submitted work.
    pub(crate) fn cancel(self, error: CudaError) {
        self.submission.finish(Err(engine_failure(error)));
    }
}
