//! Every refusal: its variant, its message, and that it had no effect.

use terrane_core::{Allocate, ByteCount, Region, RegionRequest, StorageKind};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfigBuilder};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::device::SimulatedStream;
use terrane_testkit::engine::SimulatedEngine;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::InProcess;
use terrane_transfer::{
    CopyEngine, CopyJob, Declined, DeviceOrder, Durability, Endpoint, Quote, Side, Transfer,
    TransferError, TransferManager, TransferOptions, TransferPlan,
};

use crate::support::*;

/// Refuses the transfer. Both ends are unchanged, and all their blocks are free.
#[track_caller]
fn refused_untouched(rig: &Rig, transfer: Transfer) -> TransferError {
    let before = [&rig.source, &rig.destination].map(|end| Image::scribble(end, &InProcess, 1));
    let cause = rig.refused(transfer);
    rig.assert_nothing_claimed();
    assert_eq!((rig.engine.queued(), rig.engine.ended()), (0, 0), "a job reached the engine");
    for (end, before) in [&rig.source, &rig.destination].into_iter().zip(before) {
        Image::of(end, &InProcess).assert_equals(&before, "after a refusal");
    }
    cause
}

#[test]
fn shapes_that_differ_are_refused_with_the_first_field() {
    type Change = fn(LayoutConfigBuilder) -> LayoutConfigBuilder;
    let cases: [(Change, &str, u64, u64); 6] = [
        (|shape| shape.num_layers(5).outer_dim(1), "num_layers", 4, 5),
        (|shape| shape.outer_dim(1), "outer_dim", 2, 1),
        (|shape| shape.page_size(6), "page_size", 3, 6),
        (|shape| shape.inner_dim(11), "inner_dim", 10, 11),
        (|shape| shape.element(ElementFormat::Width(4)), "bytes a token", 20, 40),
        // The same total number of bytes, divided differently.
        (|shape| shape.page_size(1).inner_dim(30), "page_size", 3, 1),
    ];
    for (change, field, from, to) in cases {
        let mut rig = Rig::new(8);
        rig.destination = endpoint(change(shape()).build().unwrap(), BLOCK_FIRST);
        let error = refused_untouched(&rig, rig.transfer(&[0], &[0]));
        assert_says(&error, &[field, &from.to_string(), &to.to_string()]);
        let TransferError::ShapeMismatch { field: f, from: a, to: b } = error else {
            panic!("{error:?}")
        };
        assert_eq!((f, a, b), (field, from, to));
    }
}

#[test]
fn equal_element_sizes_match_with_any_block_counts_and_alignments() {
    let mut rig = Rig::new(8);
    let same_size = shape().num_blocks(3).element(ElementFormat::RowBytes(20)).build().unwrap();
    let aligned = same_size.with_block_alignment(terrane_core::Alignment::SECTOR).unwrap();
    rig.destination = endpoint(aligned, BLOCK_FIRST);
    run(&rig.manager, rig.transfer(&[7], &[2]));
}

#[test]
fn unequal_block_counts_are_refused() {
    let rig = Rig::new(8);
    let error = refused_untouched(&rig, rig.transfer(&[0, 1, 2], &[0, 1]));
    assert!(matches!(error, TransferError::UnequalBlockCounts { from: 3, to: 2 }));
    assert_says(&error, &["3 source blocks", "2 destination blocks"]);
}

#[test]
fn blocks_that_do_not_exist_are_refused_on_either_side() {
    let rig = Rig::new(8);
    let error = refused_untouched(&rig, rig.transfer(&[0, 8], &[0, 1]));
    assert!(matches!(
        error,
        TransferError::NoSuchBlock { side: Side::Source, block: 8, num_blocks: 8 }
    ));
    assert_says(&error, &["source block 8", "the layout has 8"]);
    let error = refused_untouched(&rig, rig.transfer(&[0, 1], &[u32::MAX, 1]));
    assert!(matches!(error, TransferError::NoSuchBlock { side: Side::Destination, .. }));
    assert_says(&error, &["destination block 4294967295"]);
    for hold in [Endpoint::hold_for_read, Endpoint::hold_for_write] {
        assert!(matches!(
            hold(&rig.source, &[1, 9]),
            Err(TransferError::NoSuchBlock { block: 9, .. })
        ));
    }
    rig.assert_nothing_claimed();
}

#[test]
fn a_destination_named_twice_is_refused_at_any_position() {
    let rig = Rig::new(8);
    for to in [[5, 5, 1], [5, 1, 5], [1, 5, 5]] {
        let error = refused_untouched(&rig, rig.transfer(&[0, 1, 2], &to));
        assert!(matches!(error, TransferError::DuplicateDestination { block: 5 }));
        assert_says(&error, &["destination block 5"]);
    }
}

#[test]
#[expect(clippy::reversed_empty_ranges, reason = "a reversed range must be refused")]
fn layers_out_of_range_are_refused() {
    let rig = Rig::new(8);
    for layers in [0..5, 4..5, 2..2, 3..1, 0..u32::MAX] {
        let error = refused_untouched(&rig, rig.transfer(&[0], &[0]).layers(layers.clone()));
        let shown = format!("layers {}..{}", layers.start, layers.end);
        assert_says(&error, &[&shown, "4 layers"]);
        assert!(matches!(error, TransferError::NoSuchLayers { num_layers: 4, .. }));
    }
}

#[test]
fn a_block_cannot_be_read_and_written_by_one_transfer() {
    let rig = Rig::new(8);
    let within = Transfer::new(&rig.source, &rig.source);
    let error = refused_untouched(&rig, within.clone().blocks(&[0, 1, 2], &[5, 0, 6]));
    let TransferError::Overlap { source_block, destination } = error else { panic!("{error:?}") };
    assert_eq!((source_block, destination), (0, 0));
    assert_says(&error, &["destination block 0", "source block 0"]);
    // A copy of a block onto itself, too.
    assert!(matches!(
        refused_untouched(&rig, within.clone().blocks(&[3], &[3])),
        TransferError::Overlap { source_block: 3, destination: 3 }
    ));
    run(&rig.manager, within.blocks(&[0, 1, 2], &[5, 7, 6]));
}

/// Two layouts of the same bytes. The second one begins `shift` blocks later.
fn overlapping(shift: u32) -> [Endpoint; 2] {
    let config = config(8);
    let block = config.block_bytes();
    let bytes = block.checked_mul("blocks", 24).unwrap();
    let memory = HeapAllocator::system().allocate(&RegionRequest::new(bytes)).unwrap();
    let base = Region::new(memory);
    [0, shift].map(|blocks| {
        let offset = block.checked_mul("blocks", blocks.into()).unwrap();
        let region = base.view(offset, config.total_bytes()).unwrap();
        let builder = LayoutBuilder::new(config).fully_contiguous().adopt([region]);
        // SAFETY: no two transfers are in flight at the same time in this test.
        unsafe { Endpoint::sharing(builder.unregistered().build().unwrap()) }
    })
}

#[test]
fn bytes_belong_to_one_endpoint_and_the_refusal_returns_the_layout() {
    let config = config(8);
    let memory = HeapAllocator::system();
    let request = RegionRequest::new(config.total_bytes());
    let base = Region::new(memory.allocate(&request).unwrap());
    let layout = || {
        let builder = LayoutBuilder::new(config).fully_contiguous().adopt([base.clone()]);
        builder.unregistered().build().unwrap()
    };
    let first = Endpoint::new(layout()).unwrap();
    let error = Endpoint::new(layout()).unwrap_err();
    assert_eq!(error.span, base.span());
    assert!(error.to_string().contains("in use by another endpoint"), "{error}");
    let clone = first.clone();
    drop(first);
    assert!(Endpoint::new(layout()).is_err(), "a clone of the first endpoint lives");
    drop(clone);
    assert!(Endpoint::new(*error.layout).is_ok());
}

#[test]
fn bytes_beyond_the_blocks_may_belong_to_another_endpoint() {
    let config = config(8);
    let bytes = config.total_bytes();
    let twice = bytes.checked_mul("layouts", 2).unwrap();
    let memory = HeapAllocator::system();
    let base = Region::new(memory.allocate(&RegionRequest::new(twice)).unwrap());
    let half = base.view(bytes, bytes).unwrap();
    let endpoint = |region| {
        let builder = LayoutBuilder::new(config).fully_contiguous().adopt([region]);
        Endpoint::new(builder.unregistered().build().unwrap())
    };
    let _whole = endpoint(base).unwrap();
    assert!(endpoint(half).is_ok(), "the first endpoint has blocks in the first half only");
}

#[test]
fn an_overlap_of_two_layouts_of_the_same_bytes_is_refused() {
    let manager = TransferManager::new([std::sync::Arc::new(SimulatedEngine::default()) as _]);
    let [first, second] = overlapping(3);
    // Block 3 of the first layout is block 0 of the second.
    let transfer = |from, to| Transfer::new(&first, &second).blocks(from, to);
    let error = refused(&manager, transfer(&[7, 3, 0], &[5, 6, 0]));
    let TransferError::Overlap { source_block, destination } = error else { panic!("{error:?}") };
    assert_eq!((source_block, destination), (3, 0));
    assert_unclaimed(&first);
    assert_unclaimed(&second);
    run(&manager, transfer(&[7, 0, 1], &[5, 6, 0]));
    // Adjacent blocks do not overlap.
    let [first, second] = overlapping(8);
    let all: Vec<_> = (0..8).collect();
    run(&manager, Transfer::new(&first, &second).blocks(&all, &all));
}

#[test]
fn a_device_needs_an_order_and_the_host_accepts_none() {
    let mut rig = Rig::new(8);
    let device = HeapAllocator::new(DEVICE);
    let host = std::mem::replace(&mut rig.source, endpoint_in(&device, config(8), BLOCK_FIRST));
    let error = refused_untouched(&rig, rig.transfer(&[0], &[0]));
    assert!(matches!(error, TransferError::OrderNotStated { side: Side::Source, .. }));
    assert_says(&error, &["the source is memory of device 0"]);
    let error = refused_untouched(&rig, rig.back(&[0], &[0]));
    assert!(matches!(
        error,
        TransferError::OrderNotStated { side: Side::Destination, kind: DEVICE }
    ));
    rig.source = host;
    let order = DeviceOrder::AlreadySynchronised;
    let error = refused_untouched(&rig, rig.transfer(&[0], &[0]).device_order(order));
    assert!(matches!(error, TransferError::OrderWithoutDevice));
    assert_says(&error, &["leave it out"]);
}

#[test]
fn durability_needs_a_file() {
    let rig = Rig::new(8);
    for durability in [Durability::Data, Durability::Full] {
        let error = refused_untouched(&rig, rig.transfer(&[0], &[0]).durability(durability));
        assert!(matches!(
            error,
            TransferError::DurabilityWithoutFile { kind: StorageKind::System }
        ));
        assert_says(&error, &["system memory"]);
    }
    run(&rig.manager, rig.transfer(&[0], &[0]).durability(Durability::None));
}

#[test]
fn a_transfer_without_an_engine_is_refused_with_the_reason_of_each() {
    let mut rig = Rig::new(8);
    let without_engines = TransferManager::new([]);
    assert_says(
        &refused(&without_engines, rig.transfer(&[0], &[0])),
        &["the manager has no engines"],
    );

    let device = HeapAllocator::new(DEVICE);
    rig.source = endpoint_in(&device, config(8), BLOCK_FIRST);
    let hosts_only = SimulatedEngine::new(
        terrane_testkit::engine::SimulatedEngineOptions::default()
            .named("hosts only")
            .serving(|from, to| from.is_host() && to.is_host()),
    );
    let engines = [std::sync::Arc::new(hosts_only) as _, rig.engine.clone() as _];
    let manager = TransferManager::new(engines);
    // A stream of a device that no engine supports.
    let gone = SimulatedStream::new(Default::default()).order();
    let error = refused(&manager, rig.transfer(&[0], &[0]).device_order(gone));
    assert_says(&error, &["from device 0 to system", "hosts only: does not copy between"]);
    let TransferError::NoEngine { from: DEVICE, to: StorageKind::System, declined } = error else {
        panic!("{error:?}")
    };
    let expected = [("hosts only", Declined::Kinds), ("simulated", Declined::DeviceOrder)];
    assert_eq!(declined, expected);
    rig.assert_nothing_claimed();
}

/// An engine that declines everything.
#[derive(Debug)]
struct Declining(&'static str, Declined);

// SAFETY: it accesses no byte; a submitted job ends as it drops.
unsafe impl CopyEngine for Declining {
    fn name(&self) -> &'static str {
        self.0
    }

    fn quote(&self, _: &TransferPlan, _: &TransferOptions) -> Result<Quote, Declined> {
        Err(self.1)
    }

    fn submit(&self, _: CopyJob) {}
}

#[test]
fn the_explanation_has_the_reasons_of_engines_that_declined() {
    let rig = Rig::new(8);
    let other = Declining("library", Declined::NoCommonBackend);
    let unconcerned = Declining("elsewhere", Declined::Kinds);
    let engines: [std::sync::Arc<dyn CopyEngine>; 3] =
        [std::sync::Arc::new(other), rig.engine.clone(), std::sync::Arc::new(unconcerned)];
    let manager = TransferManager::new(engines);
    let explained = manager.explain(&rig.transfer(&[0], &[1])).unwrap();
    assert_eq!(explained.engine, "simulated");
    let declined = [("library", Declined::NoCommonBackend), ("elsewhere", Declined::Kinds)];
    assert_eq!(explained.declined, declined);
    let text = explained.to_string();
    assert!(text.contains("; declined by library: no backend of its agent"), "{text}");
    assert!(!text.contains("elsewhere"), "this engine copies other kinds: {text}");
    let report = end_of(manager.submit(rig.transfer(&[0], &[1]), ()).unwrap()).result.unwrap();
    assert_eq!(report.explanation, explained);
}

#[test]
fn explaining_refuses_like_submitting_except_for_conflicts() {
    let rig = Rig::new(8);
    assert!(matches!(
        rig.manager.explain(&rig.transfer(&[0], &[8])),
        Err(TransferError::NoSuchBlock { .. })
    ));
    let _hold = rig.destination.hold_for_write(&[1]).unwrap();
    let explained = rig.manager.explain(&rig.transfer(&[0], &[1])).unwrap();
    assert_eq!(explained.bytes, ByteCount::new(8 * PIECE));
    assert_eq!((explained.pieces, explained.runs), (8, 8));
    assert!(rig.refused(rig.transfer(&[0], &[1])).is_conflict());
}
