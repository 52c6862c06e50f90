//! Long queues of transfers that run one after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use terrane_core::ByteCount;
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::Fault;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::process::in_child;
use terrane_transfer::engines::{HostEngine, HostEngineOptions, RelayEngine, RelayOptions};
use terrane_transfer::{Completion, Endpoint, Hold, Transfer, TransferError, TransferManager};

use crate::limits::{process_time, thread_time};
use crate::support::*;

const LONG: u32 = 10_000;

struct CountsDrops(Arc<AtomicUsize>);

impl Drop for CountsDrops {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// `length` transfers of one block each, each of which runs after the one before.
fn chain(rig: &Rig, length: u32, dropped: &Arc<AtomicUsize>) -> Vec<Completion<CountsDrops>> {
    let blocks = rig.source.layout().geometry().num_blocks();
    let mut all: Vec<Completion<CountsDrops>> = Vec::new();
    for number in 0..length {
        let block = [number % blocks];
        let mut transfer = rig.transfer(&block, &block);
        if let Some(last) = all.last() {
            transfer = transfer.after(&last.ticket());
        }
        all.push(rig.manager.submit(transfer, CountsDrops(Arc::clone(dropped))).unwrap());
    }
    all
}

#[test]
fn a_chain_of_10_000_transfers_succeeds() {
    let rig = Rig::new(LONG);
    rig.engine.hold();
    let dropped = Arc::default();
    let all = chain(&rig, LONG, &dropped);
    rig.engine.release_all();
    for completion in all {
        end_of(completion).result.unwrap();
    }
    assert_eq!(dropped.load(Ordering::SeqCst), 10_000);
}

#[test]
fn a_chain_of_10_000_transfers_fails_with_its_first() {
    let rig = Rig::new(LONG);
    rig.engine.hold();
    rig.engine.fail_next(Fault::Engine);
    let dropped = Arc::default();
    let all = chain(&rig, LONG, &dropped);
    let mut previous = None;
    rig.engine.release_all();
    for completion in all {
        let id = completion.ticket().id();
        let error = end_of(completion).result.unwrap_err();
        match previous.replace(id) {
            None => assert!(matches!(error, TransferError::Engine { .. }), "{error:?}"),
            Some(before) => {
                assert_says(&error, &[&format!("transfer {before}")]);
                assert!(error.is_refusal(), "it was never started");
                let TransferError::PredecessorFailed { predecessor } = error else {
                    panic!("{error:?}")
                };
                assert_eq!(predecessor, before);
            }
        }
    }
    // Outcomes are available before the engine has counted.
    rig.engine.wait_until_idle();
    assert_eq!(rig.engine.ended(), 1, "only the first was submitted to the engine");
    rig.assert_nothing_claimed();
}

#[test]
fn a_chain_over_the_same_block_is_submitted_in_reasonable_time() {
    let rig = Rig::new(1);
    rig.engine.hold();
    let begun = thread_time();
    let all = chain(&rig, 1_000, &Arc::default());
    // 1,000 times 1,000 predecessors at about 100 ns each in an unoptimised build; comparing each
    // pair of them would take hours. The processor time of this thread does not depend on other
    // processes.
    let worked = thread_time() - begun;
    assert!(worked < Duration::from_secs(20), "{worked:?}");
    rig.engine.release_all();
    for completion in all {
        end_of(completion).result.unwrap();
    }
}

#[test]
fn all_completions_of_a_chain_may_be_dropped() {
    let rig = Rig::new(LONG);
    rig.engine.hold();
    let dropped = Arc::<AtomicUsize>::default();
    let mut all = chain(&rig, LONG, &dropped);
    let last = all.pop().unwrap();
    drop(all);
    assert_eq!(dropped.load(Ordering::SeqCst), 0, "the transfers still hold their guards");
    rig.engine.release_all();
    end_of(last).result.unwrap();
    rig.engine.wait_until_idle();
    assert_eq!(dropped.load(Ordering::SeqCst), 10_000);
}

#[test]
fn transfers_that_wait_for_a_failed_one_never_start() {
    let rig = Rig::new(8);
    rig.engine.fail_next(Fault::DropJob);
    let failed = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let ticket = failed.ticket();
    assert!(end_of(failed).result.is_err());
    // Also if they are submitted after it has ended.
    let late = rig.manager.submit(rig.transfer(&[1], &[1]).after(&ticket), "guard").unwrap();
    let outcome = end_of(late);
    assert_eq!(outcome.guard, "guard");
    assert!(matches!(outcome.result, Err(TransferError::PredecessorFailed { .. })));
    rig.assert_nothing_claimed();
}

#[test]
fn one_failed_predecessor_of_several_is_enough_and_all_are_waited_for() {
    let rig = Rig::new(8);
    rig.engine.hold();
    rig.engine.fail_next(Fault::Engine);
    let fails = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let goes_on = rig.manager.submit(rig.transfer(&[1], &[1]), ()).unwrap();
    let both = rig.back(&[0, 1], &[2, 3]).after(&fails.ticket()).after(&goes_on.ticket());
    let both = rig.manager.submit(both, ()).unwrap();
    rig.engine.release(1);
    let failed = fails.ticket().id();
    assert!(end_of(fails).result.is_err());
    // The other predecessor still uses its blocks, so the failed transfer cannot release them yet.
    assert!(!both.has_ended());
    rig.engine.release_all();
    end_of(goes_on).result.unwrap();
    let error = end_of(both).result.unwrap_err();
    assert!(
        matches!(error, TransferError::PredecessorFailed { predecessor } if predecessor == failed)
    );
    rig.assert_nothing_claimed();
}

/// The claims in flight are visited once, not once for each block of the transfer.
#[test]
fn a_transfer_of_all_blocks_after_many_holds_is_submitted_in_linear_time() {
    const BLOCKS_OF_HOLD: u32 = 10;
    let work_of = |holds: u32| {
        let rig = Rig::new(1);
        rig.engine.hold();
        let blocks = holds * BLOCKS_OF_HOLD;
        let tiny = shape().num_blocks(blocks).num_layers(1).outer_dim(1).page_size(1);
        let tiny = tiny.inner_dim(1).build().unwrap();
        let [from, to] = [(); 2].map(|()| endpoint(tiny, CONTIGUOUS));
        let hold = |number| {
            let first = number * BLOCKS_OF_HOLD;
            to.hold_for_read(&(first..first + BLOCKS_OF_HOLD).collect::<Vec<_>>()).unwrap()
        };
        let holds: Vec<Hold> = (0..holds).map(hold).collect();
        let all: Vec<u32> = (0..blocks).collect();
        let transfer = Transfer::new(&from, &to).blocks(&all, &all);
        let ordered = holds.iter().fold(transfer, |all, hold| all.after_end(&hold.ticket()));
        let begun = thread_time();
        let completion = rig.manager.submit(ordered, ()).unwrap();
        let worked = thread_time() - begun;
        completion.cancel();
        drop(holds);
        assert!(end_of(completion).result.is_err());
        worked.as_secs_f64()
    };
    // Ten times as many blocks and holds take 10 times as long, or 100 times if each pair of them
    // is compared. Another process can spoil the caches for one measurement, but hardly for all.
    let is_linear = || work_of(10_000) / work_of(1_000) < 40.0;
    assert!((0..3).any(|_| is_linear()), "the time grows with the product of blocks and holds");
}

/// About 10 µs for each transfer in an unoptimised build, whatever their number. An engine that
/// visits every transfer at each end would need 250 µs for each of 80,000, and 15 µs for each of
/// 5,000.
#[test]
fn the_disk_engine_serves_many_small_transfers_in_linear_time() {
    // In a separate process, because its processor time is measured.
    in_child("queues::the_disk_engine_serves_many_small_transfers_in_linear_time", || {
        let directory = tempfile::tempdir().unwrap();
        let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
        assert_linear([5_000, 80_000], |transfers| {
            let to = endpoint_in(&files, config(transfers), CONTIGUOUS);
            work_of_each(transfers, &to, &TransferManager::with_default_engines().unwrap())
        });
    });
}

#[test]
fn a_relay_serves_many_small_transfers_in_linear_time() {
    in_child("queues::a_relay_serves_many_small_transfers_in_linear_time", || {
        let engine = Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap());
        let options = RelayOptions { slots: 8, slot_bytes: ByteCount::mib(1) };
        let pinned = HeapAllocator::pinned();
        let relay = RelayEngine::new(engine.clone(), engine, pinned, &options).unwrap();
        let manager = TransferManager::new([Arc::new(relay) as _]);
        assert_linear([1_000, 16_000], |transfers| {
            work_of_each(transfers, &endpoint(config(transfers), CONTIGUOUS), &manager)
        });
    });
}

/// Compares the time of each of few transfers and each of many.
fn assert_linear(counts: [u32; 2], work_of_each: impl Fn(u32) -> Duration) {
    let ratio = || {
        let [few, many] = counts.map(&work_of_each);
        many.as_secs_f64() / few.as_secs_f64()
    };
    // Another process can spoil the caches for one measurement, but hardly for all.
    let ratios: Vec<f64> = (0..3).map(|_| ratio()).take_while(|ratio| *ratio >= 4.0).collect();
    assert!(ratios.len() < 3, "the time per transfer grows with their number: {ratios:?}");
}

/// The processor time of this process for each of `transfers` small transfers to this endpoint.
fn work_of_each(transfers: u32, to: &Endpoint, manager: &TransferManager) -> Duration {
    let from = endpoint(config(transfers), CONTIGUOUS);
    let gate = to.hold_for_read(&[0]).unwrap();
    let submit = |block| {
        let transfer = Transfer::new(&from, to).blocks(&[block], &[block]);
        manager.submit(transfer.after(&gate.ticket()), ()).unwrap()
    };
    let all: Vec<_> = (0..transfers).map(submit).collect();
    let begun = process_time();
    drop(gate);
    for completion in all {
        completion.wait().result.unwrap();
    }
    (process_time() - begun) / transfers
}
