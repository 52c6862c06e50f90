//! Transfers without a waiting thread, without memory, and without their engine.

use std::mem::ManuallyDrop;
use std::num::NonZeroU32;
use std::thread;

use terrane_core::{Allocate, ByteCount, RegionRequest};
use terrane_cuda::{Context, CopyPath, DeviceAllocator, DeviceEngineOptions, DeviceMemory};
use terrane_layout::LayoutKind;
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{check_transfer, end_of, ordered};
use terrane_testkit::model::Image;
use terrane_testkit::process::in_child;
use terrane_transfer::{Endpoint, Transfer};

use super::fixture::{APART, DEVICE, Fixture, HeldStream, LAYERS_APART, PINNED, config};
use crate::needs::{Needs, device_with_kernels as device};

const ROOM: Needs = Needs { device: ByteCount::gib(1), host: ByteCount::gib(1) };
const ALL: [&str; 3] = [DEVICE, APART, PINNED];

fn options(path: Option<CopyPath>) -> DeviceEngineOptions {
    DeviceEngineOptions { path, ..DeviceEngineOptions::default() }
}

/// A completion is dropped or leaked, or its future is dropped half-way. The copy continues, and
/// every byte arrives. The guard and all memory are freed after the copy, not before.
#[test]
fn transfers_without_a_completion_still_end() {
    let Some(context) = device("transfers_without_a_completion_still_end", ROOM) else { return };
    for path in [None, Some(CopyPath::Direct), Some(CopyPath::Staged)] {
        let fixture = Fixture::new(&context, options(path), &ALL);
        let manager = fixture.manager();
        let shape = config(64, 8, 16);
        let ids: Vec<u32> = (0..64).collect();
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        let (told, ended) = std::sync::mpsc::channel();
        for way in 0..3 {
            let before = held_memory(&context);
            let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
            let image = Image::scribble(&here, fixture.access(), way);
            let mut expected = Image::of(&there, fixture.access());
            expected.transfer(&image, &ids, &ids, 0..8);
            let held = HeldStream::new(&context);
            let guard = ReportsDrop(told.clone());
            let transfer = Transfer::new(&here, &there).device_order(held.order());
            let completion = manager.submit(transfer.blocks(&ids, &ids), guard).unwrap();
            let ticket = completion.ticket();
            // From here on the transfer owns its resources.
            drop(here);
            match way {
                0 => drop(completion),
                // The forgotten completion never drops.
                1 => {
                    let _leaked = ManuallyDrop::new(completion);
                }
                _ => drop(completion.into_future()),
            }
            // The transfer waits for a blocked stream, so none of its memory may be freed yet.
            assert!(ended.try_recv().is_err() && !ticket.has_ended(), "{path:?}, way {way}");
            assert!(held_memory(&context) != before, "{path:?}, way {way}: the source has gone");
            drop(held);
            while !ticket.has_ended() {
                thread::yield_now();
            }
            // A leaked completion leaks its guard.
            if way != 1 {
                ended.recv().unwrap();
            }
            Image::of(&there, fixture.access()).assert_equals(&expected, &format!("{way}"));
            // The first transfer allocates the engine's buffers, which are kept.
            if way != 0 {
                assert_eq!(held_memory(&context), before, "{path:?}, way {way}");
            }
        }
        assert!(ended.try_recv().is_err(), "each guard drops once");
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// The number of the device's allocations, and their bytes.
fn held_memory(context: &Context) -> (u64, ByteCount) {
    let held = context.usage().device;
    (held.count, held.bytes)
}

/// A guard that reports its drop.
struct ReportsDrop(std::sync::mpsc::Sender<()>);

impl Drop for ReportsDrop {
    fn drop(&mut self) {
        // The test may have ended.
        let _ = self.0.send(());
    }
}

#[test]
fn threads_submit_both_ways_at_once() {
    let Some(context) = device("threads_submit_both_ways_at_once", ROOM) else { return };
    let two = NonZeroU32::new(2).unwrap();
    let options = DeviceEngineOptions { completion_threads: two, ..options(None) };
    let fixture = Fixture::new(&context, options, &ALL);
    let manager = fixture.manager();
    let shape = config(48, 8, 16);
    let ends: Vec<_> = (0..4)
        .map(|number| {
            let here =
                fixture.endpoint(if number % 2 == 0 { DEVICE } else { APART }, shape, LAYERS_APART);
            let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
            let image = Image::scribble(&here, fixture.access(), number);
            (here, there, image)
        })
        .collect();
    thread::scope(|scope| {
        for (here, there, _) in &ends {
            let manager = &manager;
            scope.spawn(move || {
                let all: Vec<u32> = (0..48).collect();
                let reversed: Vec<u32> = all.iter().rev().copied().collect();
                // Copied there in one transfer, and back as single blocks and as a whole, reversed
                // twice.
                for _ in 0..3 {
                    let out = ordered(Transfer::new(here, there), here, there);
                    end_of(manager.submit(out.blocks(&all, &reversed), ()).unwrap())
                        .result
                        .unwrap();
                    let back = |ids: &[u32]| {
                        let from: Vec<u32> = ids.iter().map(|id| 47 - id).collect();
                        let back = ordered(Transfer::new(there, here), there, here);
                        manager.submit(back.blocks(&from, ids), ()).unwrap()
                    };
                    let singles: Vec<_> = (0..16).map(|id| back(&[id])).collect();
                    let rest = back(&all[16..]);
                    singles.into_iter().for_each(|single| drop(end_of(single).result.unwrap()));
                    end_of(rest).result.unwrap();
                }
            });
        }
    });
    for (here, _, image) in &ends {
        Image::of(here, fixture.access()).assert_equals(image, "there and back");
    }
}

/// Without memory for buffers, a transfer is copied by another path. With memory again, by the
/// first path.
#[test]
fn without_memory_for_buffers_transfers_continue() {
    let path = "engine::faults::without_memory_for_buffers_transfers_continue";
    in_child(path, || {
        let Some(context) = device(path, ROOM) else { return };
        let fixture = Fixture::new(&context, options(Some(CopyPath::Staged)), &ALL);
        let manager = fixture.manager();
        let shape = config(64, 8, 16);
        let ids: Vec<u32> = (0..64).collect();
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        Image::scribble(&here, fixture.access(), 8);
        // The engine's small tables are allocated first.
        let hoarded = hoard(&DeviceAllocator::new(&context));
        let access = fixture.access();
        let staged = |from: &Endpoint, to: &Endpoint| {
            let transfer = ordered(Transfer::new(from, to), from, to).blocks(&ids, &ids);
            assert_eq!(manager.explain(&transfer).unwrap().path(), CopyPath::Staged.name());
        };
        staged(&here, &there);
        let before = held_memory(&context);
        check_transfer(&manager, access, (&here, &ids), (&there, &ids), 0..8);
        assert_eq!(held_memory(&context), before, "there was memory for a buffer");
        drop(hoarded);
        staged(&there, &here);
        let before = held_memory(&context);
        check_transfer(&manager, access, (&there, &ids), (&here, &ids), 0..8);
        check_transfer(&manager, access, (&here, &ids), (&there, &ids), 0..8);
        assert_ne!(held_memory(&context), before, "no buffer was made again");
        assert_eq!(context.lost(), None);
    });
}

/// All of the device's memory except less than a buffer.
pub fn hoard(allocator: &DeviceAllocator) -> Vec<DeviceMemory> {
    let mut all = Vec::new();
    for bytes in [ByteCount::gib(1), ByteCount::mib(64), ByteCount::mib(8)] {
        while let Ok(memory) = allocator.allocate(&RegionRequest::new(bytes)) {
            all.push(memory);
        }
    }
    all
}

#[test]
fn an_engine_that_drops_completes_its_transfers() {
    let name = "an_engine_that_drops_completes_its_transfers";
    let Some(context) = device(name, ROOM) else { return };
    for path in [None, Some(CopyPath::Direct), Some(CopyPath::Staged), Some(CopyPath::Batched)] {
        let fixture = Fixture::new(&context, options(path), &ALL);
        let manager = fixture.manager();
        let shape = config(128, 8, 16);
        let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
        let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
        let image = Image::scribble(&here, fixture.access(), 6);
        let mut expected = Image::of(&there, fixture.access());
        let all: Vec<_> = (0..8)
            .map(|part: u32| {
                let ids: Vec<u32> = (part * 16..part * 16 + 16).collect();
                expected.transfer(&image, &ids, &ids, 0..8);
                let transfer = ordered(Transfer::new(&here, &there), &here, &there);
                manager.submit(transfer.blocks(&ids, &ids), ()).unwrap()
            })
            .collect();
        drop(manager);
        all.into_iter().for_each(|completion| drop(end_of(completion).result.unwrap()));
        Image::of(&there, fixture.access()).assert_equals(&expected, "after the engine dropped");
    }
}
