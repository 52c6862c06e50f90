//! Copies between host memory and host memory.

mod turns;
mod work;

use std::borrow::Cow;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, OsError, OwnerProcess};

use crate::checksums::crc;
use crate::engine::declined::Declined;
use crate::engine::job::{CopyFailure, CopyJob};
use crate::engine::quote::{Decision, Quote};
use crate::engine::rate::Rate;
use crate::engine::{CopyEngine, threads};
use crate::engines::copy::{self, Store};
use crate::plan::TransferPlan;
use crate::transfer::TransferOptions;
use turns::Turns;
use work::{ChunkedJob, QueuedJob};

/// The maximum number of threads of an engine. The standard library aborts if stacks run out.
const MOST_THREADS: usize = 1024;

/// Copies between host memory and host memory, system or pinned. It uses its own threads and those
/// that [wait](crate::WaiterProgress::poll_blocking) for a transfer.
///
/// The threads share a large transfer in chunks. Its stores are non-temporal, because it would only
/// evict other data from the cache. A small transfer is copied through the cache, in turn with
/// chunks of larger ones. A transfer waits for earlier ones that are not larger. Each layer of a
/// layer-by-layer transfer is done when its last chunk has been copied.
///
/// Dropping the engine lets its threads complete all submitted jobs, and joins them. A drop on an
/// engine's thread must not join others; the threads then exit by themselves.
pub struct HostEngine {
    queue: Option<Sender<Arc<QueuedJob>>>,
    threads: Vec<JoinHandle<()>>,
    owner: OwnerProcess,
    options: HostEngineOptions,
    rates: Arc<HostRates>,
}

/// The options of a [`HostEngine`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostEngineOptions {
    /// The number of the engine's threads that copy, besides waiting threads. A few threads usually
    /// reach a processor's memory bandwidth. The default is the number of processors that this
    /// process may use, at most 8.
    ///
    /// An engine has at most 1,024 threads, because more never raise the rate of a memory.
    pub threads: NonZeroUsize,
    /// The bytes that one thread copies at a time, at least 1. It bounds the delay of a deadline or
    /// a cancellation, and the difference between the ends of the threads.
    pub chunk: ByteCount,
    /// The size in bytes from which transfers use non-temporal stores. It has no effect if the
    /// processor has none.
    pub streaming_from: ByteCount,
}

/// The mean length of runs below which stores are not non-temporal, because too many lines are
/// partial.
const MIN_STREAMED_RUN: ByteCount = ByteCount::kib(1);

impl Default for HostEngineOptions {
    /// As many threads as processors up to 8, chunks of 256 KiB, streaming from 8 MiB on.
    ///
    /// With chunks of 1 MiB no rate is higher, and a copy of 2 MiB takes up to twice as long.
    /// Streaming was measured on an AMD EPYC with 32 MiB of cache. Below 8 MiB a copy through the
    /// cache is as fast, and leaves the data in the cache.
    fn default() -> Self {
        let available = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let most = NonZeroUsize::MIN.saturating_add(7);
        Self {
            threads: available.min(most),
            chunk: ByteCount::kib(256),
            streaming_from: ByteCount::mib(8),
        }
    }
}

/// A path of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostPath {
    ThroughCache,
    Streaming,
    Relayout,
}

impl HostPath {
    fn store(self) -> Store {
        match self {
            Self::ThroughCache | Self::Relayout => Store::Cached,
            Self::Streaming => Store::NonTemporal,
        }
    }
}

impl Decision for HostPath {
    fn path(&self) -> Cow<'_, str> {
        Cow::Borrowed(self.label())
    }

    fn label(&self) -> &'static str {
        match self {
            Self::ThroughCache => "copy through the cache",
            Self::Streaming => "streaming copy",
            Self::Relayout => "re-layout through the cache",
        }
    }

    fn reason(&self) -> Cow<'_, str> {
        Cow::Borrowed(match self {
            Self::ThroughCache => "small or in short runs",
            Self::Streaming => "larger than the cache can use",
            Self::Relayout => "token orders differ, or some heads are copied",
        })
    }
}

#[derive(Debug)]
struct HostRates {
    through_cache: Rate,
    streaming: Rate,
    relayout: Rate,
}

impl HostRates {
    fn of(&self, path: HostPath) -> &Rate {
        match path {
            HostPath::ThroughCache => &self.through_cache,
            HostPath::Streaming => &self.streaming,
            HostPath::Relayout => &self.relayout,
        }
    }
}

impl HostEngine {
    /// Creates an engine with these options. Its threads are named `terrane-copy-0` and so on.
    ///
    /// # Errors
    ///
    /// [`OsError`] if a thread cannot be started; threads that were started are joined.
    pub fn new(options: HostEngineOptions) -> Result<Self, OsError> {
        // Estimates, until transfers have been measured: the rate of one memory channel, and the
        // time to wake a thread.
        let guess = |rate| Rate::new(rate, Duration::from_micros(10), Duration::from_nanos(20));
        let (through_cache, streaming, relayout) = (guess(8e9), guess(10e9), guess(8e9));
        let rates = Arc::new(HostRates { through_cache, streaming, relayout });
        let (queue, work) = unbounded();
        let idle = Arc::new(AtomicUsize::new(0));
        let owner = OwnerProcess::current();
        let mut engine = Self { queue: Some(queue), threads: Vec::new(), owner, options, rates };
        for number in 0..engine.options.threads.get().min(MOST_THREADS) {
            let (work, idle) = (work.clone(), Arc::clone(&idle));
            let name = format!("terrane-copy-{number}");
            engine.threads.push(threads::spawn(name, move || serve(&work, &idle))?);
        }
        Ok(engine)
    }

    fn choose(&self, plan: &TransferPlan) -> &'static HostPath {
        let streams = || {
            plan.bytes() >= self.options.streaming_from
                && plan.mean_run() >= MIN_STREAMED_RUN
                && copy::has_non_temporal_stores()
        };
        if plan.breaks_pieces() {
            &HostPath::Relayout
        } else if streams() {
            &HostPath::Streaming
        } else {
            &HostPath::ThroughCache
        }
    }
}

// SAFETY: the threads access only bytes of the runs, in `work`. The thread that drops the last
// reference to the work finishes the job; no thread copies any more then.
unsafe impl CopyEngine for HostEngine {
    fn name(&self) -> &'static str {
        "host"
    }

    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        if !self.owner.is_current() {
            return Err(Declined::Forked);
        }
        if !plan.source().kind().is_host() || !plan.destination().kind().is_host() {
            return Err(Declined::Kinds);
        }
        if options.device_order.is_some() {
            return Err(Declined::DeviceOrder);
        }
        let path = self.choose(plan);
        let predicted = self.rates.of(*path).predict(plan.bytes(), plan.run_count());
        Ok(Quote::constant(predicted, path))
    }

    fn computes_checksums(&self) -> bool {
        crc::IS_COMPUTED
    }

    fn submit(&self, job: CopyJob) {
        let Some(queue) = &self.queue else { return };
        let path = match job.decision::<HostPath>() {
            Ok(&path) => path,
            Err(foreign) => {
                return job.finish(Err(CopyFailure::Engine { source: foreign.into() }));
            }
        };
        let chunks = job.plan().bytes().get().div_ceil(self.options.chunk.get().max(1));
        // Waking a thread is worth it from two chunks on: copying a chunk takes about as long as
        // waking.
        let threads = to_u64(self.threads.len()).min(chunks.div_ceil(2)).max(1);
        let work = QueuedJob::new(ChunkedJob::new(job, path, self.options.chunk, &self.rates));
        // One entry for each thread that takes part. If the threads have exited, the work and its
        // job drop here, which notifies the caller.
        for _ in 1..threads {
            let _ = queue.send(Arc::clone(&work));
        }
        let _ = queue.send(work);
    }
}

impl Drop for HostEngine {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            return threads::leave((self.queue.take(), std::mem::take(&mut self.threads)));
        }
        self.queue = None;
        threads::join(self.threads.drain(..));
    }
}

terrane_core::debug_fields!(HostEngine { options });

/// Runs a thread until the engine has dropped and all submitted jobs have ended.
///
/// It accepts another transfer beside its own only if no thread is `idle`.
fn serve(queue: &Receiver<Arc<QueuedJob>>, idle: &AtomicUsize) {
    let mut turns = Turns::new();
    loop {
        // Relaxed: a hint. Any thread may take the work, and only one does.
        if turns.is_empty() {
            idle.fetch_add(1, Ordering::Relaxed);
            let arrived = queue.recv();
            idle.fetch_sub(1, Ordering::Relaxed);
            let Ok(work) = arrived else { return };
            turns.push(work.bytes(), work);
        } else if idle.load(Ordering::Relaxed) == 0
            && let Ok(work) = queue.try_recv()
        {
            turns.push(work.bytes(), work);
        }
        // Only foreign code can panic, such as the drop of a caller's guard. The thread has other
        // transfers to serve.
        let copy = |work: &Arc<QueuedJob>| {
            catch_unwind(AssertUnwindSafe(|| work.copy_one_chunk())).unwrap_or(false)
        };
        turns.copy_next(|work| work.must_stop(), copy);
    }
}
