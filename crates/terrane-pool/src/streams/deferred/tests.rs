//! Items whose streams finish late, never, or have fences that fail.
#![allow(clippy::unwrap_used, reason = "a failed expectation panics")]

use super::*;
use crate::streams::simulated::SimulatedStreams;
use terrane_core::{ByteCount, Label, StorageKind};

const STREAM: StreamId = StreamId::new(1);

fn deferred(pending_wait: Duration) -> (DeferredFrees<Arc<()>>, SimulatedStreams) {
    let streams = SimulatedStreams::new(0);
    (DeferredFrees::new(Arc::new(streams.clone()), pending_wait), streams)
}

#[test]
fn items_are_reused_after_their_stream_and_so_are_fences() {
    let (deferred, streams) = deferred(Duration::ZERO);
    for _ in 0..5 {
        streams.submit(STREAM, || {});
        deferred.keep(Marks::new(deferred.fences(), [STREAM]), Arc::new(()));
        assert_eq!(deferred.reap(drop), 0);
        streams.run_all();
        assert_eq!(deferred.reap(drop), 1);
    }
    assert_eq!(streams.fences_created(), 1);
}

#[test]
fn a_mark_that_fails_is_made_later_and_nothing_is_freed_before() {
    let (deferred, streams) = deferred(Duration::ZERO);
    streams.submit(STREAM, || {});
    streams.fail_next(1);
    deferred.keep(Marks::new(deferred.fences(), [STREAM]), Arc::new(()));
    streams.fail_next(1);
    assert_eq!(deferred.reap(drop), 0);
    streams.run_all();
    assert_eq!(deferred.reap(drop), 1);
}

#[test]
fn a_second_request_waits_too() {
    let (deferred, streams) = deferred(Duration::from_secs(60));
    let free = AtomicUsize::new(0);
    streams.submit(STREAM, || {});
    deferred.keep(Marks::new(deferred.fences(), [STREAM]), Arc::new(()));
    // The one item makes room for both requests.
    let allocate = || match free.load(Ordering::SeqCst) {
        0 => Err(exhausted()),
        _ => Ok(()),
    };
    let free_item = |_| free.store(2, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| deferred.allocate_or_reclaim(allocate, free_item));
        while !deferred.waiting.lock().is_empty() {
            std::thread::yield_now();
        }
        let second = scope.spawn(|| deferred.allocate_or_reclaim(allocate, free_item));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(deferred.len(), 1, "the stream still uses it");
        streams.run_all();
        assert!(first.join().unwrap().is_ok());
        assert!(second.join().unwrap().is_ok());
    });
}

fn exhausted() -> AllocateError {
    AllocateError::OutOfMemory {
        kind: StorageKind::System,
        requested: ByteCount::ZERO,
        available: None,
        label: Label::default(),
        source: None,
    }
}

#[test]
fn a_later_item_serves_a_request_while_an_earlier_one_is_in_use() {
    const OTHER: StreamId = StreamId::new(2);
    let (deferred, streams) = deferred(Duration::from_secs(60));
    streams.submit(STREAM, || {});
    streams.submit(OTHER, || {});
    for stream in [STREAM, OTHER] {
        deferred.keep(Marks::new(deferred.fences(), [stream]), Arc::new(()));
    }
    let free = AtomicUsize::new(0);
    let allocate = || match free.load(Ordering::SeqCst) {
        0 => Err(exhausted()),
        _ => Ok(()),
    };
    let free_item = |_| free.store(1, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let request = scope.spawn(|| deferred.allocate_or_reclaim(allocate, free_item));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!request.is_finished());
        assert!(streams.step(OTHER));
        assert!(request.join().unwrap().is_ok());
    });
    assert_eq!((deferred.len(), streams.backlog(STREAM)), (1, 1));
    streams.run_all();
}

#[test]
fn a_request_without_a_limit_is_refused_if_every_fence_fails() {
    let (deferred, streams) = deferred(Duration::MAX);
    streams.submit(STREAM, || {});
    streams.fail_next(u32::MAX);
    deferred.keep(Marks::new(deferred.fences(), [STREAM]), Arc::new(()));
    let refused = deferred.allocate_or_reclaim(|| Err::<(), _>(exhausted()), drop);
    assert!(refused.is_err());
}

/// A source that cannot make fences, and counts the attempts.
#[derive(Debug, Default)]
struct NoFences(AtomicUsize);

impl FenceSource for NoFences {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Err(FenceError { operation: "create", source: "no fences".into() })
    }
}

/// A request that finds no item, because another thread has it, does not forget that fences fail.
#[test]
fn a_request_is_refused_although_another_thread_often_has_the_item() {
    // Each round lasts at least this long and has a failure, so a second of failures ends in half
    // of the rounds.
    const ROUNDS: usize = 100;
    const HOLD: Duration = Duration::from_millis(20);
    let source = Arc::new(NoFences::default());
    let attempts = || source.0.load(Ordering::SeqCst);
    let deferred = DeferredFrees::new(Arc::<NoFences>::clone(&source), Duration::MAX);
    deferred.keep(Marks::new(deferred.fences(), [STREAM]), Arc::new(()));
    let request = || deferred.allocate_or_reclaim(|| Err::<(), _>(exhausted()), drop);
    std::thread::scope(|scope| {
        let request = scope.spawn(request);
        let mut rounds = 0;
        let mut before = attempts();
        while !request.is_finished() && rounds < ROUNDS {
            // A query and a wait alternate, so one of two attempts is a wait.
            if attempts() < before + 2 {
                std::thread::yield_now();
            } else if let Some((progress, item)) = deferred.pop() {
                rounds += 1;
                std::thread::sleep(HOLD);
                before = attempts();
                deferred.put_back(progress, item);
            }
        }
        assert!(request.join().unwrap().is_err());
        assert!(rounds < ROUNDS, "the request did not end while the item was taken");
    });
}

/// Fences that no query finds complete. Of all waits, the first and the third fail. The second
/// takes longer than failures may last.
#[derive(Clone, Debug, Default)]
struct FailsTwice(Arc<AtomicUsize>);

impl FenceSource for FailsTwice {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        Ok(Arc::new(self.clone()))
    }
}

impl Fence for FailsTwice {
    fn record(&self, _: StreamId) -> Result<(), FenceError> {
        Ok(())
    }

    fn is_complete(&self) -> Result<bool, FenceError> {
        Ok(false)
    }

    fn wait(&self, _: Duration) -> Result<bool, FenceError> {
        match self.0.fetch_add(1, Ordering::SeqCst) {
            0 | 2 => return Err(FenceError { operation: "wait", source: "it fails".into() }),
            1 => std::thread::sleep(Duration::from_millis(1100)),
            _ => {}
        }
        Ok(true)
    }
}

#[test]
fn failures_before_and_after_a_free_are_not_added_up() {
    let deferred = DeferredFrees::new(Arc::new(FailsTwice::default()), Duration::MAX);
    for _ in 0..2 {
        deferred.keep(Marks::new(deferred.fences(), [STREAM]), Arc::new(()));
    }
    let freed = AtomicUsize::new(0);
    let allocate = || match freed.load(Ordering::SeqCst) {
        2 => Ok(()),
        _ => Err(exhausted()),
    };
    let count = |_| {
        freed.fetch_add(1, Ordering::SeqCst);
    };
    assert!(deferred.allocate_or_reclaim(allocate, count).is_ok());
}

#[test]
fn many_requests_without_a_limit_are_refused_if_every_fence_fails() {
    let (deferred, streams) = deferred(Duration::MAX);
    streams.submit(STREAM, || {});
    streams.fail_next(u32::MAX);
    deferred.keep(Marks::new(deferred.fences(), [STREAM]), Arc::new(()));
    let request = || deferred.allocate_or_reclaim(|| Err::<(), _>(exhausted()), drop);
    std::thread::scope(|scope| {
        let requests = [(); 16].map(|()| scope.spawn(request));
        assert!(requests.into_iter().all(|request| request.join().unwrap().is_err()));
    });
}

#[test]
fn an_item_is_freed_at_the_end_although_its_fence_failed_once() {
    let (deferred, streams) = deferred(Duration::from_secs(60));
    streams.submit(STREAM, || {});
    let used = Arc::new(());
    deferred.keep(Marks::new(deferred.fences(), [STREAM]), Arc::clone(&used));
    streams.run_all();
    streams.fail_next(1);
    drop(deferred);
    assert_eq!(Arc::strong_count(&used), 1);
}

#[test]
fn a_wait_may_have_no_end() {
    let (deferred, streams) = deferred(Duration::MAX);
    streams.set_runs_on_wait(true);
    streams.submit(STREAM, || {});
    let used = Arc::new(());
    deferred.keep(Marks::new(deferred.fences(), [STREAM]), Arc::clone(&used));
    drop(deferred);
    assert_eq!(Arc::strong_count(&used), 1);
}

/// A fence that panics when it is queried or waited for.
#[derive(Debug)]
struct Broken;

impl FenceSource for Broken {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        Ok(Arc::new(Self))
    }
}

impl Fence for Broken {
    fn record(&self, _: StreamId) -> Result<(), FenceError> {
        Ok(())
    }

    fn is_complete(&self) -> Result<bool, FenceError> {
        std::panic::resume_unwind(Box::new("the driver is gone"))
    }

    fn wait(&self, _: Duration) -> Result<bool, FenceError> {
        self.is_complete()
    }
}

#[test]
fn a_fence_that_panics_frees_nothing() {
    let panics = |work: &mut dyn FnMut()| {
        let work = std::panic::AssertUnwindSafe(work);
        assert!(std::panic::catch_unwind(|| { work }.0()).is_err());
    };
    let mut deferred = Some(DeferredFrees::new(Arc::new(Broken), Duration::ZERO));
    let used = [(); 3].map(|()| Arc::new(()));
    for item in &used {
        let deferred = deferred.as_ref().unwrap();
        deferred.keep(Marks::new(deferred.fences(), [STREAM]), Arc::clone(item));
    }
    panics(&mut || assert_eq!(deferred.as_ref().unwrap().reap(drop), 0));
    panics(&mut || drop(deferred.take()));
    assert!(used.iter().all(|item| Arc::strong_count(item) == 2));
}

#[test]
fn items_that_a_stream_uses_at_the_end_are_leaked_and_the_rest_are_freed() {
    let (deferred, streams) = deferred(Duration::from_millis(1));
    let (used, free) = (Arc::new(()), Arc::new(()));
    deferred.keep(Marks::default(), Arc::clone(&free));
    streams.submit(STREAM, || {});
    deferred.keep(Marks::new(deferred.fences(), [STREAM]), Arc::clone(&used));
    drop(deferred);
    assert_eq!((Arc::strong_count(&free), Arc::strong_count(&used)), (1, 2));
}
