//! Failures of accepted transfers, and their errors.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use terrane_core::ByteCount;
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::{Fault, InjectedFault, SimulatedEngineOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
};
use terrane_transfer::{
    CopyEngine, CopyJob, Declined, ForeignDecision, OnlyPath, Outcome, Quote, Transfer,
    TransferError, TransferManager, TransferOptions, TransferPlan,
};

use crate::support::*;

#[test]
fn a_failed_run_is_named_by_its_blocks_with_the_cause() {
    let rig = Rig::new(8);
    let fault = Fault::ShortCopy { after_runs: 5 };
    rig.engine.fail_next(fault);
    // In the order of the contiguous source, with 8 pieces per block: the sixth run belongs to the
    // first pair.
    let completion = rig.manager.submit(rig.transfer(&[6, 3], &[1, 2]), "guard").unwrap();
    let Outcome { guard, result } = end_of(completion);
    assert_eq!(guard, "guard");
    let error = result.unwrap_err();
    assert!(!error.is_refusal());
    assert_says(&error, &["60 B", "source block 6", "destination block 1"]);
    let cause = error.source().unwrap().downcast_ref::<InjectedFault>().unwrap();
    assert_eq!(cause.0, fault);
}

#[test]
fn blocks_are_named_correctly_if_a_layout_has_a_single_block() {
    let mut rig = Rig::new(5);
    for single in [CONTIGUOUS, BLOCK_FIRST, OUTER_FIRST] {
        rig.source = endpoint(config(1), single);
        for after_runs in 0..8 {
            rig.engine.fail_next(Fault::ShortCopy { after_runs });
            let completion = rig.manager.submit(rig.transfer(&[0], &[4]), ()).unwrap();
            match end_of(completion).result.unwrap_err() {
                TransferError::Copy { source_block, destination_block, .. } => {
                    assert_eq!((source_block, destination_block), (0, 4), "run {after_runs}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Replaces the quotes of another engine.
#[derive(Debug)]
struct Requoting<E>(E);

// SAFETY: the other engine executes the jobs.
unsafe impl<E: CopyEngine> CopyEngine for Requoting<E> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn quote(&self, _: &TransferPlan, _: &TransferOptions) -> Result<Quote, Declined> {
        Ok(Quote::constant(Duration::ZERO, &OnlyPath { path: "another", reason: "a test" }))
    }

    fn submit(&self, job: CopyJob) {
        self.0.submit(job);
    }
}

#[test]
fn an_engine_refuses_a_job_that_another_engine_quoted() {
    let host = HostEngine::new(HostEngineOptions::default()).unwrap();
    let disk = DiskEngine::new(&DiskEngineOptions::default()).unwrap();
    let both = [(); 2].map(|()| Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap()));
    let [one, other] = both;
    let relay = RelayEngine::new(one, other, HeapAllocator::pinned(), &RelayOptions::default());
    let engines: [Arc<dyn CopyEngine>; 3] =
        [Arc::new(Requoting(host)), Arc::new(Requoting(disk)), Arc::new(Requoting(relay.unwrap()))];
    let rig = Rig::new(2);
    for engine in engines {
        let manager = TransferManager::new([engine]);
        let outcome = end_of(manager.submit(rig.transfer(&[0], &[0]), "guard").unwrap());
        assert_eq!(outcome.guard, "guard");
        let error = outcome.result.unwrap_err();
        let cause = error.source().unwrap().downcast_ref::<ForeignDecision>().unwrap();
        assert_eq!(cause.path, "another");
    }
}

#[test]
fn failed_engines_and_dropped_engines_differ_from_failed_runs() {
    let rig = Rig::new(8);
    rig.engine.fail_next(Fault::Engine);
    let error = end_of(rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap()).result;
    let error = error.unwrap_err();
    assert_says(&error, &["engine simulated failed"]);
    assert!(error.source().is_some());
    rig.engine.fail_next(Fault::DropJob);
    let outcome = end_of(rig.manager.submit(rig.transfer(&[0], &[0]), 5).unwrap());
    assert_eq!(outcome.guard, 5);
    let error = outcome.result.unwrap_err();
    assert!(matches!(error, TransferError::EngineStopped) && !error.is_refusal());
}

#[test]
fn a_deadline_ends_a_transfer_with_the_figures() {
    let options = SimulatedEngineOptions::default().delaying(Duration::from_millis(4));
    let rig = Rig::with_options(64, options);
    let all: Vec<_> = (0..64).collect();
    // 512 runs of 2 ms on average.
    let deadline = Instant::now() + Duration::from_millis(20);
    let completion = rig.manager.submit(rig.transfer(&all, &all).deadline(deadline), ()).unwrap();
    let error = end_of(completion).result.unwrap_err();
    assert!(!error.is_refusal());
    assert_says(&error, &["the deadline passed", "30 KiB"]);
    let TransferError::DeadlineExceeded { done, total, .. } = error else { panic!("{error:?}") };
    assert_eq!(total, ByteCount::new(64 * 8 * PIECE));
    assert!(done < total);
}

#[test]
fn time_spent_waiting_for_predecessors_counts() {
    let rig = Rig::new(8);
    rig.engine.hold();
    let first = rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap();
    let deadline = Instant::now() + Duration::from_millis(5);
    let second = rig.transfer(&[1], &[1]).after(&first.ticket()).deadline(deadline);
    let second = rig.manager.submit(second, ()).unwrap();
    std::thread::sleep(Duration::from_millis(6));
    assert!(!second.has_ended(), "a waiting transfer ends after its predecessors");
    rig.engine.release_all();
    end_of(first).result.unwrap();
    let error = end_of(second).result.unwrap_err();
    assert!(matches!(error, TransferError::DeadlineExceeded { .. }), "{error:?}");
}

#[test]
fn the_faster_of_two_engines_is_chosen_and_the_first_of_equal_ones() {
    let named = |name, millis| {
        let options = SimulatedEngineOptions::default().named(name);
        let options = options.predicting(Duration::from_millis(millis));
        Arc::new(terrane_testkit::engine::SimulatedEngine::new(options)) as _
    };
    let rig = Rig::new(8);
    let taken = |engines: [(&'static str, u64); 3]| {
        let engines = engines.map(|(name, millis)| named(name, millis));
        let manager = TransferManager::new(engines);
        let transfer: Transfer = rig.transfer(&[0], &[0]);
        let explained = manager.explain(&transfer).unwrap();
        let report = end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
        assert_eq!(report.explanation, explained);
        explained.engine
    };
    assert_eq!(taken([("a", 3), ("b", 1), ("c", 2)]), "b");
    assert_eq!(taken([("a", 3), ("b", 2), ("c", 2)]), "b");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn after_every_failure_the_guard_returns_and_the_next_transfer_succeeds(
        after_runs in 0..20_usize,
        kind in 0..3_usize,
        seed: u64,
    ) {
        let rig = Rig::with_options(4, SimulatedEngineOptions::default().reordering(seed));
        let fault = [Fault::ShortCopy { after_runs }, Fault::Engine, Fault::DropJob][kind];
        rig.engine.fail_next(fault);
        let outcome = end_of(rig.manager.submit(rig.transfer(&[0, 2], &[3, 1]), seed).unwrap());
        prop_assert_eq!(outcome.guard, seed);
        prop_assert!(outcome.result.is_err());
        rig.assert_nothing_claimed();
        run(&rig.manager, rig.transfer(&[0, 2], &[3, 1]));
    }
}
