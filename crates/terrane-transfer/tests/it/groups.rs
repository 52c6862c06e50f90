//! Cache groups in one tensor: no group writes a block while another one uses it.

use std::thread;

use terrane_core::{Allocate, ByteCount, Memory, Region, RegionRequest};
use terrane_layout::{
    Axis, AxisSteps, Geometry, LayoutBuilder, LayoutConfig, LayoutKind, PhysicalLayout, Section,
    SectionName,
};
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::{Fault, SimulatedEngine};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::Pattern;
use terrane_transfer::{
    Endpoint, GroupRefusal, GroupsRefused, Transfer, TransferError, TransferManager,
};

use crate::support::*;

const BLOCKS: u32 = 8;
/// The bytes of a block of [`attention`].
const PAGE: u32 = 480;

/// 4 layers, K and V, 3 tokens: 480 bytes.
fn attention() -> Geometry {
    Geometry::new(&config(BLOCKS), CONTIGUOUS).unwrap()
}

/// Rows of K and V after each other, and layers inside of tokens: the same shape with other
/// strides.
fn attention_by_token() -> Geometry {
    let section = |name, offset| {
        Section::new(name, 2)
            .at(0, offset)
            .axis(Axis::Block, AxisSteps::new(BLOCKS, PAGE.into()))
            .axis(Axis::Token, AxisSteps::new(3, 160))
            .axis(Axis::Layer, AxisSteps::new(4, 40))
            .axis(Axis::Element, AxisSteps::new(10, 2))
    };
    let names = attention().sections().iter().map(Section::name).collect::<Vec<_>>();
    Geometry::from_sections([section(names[0], 0), section(names[1], 20)]).unwrap()
}

/// One layer, 400 bytes of a page.
fn state() -> Geometry {
    let section = Section::new(SectionName::STATE, 4)
        .axis(Axis::Block, AxisSteps::new(BLOCKS, PAGE.into()))
        .axis(Axis::Element, AxisSteps::new(100, 4));
    Geometry::from_sections([section]).unwrap()
}

pub fn tensor_in(heap: &HeapAllocator, bytes: u64) -> Region {
    Region::new(heap.allocate(&RegionRequest::new(ByteCount::new(bytes))).unwrap())
}

fn tensor() -> Region {
    tensor_in(&HeapAllocator::system(), u64::from(BLOCKS * PAGE) + 4096)
}

/// Each region of the geometry is adjacent to the one before it.
fn over(tensor: &Region, geometry: Geometry, shift: u64) -> PhysicalLayout {
    let mut begin = shift;
    let regions: Vec<Region> = (0..geometry.region_count())
        .map(|region| {
            let length = geometry.region_bytes(region);
            let view = tensor.view(ByteCount::new(begin), length).unwrap();
            begin += length.get();
            view
        })
        .collect();
    LayoutBuilder::from_geometry(geometry).adopt(regions).unregistered().build().unwrap()
}

fn groups(tensor: &Region, geometries: impl IntoIterator<Item = Geometry>) -> Vec<Endpoint> {
    let layouts = geometries.into_iter().map(|geometry| over(tensor, geometry, 0));
    Endpoint::of_groups(layouts).unwrap()
}

#[track_caller]
fn refusal(layouts: impl IntoIterator<Item = PhysicalLayout>) -> GroupRefusal {
    let layouts: Vec<_> = layouts.into_iter().collect();
    let count = layouts.len();
    let GroupsRefused { layouts, reason } = Endpoint::of_groups(layouts).unwrap_err();
    assert_eq!(layouts.len(), count, "not all layouts were returned");
    reason
}

struct Shared {
    engine: std::sync::Arc<SimulatedEngine>,
    manager: TransferManager,
    attention: Endpoint,
    state: Endpoint,
    /// Endpoints in other memory, with the shapes of both groups.
    others: [Endpoint; 2],
}

fn shared() -> Shared {
    let engine = std::sync::Arc::new(SimulatedEngine::default());
    let manager = TransferManager::new([engine.clone() as _]);
    let mut ends = groups(&tensor(), [attention(), state()]).into_iter();
    let alone = |geometry| Endpoint::new(over(&tensor(), geometry, 0)).unwrap();
    let others = [attention(), state()].map(alone);
    let (attention, state) = (ends.next().unwrap(), ends.next().unwrap());
    Shared { engine, manager, attention, state, others }
}

#[test]
fn a_block_that_one_group_writes_cannot_be_used_by_another() {
    let Shared { engine, manager, attention, state, others } = shared();
    let [of_attention, of_state] = &others;
    engine.hold();
    // Some layers of group 0 conflict with any use by group 1, and not with other layers of group
    // 0.
    let low = Transfer::new(of_attention, &attention).blocks(&[0, 1], &[3, 4]).layers(0..2);
    let writes = manager.submit(low, ()).unwrap();
    let high = Transfer::new(of_attention, &attention).blocks(&[0], &[3]).layers(2..4);
    let beside = manager.submit(high, ()).unwrap();
    for transfer in [
        Transfer::new(&state, of_state).blocks(&[4], &[0]),
        Transfer::new(of_state, &state).blocks(&[0], &[4]),
    ] {
        let error = refused(&manager, transfer);
        assert_says(&error, &["block 4 is in use (being written)"]);
    }
    assert!(state.hold_for_read(&[3]).is_err());
    let free = Transfer::new(of_state, &state).blocks(&[0], &[5]);
    let free = manager.submit(free, ()).unwrap();
    assert!(attention.hold_for_read(&[5]).is_err());
    // After the writer, it is granted.
    let after = Transfer::new(&state, of_state).blocks(&[4], &[1]).after(&writes.ticket());
    let after = manager.submit(after, ()).unwrap();
    engine.release_all();
    for completion in [writes, beside, free, after] {
        end_of(completion).result.unwrap();
    }
    let hold = state.hold_for_read(&[3]).unwrap();
    drop(attention.hold_for_read(&[3]).unwrap());
    assert!(attention.hold_for_write(&[3]).is_err());
    drop(hold);
    [&attention, &state].into_iter().for_each(assert_unclaimed);
}

#[test]
fn a_partly_written_block_is_incomplete_for_all_groups() {
    let Shared { engine, manager, attention, state, others } = shared();
    let [of_attention, of_state] = &others;
    let fail = || {
        engine.fail_next(Fault::ShortCopy { after_runs: 1 });
        let part = Transfer::new(of_attention, &attention).blocks(&[0], &[2]).layers(0..2);
        assert!(end_of(manager.submit(part, ()).unwrap()).result.is_err());
    };
    fail();
    let read = || Transfer::new(&state, of_state).blocks(&[2], &[0]);
    let error = refused(&manager, read());
    assert!(matches!(&error, TransferError::Incomplete { blocks } if blocks == &[2]), "{error:?}");
    // The other group writes the block, and may read it. The first group still may not.
    drop(state.hold_for_write(&[2]).unwrap());
    run(&manager, read());
    assert!(attention.hold_for_read(&[2]).is_err());
    // The first group writes again what it had failed to write.
    fail();
    run(&manager, Transfer::new(of_attention, &attention).blocks(&[0], &[2]).layers(0..2));
    run(&manager, read());
    drop(attention.hold_for_read(&[2]).unwrap());
}

#[test]
fn blocks_move_between_two_groups_of_one_set() {
    let manager = TransferManager::with_default_engines().unwrap();
    let tensor = tensor();
    let mut ends = groups(&tensor, [attention(), attention_by_token()]).into_iter();
    let (by_layer, by_token) = (ends.next().unwrap(), ends.next().unwrap());
    let fill = |shift| Endpoint::new(over(&self::tensor(), attention(), shift)).unwrap();
    let (from, to) = (fill(0), fill(16));
    Pattern::new(7).fill(&from).unwrap();
    run(&manager, Transfer::new(&from, &by_layer).blocks(&[0, 1], &[5, 2]));
    // The same block with other strides would be read while it is written.
    let error = refused(&manager, Transfer::new(&by_layer, &by_token).blocks(&[5], &[5]));
    assert!(matches!(error, TransferError::Overlap { .. }), "{error:?}");
    run(&manager, Transfer::new(&by_layer, &by_token).blocks(&[5, 2], &[0, 1]));
    run(&manager, Transfer::new(&by_token, &to).blocks(&[0, 1], &[0, 1]));
    for block in [0, 1] {
        for (layer, section) in (0..4).flat_map(|layer| [(layer, 0), (layer, 1)]) {
            let [expected, found] = [&from, &to].map(|end| {
                let span = end.layout().span(block, layer, section).unwrap();
                // SAFETY: the layouts are alive, and nothing writes them now.
                unsafe { bytes_of(span) }
            });
            assert_eq!(expected, found, "block {block}, layer {layer}, section {section}");
        }
    }
    [&by_layer, &by_token].into_iter().for_each(assert_unclaimed);
}

/// # Safety
///
/// The span is host memory that is alive and that nothing writes.
unsafe fn bytes_of(span: terrane_core::Span) -> Vec<u8> {
    let address = span.location.as_host().unwrap().as_ptr();
    // SAFETY: the contract of this function.
    unsafe { std::slice::from_raw_parts(address, span.length.to_usize()) }.to_vec()
}

#[test]
fn threads_with_opposite_directions_do_not_deadlock() {
    let engine = std::sync::Arc::new(SimulatedEngine::default());
    let manager = TransferManager::new([engine as _]);
    let tensor = tensor();
    let ends = groups(&tensor, [attention(), attention_by_token()]);
    let alone = Endpoint::new(over(&self::tensor(), attention(), 0)).unwrap();
    let directions =
        [(&ends[0], &ends[1]), (&ends[1], &ends[0]), (&alone, &ends[1]), (&ends[0], &alone)];
    thread::scope(|scope| {
        for (number, (from, to)) in (0_u32..).zip(directions) {
            let manager = &manager;
            scope.spawn(move || {
                for _ in 0..200 {
                    let transfer = Transfer::new(from, to).blocks(&[number], &[number + 4]);
                    run(manager, transfer);
                }
            });
        }
    });
    ends.iter().for_each(assert_unclaimed);
}

#[test]
fn groups_of_different_shapes_are_accepted_if_their_blocks_have_equal_positions() {
    let shapes = |kind, tokens: u32, elements: u32| {
        let config = shape().num_blocks(BLOCKS).num_layers(3).page_size(tokens);
        Geometry::new(&config.inner_dim(elements).build().unwrap(), kind).unwrap()
    };
    let bytes = u64::from(BLOCKS) * 3 * 2 * 240;
    for kind in [CONTIGUOUS, BLOCK_FIRST, OUTER_FIRST] {
        let tensor = tensor_in(&HeapAllocator::system(), bytes);
        let ends =
            groups(&tensor, [shapes(kind, 12, 10), shapes(kind, 4, 30), shapes(kind, 1, 120)]);
        assert_eq!(ends.len(), 3);
        assert!(ends[0].id() != ends[1].id());
        let hold = ends[2].hold_for_write(&[7]).unwrap();
        assert!(ends[0].hold_for_read(&[7]).is_err() && ends[1].hold_for_write(&[7]).is_err());
        drop(hold);
    }
    assert!(Endpoint::of_groups([]).unwrap().is_empty());
}

#[test]
fn a_layout_that_shares_no_memory_may_be_in_a_set() {
    let tensors = [tensor(), tensor()];
    let layouts = [over(&tensors[0], attention(), 0), over(&tensors[1], state(), 7)];
    let ends = Endpoint::of_groups(layouts).unwrap();
    let _hold = ends[0].hold_for_write(&[1]).unwrap();
    assert!(ends[1].hold_for_write(&[1]).is_err());
}

#[test]
fn each_refusal_names_the_groups() {
    let tensor = tensor();
    let fewer = Geometry::new(&config(7), CONTIGUOUS).unwrap();
    let reason = refusal([over(&tensor, attention(), 0), over(&tensor, fewer, 0)]);
    let (first_blocks, second_blocks) = (8, 7);
    let expected =
        GroupRefusal::UnequalBlockCounts { first: 0, second: 1, first_blocks, second_blocks };
    assert_eq!(reason, expected);

    // 400 bytes fit into 480 at offsets up to 80.
    let layouts = |shift| {
        [attention(), state()].map(|geometry| over(&tensor, geometry, 0)).into_iter().chain([over(
            &tensor,
            state(),
            shift,
        )])
    };
    drop(Endpoint::of_groups(layouts(80)).unwrap());
    let reason = refusal(layouts(81));
    let (first_block, second_block) = (1, 0);
    assert_eq!(
        reason,
        GroupRefusal::BlocksOverlap { first: 0, second: 2, first_block, second_block }
    );
    let message = GroupsRefused { layouts: Vec::new(), reason }.to_string();
    assert!(message.contains("block 1 of group 0 and block 0 of group 2"), "{message}");

    let reason = refusal([BLOCK_FIRST, OUTER_FIRST].map(|kind| {
        let geometry = Geometry::new(&config(BLOCKS), kind).unwrap();
        over(&tensor, geometry, 0)
    }));
    let (first_stride, second_stride) = (2 * PIECE, PIECE);
    assert_eq!(
        reason,
        GroupRefusal::StridesDiffer { first: 0, second: 1, first_stride, second_stride }
    );

    // The stride of heads, 4 × 300, is outside of the blocks.
    let scattered = Section::new(SectionName::STATE, 1)
        .axis(Axis::Layer, AxisSteps::new(4, 2400))
        .axis(Axis::Head, AxisSteps::new(300, 8))
        .axis(Axis::Block, AxisSteps::new(BLOCKS, 1));
    let scattered = || Geometry::from_sections([scattered]).unwrap();
    let bytes = tensor_in(&HeapAllocator::system(), 10_000);
    let reason = refusal([over(&bytes, scattered(), 0), over(&bytes, scattered(), 0)]);
    assert_eq!(reason, GroupRefusal::TooScattered { group: 0, windows: 1200 });
}

#[test]
fn bytes_of_a_set_cannot_belong_to_another_endpoint() {
    let tensor = tensor();
    let outside = Endpoint::new(over(&tensor, state(), 0)).unwrap();
    let layouts = || [attention(), state()].map(|geometry| over(&tensor, geometry, 0));
    let GroupRefusal::BytesInUse { group, span } = refusal(layouts()) else { panic!() };
    assert_eq!((group, span.location), (0, tensor.location()));
    drop(outside);
    let mut ends = Endpoint::of_groups(layouts()).unwrap();
    assert!(Endpoint::new(over(&tensor, state(), 0)).is_err());
    assert!(Endpoint::of_groups(layouts()).is_err());
    // Also while only one endpoint of the set lives.
    ends.truncate(1);
    assert!(Endpoint::new(over(&tensor, state(), 0)).is_err());
    drop(ends);
    Endpoint::new(over(&tensor, state(), 0)).unwrap();
}

#[test]
fn the_memory_of_all_groups_lives_until_the_last_one_drops() {
    let heap = HeapAllocator::system();
    let tensors = [attention(), state()].map(|geometry| {
        let tensor = tensor_in(&heap, 4096);
        over(&tensor, geometry, 0)
    });
    let mut ends = Endpoint::of_groups(tensors).unwrap();
    drop(ends.remove(0));
    // Otherwise a new allocation at these addresses would be refused as in use.
    assert_eq!(heap.live(), 2);
    let hold = ends[0].hold_for_read(&[0]).unwrap();
    drop(ends);
    assert_eq!(heap.live(), 2);
    drop(hold);
    heap.assert_all_freed();
}

#[test]
fn groups_in_one_file_all_use_direct_io_or_all_the_page_cache() {
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let page = |pieces: u32| {
        let config = LayoutConfig::builder().num_blocks(2).num_layers(pieces).outer_dim(1);
        let config = config.page_size(1).inner_dim(8192 / pieces / 2);
        let element = terrane_layout::ElementFormat::Width(2);
        Geometry::new(&config.element(element).build().unwrap(), CONTIGUOUS).unwrap()
    };
    let request = RegionRequest::new(ByteCount::new(16_384));
    let file = Region::new(files.allocate(&request).unwrap());
    let layouts = |pieces: [u32; 2]| pieces.map(|pieces| over(&file, page(pieces), 0));
    drop(Endpoint::of_groups(layouts([1, 2])).unwrap());
    let reason = refusal(layouts([1, 8]));
    assert!(
        matches!(reason, GroupRefusal::FileAccessDiffers { first: 0, second: 1, .. }),
        "{reason:?}"
    );
}

#[test]
fn every_kind_of_layout_is_a_set_of_one() {
    for kind in LayoutKind::ALL {
        let geometry = Geometry::new(&config(BLOCKS), kind).unwrap();
        assert_eq!(groups(&tensor(), [geometry]).len(), 1);
    }
}
