//! Jobs for the thread of a direction, and jobs that wait for their order first.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;

use crate::engine::complete::failed_job::engine_failure;
use crate::engine::submit::direction_queue::{Chunk, Desk, Seat};
use crate::engine::submit::order_event::Gate;
use crate::engine::submit::submission::Work;
use crate::error::CudaError;

/// A job for a feeder.
pub(crate) struct Feed {
    pub(crate) work: Box<Work>,
    pub(crate) predicted: Duration,
    /// The first part, if it is already on the device.
    pub(crate) begun: Option<Chunk>,
    /// The job's place in the count of jobs.
    pub(crate) seat: Seat,
}

/// A job that goes to a feeder when it may begin. Until then it holds no stream, no buffer, and no
/// seat.
pub(crate) struct Gated {
    pub(crate) gate: Gate,
    pub(crate) work: Box<Work>,
    pub(crate) predicted: Duration,
    pub(crate) queue: Sender<Feed>,
    pub(crate) desk: Arc<Desk>,
}

impl Gated {
    /// Hands the job to its feeder.
    pub(crate) fn go_on(self) {
        let Self { gate, work, predicted, queue, desk } = self;
        drop(gate);
        let (seat, _) = desk.enter();
        // If the feeder has ended, the job drops here.
        drop(queue.send(Feed { work, predicted, begun: None, seat }));
    }

    /// Ends the job, without any submitted work.
    pub(crate) fn cancel(self, error: CudaError) {
        self.work.into_cargo(None).finish(Err(engine_failure(error)));
    }
}
