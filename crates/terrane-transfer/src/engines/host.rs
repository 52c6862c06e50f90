//! Copies between host memory and host memory.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use terrane_core::{ByteCount, HostAddress, Location, OsError};

use crate::engines::copy::{self, Caching};
use crate::engines::rate::Rate;
use crate::engines::threads;
use crate::{CopyEngine, CopyFailure, CopyJob, Declined, Endpoint, Quote, Terms, TransferPlan};

/// Copies between host memory and host memory, system or pinned, on threads of its own.
///
/// A large transfer is shared out among the threads in chunks, and written past the cache, which
/// it would only sweep out; a small one is copied by one thread through the cache, in turn with
/// the chunks of whatever large ones the thread is busy with. Of a layer-wise transfer, each layer
/// is done when its last chunk has been copied.
///
/// Dropping the engine lets its threads finish what was submitted, and joins them, unless it drops
/// on a thread of an engine, which must not wait for others: then they end by themselves.
pub struct HostEngine {
    queue: Option<Sender<Arc<Work>>>,
    threads: Vec<JoinHandle<()>>,
    options: HostEngineOptions,
    rates: Arc<Rates>,
}

/// The options of a [`HostEngine`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostEngineOptions {
    /// How many threads copy. A processor's memory bandwidth is usually reached with a few; the
    /// default is all that this process may use, but 8 at most.
    pub threads: NonZeroUsize,
    /// How much one thread takes at a time, a byte at least. Bounds how late a deadline is noticed, and how
    /// unevenly the threads can finish.
    pub chunk: ByteCount,
    /// From this size on, transfers are written past the cache. Off where the processor cannot.
    pub streaming_from: ByteCount,
}

/// With runs shorter than this on average, nothing is written past the cache: too many of their lines
/// are partial.
const LEAST_STREAMED_RUN: ByteCount = ByteCount::kib(1);

impl Default for HostEngineOptions {
    /// As many threads as processors up to 8, chunks of 1 MiB, streaming from 8 MiB on.
    ///
    /// Measured on an AMD EPYC of 32 MiB cache: below 8 MiB a copy through the cache is as fast,
    /// and leaves what it copied where the processor finds it.
    fn default() -> Self {
        let available = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let most = NonZeroUsize::MIN.saturating_add(7);
        Self {
            threads: available.min(most),
            chunk: ByteCount::mib(1),
            streaming_from: ByteCount::mib(8),
        }
    }
}

#[derive(Debug)]
struct Rates {
    through: Rate,
    past: Rate,
}

const THROUGH_CACHE: &str = "copy through the cache";
const PAST_CACHE: &str = "streaming copy";

impl HostEngine {
    /// An engine with these options, whose threads are named `terrane-copy-0` and so on.
    ///
    /// # Errors
    ///
    /// [`OsError`] if a thread cannot be started; those that were are joined.
    pub fn new(options: HostEngineOptions) -> Result<Self, OsError> {
        // Guesses, until transfers have been measured: what one memory channel does, and what
        // waking a thread costs.
        let guess = |rate| Rate::new(rate, Duration::from_micros(10), Duration::from_nanos(20));
        let rates = Arc::new(Rates { through: guess(8e9), past: guess(10e9) });
        let (queue, work) = unbounded();
        let idle = Arc::new(AtomicUsize::new(0));
        let mut engine = Self { queue: Some(queue), threads: Vec::new(), options, rates };
        for number in 0..engine.options.threads.get() {
            let (work, idle) = (work.clone(), Arc::clone(&idle));
            let name = format!("terrane-copy-{number}");
            engine.threads.push(threads::spawn(name, move || serve(&work, &idle))?);
        }
        Ok(engine)
    }

    fn caching(&self, plan: &TransferPlan) -> Caching {
        let streams = plan.bytes() >= self.options.streaming_from
            && plan.mean_run() >= LEAST_STREAMED_RUN
            && copy::can_stream();
        if streams { Caching::Past } else { Caching::Through }
    }
}

// SAFETY: the threads touch the bytes of the runs only, in `Work::copy_chunks`, and the job is
// finished by whoever holds the last reference to the work, when no thread copies any more.
unsafe impl CopyEngine for HostEngine {
    fn name(&self) -> &'static str {
        "host"
    }

    fn quote(&self, plan: &TransferPlan, terms: &Terms) -> Result<Quote, Declined> {
        if !plan.source().kind().is_host() || !plan.destination().kind().is_host() {
            return Err(Declined::Kinds);
        }
        if terms.device_order.is_some() {
            return Err(Declined::DeviceOrder);
        }
        let caching = self.caching(plan);
        let (path, rate, reason) = match caching {
            Caching::Through => (THROUGH_CACHE, &self.rates.through, "small or in short runs"),
            Caching::Past => (PAST_CACHE, &self.rates.past, "too large to be of use in the cache"),
        };
        let predicted = rate.predict(plan.bytes(), plan.runs().len());
        Ok(Quote { path, reason: Cow::Borrowed(reason), predicted })
    }

    fn submit(&self, job: CopyJob) {
        let Some(queue) = &self.queue else { return };
        let caching = if job.path() == PAST_CACHE { Caching::Past } else { Caching::Through };
        let chunks = job.plan().bytes().get().div_ceil(self.options.chunk.get().max(1));
        // A thread is worth waking for two chunks: to copy one takes about as long.
        let threads =
            ByteCount::from_usize(self.threads.len()).get().min(chunks.div_ceil(2)).max(1);
        let work = Arc::new(Work {
            caching,
            chunk: self.options.chunk.get().max(1),
            cursor: Mutex::new(Cursor::default()),
            failure: Mutex::new(None),
            rates: Arc::clone(&self.rates),
            left_of_layers: left_of_layers(&job),
            job,
        });
        // One reference for each thread that shall take part, and none for this one, which is not
        // to run what follows a job's end. Should the threads be gone, the work drops here, and
        // the job with it, which tells its caller.
        for _ in 1..threads {
            let _ = queue.send(Arc::clone(&work));
        }
        let _ = queue.send(work);
    }
}

impl Drop for HostEngine {
    fn drop(&mut self) {
        self.queue = None;
        threads::join(self.threads.drain(..));
    }
}

impl fmt::Debug for HostEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostEngine").field("options", &self.options).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a thread does until the engine has dropped and what was submitted has ended.
///
/// It copies a chunk of each of its transfers in turn, so that a small one does not wait for the
/// end of a large one. It takes on another beside those it has only if no thread is `idle`.
fn serve(queue: &Receiver<Arc<Work>>, idle: &AtomicUsize) {
    let mut turns: VecDeque<Arc<Work>> = VecDeque::new();
    loop {
        // Relaxed: a hint. Whoever takes the work on, it is taken once.
        if turns.is_empty() {
            idle.fetch_add(1, Ordering::Relaxed);
            let arrived = queue.recv();
            idle.fetch_sub(1, Ordering::Relaxed);
            let Ok(work) = arrived else { return };
            turns.push_back(work);
        } else if idle.load(Ordering::Relaxed) == 0 {
            turns.extend(queue.try_recv());
        }
        let Some(work) = turns.pop_front() else { continue };
        if work.copy_one_chunk() {
            turns.push_back(work);
        } else {
            // Only foreign code can panic, such as the drop of a caller's guard. The thread has
            // other transfers to serve.
            let _ = catch_unwind(AssertUnwindSafe(|| Work::release(work)));
        }
    }
}

/// A job, shared by the threads that execute it.
struct Work {
    caching: Caching,
    chunk: u64,
    cursor: Mutex<Cursor>,
    failure: Mutex<Option<CopyFailure>>,
    rates: Arc<Rates>,
    /// The bytes of each layer that have not been copied; of no layer, if nobody wants to know.
    left_of_layers: Box<[AtomicU64]>,
    job: CopyJob,
}

fn left_of_layers(job: &CopyJob) -> Box<[AtomicU64]> {
    if job.layers().is_none() {
        return Box::default();
    }
    let plan = job.plan();
    let layers = plan.layers();
    let of_each = plan.bytes().get() / u64::from(layers.end - layers.start);
    layers.map(|_| AtomicU64::new(of_each)).collect()
}

/// Where the part of the job begins that no thread has taken yet.
#[derive(Clone, Copy, Default)]
struct Cursor {
    run: usize,
    offset: u64,
}

impl Work {
    /// Copies a chunk that no thread has taken yet. Says whether there was one.
    fn copy_one_chunk(&self) -> bool {
        self.job.start();
        let Some((begin, bytes)) = self.take_chunk() else { return false };
        if self.job.terms().deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            self.fail(CopyFailure::DeadlineExceeded);
            return false;
        }
        let copied = copy_chunk(self.job.plan(), begin, bytes, self.caching);
        copy::publish();
        match copied {
            Ok(()) => {
                self.job.progress().add(ByteCount::new(bytes));
                self.tell_layers(begin, bytes);
            }
            Err(failure) => self.fail(failure),
        }
        true
    }

    /// Says of each layer that `bytes` from `begin` on were the last of, that it is done.
    fn tell_layers(&self, begin: Cursor, mut bytes: u64) {
        let Some(signals) = self.job.layers() else { return };
        let plan = self.job.plan();
        let mut offset = begin.offset;
        for run in plan.runs().iter().skip(begin.run) {
            let length = (run.bytes().get() - offset).min(bytes);
            let layer = plan.layer(run);
            let index = ByteCount::new((layer - plan.layers().start).into()).to_usize();
            // Released by whoever copied, and acquired by whoever was last and tells of all.
            let left = self.left_of_layers.get(index);
            if left.is_some_and(|left| left.fetch_sub(length, Ordering::AcqRel) == length) {
                signals.done(layer..layer + 1);
            }
            bytes -= length;
            offset = 0;
            if bytes == 0 {
                break;
            }
        }
    }

    /// Ends the job with `failure` once the other threads have copied what they have taken.
    fn fail(&self, failure: CopyFailure) {
        lock(&self.cursor).run = usize::MAX;
        lock(&self.failure).get_or_insert(failure);
    }

    /// Takes the next chunk: where it begins, and how many bytes it has.
    fn take_chunk(&self) -> Option<(Cursor, u64)> {
        let runs = self.job.plan().runs();
        let mut cursor = lock(&self.cursor);
        let begin = *cursor;
        let mut taken = 0;
        while let Some(run) = runs.get(cursor.run) {
            let left_of_run = run.bytes().get() - cursor.offset;
            let left_of_chunk = self.chunk - taken;
            if left_of_run > left_of_chunk {
                cursor.offset += left_of_chunk;
                return Some((begin, self.chunk));
            }
            taken += left_of_run;
            *cursor = Cursor { run: cursor.run + 1, offset: 0 };
            if taken == self.chunk {
                break;
            }
        }
        (taken > 0).then_some((begin, taken))
    }

    /// Lets go of the work; the last one to do so finishes the job.
    fn release(work: Arc<Self>) {
        let Some(Self { job, caching, failure, rates, .. }) = Arc::into_inner(work) else { return };
        if let Some(failure) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return job.finish(Err(failure));
        }
        let rate = match caching {
            Caching::Through => &rates.through,
            Caching::Past => &rates.past,
        };
        rate.learn(job.plan().bytes(), job.running_for());
        job.finish(Ok(()));
    }
}

/// Copies `bytes` bytes of the plan from `begin` on.
fn copy_chunk(
    plan: &TransferPlan,
    begin: Cursor,
    mut bytes: u64,
    caching: Caching,
) -> Result<(), CopyFailure> {
    let mut offset = begin.offset;
    for (index, run) in plan.runs().iter().enumerate().skip(begin.run) {
        let length = (run.bytes().get() - offset).min(bytes);
        let source = host_address(plan.source(), run.source_region, run.source_offset + offset);
        let destination = host_address(
            plan.destination(),
            run.destination_region,
            run.destination_offset + offset,
        );
        let (Some(source), Some(destination)) = (source, destination) else {
            let (offset, source) = (ByteCount::new(offset), Box::new(NotInHostMemory));
            return Err(CopyFailure::Run { index, offset, source });
        };
        // SAFETY: the plan's runs lie within the regions of both ends, which the job keeps alive
        // and whose bytes are valid by the contract of `Memory`; they do not overlap; the claims
        // of the transfer keep all others from writing the source or touching the destination;
        // and the chunks that threads take are disjoint.
        unsafe {
            let length = ByteCount::new(length).to_usize();
            copy::copy(source.as_ptr(), destination.as_ptr(), length, caching);
        }
        bytes -= length;
        offset = 0;
        if bytes == 0 {
            break;
        }
    }
    Ok(())
}

/// Memory whose kind says that it is the host's, and whose location says that it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("memory of a host kind has no host address; its implementation of Memory is wrong")]
struct NotInHostMemory;

/// An address within a region of host memory.
fn host_address(end: &Endpoint, region: u32, offset: u64) -> Option<HostAddress> {
    end.base(region).and_then(Location::as_host)?.checked_add(ByteCount::new(offset))
}
