//! Transfers with pinned memory that is still in preparation, only partly pinned, or registered in
//! many parts.

use std::time::Duration;

use terrane_core::{Allocate, ByteCount, Memory, Region};
use terrane_cuda::{
    Context, CopyPath, DeviceEngineOptions, DriverCode, PinnedAllocator, PinnedBringUp,
    PinnedOptions,
};
use terrane_layout::{LayoutBuilder, LayoutConfig, LayoutKind, LayoutPlan};
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{check_transfer, ordered};
use terrane_testkit::model::Image;
use terrane_transfer::{Declined, Endpoint, Transfer, TransferError};

use super::fixture::{APART, DEVICE, Fixture, LAYERS_APART, PINNED, config, endpoint};
use crate::faults;
use crate::needs::{LITTLE, device};

const TIMEOUT: Duration = Duration::from_secs(120);
/// Blocks of 64 KiB, 16 of them per step.
const BLOCKS: u32 = 64;
const STEP: ByteCount = ByteCount::mib(1);

fn shape() -> LayoutConfig {
    config(BLOCKS, 8, 16)
}

/// Blocks in memory that is prepared in four steps.
fn memory_in_steps(context: &Context) -> (Endpoint, PinnedBringUp) {
    let options = PinnedOptions { background_step: STEP, ..PinnedOptions::default() };
    let pinned = PinnedAllocator::new(context, options).unwrap();
    let plan = LayoutPlan::new(&shape(), LayoutKind::FullyContiguous, pinned.limits()).unwrap();
    assert_eq!(plan.geometry().block_unit(), Some(ByteCount::kib(64)));
    let (memory, bring_up) = pinned.allocate_in_background(&plan.base_request()).unwrap();
    let regions = plan.cut(&Region::new(memory)).unwrap();
    let layout = LayoutBuilder::new(shape()).kind(LayoutKind::FullyContiguous).adopt(regions);
    (Endpoint::new(layout.unregistered().build().unwrap()).unwrap(), bring_up)
}

/// If half of the memory is pinned, every path copies the blocks of that half, and others are
/// refused: no copy blocks its caller, and no kernel accesses memory that is not pinned.
#[test]
fn only_blocks_in_the_usable_prefix_are_copied() {
    let name = "only_blocks_in_the_usable_prefix_are_copied";
    let Some(context) = device(name, LITTLE) else { return };
    for path in [None, Some(CopyPath::CopyEach), Some(CopyPath::Batched), Some(CopyPath::Staged)] {
        if !faults::fail(name, "cuMemHostRegister_v2", 2, DriverCode::OUT_OF_MEMORY) {
            return;
        }
        let (there, bring_up) = memory_in_steps(&context);
        assert_eq!(
            bring_up.wait_for(STEP.checked_mul("steps", 4).unwrap(), TIMEOUT).unwrap_err().usable,
            ByteCount::mib(2)
        );
        let options = DeviceEngineOptions { path, ..DeviceEngineOptions::default() };
        let fixture = Fixture::new(&context, options, &[DEVICE, APART, PINNED]);
        let (manager, access) = (fixture.manager(), fixture.access());
        let here = fixture.endpoint(DEVICE, shape(), LAYERS_APART);
        Image::scribble(&here, access, 3);
        for ids in [&[31, 0, 7][..], &(0..32).collect::<Vec<_>>()] {
            check_transfer(&manager, access, (&here, ids), (&there, ids), 0..8);
            check_transfer(&manager, access, (&there, ids), (&here, ids), 0..8);
        }
        for ids in [[0, 32], [62, 63], [31, 40]] {
            for (from, to) in [(&here, &there), (&there, &here)] {
                let transfer = ordered(Transfer::new(from, to), from, to).blocks(&ids, &ids);
                let rejected = manager.submit(transfer, ()).map(drop).unwrap_err();
                let TransferError::NoEngine { declined, .. } = &rejected.cause else {
                    panic!("{path:?}, {ids:?}: {rejected}");
                };
                let all_so = declined.iter().all(|(_, why)| *why == Declined::MemoryNotReady);
                assert!(all_so, "{path:?}, {ids:?}: {rejected}");
            }
        }
        assert_eq!(context.lost(), None, "{path:?}");
    }
}

/// Facts about an endpoint whose memory is still in preparation are queried again afterwards. Then
/// kernels can access it, too.
#[test]
fn completely_prepared_memory_is_copied_by_every_path() {
    let name = "completely_prepared_memory_is_copied_by_every_path";
    let Some(context) = device(name, LITTLE) else { return };
    let options =
        DeviceEngineOptions { path: Some(CopyPath::Direct), ..DeviceEngineOptions::default() };
    let fixture = Fixture::new(&context, options, &[DEVICE, APART, PINNED]);
    let (manager, access) = (fixture.manager(), fixture.access());
    let (there, bring_up) = memory_in_steps(&context);
    let here = fixture.endpoint(DEVICE, shape(), LAYERS_APART);
    let all: Vec<u32> = (0..BLOCKS).collect();
    let transfer = || ordered(Transfer::new(&here, &there), &here, &there).blocks(&all, &all);
    // Refused or not, depending on the usable prefix.
    let _early = manager.explain(&transfer());
    assert!(bring_up.wait_for(bring_up.length(), TIMEOUT).unwrap());
    assert!(there.layout().regions().iter().all(|region| region.device_alias().is_some()));
    let explained = manager.explain(&transfer()).unwrap();
    assert_eq!(explained.path(), CopyPath::Direct.name());
    Image::scribble(&here, access, 4);
    check_transfer(&manager, access, (&here, &all), (&there, &all), 0..8);
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// However many registrations the memory has, no copy crosses the border between two of them.
#[test]
fn copies_are_split_at_each_of_thousands_of_registrations() {
    let name = "copies_are_split_at_each_of_thousands_of_registrations";
    let Some(context) = device(name, LITTLE) else { return };
    let page = ByteCount::kib(4);
    let options =
        PinnedOptions { unit: page, largest_registration: page, ..PinnedOptions::default() };
    let pinned = PinnedAllocator::new(&context, options).unwrap();
    // Blocks of one page.
    let (shape, contiguous) = (config(4200, 2, 4), LayoutKind::FullyContiguous);
    let before = context.usage().registered.count;
    let there = endpoint(&pinned, shape, contiguous);
    if context.usage().registered.count - before < 4200 {
        return eprintln!("skipped: {name}: this driver or system registers no single pages");
    }
    let options =
        DeviceEngineOptions { path: Some(CopyPath::Contiguous), ..DeviceEngineOptions::default() };
    let fixture = Fixture::new(&context, options, &[DEVICE, PINNED]);
    let (manager, access) = (fixture.manager(), fixture.access());
    let here = fixture.endpoint(DEVICE, shape, contiguous);
    Image::scribble(&here, access, 2);
    let ids: Vec<u32> = (4095..4105).collect();
    check_transfer(&manager, access, (&here, &ids), (&there, &ids), 0..2);
    check_transfer(&manager, access, (&there, &ids), (&here, &ids), 0..2);
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
