//! Staging tables over heap, pools and simulated devices, with simulated streams.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use terrane_core::{ByteCount, HostAddress, RegionRequest};
use terrane_pool::staging::{Copying, Direction, StagingArea, StagingError, TransferTable};
use terrane_pool::{Pool, PoolOptions, StreamId};
use terrane_testkit::fault::{FaultPlan, InjectFaults as _};
use terrane_testkit::simulated::{Simulated, SimulatedOptions, SimulatedStreams};

use crate::heap::Heap;

const COPY: StreamId = StreamId::new(9);
const PATIENCE: Duration = Duration::from_millis(10);

fn bytes(count: usize) -> ByteCount {
    ByteCount::from_usize(count)
}

fn area() -> (StagingArea<Heap>, Heap, SimulatedStreams) {
    let (heap, streams) = (Heap::new(ByteCount::mib(16)), SimulatedStreams::new(3));
    (StagingArea::new(heap.clone(), Arc::new(streams.clone()), PATIENCE), heap, streams)
}

fn begin<A: terrane_core::Allocate>(table: TransferTable<A>) -> Copying<A> {
    table.begin(&[COPY]).map_err(|(_, error)| error).unwrap()
}

fn host<A: terrane_core::Allocate>(copying: &Copying<A>) -> Vec<(Direction, HostAddress, usize)> {
    copying
        .copies()
        .map(|copy| {
            assert_eq!(copy.host.length, copy.length);
            (copy.direction, copy.host.location.as_host().unwrap(), copy.length.to_usize())
        })
        .collect()
}

fn read(at: HostAddress, length: usize) -> Vec<u8> {
    // SAFETY: the test reads a live staging buffer that nothing else accesses meanwhile.
    unsafe { std::slice::from_raw_parts(at.as_ptr(), length) }.to_vec()
}

/// Submits work that writes the device's bytes into the output at `index`.
fn submit_outputs(streams: &SimulatedStreams, copies: &[(Direction, HostAddress, usize)]) {
    let outputs = copies.iter().filter(|copy| copy.0 == Direction::FromDevice);
    for (index, &(_, at, length)) in outputs.enumerate() {
        streams.submit(COPY, move || {
            for position in 0..length {
                // SAFETY: the table keeps the buffer until this stream has finished. This test
                // checks that promise.
                unsafe { at.as_ptr().wrapping_add(position).write(device_byte(index, position)) };
            }
        });
    }
}

fn device_byte(output: usize, position: usize) -> u8 {
    u8::try_from((output * 131 + position * 7 + 1) % 251).unwrap()
}

fn device_bytes(output: usize, length: usize) -> Vec<u8> {
    (0..length).map(|position| device_byte(output, position)).collect()
}

#[test]
fn uploads_are_stored_in_order_with_zeroed_tails() {
    let (area, heap, _) = area();
    let mut table = area.transfer_table().unwrap();
    table.try_reserve(5).unwrap();
    table.upload(&[1, 2, 3]).unwrap();
    table.upload_padded(&[4; 5], bytes(12)).unwrap();
    table.upload_words(&[0x0102_0304, 5]).unwrap();
    table.upload(&[]).unwrap();
    table.upload_padded(&[], bytes(4)).unwrap();
    assert_eq!((table.len(), heap.live_blocks()), (5, 4), "zero bytes allocate nothing");
    let error = table.upload_padded(&[1; 5], bytes(4)).unwrap_err();
    assert!(matches!(error, StagingError::PaddingTooShort { .. }), "{error}");

    let copying = begin(table);
    let found: Vec<_> = host(&copying).iter().map(|&(_, at, length)| read(at, length)).collect();
    let words: Vec<u8> = [0x0102_0304_u32, 5].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let padded = [[4; 5].as_slice(), &[0; 7]].concat();
    assert_eq!(found, [vec![1, 2, 3], padded, words, vec![0; 4]]);
}

#[test]
fn outputs_are_read_when_their_stream_is_done_and_not_before() {
    let (area, heap, streams) = area();
    let mut table = area.transfer_table().unwrap();
    let upload = table.upload(&[7; 8]).unwrap();
    let first = table.output(bytes(10)).unwrap();
    let empty = table.output(bytes(0)).unwrap();
    let padded = table.output_padded(bytes(3), bytes(16)).unwrap();
    let copying = begin(table);
    let copies = host(&copying);
    assert_eq!(copies.len(), 3);
    submit_outputs(&streams, &copies);
    let mut pending = copying.submitted();
    assert!(!pending.is_complete().unwrap());
    let unfinished = pending.wait(Duration::from_millis(1)).unwrap_err();
    assert!(matches!(unfinished.cause, StagingError::TimedOut { .. }), "{unfinished}");

    streams.run_all();
    let finished = unfinished.pending.wait(Duration::ZERO).unwrap();
    assert_eq!(finished.output(first).unwrap(), device_bytes(0, 10));
    assert_eq!(finished.output(empty).unwrap(), [0; 0]);
    assert_eq!(finished.output(padded).unwrap(), device_bytes(1, 3), "without the padding");
    assert_eq!(finished.range(first, bytes(4), bytes(3)).unwrap(), &device_bytes(0, 10)[4..7]);
    assert!(matches!(finished.output(upload), Err(StagingError::NoSuchOutput { index: 0, .. })));

    assert_eq!(finished.range(first, bytes(6), bytes(4)).unwrap(), &device_bytes(0, 10)[6..]);
    let error = finished.range(first, bytes(7), bytes(4)).unwrap_err();
    assert!(matches!(error, StagingError::OutOfBounds { .. }), "{error}");
    drop(finished);
    assert_eq!(heap.live_blocks(), 0);
}

#[test]
fn collections_keep_their_capacity_and_errors_change_nothing() {
    let (area, _, streams) = area();
    let mut table = area.transfer_table().unwrap();
    for length in [5, 0, 70] {
        table.output(bytes(length)).unwrap();
    }
    let copying = begin(table);
    submit_outputs(&streams, &host(&copying));
    streams.run_all();
    let finished = copying.submitted().wait(PATIENCE).unwrap();

    let mut outputs = vec![Vec::with_capacity(4096), vec![9; 3]];
    let kept = outputs[0].as_ptr();
    finished.collect(&mut outputs).unwrap();
    assert_eq!(outputs, [device_bytes(0, 5), vec![], device_bytes(1, 70)]);
    assert_eq!((outputs[0].as_ptr(), outputs[0].capacity()), (kept, 4096));
    outputs.push(vec![1]);
    finished.collect(&mut outputs).unwrap();
    assert_eq!(outputs.len(), 3);

    let (mut a, mut b, mut c) = ([1; 5], [2; 0], [3; 70]);
    let error = finished.collect_into(&mut [&mut a, &mut c]).unwrap_err();
    assert!(matches!(error, StagingError::WrongCount { outputs: 3, given: 2 }), "{error}");
    let error = finished.collect_into(&mut [&mut a, &mut b, &mut c[..69]]).unwrap_err();
    assert!(matches!(error, StagingError::WrongLength { position: 2, .. }), "{error}");
    assert_eq!((a, c), ([1; 5], [3; 70]), "an error does not change the outputs");
    finished.collect_into(&mut [&mut a, &mut b, &mut c]).unwrap();
    assert_eq!((a.to_vec(), c.to_vec()), (device_bytes(0, 5), device_bytes(1, 70)));
}

#[test]
fn a_table_that_is_dropped_keeps_its_buffers_until_its_streams_are_done() {
    for state in ["filling", "copying", "submitted"] {
        let (area, heap, streams) = area();
        let mut table = area.transfer_table().unwrap();
        table.upload(&[1; 100]).unwrap();
        table.output(bytes(100)).unwrap();
        if state == "filling" {
            drop(table);
            assert_eq!(heap.live_blocks(), 0);
            continue;
        }
        let copying = begin(table);
        submit_outputs(&streams, &host(&copying));
        match state {
            "copying" => drop(copying),
            _ => drop(copying.submitted()),
        }
        assert_eq!((area.pending(), area.reap(), heap.live_blocks()), (1, 0, 2), "{state}");
        streams.run_all();
        assert_eq!((area.reap(), area.pending(), heap.live_blocks()), (1, 0, 0), "{state}");
    }
}

#[test]
fn the_end_of_an_area_waits_and_leaks_rather_than_free_under_a_copy() {
    for runs in [true, false] {
        let (area, heap, streams) = area();
        streams.set_runs_on_wait(runs);
        heap.expect_leaks();
        let mut table = area.transfer_table().unwrap();
        table.output(bytes(8)).unwrap();
        let copying = begin(table);
        submit_outputs(&streams, &host(&copying));
        drop((copying, area));
        assert_eq!(heap.live_blocks(), u64::from(!runs));
        // The buffer still exists for the work that writes it.
        streams.run_all();
    }
}

#[test]
fn a_fence_that_fails_proves_nothing_and_is_tried_again() {
    let (area, heap, streams) = area();
    let mut table = area.transfer_table().unwrap();
    let output = table.output(bytes(8)).unwrap();
    let copying = begin(table);
    submit_outputs(&streams, &host(&copying));
    streams.fail_next(2);
    let mut pending = copying.submitted();
    assert!(matches!(pending.is_complete(), Err(StagingError::Fence(_))));
    assert!(!pending.is_complete().unwrap());
    streams.run_all();
    streams.fail_next(1);
    let failed = pending.wait(PATIENCE).unwrap_err();
    assert!(matches!(failed.cause, StagingError::Fence(_)), "{failed}");
    let finished = failed.pending.wait(PATIENCE).unwrap();
    assert_eq!(finished.output(output).unwrap(), device_bytes(0, 8));
    drop(finished);

    // The same, after the owner has dropped the table.
    let mut table = area.transfer_table().unwrap();
    table.output(bytes(8)).unwrap();
    let copying = begin(table);
    submit_outputs(&streams, &host(&copying));
    streams.fail_next(3);
    drop(copying);
    assert_eq!((area.reap(), heap.live_blocks()), (0, 1));
    streams.run_all();
    assert_eq!((area.reap(), heap.live_blocks()), (1, 0));
}

#[test]
fn an_exhausted_area_waits_for_its_own_buffers() {
    let (heap, streams) = (Heap::new(bytes(128)), SimulatedStreams::new(0));
    streams.set_runs_on_wait(true);
    let area = StagingArea::new(heap, Arc::new(streams.clone()), PATIENCE);
    for _ in 0..5 {
        let mut table = area.transfer_table().unwrap();
        table.output(bytes(128)).unwrap();
        let copying = begin(table);
        submit_outputs(&streams, &host(&copying));
    }
    let mut table = area.transfer_table().unwrap();
    table.output(bytes(120)).unwrap();
    let error = table.output(bytes(128)).unwrap_err();
    assert!(matches!(error, StagingError::Allocate(ref e) if e.is_exhaustion()), "{error}");
    assert_eq!(table.len(), 1);
}

#[test]
fn a_failing_upstream_leaves_tables_as_they_were_and_nothing_leaks() {
    for fault in 0..6 {
        let heap = Heap::new(ByteCount::mib(1));
        let upstream = heap.clone().failing(FaultPlan::new().fail_call(fault));
        let area = StagingArea::without_streams(upstream);
        let mut table = area.transfer_table().unwrap();
        let mut refused = 0;
        for length in 1..=6_usize {
            let before = table.len();
            let entry = match length % 3 {
                0 => table.upload(&vec![1; length]),
                1 => table.upload_words(&vec![1; length]),
                _ => table.output_padded(bytes(length), bytes(64)),
            };
            refused += usize::from(entry.is_err());
            assert_eq!(table.len(), before + usize::from(entry.is_ok()));
        }
        assert_eq!((refused, table.len(), heap.live_blocks()), (1, 5, 5));
        let copying = table.begin(&[]).map_err(|(_, error)| error).unwrap();
        drop(copying.submitted().wait(Duration::ZERO).unwrap());
        assert_eq!(heap.live_blocks(), 0);
    }
}

#[test]
fn streams_need_fences_and_tables_need_host_memory() {
    let area = StagingArea::without_streams(Heap::new(ByteCount::mib(1)));
    let (table, error) = area.transfer_table().unwrap().begin(&[COPY]).unwrap_err();
    assert!(matches!(error, StagingError::NoFences), "{error}");
    assert!(table.is_empty());
    let device = StagingArea::without_streams(Simulated::new(SimulatedOptions::default()));
    assert!(matches!(device.transfer_table(), Err(StagingError::NotHost { .. })));
}

#[test]
fn a_dispatch_set_is_released_as_a_whole() {
    let device = Arc::new(Simulated::new(SimulatedOptions::default()));
    let streams = SimulatedStreams::new(5);
    let area = StagingArea::new(Arc::clone(&device), Arc::new(streams.clone()), PATIENCE);
    let mut set = area.dispatch_set();
    set.try_reserve(3).unwrap();
    let input = set.allocate(&RegionRequest::new(bytes(256)).labelled("input")).unwrap();
    let nothing = set.allocate(&RegionRequest::new(bytes(0))).unwrap();
    set.parameters(bytes(48)).unwrap();
    assert!(matches!(set.parameters(bytes(48)), Err(StagingError::ParametersTaken)));
    assert_eq!((set.len(), device.usage().live_blocks), (2, 2));

    let launched = set.begin(&[COPY]).map_err(|(_, error)| error).unwrap();
    assert!(launched.location(input).unwrap().is_some() && launched.parameters().is_some());
    assert_eq!(launched.location(nothing).unwrap(), None);
    assert_eq!(launched.locations().flatten().count(), 1);
    streams.submit(COPY, || {});
    let mut pending = launched.submitted();
    assert!(!pending.is_complete().unwrap());
    drop(pending);
    assert_eq!(device.usage().live_blocks, 2);
    streams.run_all();
    assert_eq!((area.reap(), device.usage().live_blocks), (1, 0));
}

#[test]
fn buffers_of_a_pool_are_reused_from_table_to_table() {
    let heap = Heap::new(ByteCount::mib(16));
    let pool = Arc::new(Pool::new(heap.clone(), PoolOptions::default()).unwrap());
    let streams = SimulatedStreams::new(1);
    let area = StagingArea::new(Arc::clone(&pool), Arc::new(streams.clone()), PATIENCE);
    for round in 0..50 {
        let mut table = area.transfer_table().unwrap();
        table.upload(&[1; 700]).unwrap();
        table.output(bytes(5000)).unwrap();
        let copying = begin(table);
        submit_outputs(&streams, &host(&copying));
        streams.run_all();
        let finished = copying.submitted().wait(PATIENCE).unwrap();
        assert_eq!(finished.outputs(), 1, "round {round}");
    }
    assert_eq!(heap.live_blocks(), 2);
    drop((area, pool));
    assert_eq!(heap.live_blocks(), 0);
}

proptest! {
    #[test]
    fn tables_do_as_their_model(
        entries in prop::collection::vec((any::<bool>(), 0..200_usize, 0..50_usize), 0..20),
        ranges in prop::collection::vec((0..20_usize, 0..210_usize, 0..210_usize), 0..20),
    ) {
        let (area, heap, streams) = area();
        let mut table = area.transfer_table().unwrap();
        let mut ids = Vec::new();
        for &(is_output, length, padding) in &entries {
            let padded = bytes(length + padding);
            ids.push(if is_output {
                table.output_padded(bytes(length), padded).unwrap()
            } else {
                table.upload_padded(&device_bytes(length, length), padded).unwrap()
            });
        }
        let copying = begin(table);
        let copies = host(&copying);
        submit_outputs(&streams, &copies);
        streams.run_all();

        // The model's expectation: every entry that is copied, and every output by its entry.
        let copied = entries.iter().filter(|&&(_, length, padding)| length + padding > 0);
        for (&(is_output, length, padding), &(direction, at, whole)) in copied.zip(&copies) {
            prop_assert_eq!(is_output, direction == Direction::FromDevice);
            prop_assert_eq!(whole, length + padding);
            if !is_output {
                let expected = [device_bytes(length, length), vec![0; padding]].concat();
                prop_assert_eq!(read(at, whole), expected);
            }
        }
        let mut filled = 0..;
        let expected: Vec<Option<Vec<u8>>> = entries
            .iter()
            .map(|&(is_output, length, padding)| {
                is_output.then(|| match length + padding {
                    0 => Vec::new(),
                    _ => device_bytes(filled.next().unwrap(), length),
                })
            })
            .collect();
        let finished = copying.submitted().wait(PATIENCE).unwrap();
        for (index, offset, length) in ranges {
            let Some(id) = ids.get(index) else { continue };
            let model = expected[index].as_ref().and_then(|output| output.get(offset..offset + length));
            prop_assert_eq!(finished.range(*id, bytes(offset), bytes(length)).ok(), model);
        }
        let mut collected = Vec::new();
        finished.collect(&mut collected).unwrap();
        prop_assert_eq!(collected, expected.into_iter().flatten().collect::<Vec<_>>());
        drop(finished);
        prop_assert_eq!(heap.live_blocks(), 0);
    }
}
