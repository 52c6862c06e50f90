//! The task of a running job, the guard of its caller, and its end.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use terrane_core::ByteCount;
use terrane_core::sync::lock;
use terrane_storage::IoMemory;
use terrane_transfer::DeviceOrder;

use crate::error::StoreError;
use crate::queue::QueuePlace;
use crate::slab::{Priority, SlabBuffers, SlabDirection, SlabRequest, SlabSink};
use crate::store::job::Job;
use crate::store::job::arrivals::Arrivals;
use crate::store::job::control::JobControl;
use crate::store::job::executor::LiveTask;
use crate::store::job::options::JobOptions;
use crate::store::job::outcome::JobOutcome;
use crate::store::job::result::BlockResult;
use crate::store::shared::{JobOrigin, JobPlace, StoreCore};
use crate::store::tier::counters::nanoseconds;
use crate::store::tier::{DiskParts, count};

/// The caller's guard, which the job and its requests share.
pub(crate) type GuardCell = Arc<SharedGuard>;

/// The caller's guard: dropped when the job has ended.
///
/// After a panic in the task it drops with the last request, because requests still use its memory.
#[derive(Default)]
pub(crate) struct SharedGuard {
    guard: Mutex<Option<Box<dyn Send>>>,
    /// Set if the task panicked: the job ends when this drops.
    end: Mutex<Option<EndParts>>,
}

thread_local! {
    /// The number of guards and wakers of callers that run on this thread now, one inside the other.
    static FOREIGN_CALLS: Cell<usize> = const { Cell::new(0) };
}

/// Whether this thread is inside the drop of a guard. A close there must not wait for its job.
pub(crate) fn is_ending_job() -> bool {
    FOREIGN_CALLS.get() > 0
}

/// Calls foreign code, whose panic must not keep the job from its end.
pub(crate) fn call_foreign(name: &str, call: impl FnOnce()) {
    FOREIGN_CALLS.set(FOREIGN_CALLS.get() + 1);
    let result = catch_unwind(AssertUnwindSafe(call));
    FOREIGN_CALLS.set(FOREIGN_CALLS.get().saturating_sub(1));
    if result.is_err() {
        tracing::error!("{name} panicked at the end of a job");
    }
}

impl SharedGuard {
    pub(crate) fn set(&self, guard: impl Send + 'static) {
        *lock(&self.guard) = Some(Box::new(guard));
    }

    fn drop_guard(&self) {
        let guard = lock(&self.guard).take();
        if guard.is_some() {
            call_foreign("the guard of a caller", || drop(guard));
        }
    }
}

impl Drop for SharedGuard {
    fn drop(&mut self) {
        self.drop_guard();
        let end = lock(&self.end).take();
        if let Some(end) = end {
            let results = vec![BlockResult::Cancelled; end.keys];
            end.publish(results);
        }
    }
}

/// The facts about a job that its task needs.
pub(crate) struct JobTask {
    pub(crate) core: Arc<StoreCore>,
    pub(crate) control: Arc<JobControl>,
    pub(crate) group: u16,
    pub(crate) durable: bool,
    pub(crate) device_order: Option<DeviceOrder>,
    pub(crate) begun: Instant,
    pub(crate) guard: GuardCell,
}

/// A block in the slab files, and the memory that it is read into or written from.
pub(crate) struct DiskBlock {
    pub(crate) slot: u32,
    pub(crate) buffers: SlabBuffers,
    /// The memory of the buffers, which the queue may register.
    pub(crate) memory: Option<IoMemory>,
    pub(crate) direction: SlabDirection,
}

impl JobTask {
    /// Reads or writes blocks of the job. Their results arrive with their places in `blocks`. `keeps`
    /// drops when all have ended, also after a panic in the task.
    ///
    /// If the job had to stop meanwhile, the requests are cancelled: a cancellation before the submission
    /// did not find them. A raise of its priority is repeated for the same reason.
    ///
    /// # Safety
    ///
    /// As for [`Slabs::submit`](crate::slab::Slabs::submit), until `keeps` drops.
    #[expect(unsafe_code, reason = "the memory is named by addresses")]
    pub(crate) unsafe fn submit_blocks(
        &self,
        disk: &DiskParts,
        group: u16,
        keeps: Arc<dyn Any + Send + Sync>,
        blocks: impl ExactSizeIterator<Item = DiskBlock>,
    ) -> Arc<Arrivals> {
        let arrivals = Arc::new(Arrivals::new(blocks.len(), keeps));
        let (job, deadline) = (self.control.id, self.control.deadline);
        let priority = self.control.priority();
        let request = |(index, block): (usize, DiskBlock)| SlabRequest {
            job,
            index,
            group,
            slot: block.slot,
            buffers: block.buffers,
            memory: block.memory,
            direction: block.direction,
            deadline,
            priority,
            sink: Arc::clone(&arrivals) as Arc<dyn SlabSink>,
        };
        let requests: Vec<SlabRequest> = blocks.enumerate().map(request).collect();
        // SAFETY: the caller keeps the contract of the call.
        unsafe { disk.slabs.submit(requests) };
        // The requests have the deadline themselves, and report it.
        if matches!(self.control.stopped(), Some(BlockResult::Cancelled)) {
            disk.slabs.cancel(job);
        }
        let raised = self.control.priority();
        if priority < raised {
            disk.slabs.raise(job, raised);
        }
        arrivals
    }
}

/// Ends a job: exactly once, on every path.
pub(crate) struct JobEnd {
    guard: GuardCell,
    /// `None` once the job has ended.
    parts: Option<EndParts>,
}

/// The receivers of a job's outcome.
pub(crate) struct EndParts {
    pub(crate) core: Arc<StoreCore>,
    pub(crate) control: Arc<JobControl>,
    in_table: JobPlace,
    /// The place in the caller's queue, and the tag.
    place: Option<(QueuePlace<JobOutcome>, u64)>,
    pub(crate) begun: Instant,
    pub(crate) keys: usize,
    /// Keeps the thread that ends jobs alive. It drops after the store, as the last field.
    _live: LiveTask,
}

/// Begins a job of the store itself, which writes back. `None` if the store closes.
pub(crate) fn begin_internal(
    core: &Arc<StoreCore>,
    group: u16,
    priority: Priority,
) -> Option<Begun> {
    let options = JobOptions { group, priority, ..JobOptions::new() };
    begin(core, JobOrigin::Store, options, 0).ok()
}

/// A job that has begun, and its parts for the task that does its work.
pub(crate) type Begun = (Job, JobTask, JobEnd);

/// Starts the task of a job without a guard.
pub(crate) fn start<F>((job, task, end): Begun, work: impl FnOnce(JobTask) -> F) -> Job
where
    F: Future<Output = Vec<BlockResult>> + Send + 'static,
{
    let executor = task.core.executor.clone();
    let work = work(task);
    executor.spawn(async move { end.finish(work.await) });
    job
}

/// Begins a job. The guard of a caller is taken only if it begins.
pub(crate) fn begin(
    core: &Arc<StoreCore>,
    origin: JobOrigin,
    options: JobOptions,
    keys: usize,
) -> Result<Begun, StoreError> {
    let parts = begin_without_task(core, origin, &options, keys)?;
    let control = Arc::clone(&parts.control);
    let guard = GuardCell::default();
    let task = JobTask {
        core: Arc::clone(core),
        control: Arc::clone(&control),
        group: options.group,
        durable: options.durable,
        device_order: options.device_order,
        begun: parts.begun,
        guard: Arc::clone(&guard),
    };
    Ok((Job { control }, task, JobEnd { guard, parts: Some(parts) }))
}

/// Begins a job that ends with [`EndParts::publish`]. A drain waits for that call.
pub(crate) fn begin_without_task(
    core: &Arc<StoreCore>,
    origin: JobOrigin,
    options: &JobOptions,
    keys: usize,
) -> Result<EndParts, StoreError> {
    let place = match &options.queue {
        Some((queue, tag)) => Some((queue.reserve()?, *tag)),
        None => None,
    };
    let slabs = core.disk.as_ref().map(|disk| &disk.slabs);
    let job = (core.jobs.next_id(), keys);
    let (deadline, priority) = (options.deadline, options.priority);
    let control = Arc::new(JobControl::new(job, deadline, priority, &core.executor, slabs));
    // Before the job is in the table: a close that sees the job finds the thread there, too.
    let live = core.executor.enter();
    let in_table = core.jobs.begin(&control, origin)?;
    let (core, begun) = (Arc::clone(core), Instant::now());
    Ok(EndParts { core, control, in_table, place, begun, keys, _live: live })
}

impl JobEnd {
    /// Drops the guard, then publishes the outcome.
    pub(crate) fn finish(mut self, results: Vec<BlockResult>) {
        if let Some(parts) = self.parts.take() {
            self.guard.drop_guard();
            parts.publish(results);
        }
    }
}

impl EndParts {
    /// Publishes the outcome. The caller has dropped the guard.
    pub(crate) fn publish(mut self, results: Vec<BlockResult>) {
        let took = self.begun.elapsed();
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
        let is_ok = results.iter().all(BlockResult::is_ok);
        if let Some(layers) = self.control.layers() {
            if is_ok { layers.only_copies_are_left() } else { layers.fail() }
        }
        let (id, bytes) = (self.control.id, ByteCount::new(bytes));
        let mut outcome = JobOutcome { id, tag: 0, results, bytes, took, is_ok };
        if self.in_table.origin == JobOrigin::Caller {
            self.core.job_times.update(|shard| shard.record(0, nanoseconds(took)));
        }
        self.core.report_health();
        if let Some((place, tag)) = self.place.take() {
            outcome.tag = tag;
            let results = Vec::new();
            let rest = JobOutcome { results, ..outcome };
            place.deliver(outcome);
            outcome = rest;
        }
        let waker = self.control.outcome.publish(outcome);
        if let Some(waker) = waker {
            call_foreign("the waker of a job", || waker.wake());
        }
        // Last: a drain returns when all outcomes are where they belong.
        self.core.jobs.end(self.in_table);
    }
}

impl Drop for JobEnd {
    fn drop(&mut self) {
        // The task panicked. The job ends when no request uses its memory.
        if let Some(parts) = self.parts.take() {
            *lock(&self.guard.end) = Some(parts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;
    use crate::store::open::builder::BlockGroup;
    use std::sync::atomic::{AtomicBool, Ordering};

    struct SetsOnDrop(Arc<AtomicBool>);

    impl Drop for SetsOnDrop {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn after_a_panic_the_guard_drops_and_the_job_ends_with_the_last_request() {
        let group = BlockGroup::new("kv", 4096);
        let (store, _) = Store::builder().group(group).host(ByteCount::kib(64)).open().unwrap();
        let core = store.core();
        let (job, task, end) = begin(core, JobOrigin::Caller, JobOptions::new(), 2).unwrap();
        let has_dropped = Arc::new(AtomicBool::new(false));
        task.guard.set(SetsOnDrop(Arc::clone(&has_dropped)));
        let slots = core.tiers[0].table(0).unwrap().try_take(3).unwrap();
        let in_use = || store.snapshot().tiers[0].groups[0].in_use;
        let keeps = Arc::new((slots.share(), Arc::clone(&task.guard)));
        let arrivals = Arc::new(Arrivals::new(1, keeps));
        core.executor.spawn(async move {
            let _task = (task, end, slots);
            panic!("the task of a test");
        });
        assert!(!job.has_ended() && !has_dropped.load(Ordering::SeqCst));
        assert_eq!(in_use(), 3);
        drop(arrivals);
        assert!(job.has_ended() && has_dropped.load(Ordering::SeqCst));
        assert_eq!(in_use(), 0);
        let outcome = job.wait();
        assert!(matches!(outcome.results[..], [BlockResult::Cancelled, BlockResult::Cancelled]));
        assert_eq!(store.close(Instant::now()).left, 0);
    }
}
