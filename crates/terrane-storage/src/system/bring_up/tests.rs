//! The ready prefix, its waiters, and failures of a bring-up.

use super::*;
use std::sync::atomic::AtomicUsize;
use std::task::{RawWaker, RawWakerVTable, Wake};

const ENOUGH: Duration = Duration::from_secs(60);

fn bytes(bytes: u64) -> ByteCount {
    ByteCount::new(bytes)
}

#[test]
fn the_prefix_only_grows_and_ends_with_the_length() {
    let (bring_up, producer) = BringUp::<StorageError>::new(bytes(100));
    for (said, usable) in [(30, 30), (10, 30), (70, 70), (100, 70), (1000, 70)] {
        producer.usable(bytes(said));
        assert_eq!(bring_up.usable_prefix(), bytes(usable));
        assert!(bring_up.wait_for(bytes(usable), Duration::ZERO).unwrap());
        assert!(!bring_up.is_complete(), "the producer completes it separately");
    }
    producer.complete();
    assert!(bring_up.is_complete() && bring_up.ended().is_none());
    assert!(bring_up.wait_for(bytes(u64::MAX), Duration::ZERO).unwrap());
    assert!(BringUp::<StorageError>::complete(bytes(5)).is_complete());
}

#[test]
fn a_waiting_thread_gets_the_prefix_or_the_end() {
    let (bring_up, producer) = BringUp::<StorageError>::new(bytes(100));
    assert!(!bring_up.wait_for(bytes(1), Duration::ZERO).unwrap());
    let (half, all) = std::thread::scope(|scope| {
        let half = scope.spawn(|| bring_up.wait_for(bytes(50), ENOUGH).unwrap());
        let all = scope.spawn(|| bring_up.wait_for(bytes(100), ENOUGH).unwrap_err());
        producer.usable(bytes(60));
        producer.fail(StorageError::Cancelled { ready: bytes(60), of: bytes(100) });
        (half.join().unwrap(), all.join().unwrap())
    });
    assert!(half);
    assert_eq!((all.usable, all.of), (bytes(60), bytes(100)));
    assert!(matches!(all.cause.as_deref(), Some(StorageError::Cancelled { .. })));
    assert!(std::error::Error::source(&all).is_some());
    assert!(bring_up.wait_for(bytes(60), Duration::ZERO).unwrap(), "that stays usable");
    assert!(bring_up.ended().is_some());
}

#[test]
fn no_thread_waits_for_a_producer_that_was_dropped() {
    let (bring_up, producer) = BringUp::<StorageError>::new(bytes(100));
    producer.usable(bytes(10));
    bring_up.cancel();
    assert!(producer.is_cancelled());
    drop(producer);
    let ended = bring_up.wait_for(bytes(11), ENOUGH).unwrap_err();
    assert!(ended.cause.is_none());
    assert!(ended.to_string().contains("cancelled"), "{ended}");
}

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A waker whose clones check the lock of the bring-up.
fn looking(bring_up: &BringUp) -> Waker {
    const TABLE: RawWakerVTable = RawWakerVTable::new(clone, |_| (), |_| (), |_| ());
    fn clone(data: *const ()) -> RawWaker {
        // SAFETY: the test keeps the bring-up alive for longer than its wakers.
        let bring_up = unsafe { &*data.cast::<BringUp>() };
        let is_free = bring_up.0.ending.try_lock().is_ok();
        assert!(is_free, "a waker was cloned under the lock");
        RawWaker::new(data, &TABLE)
    }
    let data = std::ptr::from_ref(bring_up).cast();
    // SAFETY: the functions of the table only read the bring-up, which is allowed on any
    // thread.
    unsafe { Waker::from_raw(RawWaker::new(data, &TABLE)) }
}

#[test]
fn wakers_are_cloned_without_the_lock() {
    let (bring_up, producer) = BringUp::<StorageError>::new(bytes(100));
    let waker = looking(&bring_up);
    let mut future = bring_up.usable(bytes(50));
    for _ in 0..2 {
        assert!(Pin::new(&mut future).poll(&mut Context::from_waker(&waker)).is_pending());
    }
    producer.complete();
    assert!(Pin::new(&mut future).poll(&mut Context::from_waker(&waker)).is_ready());
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a waker of a test panics");
    }
}

#[test]
fn a_waker_that_panics_does_not_stop_other_notifications() {
    let (bring_up, producer) = BringUp::<StorageError>::new(bytes(100));
    let count = Arc::new(Count::default());
    let (mut first, mut second) = (bring_up.usable(bytes(50)), bring_up.usable(bytes(50)));
    let panics = Waker::from(Arc::new(Panics));
    let counts = Waker::from(Arc::clone(&count));
    assert!(Pin::new(&mut first).poll(&mut Context::from_waker(&panics)).is_pending());
    assert!(Pin::new(&mut second).poll(&mut Context::from_waker(&counts)).is_pending());
    producer.usable(bytes(60));
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
}

#[test]
fn a_future_is_woken_once_a_change() {
    let (bring_up, producer) = BringUp::<StorageError>::new(bytes(100));
    let count = Arc::new(Count::default());
    let waker = Waker::from(Arc::clone(&count));
    let mut context = Context::from_waker(&waker);
    let mut future = bring_up.usable(bytes(50));
    for _ in 0..3 {
        assert!(Pin::new(&mut future).poll(&mut context).is_pending());
    }
    producer.usable(bytes(20));
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    assert!(Pin::new(&mut future).poll(&mut context).is_pending());
    producer.complete();
    assert!(matches!(Pin::new(&mut future).poll(&mut context), Poll::Ready(Ok(()))));
}
