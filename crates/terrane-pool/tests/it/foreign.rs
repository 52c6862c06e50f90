//! Foreign code that a pool or an adaptor calls, and that uses the same pool or adaptor.
//!
//! If it were called under a lock, it would deadlock.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread;
use std::time::Duration;

use terrane_core::{Allocate, ByteCount, Location, Memory, RegionRequest};
use terrane_pool::adaptors::{Guard, Inspect, LiveBlocks, Tags, Trace, TraceSink};
use terrane_pool::{Access, Fence, FenceError, FenceSource, Pool, PoolOptions, StreamId};
use terrane_testkit::events::AtEvents;
use terrane_testkit::simulated::{Simulated, SimulatedOptions, SimulatedStreams};
use tracing::Subscriber;
use tracing::subscriber::with_default;

use crate::heap::Heap;
use crate::support::{Block, Counted, comes_true};

const PAGE: ByteCount = ByteCount::kib(4);
const A: StreamId = StreamId::new(1);
const B: StreamId = StreamId::new(2);

/// Runs `work` on a new thread, and panics if `work` panics or does not end.
fn ends(work: impl FnOnce() + Send + 'static) {
    let thread = thread::Builder::new().name("test".into()).spawn(work).unwrap();
    assert!(comes_true(|| thread.is_finished()), "a thread deadlocked");
    thread.join().unwrap();
}

fn request() -> RegionRequest {
    RegionRequest::new(PAGE)
}

/// Releases a block that two streams use.
fn park(pool: &Pool<Counted>) {
    let mut block = pool.allocate_on(A, &request()).unwrap();
    block.record_use(B, Access::Write).unwrap();
    drop(block);
}

/// A source of fences that owns a block of another pool.
#[derive(Debug)]
struct Holder(SimulatedStreams, #[expect(dead_code, reason = "it is dropped")] Block);

impl FenceSource for Holder {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        self.0.create()
    }
}

#[test]
fn a_closed_pool_that_holds_a_block_of_the_pool_a_thread_settles_in_is_dropped_without_a_lock() {
    ends(|| {
        let second = Arc::new(Pool::new(Counted::unlimited(), PoolOptions::default()).unwrap());
        let acquired = {
            let acquire = || second.allocate_bytes(PAGE).unwrap();
            thread::scope(|scope| scope.spawn(acquire).join()).unwrap()
        };
        let fences = Arc::new(Holder(SimulatedStreams::new(1), acquired));
        let first =
            Pool::with_fences(Counted::unlimited(), PoolOptions::default(), fences).unwrap();
        // This thread registers with the first pool, and is its last owner.
        drop(first.allocate_bytes(PAGE).unwrap());
        drop(first);
        drop(second.allocate_bytes(PAGE).unwrap());
        assert_eq!(second.snapshot().live, ByteCount::ZERO);
    });
}

/// Calls `query` at each event of a pool.
fn at_events(query: impl Fn() + Send + Sync + 'static) -> impl Subscriber + Send + Sync {
    AtEvents::of("terrane_pool", move |_| query())
}

#[test]
fn a_subscriber_may_use_the_pool() {
    ends(|| {
        let (upstream, streams) = (Counted::new(PAGE), SimulatedStreams::new(1));
        let pending_wait = Duration::from_millis(1);
        let options = PoolOptions { pending_wait, order_streams: true, ..PoolOptions::default() };
        let fences = Arc::new(streams.clone());
        let pool = Arc::new(Pool::with_fences(upstream, options, fences).unwrap());
        let weak = Arc::downgrade(&pool);
        let query = move || weak.upgrade().map_or((), |pool| drop(pool.snapshot()));
        with_default(at_events(query), || {
            for failures in 1..8 {
                streams.submit(A, || {});
                park(&pool);
                streams.fail_next(failures);
                // Failures to create, record, query, wait for or order a fence are reported.
                let _ = pool.allocate_on(A, &request()).map(drop);
                let _ = pool.allocate_bytes(PAGE).map(drop);
                streams.fail_next(0);
                streams.run_all();
                pool.trim(ByteCount::ZERO);
            }
            pool.close();
        });
    });
}

#[test]
fn a_subscriber_may_ask_the_guard_what_it_has_found() {
    ends(|| {
        let guard = Guard::new(Heap::new(ByteCount::mib(1)));
        let log = guard.log().clone();
        with_default(at_events(move || drop(log.violations())), || {
            let block = guard.allocate(&request()).unwrap();
            let Location::Host(address) = block.location() else { panic!("the host's") };
            // SAFETY: the byte before the block is the guard's canary.
            unsafe { address.as_ptr().wrapping_sub(1).write(0) };
            assert_eq!(guard.verify(), 1);
            drop(block);
        });
        assert_eq!(guard.log().found(), 2);
    });
}

/// Streams whose fences use the pool on every call.
#[derive(Debug, Default)]
struct Users {
    streams: SimulatedStreams,
    pool: OnceLock<Weak<Pool<Counted>>>,
    /// Set while the pool is used, because this use may call fences again.
    is_using: AtomicBool,
}

impl Users {
    fn use_pool(&self) {
        let Some(pool) = self.pool.get().and_then(Weak::upgrade) else { return };
        if !self.is_using.swap(true, Ordering::Relaxed) {
            pool.snapshot();
            drop(pool.allocate_bytes(ByteCount::kib(64)));
            self.is_using.store(false, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
struct User(Arc<dyn Fence>, Arc<Users>);

#[derive(Debug)]
struct Source(Arc<Users>);

impl FenceSource for Source {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        self.0.use_pool();
        Ok(Arc::new(User(self.0.streams.create()?, Arc::clone(&self.0))))
    }
}

impl Fence for User {
    fn record(&self, stream: StreamId) -> Result<(), FenceError> {
        self.1.use_pool();
        self.0.record(stream)
    }
    fn is_complete(&self) -> Result<bool, FenceError> {
        self.1.use_pool();
        self.0.is_complete()
    }
    fn wait(&self, timeout: Duration) -> Result<bool, FenceError> {
        self.1.use_pool();
        self.0.wait(timeout)
    }
    fn delay(&self, stream: StreamId) -> Result<bool, FenceError> {
        self.1.use_pool();
        self.0.delay(stream)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.1.use_pool();
    }
}

#[test]
fn a_fence_may_use_the_pool() {
    ends(|| {
        let users = Arc::new(Users::default());
        let source = Arc::new(Source(Arc::clone(&users)));
        let pending_wait = Duration::from_millis(1);
        let options = PoolOptions { pending_wait, order_streams: true, ..PoolOptions::default() };
        let pool = Pool::with_fences(Counted::new(ByteCount::kib(96)), options, source).unwrap();
        let pool = Arc::new(pool);
        users.pool.set(Arc::downgrade(&pool)).unwrap();
        for _ in 0..4 {
            users.streams.submit(A, || {});
            for _ in 0..8 {
                park(&pool);
            }
            drop(pool.allocate_on(StreamId::new(3), &request()));
            drop(pool.allocate_bytes(ByteCount::kib(96)));
            users.streams.run_all();
            pool.reap();
        }
        pool.close();
        assert_eq!(pool.snapshot().held, ByteCount::ZERO);
    });
}

/// A writer that allocates traced memory on every call.
struct Recursive(Arc<OnceLock<Trace<Simulated, Recursive>>>, Arc<Mutex<u64>>);

impl Write for Recursive {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        *self.1.lock().unwrap() += 1;
        if let Some(source) = self.0.get() {
            source.allocate(&request()).map_err(io::Error::other)?;
        }
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_writer_of_a_trace_may_use_traced_memory() {
    ends(|| {
        let (source, writes) = (Arc::new(OnceLock::new()), Arc::default());
        let sink = TraceSink::new(Recursive(Arc::clone(&source), Arc::clone(&writes)));
        let traced = Trace::new(Simulated::new(SimulatedOptions::default()), sink.clone());
        let source = source.get_or_init(|| traced);
        for _ in 0..5000 {
            source.allocate(&request()).unwrap();
        }
        sink.flush().unwrap();
        assert!(*writes.lock().unwrap() > 2, "rows are written before they are flushed");
        assert_eq!(sink.lost_rows(), 0);
    });
}

#[test]
fn live_blocks_may_be_freed_while_they_are_listed() {
    ends(|| {
        let table = LiveBlocks::new();
        let source = Tags::new(Simulated::new(SimulatedOptions::default()), table.clone());
        let mut blocks: Vec<_> = (0..4).map(|_| source.allocate(&request()).unwrap()).collect();
        table.inspect(&mut |_| drop(blocks.pop()));
        assert_eq!(table.live(), 0);
    });
}
