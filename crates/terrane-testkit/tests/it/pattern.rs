//! Patterns in whole layouts, in memory and in files.

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use terrane_core::{
    ByteCount, FileHandle, FileIdentity, FilePosition, ForeignMemory, Location, Span, StorageKind,
};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, LayoutPlan};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::{Pattern, PatternError};
use terrane_transfer::Endpoint;

fn config() -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(6)
        .num_layers(3)
        .outer_dim(2)
        .page_size(3)
        .inner_dim(11)
        .element(ElementFormat::Width(3))
        .build()
        .unwrap()
}

/// A layout in an unlinked file.
fn in_file(kind: LayoutKind) -> Endpoint {
    let file: File = tempfile::tempfile().unwrap();
    let plan = LayoutPlan::new(&config(), kind, Default::default()).unwrap();
    file.set_len(plan.base_bytes().get()).unwrap();
    let metadata = file.metadata().unwrap();
    let identity = FileIdentity { file_system: metadata.dev(), inode: metadata.ino() };
    let handle = FileHandle {
        descriptor: file.as_raw_fd(),
        direct: None,
        identity,
        durability: Default::default(),
    };
    let position = FilePosition { file: handle, offset: ByteCount::ZERO };
    let span = Span {
        kind: StorageKind::Disk,
        location: Location::File(position),
        length: plan.base_bytes(),
    };
    // SAFETY: the file is open while its owner lives, and no other code uses it.
    let memory = unsafe { ForeignMemory::new(span, file) };
    let regions = plan.cut(&terrane_core::Region::new(memory)).unwrap();
    Endpoint::new(
        LayoutBuilder::new(config()).kind(kind).adopt(regions).unregistered().build().unwrap(),
    )
    .unwrap()
}

fn in_memory(kind: LayoutKind, allocator: &HeapAllocator) -> Endpoint {
    let builder = LayoutBuilder::new(config()).kind(kind).allocate(allocator);
    Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
}

#[test]
fn a_filled_pattern_is_verified_in_every_kind_of_memory() {
    for kind in LayoutKind::ALL {
        let ends = [
            in_memory(kind, &HeapAllocator::system()),
            in_memory(kind, &HeapAllocator::simulated_device(3)),
            in_file(kind),
        ];
        for end in &ends {
            let pattern = Pattern::new(11).threads(NonZeroUsize::new(3).unwrap());
            assert!(!pattern.verify(end).unwrap().is_clean(), "the pattern is not filled yet");
            pattern.fill(end).unwrap();
            let found = pattern.verify(end).unwrap();
            found.assert_clean("just filled");
            assert_eq!(found.bytes, config().total_bytes());
        }
    }
}

#[test]
fn the_first_mismatch_is_named_with_the_expected_value() {
    let end = in_memory(LayoutKind::ALL[2], &HeapAllocator::system());
    let pattern = Pattern::new(2);
    pattern.fill(&end).unwrap();
    let address = end.layout().host_address(4, 1, 1).unwrap();
    // SAFETY: within the piece, and no other code uses it.
    let byte = unsafe { &mut *address.as_ptr().wrapping_add(50) };
    *byte ^= 0x80;
    let found = pattern.verify(&end).unwrap();
    assert_eq!(found.mismatches, 1);
    let first = found.first.unwrap();
    assert_eq!((first.at.block, first.at.layer, first.at.outer, first.offset), (4, 1, 1, 50));
    assert_eq!(first.found, first.expected ^ 0x80);
    let text = found.to_string();
    assert!(text.contains("byte 50 of block 4 layer 1 outer 1"), "{text}");
}

#[test]
fn blocks_in_use_are_refused() {
    let end = in_memory(LayoutKind::ALL[0], &HeapAllocator::system());
    let _hold = end.hold_for_read(&[2]).unwrap();
    assert!(matches!(Pattern::new(1).fill(&end), Err(PatternError::Blocks(_))));
    assert!(Pattern::new(1).fill_blocks(&end, &[1, 3]).is_ok());
}
