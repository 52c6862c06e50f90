//! Operations in flight: dropped futures, dropped tiers, and the barrier of `flush`.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use terrane::prelude::TransferManager;
use terrane::transfer::CopyEngine;
use terrane_testkit::engine::{Fault, SimulatedEngine};

use crate::block_on::block_on;
use crate::contract::HostTier;
use crate::rank::{Guard, Rank, name};

/// A rank whose copies wait for the test.
fn steered(blocks: u32) -> (Rank, Arc<SimulatedEngine>) {
    let engine = Arc::new(SimulatedEngine::default());
    let manager = TransferManager::new([Arc::clone(&engine) as Arc<dyn CopyEngine>]);
    (Rank::with(None, &manager, blocks, None), engine)
}

/// Polls a future once, and counts later wakes.
fn is_ready<F: Future + ?Sized>(future: Pin<&mut F>, wakes: &Arc<Wakes>) -> bool {
    let waker = Waker::from(Arc::clone(wakes));
    matches!(future.poll(&mut Context::from_waker(&waker)), Poll::Ready(_))
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_flush_waits_for_the_saves_before_it() {
    let (rank, engine) = steered(8);
    let wakes = Arc::new(Wakes::default());
    let guard = Guard::default();
    engine.hold();
    let first = rank.start_save(&[1, 2], &guard);
    assert_eq!(guard.held(), 2);
    let mut barrier = rank.tier.flush();
    assert!(!is_ready(barrier.as_mut(), &wakes));
    // The save is on its way, so the engine asks again.
    assert_eq!(name(&rank.query(&[1, 2], false)), "loading");
    let later = rank.start_save(&[3, 4, 5], &guard);
    engine.release(1);
    block_on(first).unwrap();
    assert_eq!(guard.held(), 3);
    assert!(wakes.0.load(Ordering::SeqCst) > 0);
    assert!(is_ready(barrier.as_mut(), &wakes), "the later save does not count");
    assert_eq!(rank.has(&[1, 2]), 2);
    engine.release_all();
    block_on(later).unwrap();
    assert_eq!((rank.has(&[3, 4, 5]), guard.held()), (3, 0));
}

#[test]
fn a_dropped_save_goes_on_and_keeps_its_guards() {
    let (rank, engine) = steered(8);
    let guard = Guard::default();
    engine.hold();
    drop(rank.start_save(&[1, 2], &guard));
    // The pages must not be reused yet.
    assert_eq!(guard.held(), 2);
    engine.release_all();
    block_on(rank.tier.flush()).unwrap();
    assert_eq!((guard.held(), rank.has(&[1, 2])), (0, 2));
}

#[test]
fn a_dropped_load_goes_on_and_ends_its_pins() {
    let (rank, engine) = steered(8);
    rank.save(&[1, 2, 3]).unwrap();
    engine.hold();
    drop(rank.tier.load(rank.hit(&[1, 2, 3]), vec![4, 5, 6]));
    let pinned = || rank.store.snapshot().tiers[0].groups[0].pinned;
    assert!(rank.cache.hold_for_read(&[4]).is_err(), "the copy may still write the page");
    engine.release_all();
    // The pages are claimed until the copy has ended.
    assert_eq!(rank.store.drain(Instant::now() + Duration::from_secs(60)).left, 0);
    for (page, number) in [(4, 1), (5, 2), (6, 3)] {
        assert!(rank.engine.read(page).unwrap() == rank.engine.content(number));
    }
    assert_eq!(pinned(), 0);
}

/// The copies own the arenas, so nothing that the engine drops ends their memory.
#[test]
fn a_tier_and_an_engine_that_drop_in_the_middle_leave_nothing_behind() {
    let (rank, engine) = steered(8);
    let guard = Guard::default();
    rank.save(&[7, 8]).unwrap();
    let hit = rank.hit(&[7, 8]);
    engine.hold();
    let save = rank.start_save(&[1, 2], &guard);
    let load = rank.tier.load(hit, vec![9, 10]);
    let Rank { engine: arenas, cache, store, tier } = rank;
    // The drop of the store waits for its jobs.
    let dropped = std::thread::scope(|scope| {
        let thread = scope.spawn(move || drop((store, tier, cache, arenas)));
        engine.release_all();
        thread.join()
    });
    dropped.unwrap();
    block_on(save).unwrap();
    block_on(load).unwrap();
    assert_eq!(guard.held(), 0);
}

#[test]
fn a_failed_copy_is_an_error_and_the_pages_are_free() {
    let (rank, engine) = steered(8);
    rank.save(&[1, 2, 3]).unwrap();
    engine.fail_next(Fault::ShortCopy { after_runs: 1 });
    let hit = rank.hit(&[1, 2, 3]);
    let error = block_on(rank.tier.load(hit, vec![4, 5, 6])).unwrap_err();
    assert!(format!("{error:#}").starts_with("the load failed: "), "{error:#}");
    // The blocks are still there, and the same pages can be loaded again.
    rank.load(&[1, 2, 3], &[4, 5, 6]);
    engine.fail_next(Fault::Engine);
    rank.save(&[4, 5]).unwrap_err();
    assert_eq!(rank.has(&[4, 5]), 0);
    rank.save(&[4, 5]).unwrap();
    assert_eq!(rank.has(&[4, 5]), 2);
}
