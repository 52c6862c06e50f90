//! Relays with parts that do not complete and cannot be stopped.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_core::AllocateError;
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::{Fault, InjectedFault, SimulatedEngine};
use terrane_testkit::fault::{FaultPlan, Faulty};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::Pattern;
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, RelayEngine, RelaySlots, StepFailed,
};
use terrane_transfer::{DeviceOrder, Report, Transfer, TransferError, TransferManager};

use super::rig::{ReleaseAll, Steered};
use super::{BLOCK, slots, to_device, to_system, until};
use crate::support::*;

impl Steered {
    /// Copies blocks to blocks with the same ids.
    fn across(&self, blocks: &[u32]) -> Transfer {
        self.transfer(blocks, blocks)
    }

    fn assert_claimed(&self, block: u32) {
        assert!(self.source.hold_for_write(&[block]).unwrap_err().is_conflict());
        assert!(self.destination.hold_for_read(&[block]).unwrap_err().is_conflict());
    }

    /// Copies these blocks, and checks the bytes.
    fn assert_copies(&self, blocks: &[u32]) {
        end_of(self.manager.submit(self.across(blocks), ()).unwrap()).result.unwrap();
        let found = Pattern::new(1).verify_blocks(&self.destination, blocks, blocks, 0..4);
        found.unwrap().assert_clean("all");
    }
}

#[track_caller]
fn assert_hung(result: Result<Report, TransferError>, engine: &str) {
    let error = result.unwrap_err();
    let failed = error.source().unwrap().downcast_ref::<StepFailed>().unwrap();
    assert_eq!(failed.engine, engine);
    let cause = failed.source().unwrap().downcast_ref::<InjectedFault>();
    assert_eq!(cause, Some(&InjectedFault(Fault::Hang)), "{error:?}");
}

#[test]
fn an_orphaned_part_keeps_its_slot_and_another_slot_replaces_it() {
    for second_hop in [false, true] {
        let pinned = HeapAllocator::pinned();
        let rig = Steered::over(pinned.clone(), &slots(4, BLOCK));
        let engine = if second_hop { &rig.system } else { &rig.device };
        // As many as the engine has at a time.
        engine.fail_next(Fault::Hang);
        engine.fail_next(Fault::Hang);
        let completion = rig.manager.submit(rig.across(&[0, 1]), ()).unwrap();
        until(|| engine.hung() == 2);
        let waiting = rig.manager.submit(rig.across(&[2, 3]), ()).unwrap();
        assert!(!completion.has_ended() && !waiting.has_ended());

        engine.orphan_hung();
        assert_hung(end_of(completion).result, if second_hop { "system" } else { "device" });
        end_of(waiting).result.unwrap();
        rig.assert_claimed(0);
        rig.assert_claimed(1);
        let others: Vec<u32> = (2..16).collect();
        rig.assert_copies(&others);
        let RelaySlots { held, orphaned, .. } = rig.relay.slots();
        assert_eq!(orphaned, 2);
        // No other chunk uses memory that such a copy may still access.
        let held = u64::try_from(held).unwrap();
        assert_eq!(pinned.live(), held + 2);

        engine.end_orphaned();
        assert_eq!(pinned.live(), held);
        rig.assert_copies(&[0, 1]);
        rig.relay.trim();
        assert_eq!((pinned.live(), rig.relay.slots().held), (1, 1));
    }
}

#[test]
fn a_transfer_that_waits_for_its_turn_ends_at_its_deadline() {
    let rig = Steered::new(&slots(4, BLOCK));
    rig.system.fail_next(Fault::Hang);
    rig.system.fail_next(Fault::Hang);
    let hung = rig.manager.submit(rig.across(&[0, 1]), ()).unwrap();
    until(|| rig.system.hung() == 2);
    let deadline = Instant::now() + Duration::from_millis(5);
    let late = rig.manager.submit(rig.across(&[2, 3]).deadline(deadline), ()).unwrap();
    let error = end_of(late).result.unwrap_err();
    assert!(matches!(error, TransferError::DeadlineExceeded { .. }), "{error:?}");
    assert!(!hung.has_ended());
    // None of its parts was in flight.
    drop(rig.destination.hold_for_write(&[2, 3]).unwrap());
    rig.system.orphan_hung();
    assert_hung(end_of(hung).result, "system");
    rig.assert_copies(&[2, 3]);
}

#[test]
fn a_relay_drops_while_orphaned_copies_continue() {
    let rig = Steered::new(&slots(4, BLOCK));
    rig.device.fail_next(Fault::Hang);
    let completion = rig.manager.submit(rig.across(&[0]), ()).unwrap();
    until(|| rig.device.hung() == 1);
    rig.device.orphan_hung();
    assert_hung(end_of(completion).result, "device");
    let Steered { device, relay, manager, source, .. } = rig;
    drop((relay, manager));
    assert!(source.hold_for_write(&[0]).is_err());
    device.end_orphaned();
    assert_unclaimed(&source);
}

#[test]
fn without_memory_for_another_slot_transfers_fail() {
    let only_the_first = FaultPlan::new().fail_from(1);
    let bounce = Faulty::new(HeapAllocator::pinned(), only_the_first);
    let rig = Steered::over(bounce, &slots(1, BLOCK));
    rig.device.fail_next(Fault::Hang);
    let completion = rig.manager.submit(rig.across(&[0]), ()).unwrap();
    until(|| rig.device.hung() == 1);
    rig.device.orphan_hung();
    assert_hung(end_of(completion).result, "device");
    let error = end_of(rig.manager.submit(rig.across(&[1]), ()).unwrap()).result.unwrap_err();
    let TransferError::Engine { engine: "relay", source } = error else { panic!("{error:?}") };
    assert!(source.is::<AllocateError>(), "{source:?}");
    assert_eq!(rig.relay.slots(), RelaySlots { held: 0, most: 1, refused: 1, orphaned: 1 });
}

/// The hop of the inner relay that writes to the outer relay's slot does not complete.
#[test]
fn nested_relays_both_replace_their_slots() {
    let device = Arc::new(SimulatedEngine::new(to_device()));
    let system = Arc::new(SimulatedEngine::new(to_system()));
    let disk = Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap());
    let bounces = [HeapAllocator::pinned(), HeapAllocator::system()];
    let [pinned, heap] = bounces.clone();
    let inner = RelayEngine::new(device.clone(), system.clone(), pinned, &slots(2, BLOCK));
    let inner = Arc::new(inner.unwrap());
    let outer = RelayEngine::new(inner.clone(), disk, heap, &slots(2, BLOCK)).unwrap();
    let outer = Arc::new(outer);
    let _release = [ReleaseAll(device), ReleaseAll(system.clone())];
    let manager = TransferManager::new([outer.clone() as _]);
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = endpoint_in(&files, config(8), CONTIGUOUS);
    let source = endpoint_in(&HeapAllocator::simulated_device(0), config(8), OUTER_FIRST);
    Pattern::new(5).fill(&source).unwrap();
    let transfer = |blocks: &[u32]| {
        let transfer = Transfer::new(&source, &file).blocks(blocks, blocks);
        transfer.device_order(DeviceOrder::AlreadySynchronised)
    };

    system.fail_next(Fault::Hang);
    let completion = manager.submit(transfer(&[0]), ()).unwrap();
    until(|| system.hung() == 1);
    system.orphan_hung();
    assert!(end_of(completion).result.is_err());
    assert!(source.hold_for_write(&[0]).unwrap_err().is_conflict());
    assert!(file.hold_for_read(&[0]).unwrap_err().is_conflict());
    assert_eq!([&inner, &outer].map(|relay| relay.slots().orphaned), [1, 1]);
    let blocks: Vec<u32> = (1..8).collect();
    run(&manager, transfer(&blocks));
    system.end_orphaned();
    run(&manager, transfer(&[0]));
    Pattern::new(5).verify(&file).unwrap().assert_clean("through two slots");
    for (relay, bounce) in [&inner, &outer].into_iter().zip(&bounces) {
        assert_eq!(bounce.live(), u64::try_from(relay.slots().held).unwrap());
    }
}

#[test]
fn a_destination_of_a_relay_that_failed_at_either_hop_is_incomplete_until_it_is_written() {
    for second_hop in [false, true] {
        for fault in [Fault::Engine, Fault::DropJob, Fault::Hang] {
            let rig = Steered::over(HeapAllocator::pinned(), &slots(4, BLOCK));
            let engine = if second_hop { &rig.system } else { &rig.device };
            engine.fail_next(fault);
            let completion = rig.manager.submit(rig.across(&[0]), ()).unwrap();
            if matches!(fault, Fault::Hang) {
                until(|| engine.hung() == 1);
                engine.orphan_hung();
            }
            assert!(end_of(completion).result.is_err());
            engine.end_orphaned();
            let error = rig.destination.hold_for_read(&[0]).unwrap_err();
            assert!(matches!(error, TransferError::Incomplete { .. }), "{fault:?}: {error:?}");
            drop(rig.source.hold_for_read(&[0]).unwrap());
            rig.assert_copies(&[0]);
            drop(rig.destination.hold_for_read(&[0]).unwrap());
        }
    }
}
