//! Blocks between two devices, in addition to the checks of `paths`.

use terrane_core::{ByteCount, Memory};
use terrane_cuda::{
    Context, CopyPath, DeviceEngineOptions, EnginesOptions, Event, Stream, Timing, engines,
};
use terrane_layout::LayoutKind;
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{check_transfer, end_of, ordered};
use terrane_testkit::model::Image;
use terrane_testkit::simulated_cuda::SimulatedCuda;
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use super::fixture::{
    APART, DEVICE, Fixture, LAYERS_APART, PEER, PINNED, all_are, config, endpoint, keep_busy,
    large_memory,
};
use crate::needs::{Needs, two_devices};

const ROOM: Needs = Needs { device: ByteCount::mib(256), host: ByteCount::mib(256) };

/// No thread has to wake between the submission and the copy, whatever the size.
#[test]
fn a_long_transfer_between_devices_is_launched_by_the_submitting_thread() {
    let name = "a_long_transfer_between_devices_is_launched_by_the_submitting_thread";
    let Some([context, peer]) = two_devices(name, ROOM) else { return };
    let Some(driver) = SimulatedCuda::find() else {
        return eprintln!("skipped: {name}: the calls of a real driver are not counted");
    };
    let options = DeviceEngineOptions { path: Some(CopyPath::Peer), ..Default::default() };
    let fixture = Fixture::new(&context, options, &[APART, PEER]).beside(peer);
    let manager = fixture.manager();
    // 34 MiB: more than the caller's thread submits of a copy to the host.
    let shape = config(34, 2, 1024);
    let here = fixture.endpoint(APART, shape, LAYERS_APART);
    let there = fixture.endpoint(PEER, shape, LayoutKind::FullyContiguous);
    let (read, written): (Vec<u32>, Vec<u32>) = (0..34).map(|block| (block, 33 - block)).unzip();
    for (from, to) in [(&here, &there), (&there, &here)] {
        let transfer = ordered(Transfer::new(from, to), from, to).blocks(&read, &written);
        let before = driver.calls(Some("cuLaunchKernel"));
        let completion = manager.submit(transfer, ()).unwrap();
        assert_eq!(driver.calls(Some("cuLaunchKernel")) - before, 1);
        end_of(completion).result.unwrap();
    }
}

/// Blocks of either device, in layouts that the driver's copies cannot move as one span.
fn both_ends(fixture: &Fixture) -> [Endpoint; 2] {
    let shape = config(16, 4, 8);
    [
        fixture.endpoint(DEVICE, shape, LAYERS_APART),
        fixture.endpoint(PEER, shape, LayoutKind::FullyContiguous),
    ]
}

fn manager_of(contexts: &[&Context]) -> TransferManager {
    let contexts = contexts.iter().copied();
    TransferManager::new(engines(contexts, &EnginesOptions::default()).unwrap())
}

const READS: &str = "; the destination's device reads";
const WRITES: &str = "; the source's device writes";

#[test]
fn between_two_devices_the_destination_reads() {
    let name = "between_two_devices_the_destination_reads";
    let Some([context, peer]) = two_devices(name, ROOM) else { return };
    let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &[DEVICE, PEER]);
    let fixture = fixture.beside(peer.clone());
    let [here, there] = both_ends(&fixture);
    let (read, written): (Vec<u32>, Vec<u32>) = (0..16).map(|block| (block, 15 - block)).unzip();
    // In either order of the engines, and from either device.
    for contexts in [[&context, &peer], [&peer, &context]] {
        let manager = manager_of(&contexts);
        for (seed, from, to) in [(1, &here, &there), (2, &there, &here)] {
            Image::scribble(from, fixture.access(), seed);
            let (from, to) = ((from, &*read), (to, &*written));
            let report = check_transfer(&manager, fixture.access(), from, to, 0..4);
            let explanation = report.explanation;
            assert_eq!(explanation.path(), CopyPath::Peer.name(), "{explanation}");
            assert!(explanation.reason().ends_with(READS), "{explanation}");
        }
    }
    assert_eq!((context.lost(), peer.lost()), (None, None));
}

#[test]
fn one_device_alone_writes_to_the_other_and_reads_from_it() {
    let name = "one_device_alone_writes_to_the_other_and_reads_from_it";
    let Some([context, peer]) = two_devices(name, ROOM) else { return };
    let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &[DEVICE, PEER]);
    let fixture = fixture.beside(peer.clone());
    let [here, there] = both_ends(&fixture);
    let ids: Vec<u32> = (0..16).collect();
    for (alone, out, back) in [(&context, WRITES, READS), (&peer, READS, WRITES)] {
        let manager = manager_of(&[alone]);
        for (seed, from, to, says) in [(1, &here, &there, out), (2, &there, &here, back)] {
            Image::scribble(from, fixture.access(), seed);
            let report = check_transfer(&manager, fixture.access(), (from, &ids), (to, &ids), 0..4);
            assert!(report.explanation.reason().ends_with(says), "{report}");
        }
    }
    assert_eq!((context.lost(), peer.lost()), (None, None));
}

#[test]
fn engines_of_two_devices_serve_host_memory_with_both() {
    let name = "engines_of_two_devices_serve_host_memory_with_both";
    let Some([context, peer]) = two_devices(name, ROOM) else { return };
    let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &[DEVICE, PEER]);
    let fixture = fixture.beside(peer.clone());
    let (shape, kind) = (config(16, 4, 8), LayoutKind::FullyContiguous);
    let pinned = fixture.endpoint(PINNED, shape, kind);
    let system = endpoint(&SystemAllocator::new(SystemOptions::default()), shape, kind);
    let ids: Vec<u32> = (0..16).collect();
    let manager = manager_of(&[&context, &peer]);
    for device in &both_ends(&fixture) {
        for (host, engine) in [(&pinned, "cuda"), (&system, "relay")] {
            for (seed, from, to) in [(1, device, host), (2, host, device)] {
                Image::scribble(from, fixture.access(), seed);
                let report =
                    check_transfer(&manager, fixture.access(), (from, &ids), (to, &ids), 0..4);
                assert_eq!(report.explanation.engine, engine, "{report}");
            }
        }
    }
    assert_eq!((context.lost(), peer.lost()), (None, None));
}

/// Fills an end with a value on a stream.
fn fill(stream: &Stream, end: &Endpoint, value: u8) {
    for region in end.layout().regions() {
        // SAFETY: the endpoint keeps the region alive. No transfer of it is in flight.
        unsafe { stream.fill(region.location(), value, region.length()) }.unwrap();
    }
}

/// A stream or an event of either device orders the transfer, whichever engine copies.
#[test]
fn a_transfer_between_devices_runs_after_work_of_either() {
    let name = "a_transfer_between_devices_runs_after_work_of_either";
    let Some([context, peer]) = two_devices(name, ROOM) else { return };
    let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &[DEVICE, PEER]);
    let fixture = fixture.beside(peer.clone());
    let [here, there] = both_ends(&fixture);
    let ids: Vec<u32> = (0..16).collect();
    let streams = [&context, &peer].map(|of| Stream::new(of).unwrap());
    let rooms = [&context, &peer].map(large_memory);
    let mut value = 0;
    for engines_of in [&[&context][..], &[&context, &peer]] {
        let manager = manager_of(engines_of);
        for (ends, [source, destination]) in [([&here, &there], [0, 1]), ([&there, &here], [1, 0])]
        {
            for (by_event, late) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
                value += 2;
                fill(&streams[source], ends[0], value - 1);
                streams[source].synchronize().unwrap();
                // The source gets its value late, or the destination gets another value.
                let of = [source, destination][late];
                let stream = &streams[of];
                keep_busy(stream, &rooms[of]);
                fill(stream, ends[late], value);
                let event = Event::new(stream.context(), Timing::Off).unwrap();
                event.record(stream).unwrap();
                let order = if by_event { event.order().unwrap() } else { stream.order() };
                let [from, to] = ends;
                let transfer = Transfer::new(from, to).blocks(&ids, &ids).device_order(order);
                end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
                let expected = if late == 0 { value } else { value - 1 };
                assert!(all_are(to, &fixture, expected), "by event: {by_event}, end {late}");
            }
        }
    }
    assert_eq!((context.lost(), peer.lost()), (None, None));
}
