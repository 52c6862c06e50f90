//! Relays between engines that the test controls: the order of hops, and their slots.

use std::error::Error;
use std::sync::Arc;

use terrane_core::{AllocateError, ByteCount};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::device::SimulatedStream;
use terrane_testkit::engine::{Fault, InjectedFault};
use terrane_testkit::fault::{FaultPlan, Faulty};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::Pattern;
use terrane_transfer::engines::{
    HostEngine, HostEngineOptions, RelayEngine, RelaySlots, RelayStep, StepFailed,
};
use terrane_transfer::{Declined, Transfer, TransferError, TransferManager};

use super::rig::Steered;
use super::{BLOCK, slots, until};
use crate::support::*;

#[test]
fn first_hops_continue_during_second_hops_in_all_slots() {
    let rig = Steered::new(&slots(3, BLOCK));
    rig.system.hold();
    let all: Vec<u32> = (0..8).collect();
    let completion = rig.manager.submit(rig.transfer(&all, &all), ()).unwrap();
    // Three of eight chunks have slots. The second hop of one is held back, and those of the others
    // wait for it.
    until(|| rig.device.ended() == 3);
    rig.device.wait_until_idle();
    until(|| rig.system.queued() == 1);
    assert_eq!((rig.device.ended(), rig.relay.slots().held), (3, 3));
    assert!(completion.copied().is_zero(), "nothing has arrived");
    rig.system.release(1);
    until(|| rig.device.ended() == 4 && rig.system.queued() == 1);
    assert_eq!(completion.copied(), ByteCount::new(BLOCK));
    rig.system.release_all();
    end_of(completion).result.unwrap();
    Pattern::new(1).verify_blocks(&rig.destination, &all, &all, 0..4).unwrap().assert_clean("all");
}

/// Engines that divide their bandwidth among all jobs end all of them together. So they get few at
/// a time. They continue during the other hop of the chunks that they have copied.
#[test]
fn an_engine_has_a_part_of_the_chunks_at_a_time() {
    let rig = Steered::new(&slots(8, BLOCK));
    let all: Vec<u32> = (0..16).collect();
    rig.device.hold();
    rig.system.hold();
    let completion = rig.manager.submit(rig.transfer(&all, &all), ()).unwrap();
    until(|| rig.device.queued() == 4);
    // One more chunk has a slot, as the next.
    until(|| rig.relay.slots().held == 5);
    rig.device.release(2);
    until(|| rig.system.queued() == 2 && rig.device.queued() == 4);
    rig.device.release(4);
    // The other engine has its chunks. Further chunks wait for it, in the remaining slots.
    until(|| rig.system.queued() == 4 && rig.relay.slots().held == 8);
    rig.device.release_all();
    until(|| rig.device.ended() == 8);
    assert_eq!(rig.system.queued(), 4);
    rig.system.release_all();
    end_of(completion).result.unwrap();
    Pattern::new(1).verify_blocks(&rig.destination, &all, &all, 0..4).unwrap().assert_clean("all");
}

#[test]
fn transfers_take_turns_at_the_slots() {
    let rig = Steered::new(&slots(1, BLOCK));
    rig.system.hold();
    let many: Vec<u32> = (0..8).collect();
    let long = rig.manager.submit(rig.transfer(&many, &many), ()).unwrap();
    until(|| rig.system.queued() == 1);
    let short = rig.manager.submit(rig.transfer(&[9], &[9]), ()).unwrap();
    // The long transfer has begun, and waits for its next turn: before the short one or after it.
    rig.system.release(3);
    end_of(short).result.unwrap();
    assert!(!long.has_ended());
    rig.system.release_all();
    end_of(long).result.unwrap();
}

#[test]
fn idle_slots_are_freed_and_allocated_again() {
    let pinned = HeapAllocator::pinned();
    let rig = Steered::over(pinned.clone(), &slots(4, BLOCK));
    assert_eq!(pinned.live(), 1);
    let all: Vec<u32> = (0..8).collect();
    for _ in 0..2 {
        rig.system.hold();
        let completion = rig.manager.submit(rig.transfer(&all, &all), ()).unwrap();
        until(|| rig.device.ended() % 8 == 4 && rig.relay.slots().held == 4);
        assert_eq!((pinned.live(), rig.relay.trim()), (4, ByteCount::ZERO));
        rig.system.release_all();
        end_of(completion).result.unwrap();
        assert_eq!(rig.relay.trim(), ByteCount::new(3 * BLOCK));
        assert_eq!((pinned.live(), rig.relay.slots().held), (1, 1));
    }
    let Steered { device, system, relay, manager, .. } = rig;
    drop((device, system, manager, relay));
    pinned.assert_all_freed();
}

#[test]
fn a_relay_needs_memory_for_one_slot_and_continues_with_few() {
    let failing = |which| Faulty::new(HeapAllocator::pinned(), which);
    let host = Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap());
    let options = slots(3, BLOCK);
    let error =
        RelayEngine::new(host.clone(), host, failing(FaultPlan::new().fail_call(0)), &options)
            .unwrap_err();
    assert!(matches!(error, TransferError::EngineNotStarted { engine: "relay", .. }), "{error:?}");
    assert!(error.source().unwrap().is::<AllocateError>());

    let second_on = FaultPlan::new().fail_from(1);
    let rig = Steered::over(failing(second_on), &options);
    let all: Vec<u32> = (0..8).collect();
    end_of(rig.manager.submit(rig.transfer(&all, &all), ()).unwrap()).result.unwrap();
    let RelaySlots { held, most, refused, orphaned: 0 } = rig.relay.slots() else {
        panic!("{:?}", rig.relay.slots());
    };
    assert_eq!((held, most), (1, 3));
    assert!(refused > 0);
}

#[test]
fn a_failure_of_either_hop_names_the_blocks_and_the_cause() {
    for (fails, step) in [("device", RelayStep::IntoBounce), ("system", RelayStep::OutOfBounce)] {
        let rig = Steered::new(&slots(3, 2 * BLOCK));
        let engine = if fails == "device" { &rig.device } else { &rig.system };
        engine.fail_next(Fault::ShortCopy { after_runs: 0 });
        // In ascending order of the destination, the first chunk is 7 to 2 and 6 to 4.
        let transfer = rig.transfer(&[6, 9, 7, 3], &[4, 10, 2, 12]);
        let error = end_of(rig.manager.submit(transfer, ()).unwrap()).result.unwrap_err();
        let TransferError::Copy { source_block: 7, destination_block: 2, .. } = error else {
            panic!("{error:?}");
        };
        let failed = error.source().unwrap().downcast_ref::<StepFailed>().unwrap();
        assert_eq!((failed.step, failed.engine), (step, fails));
        assert!(failed.source().unwrap().is::<InjectedFault>(), "{failed:?}");
        assert_unclaimed(&rig.source);
        assert_unclaimed(&rig.destination);

        for fault in [Fault::Engine, Fault::DropJob] {
            engine.fail_next(fault);
            let completion = rig.manager.submit(rig.transfer(&[1], &[1]), ()).unwrap();
            let error = end_of(completion).result.unwrap_err();
            assert!(matches!(error, TransferError::Engine { engine: "relay", .. }), "{error:?}");
            let failed = error.source().unwrap().downcast_ref::<StepFailed>().unwrap();
            assert_eq!((failed.step, failed.engine), (step, fails));
        }
        // Every slot has been returned.
        let all: Vec<u32> = (0..16).collect();
        end_of(rig.manager.submit(rig.transfer(&all, &all), ()).unwrap()).result.unwrap();
    }
}

#[test]
fn a_failed_transfer_waits_for_its_parts_in_flight() {
    let rig = Steered::new(&slots(4, BLOCK));
    rig.system.hold();
    rig.system.fail_next(Fault::Engine);
    let all: Vec<u32> = (0..8).collect();
    let completion = rig.manager.submit(rig.transfer(&all, &all), ()).unwrap();
    // Two chunks are on their second hop, and two wait for theirs.
    until(|| rig.system.queued() == 2 && rig.device.ended() == 4);
    rig.system.release(1);
    until(|| rig.system.ended() == 1);
    // A transfer through the same thread and the returned slot: earlier messages have been handled.
    let other = rig.manager.submit(rig.transfer(&[9], &[9]), ()).unwrap();
    until(|| rig.system.queued() == 2);
    assert!(!completion.has_ended(), "a chunk is still in flight to the destination");
    rig.system.release_all();
    assert!(end_of(completion).result.is_err());
    end_of(other).result.unwrap();
    // Outcomes are available before the engines have counted.
    rig.device.wait_until_idle();
    rig.system.wait_until_idle();
    assert_eq!(rig.device.ended(), 5, "a chunk was begun after the failure");
    assert_eq!(rig.system.ended(), 3, "so was a second hop");
    // Every slot has been returned.
    end_of(rig.manager.submit(rig.transfer(&all, &all), ()).unwrap()).result.unwrap();
    assert_eq!(rig.relay.trim(), ByteCount::new(3 * BLOCK));
}

#[test]
fn a_device_order_is_that_of_the_submission_and_uses_no_slot() {
    for back in [false, true] {
        let rig = Steered::new(&slots(1, BLOCK));
        let stream = SimulatedStream::new(Default::default());
        stream.launch();
        let (from, to) = if back {
            Pattern::new(1).fill(&rig.destination).unwrap();
            (&rig.destination, &rig.source)
        } else {
            (&rig.source, &rig.destination)
        };
        let blocks = [0, 1, 2];
        let transfer = Transfer::new(from, to).blocks(&blocks, &blocks);
        let ordered = rig.manager.submit(transfer.device_order(stream.order()), ()).unwrap();
        // Later work of the device does not affect the transfer.
        stream.launch();
        let other = rig.manager.submit(rig.transfer(&[9], &[9]), ()).unwrap();
        end_of(other).result.unwrap();
        assert!(!ordered.has_ended() && ordered.copied().is_zero());
        stream.finish_one();
        end_of(ordered).result.unwrap();
        let found = Pattern::new(1).verify_blocks(to, &blocks, &blocks, 0..4).unwrap();
        found.assert_clean("after the stream");
    }
}

#[test]
fn an_unknown_stream_is_declined() {
    let rig = Steered::new(&slots(1, BLOCK));
    let gone = SimulatedStream::new(Default::default()).order();
    let cause = refused(&rig.manager, rig.transfer(&[0], &[0]).device_order(gone));
    let TransferError::NoEngine { declined, .. } = cause else { panic!("{cause:?}") };
    assert_eq!(declined, [("relay", Declined::DeviceOrder)]);
}

#[test]
fn a_layer_that_fits_no_slot_is_declined() {
    let rig = Steered::new(&slots(4, 2 * PIECE - 1));
    let cause = refused(&rig.manager, rig.transfer(&[0], &[0]));
    let TransferError::NoEngine { declined, .. } = cause else { panic!("{cause:?}") };
    assert_eq!(declined, [("relay", Declined::SlotTooSmall)]);
}

#[test]
fn layers_are_reported_as_they_arrive() {
    let rig = Steered::new(&slots(1, 4 * 2 * PIECE));
    rig.system.hold();
    // A slot has room for one layer of four blocks.
    let blocks = [0, 1, 2, 3];
    let transfer = rig.transfer(&blocks, &blocks).layer_by_layer();
    let completion = rig.manager.submit(transfer, ()).unwrap();
    let layers = completion.layers().unwrap();
    for layer in 0..3 {
        rig.system.release(1);
        layers.wait(layer).unwrap();
        assert!(!layers.is_done(layer + 1));
    }
    rig.system.release_all();
    end_of(completion).result.unwrap();
    assert!(layers.is_done(3));
    let found = Pattern::new(1).verify_blocks(&rig.destination, &blocks, &blocks, 0..4);
    found.unwrap().assert_clean("all layers");
}

/// The last reference to the relay is in a transfer that waits for a transfer of another engine. It
/// drops on a thread of that engine, which the relay needs to complete its transfers.
#[test]
fn a_relay_may_drop_on_the_thread_of_an_engine_that_it_needs() {
    let rig = Steered::new(&slots(1, BLOCK));
    let both = TransferManager::new([rig.relay.clone() as _, rig.system.clone() as _]);
    let pinned = endpoint_in(&HeapAllocator::pinned(), config(16), CONTIGUOUS);
    rig.system.hold();
    let first = Transfer::new(&rig.destination, &pinned).blocks(&[5], &[5]);
    let first = both.submit(first, ()).unwrap();
    let all: Vec<u32> = (0..4).collect();
    let second = both.submit(rig.transfer(&all, &all).after(&first.ticket()), ()).unwrap();
    let Steered { system, relay, manager, .. } = rig;
    drop((both, manager, relay));
    system.release_all();
    end_of(first).result.unwrap();
    end_of(second).result.unwrap();
}
