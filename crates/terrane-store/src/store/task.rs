//! A running job: what its task knows, and its end.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use terrane_core::ByteCount;
use terrane_core::sync::lock;
use terrane_transfer::DeviceOrder;

use crate::error::StoreError;
use crate::queue::QueuePlace;
use crate::slab::Priority;
use crate::store::control::JobControl;
use crate::store::job::{Job, JobOutcome, JobState};
use crate::store::options::JobOptions;
use crate::store::result::BlockResult;
use crate::store::shared::{JobOrigin, StoreCore};
use crate::store::tier::count;

/// The caller's guard: dropped when the job has ended.
pub(crate) type GuardCell = Arc<Mutex<Option<Box<dyn Send>>>>;

/// What the task of a job knows about it.
pub(crate) struct JobTask {
    pub(crate) core: Arc<StoreCore>,
    pub(crate) control: Arc<JobControl>,
    pub(crate) group: u16,
    pub(crate) durable: bool,
    pub(crate) device_order: Option<DeviceOrder>,
    pub(crate) layer_by_layer: bool,
    pub(crate) guard: GuardCell,
}

/// Ends a job: exactly once, on every path.
pub(crate) struct JobEnd {
    core: Arc<StoreCore>,
    state: Arc<JobState>,
    origin: JobOrigin,
    guard: GuardCell,
    place: Option<(QueuePlace<JobOutcome>, u64)>,
    begun: Instant,
    keys: usize,
    has_ended: bool,
}

/// Begins a job. The guard is taken only if it begins.
pub(crate) fn begin(
    core: &Arc<StoreCore>,
    options: JobOptions,
    keys: usize,
) -> Result<(Job, JobTask, JobEnd), StoreError> {
    let place = match options.queue {
        Some((queue, tag)) => Some((queue.reserve()?, tag)),
        None => None,
    };
    let control = core.control(options.deadline, options.priority);
    core.jobs.begin(&control, JobOrigin::Caller)?;
    let state = Arc::new(JobState::new(Arc::clone(&control), keys));
    let guard = GuardCell::default();
    let task = JobTask {
        core: Arc::clone(core),
        control,
        group: options.group,
        durable: options.durable,
        device_order: options.device_order,
        layer_by_layer: options.layer_by_layer,
        guard: Arc::clone(&guard),
    };
    let end = JobEnd {
        core: Arc::clone(core),
        state: Arc::clone(&state),
        origin: JobOrigin::Caller,
        guard,
        place,
        begun: Instant::now(),
        keys,
        has_ended: false,
    };
    Ok((Job { state }, task, end))
}

/// Begins a job of the store itself. `None` if the store closes.
pub(crate) fn begin_internal(
    core: &Arc<StoreCore>,
    group: u16,
    priority: Priority,
) -> Option<(Job, JobTask, JobEnd)> {
    let control = core.control(None, priority);
    core.jobs.begin(&control, JobOrigin::Store).ok()?;
    let state = Arc::new(JobState::new(Arc::clone(&control), 0));
    let guard = GuardCell::default();
    let task = JobTask {
        core: Arc::clone(core),
        control,
        group,
        durable: false,
        device_order: None,
        layer_by_layer: false,
        guard: Arc::clone(&guard),
    };
    let end = JobEnd {
        core: Arc::clone(core),
        state: Arc::clone(&state),
        origin: JobOrigin::Store,
        guard,
        place: None,
        begun: Instant::now(),
        keys: 0,
        has_ended: false,
    };
    Some((Job { state }, task, end))
}

impl JobEnd {
    /// Drops the guard, then publishes the outcome.
    pub(crate) fn finish(mut self, results: Vec<BlockResult>) {
        self.end(results);
    }

    fn end(&mut self, results: Vec<BlockResult>) {
        self.has_ended = true;
        let guard = lock(&self.guard).take();
        drop(guard);
        let took = self.begun.elapsed();
        let control = Arc::clone(&self.state.control);
        let counters = &self.core.counters;
        let mut bytes = 0;
        for result in &results {
            match result {
                BlockResult::Done { bytes: done } => bytes += u64::from(*done),
                BlockResult::AlreadyStored => count(&counters.already_stored, 1),
                BlockResult::TimedOut => count(&counters.timed_out, 1),
                BlockResult::Cancelled => count(&counters.cancelled, 1),
                BlockResult::Failed(_) => count(&counters.failed, 1),
                _ => {}
            }
        }
        let mut outcome =
            JobOutcome { id: control.id(), tag: 0, results, bytes: ByteCount::new(bytes), took };
        if self.origin == JobOrigin::Caller {
            let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
            counters.job_times.update(|shard| shard.record(0, nanoseconds));
            counters.ended_jobs.fetch_add(1, Ordering::Relaxed);
        }
        self.core.report_health();
        if let Some((place, tag)) = self.place.take() {
            outcome.tag = tag;
            let results = Vec::new();
            let rest = JobOutcome { results, ..outcome };
            place.deliver(outcome);
            outcome = rest;
        }
        self.state.publish(outcome);
        // Last: a drain returns when all outcomes are where they belong.
        self.core.jobs.end(control.id(), self.origin);
    }
}

impl Drop for JobEnd {
    fn drop(&mut self) {
        if !self.has_ended {
            // The task panicked.
            self.end(vec![BlockResult::Cancelled; self.keys]);
        }
    }
}
