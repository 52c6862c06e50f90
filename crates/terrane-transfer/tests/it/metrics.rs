//! Counts of transfers: exact when nothing is in flight, and never decreasing.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use terrane_core::ByteCount;
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::Fault;
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::engines::{HostEngine, HostEngineOptions, RelayEngine, RelayOptions};
use terrane_transfer::{PathSnapshot, Transfer, TransferManager, TransferSnapshot};

use crate::support::*;

/// An event in the life of a transfer of some blocks.
#[derive(Clone, Copy, Debug)]
enum Event {
    Succeeds,
    Fails(Fault),
    /// The transfer waits for another one, and is cancelled. The other one succeeds.
    IsCancelled,
    IsRefused,
}

fn event() -> impl Strategy<Value = Event> {
    let fault = prop_oneof![
        Just(Fault::Engine),
        Just(Fault::DropJob),
        (0_usize..3).prop_map(|after_runs| Fault::ShortCopy { after_runs }),
    ];
    prop_oneof![
        4 => Just(Event::Succeeds),
        2 => fault.prop_map(Event::Fails),
        1 => Just(Event::IsCancelled),
        1 => Just(Event::IsRefused),
    ]
}

/// The numbers that never decrease.
fn numbers(path: &PathSnapshot) -> [u64; 10] {
    let nanoseconds = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap();
    [
        path.succeeded,
        path.failed,
        path.cancelled,
        path.retries,
        path.bytes.get(),
        path.pieces,
        path.runs,
        nanoseconds(path.busy),
        nanoseconds(path.queued),
        path.latency.count(),
    ]
}

#[track_caller]
fn assert_not_fallen(before: &TransferSnapshot, now: &TransferSnapshot) {
    assert!(now.refused >= before.refused);
    for (before, now) in before.paths.iter().zip(&now.paths) {
        let numbers = numbers(before).into_iter().zip(numbers(now));
        numbers.for_each(|(before, now)| assert!(now >= before, "{now} after {before}"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn counts_are_exact_when_nothing_is_in_flight(
        events in prop::collection::vec((event(), 1_u32..5), 1..30),
    ) {
        let rig = Rig::new(8);
        let mut last = rig.manager.snapshot();
        prop_assert_eq!(&last, &TransferSnapshot::default());
        let [mut succeeded, mut failed, mut cancelled, mut refused] = [0; 4];
        let (mut bytes, mut pieces, mut runs) = (0, 0, 0);
        let (mut busy, mut queued) = (Duration::ZERO, Duration::ZERO);
        for (event, blocks) in events {
            let ids: Vec<u32> = (0..blocks).collect();
            let others: Vec<u32> = (4..4 + blocks).collect();
            // A failed transfer leaves its destination incomplete, but this test only writes it.
            let transfer = rig.transfer(&ids, &ids);
            let explanation = rig.manager.explain(&transfer).unwrap();
            let mut count = |reports: &[terrane_transfer::Report]| {
                for report in reports {
                    succeeded += 1;
                    bytes += report.explanation.bytes.get();
                    busy += report.copied;
                    queued += report.queued;
                }
            };
            pieces += explanation.pieces;
            runs += explanation.runs;
            match event {
                Event::Succeeds => {
                    count(&[end_of(rig.manager.submit(transfer, ()).unwrap()).result.unwrap()]);
                }
                Event::Fails(fault) => {
                    rig.engine.fail_next(fault);
                    end_of(rig.manager.submit(transfer, ()).unwrap()).result.unwrap_err();
                    failed += 1;
                }
                Event::IsCancelled => {
                    rig.engine.hold();
                    let first = rig.manager.submit(transfer, ()).unwrap();
                    let next = rig.transfer(&others, &others).after(&first.ticket());
                    let next = rig.manager.submit(next, ()).unwrap();
                    prop_assert_eq!(rig.manager.snapshot().paths[0].in_flight, 2);
                    next.cancel();
                    end_of(next).result.unwrap_err();
                    cancelled += 1;
                    pieces += explanation.pieces;
                    runs += explanation.runs;
                    rig.engine.release_all();
                    count(&[end_of(first).result.unwrap()]);
                }
                Event::IsRefused => {
                    rig.refused(rig.transfer(&[8], &[0]));
                    refused += 1;
                    pieces -= explanation.pieces;
                    runs -= explanation.runs;
                }
            }
            let now = rig.manager.snapshot();
            assert_not_fallen(&last, &now);
            prop_assert_eq!(now.refused, refused);
            let ended = succeeded + failed + cancelled;
            prop_assert_eq!(now.paths.len(), usize::from(ended > 0));
            for path in &now.paths {
                prop_assert_eq!([path.succeeded, path.failed], [succeeded, failed]);
                prop_assert_eq!([path.cancelled, path.in_flight], [cancelled, 0]);
                prop_assert_eq!([path.bytes.get(), path.pieces, path.runs], [bytes, pieces, runs]);
                prop_assert_eq!([path.busy, path.queued], [busy, queued]);
                prop_assert_eq!(path.ended(), ended);
                prop_assert_eq!(path.latency.count(), succeeded);
                let total = u64::try_from((busy + queued).as_nanos()).unwrap();
                prop_assert_eq!(path.latency.sum(), total);
            }
            last = now;
        }
    }
}

/// Several threads submit, while another one takes snapshots.
#[test]
fn no_number_decreases_while_transfers_run() {
    const EACH: u32 = 300;
    let host = HostEngine::new(HostEngineOptions::default()).unwrap();
    let manager = TransferManager::new([Arc::new(host) as _]);
    let [from, to] = [CONTIGUOUS, OUTER_FIRST].map(|kind| endpoint(config(8), kind));
    let submit = |block: u32| {
        for _ in 0..EACH {
            run(&manager, Transfer::new(&from, &to).blocks(&[block], &[block]));
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|block| scope.spawn(move || submit(block))).collect();
        let mut last = manager.snapshot();
        while !threads.iter().all(thread::ScopedJoinHandle::is_finished) {
            let now = manager.snapshot();
            assert_not_fallen(&last, &now);
            assert!(now.paths.iter().all(|path| path.in_flight <= 4));
            last = now;
        }
    });
    // A clone shares the counts.
    let [path] = &manager.clone().snapshot().paths[..] else { panic!("one path") };
    assert_eq!((path.succeeded, path.in_flight), (4 * u64::from(EACH), 0));
    assert_eq!((path.engine, path.path), ("host", "copy through the cache"));
    assert_eq!((path.source, path.destination), ("system", "system"));
    assert!(path.latency.quantile(99, 100).unwrap() >= path.latency.quantile(1, 2).unwrap());
}

/// The parts of a relay are not counted as separate transfers.
#[test]
fn a_relayed_transfer_counts_once() {
    let host = || Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap());
    let options = RelayOptions { slot_bytes: ByteCount::new(500), ..RelayOptions::default() };
    let relay = RelayEngine::new(host(), host(), HeapAllocator::pinned(), &options).unwrap();
    let manager = TransferManager::new([Arc::new(relay) as _]);
    let [from, to] = [CONTIGUOUS, OUTER_FIRST].map(|kind| endpoint(config(8), kind));
    run(&manager, Transfer::new(&from, &to).blocks(&[0, 1, 2], &[0, 1, 2]));
    let [path] = &manager.snapshot().paths[..] else { panic!("one path") };
    assert_eq!((path.engine, path.path, path.succeeded), ("relay", "relayed", 1));
}

#[test]
fn snapshots_are_written_for_prometheus() {
    let rig = Rig::new(4);
    run(&rig.manager, rig.transfer(&[0, 2], &[1, 3]));
    rig.refused(rig.transfer(&[9], &[0]));
    let snapshot = rig.manager.snapshot();
    let mut text = String::new();
    snapshot.write_openmetrics(&mut text).unwrap();
    let path = &snapshot.paths[0];
    let labels =
        format!("engine=\"{}\",path=\"{}\",from=\"system\",to=\"system\"", path.engine, path.path);
    for line in [
        format!("terrane_transfers_total{{{labels},result=\"success\"}} 1"),
        format!("terrane_transfers_total{{{labels},result=\"failure\"}} 0"),
        format!("terrane_transfer_bytes_total{{{labels}}} {}", 2 * 4 * 2 * PIECE),
        format!("terrane_transfer_pieces_total{{{labels}}} {}", path.pieces),
        format!("terrane_transfers_in_flight{{{labels}}} 0"),
        format!("terrane_transfer_latency_seconds_count{{{labels}}} 1"),
        "terrane_transfers_refused_total 1".to_owned(),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
    // Each family is declared once, before its samples.
    let types: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
    let distinct: std::collections::BTreeSet<_> = types.iter().collect();
    assert_eq!(types.len(), distinct.len());
    assert!(snapshot.to_string().contains("1 refused"), "{snapshot}");
}

#[test]
fn members_of_a_refused_set_are_not_counted_as_transfers() {
    let rig = Rig::new(8);
    let members = [(rig.transfer(&[0], &[0]), ()), (rig.transfer(&[9], &[0]), ())];
    assert_eq!(rig.manager.submit_all(members).unwrap_err().index, 1);
    let snapshot = rig.manager.snapshot();
    assert_eq!(snapshot.refused, 1);
    for path in &snapshot.paths {
        let counts = [path.succeeded, path.failed, path.cancelled, path.in_flight];
        assert_eq!(counts, [0; 4], "{path:?}");
    }
    // The first member's blocks are free and unchanged.
    end_of(rig.manager.submit(rig.transfer(&[0], &[0]), ()).unwrap()).result.unwrap();
}
