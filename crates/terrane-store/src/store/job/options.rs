//! Options of a job.

use std::time::Instant;

use terrane_transfer::DeviceOrder;

use crate::queue::CompletionQueue;
use crate::slab::Priority;
use crate::store::job::outcome::JobOutcome;

/// Options of a job. The default is group 0, normal priority, no deadline and no queue.
#[derive(Clone, Debug, Default)]
#[must_use = "options do nothing until a job is submitted with them"]
pub struct JobOptions {
    pub(crate) group: u16,
    pub(crate) priority: Priority,
    pub(crate) deadline: Option<Instant>,
    pub(crate) queue: Option<(CompletionQueue<JobOutcome>, u64)>,
    pub(crate) durable: bool,
    pub(crate) device_order: Option<DeviceOrder>,
    pub(crate) layer_by_layer: bool,
}

impl JobOptions {
    /// The default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// The group of the blocks: its index in the order of the builder's groups.
    pub fn group(self, group: u16) -> Self {
        Self { group, ..self }
    }

    /// The priority among jobs of the same direction.
    pub fn priority(self, priority: Priority) -> Self {
        Self { priority, ..self }
    }

    /// The time by which the job ends. A block that is not done by then is
    /// [`TimedOut`](crate::BlockResult::TimedOut). The job waits for requests that a device is
    /// working on, so it may end one such request later.
    pub fn deadline(self, deadline: Instant) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// Delivers the outcome to this queue, with `tag`. The [`Job`](crate::Job) then only cancels,
    /// raises and waits for the end.
    pub fn queue(self, queue: &CompletionQueue<JobOutcome>, tag: u64) -> Self {
        Self { queue: Some((queue.clone(), tag)), ..self }
    }

    /// Whether a put ends only when its blocks are durable on disk. A block that left the disk tier before
    /// is [`Absent`](crate::BlockResult::Absent). If the job has more blocks than the disk tier, those that
    /// are not on disk are [`NoRoom`](crate::BlockResult::NoRoom). Without a disk tier it has no effect.
    pub fn durable(self, durable: bool) -> Self {
        Self { durable, ..self }
    }

    /// Sets the work on the device that the copies of a put or get run after. It is required if the
    /// job's blocks are in device memory, and refused if they are in host memory.
    pub fn device_order(self, order: DeviceOrder) -> Self {
        Self { device_order: Some(order), ..self }
    }

    /// Makes a get copy layer by layer, from tiers of memory that a copy engine reaches.
    /// [`Job::layers`](crate::Job::layers) waits for its layers. It has no effect on other jobs.
    pub fn layer_by_layer(self) -> Self {
        Self { layer_by_layer: true, ..self }
    }
}
