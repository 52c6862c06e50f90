//! The properties of a layout over memory.

use terrane_core::{ByteCount, Location, Memory, StorageKind};
use terrane_layout::{
    BlockDimension, Index, LayoutBuilder, LayoutError, LayoutKind, PhysicalLayout,
};

use crate::doubles::{Allocator, Journal, config};

fn layout(kind: LayoutKind, allocator: &Allocator) -> PhysicalLayout {
    LayoutBuilder::new(config()).kind(kind).allocate(allocator).unregistered().build().unwrap()
}

#[test]
fn every_accessor_agrees_on_every_piece() {
    let journal = Journal::default();
    let device = Allocator::new(&journal);
    let disk = Allocator { kind: StorageKind::Disk, address: 8192, ..Allocator::new(&journal) };
    for kind in LayoutKind::ALL {
        for allocator in [&device, &disk] {
            let layout = layout(kind, allocator);
            for (block, layer, outer) in [(0, 0, 0), (4, 2, 1), (3, 0, 1), (0, 2, 0)] {
                let at = layout.geometry().offset(block, layer, outer);
                let region = &layout.regions()[usize::try_from(at.region).unwrap()];
                let expected = region.location().checked_add(ByteCount::new(at.offset)).unwrap();
                assert_eq!(layout.location(block, layer, outer).unwrap(), expected);
                let span = layout.span(block, layer, outer).unwrap();
                assert_eq!((span.location, span.length.get()), (expected, 96));
                assert_eq!(span.kind, layout.storage_kind());
                assert_eq!(layout.host_address(block, layer, outer), None);
                match expected {
                    Location::File(position) => {
                        assert_eq!(layout.file_position(block, layer, outer), Some(position));
                        assert_eq!(layout.device_address(block, layer, outer), None);
                    }
                    Location::Device { address, .. } => {
                        assert_eq!(layout.device_address(block, layer, outer), Some(address));
                        assert_eq!(layout.file_position(block, layer, outer), None);
                    }
                    other => panic!("{other}"),
                }
            }
            assert_eq!(layout.verify().unwrap().pieces, 30);
        }
    }
}

#[test]
fn regions_of_a_file_begin_at_their_offset_in_it() {
    let journal = Journal::default();
    let disk = Allocator { kind: StorageKind::Disk, address: 8192, ..Allocator::new(&journal) };
    let layout =
        layout(LayoutKind::LayerSeparate { block_dimension: BlockDimension::First }, &disk);
    let offsets: Vec<u64> = layout
        .regions()
        .iter()
        .map(|region| region.location().as_file().unwrap().offset.get())
        .collect();
    assert_eq!(offsets, [8192, 8192 + 1024, 8192 + 2048]);
    assert_eq!(layout.file_position(0, 1, 0).unwrap().offset.get(), 9216);
    assert_eq!(layout.file_position(0, 1, 0).unwrap().file.descriptor, 7);
}

#[test]
fn an_index_out_of_range_is_named() {
    let journal = Journal::default();
    let layout = layout(LayoutKind::FullyContiguous, &Allocator::new(&journal));
    for (at, index, value, bound) in [
        ((5, 0, 0), Index::Block, 5, 5),
        ((u32::MAX, 9, 9), Index::Block, u32::MAX, 5),
        ((0, 3, 2), Index::Layer, 3, 3),
        ((0, 0, 2), Index::Section, 2, 2),
    ] {
        let Err(LayoutError::IndexOutOfRange(error)) = layout.location(at.0, at.1, at.2) else {
            panic!("{at:?} has a location")
        };
        assert_eq!((error.index, error.value, error.bound), (index, value, bound));
        assert_eq!(layout.device_address(at.0, at.1, at.2), None);
    }
    // Unchecked and out of range: the result is meaningless, but the call is safe.
    let _meaningless = layout.geometry().offset(u32::MAX, u32::MAX, u32::MAX);
}

#[test]
fn the_fingerprint_names_the_geometry_and_not_the_place() {
    let journal = Journal::default();
    let here = Allocator::new(&journal);
    let there = Allocator { kind: StorageKind::Disk, address: 0, ..Allocator::new(&journal) };
    let all = LayoutKind::ALL.map(|kind| layout(kind, &here).fingerprint());
    assert_eq!(all, LayoutKind::ALL.map(|kind| layout(kind, &there).fingerprint()));
    assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2]);
}

#[test]
fn layouts_are_shared_between_threads() {
    fn shared<T: Send + Sync + 'static>(_: &T) {}
    let journal = Journal::default();
    let layout = layout(LayoutKind::FullyContiguous, &Allocator::new(&journal));
    shared(&layout);
    let origin = layout.geometry().origin();
    assert_eq!(origin, Some(&(config(), LayoutKind::FullyContiguous)));
}
