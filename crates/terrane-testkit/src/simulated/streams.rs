//! Streams without a device, for tests and for runs on machines without one.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Fence, FenceError, FenceSource, StreamId};

/// The longest wait that every clock can represent.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// A set of streams whose work runs only when a test requests it, in an order that a seed
/// determines.
///
/// Work of one stream runs in the order of its submission. Work of different streams runs in any
/// order that [`Fence::delay`] allows. Clones share the streams.
///
/// ```
/// use terrane_pool::{Fence as _, FenceSource as _, StreamId};
/// use terrane_testkit::simulated::SimulatedStreams;
///
/// # fn main() -> Result<(), terrane_pool::FenceError> {
/// let streams = SimulatedStreams::new(7);
/// let compute = StreamId::new(1);
/// streams.submit(compute, || {});
/// let fence = streams.create()?;
/// fence.record(compute)?;
/// assert!(!fence.is_complete()?);
/// streams.run_all();
/// assert!(fence.is_complete()?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct SimulatedStreams {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    progress: Condvar,
}

#[derive(Default)]
struct State {
    streams: BTreeMap<StreamId, Stream>,
    random: u64,
    runs_on_wait: bool,
    failures_due: u32,
    fences: u64,
}

#[derive(Default)]
struct Stream {
    queue: VecDeque<Work>,
    submitted: u64,
    completed: u64,
    /// Whether a thread is running the front of the queue.
    running: bool,
}

enum Work {
    Run(Box<dyn FnOnce() + Send>),
    WaitFor(StreamId, u64),
}

impl SimulatedStreams {
    /// Creates streams that are interleaved according to `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let streams = Self::default();
        streams.lock().random = seed;
        streams
    }

    /// Sets whether a wait for a fence runs the work before it, as a device would. By default, a
    /// wait lasts until another thread runs the work, or times out.
    pub fn set_runs_on_wait(&self, runs: bool) {
        self.lock().runs_on_wait = runs;
    }

    /// Makes the next `count` operations on fences fail.
    pub fn fail_next(&self, count: u32) {
        self.lock().failures_due = count;
    }

    /// Returns the number of fences created so far.
    #[must_use]
    pub fn fences_created(&self) -> u64 {
        self.lock().fences
    }

    /// Returns the number of pieces of work of `stream` that have not run yet.
    #[must_use]
    pub fn backlog(&self, stream: StreamId) -> usize {
        self.lock().streams.get(&stream).map_or(0, |stream| stream.queue.len())
    }

    /// Appends `work` to `stream`.
    pub fn submit(&self, stream: StreamId, work: impl FnOnce() + Send + 'static) {
        self.lock().push(stream, Work::Run(Box::new(work)));
    }

    /// Runs the next piece of work of `stream`. Returns whether one could run.
    pub fn step(&self, stream: StreamId) -> bool {
        let mut state = self.lock();
        let Some(work) = state.start(stream) else { return false };
        drop(state);
        if let Work::Run(run) = work {
            run();
        }
        let mut state = self.lock();
        if let Some(stream) = state.streams.get_mut(&stream) {
            stream.running = false;
            stream.completed += 1;
        }
        self.shared.progress.notify_all();
        true
    }

    /// Runs one piece of work of a stream that the seed chooses. Returns whether any could run.
    pub fn step_any(&self) -> bool {
        let mut state = self.lock();
        let mut ids: Vec<_> = state.streams.keys().copied().collect();
        let length = ids.len().max(1);
        let by = usize::try_from(state.next_random() >> 33).unwrap_or(0) % length;
        drop(state);
        ids.rotate_left(by);
        ids.into_iter().any(|stream| self.step(stream))
    }

    /// Runs all work that can run.
    pub fn run_all(&self) {
        while self.step_any() {}
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn push(&mut self, stream: StreamId, work: Work) {
        let stream = self.streams.entry(stream).or_default();
        stream.queue.push_back(work);
        stream.submitted += 1;
    }

    fn has_completed(&self, stream: StreamId, position: u64) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.completed >= position)
    }

    /// Takes the front of a queue, if it may run now.
    fn start(&mut self, id: StreamId) -> Option<Work> {
        let stream = self.streams.get(&id)?;
        if stream.running {
            return None;
        }
        if let Work::WaitFor(other, position) = stream.queue.front()?
            && !self.has_completed(*other, *position)
        {
            return None;
        }
        let stream = self.streams.get_mut(&id)?;
        stream.running = true;
        stream.queue.pop_front()
    }

    /// SplitMix64 (Steele, Lea and Flood, 2014).
    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn fault(&mut self, operation: &'static str) -> Result<(), FenceError> {
        if self.failures_due == 0 {
            return Ok(());
        }
        self.failures_due -= 1;
        Err(FenceError { operation, source: Box::new(FenceFault) })
    }
}

/// The cause of a failure that [`SimulatedStreams::fail_next`] requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("injected fault in an operation on a fence")]
struct FenceFault;

impl FenceSource for SimulatedStreams {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        let mut state = self.lock();
        state.fault("create")?;
        state.fences += 1;
        Ok(Arc::new(SimulatedFence { streams: self.clone(), mark: Mutex::new(None) }))
    }
}

struct SimulatedFence {
    streams: SimulatedStreams,
    mark: Mutex<Option<(StreamId, u64)>>,
}

impl SimulatedFence {
    fn mark(&self) -> Option<(StreamId, u64)> {
        *self.mark.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_run(&self, state: &State) -> bool {
        self.mark().is_none_or(|(stream, position)| state.has_completed(stream, position))
    }
}

impl Fence for SimulatedFence {
    fn record(&self, stream: StreamId) -> Result<(), FenceError> {
        let mut state = self.streams.lock();
        state.fault("record")?;
        let position = state.streams.get(&stream).map_or(0, |stream| stream.submitted);
        *self.mark.lock().unwrap_or_else(PoisonError::into_inner) = Some((stream, position));
        Ok(())
    }

    fn is_complete(&self) -> Result<bool, FenceError> {
        let mut state = self.streams.lock();
        state.fault("query")?;
        Ok(self.has_run(&state))
    }

    fn wait(&self, timeout: Duration) -> Result<bool, FenceError> {
        let mut state = self.streams.lock();
        state.fault("wait")?;
        let now = Instant::now();
        // A century stands for no limit.
        let deadline = now + timeout.min(CENTURY);
        while !self.has_run(&state) {
            if state.runs_on_wait {
                drop(state);
                let progressed = self.streams.step_any();
                state = self.streams.lock();
                if progressed {
                    continue;
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let waited = self.streams.shared.progress.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(true)
    }

    fn delay(&self, stream: StreamId) -> Result<bool, FenceError> {
        let mut state = self.streams.lock();
        state.fault("delay")?;
        if let Some((other, position)) = self.mark() {
            state.push(stream, Work::WaitFor(other, position));
        }
        Ok(true)
    }
}

impl fmt::Debug for SimulatedStreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        let backlogs = state.streams.iter().map(|(id, stream)| (id, stream.queue.len()));
        f.debug_map().entries(backlogs).finish()
    }
}

impl fmt::Debug for SimulatedFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimulatedFence").field(&self.mark()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    const A: StreamId = StreamId::new(1);
    const B: StreamId = StreamId::new(2);

    #[test]
    fn a_delayed_stream_runs_after_the_mark() {
        for seed in 0..20 {
            let streams = SimulatedStreams::new(seed);
            let order = Arc::new(AtomicU32::new(0));
            let (first, second) = (Arc::clone(&order), Arc::clone(&order));
            streams.submit(A, move || {
                assert_eq!(first.fetch_add(1, Ordering::Relaxed), 0);
            });
            let fence = streams.create().unwrap();
            fence.record(A).unwrap();
            assert!(fence.delay(B).unwrap());
            streams.submit(B, move || {
                assert_eq!(second.fetch_add(1, Ordering::Relaxed), 1);
            });
            streams.run_all();
            assert_eq!(order.load(Ordering::Relaxed), 2);
        }
    }

    #[test]
    fn waits_end_in_time_and_faults_are_typed() {
        let streams = SimulatedStreams::new(0);
        streams.submit(A, || {});
        let fence = streams.create().unwrap();
        fence.record(A).unwrap();
        assert!(!fence.wait(Duration::from_millis(1)).unwrap());
        streams.fail_next(1);
        assert_eq!(fence.is_complete().unwrap_err().operation, "query");
        streams.set_runs_on_wait(true);
        assert!(fence.wait(Duration::ZERO).unwrap());
        assert!(fence.wait(Duration::MAX).unwrap());
    }
}
