//! The tools on files that state more than there is: their memory has a limit.

use std::fs;
use std::path::Path;

use terrane_core::checksum::crc64;
use terrane_store::disk::CatalogError;
use terrane_store::{StoreError, tools};
use terrane_testkit::needs::{no_sanitizer, or_skipped};
use terrane_testkit::process::in_child;

use super::harness::{builder, key, keys, process_bytes, put_ok};

/// The most memory that this process had so far.
fn peak() -> u64 {
    process_bytes("VmHWM")
}

/// Replaces the group of a store by so many of these slots, in both superblocks.
fn state_groups(directory: &Path, count: u16, slot_bytes: u64, slots: u32) {
    for name in ["superblock.a", "superblock.b"] {
        let path = directory.join("model").join(name);
        let before = fs::read(&path).unwrap();
        let mut bytes = before[..64].to_vec();
        bytes[12..14].copy_from_slice(&count.to_le_bytes());
        for _ in 0..count {
            bytes.extend(slot_bytes.to_le_bytes());
            bytes.extend(slots.to_le_bytes());
            bytes.extend([0; 20]);
        }
        bytes.extend(&before[96..]);
        bytes.truncate(4088);
        bytes.extend(crc64(&bytes).to_le_bytes());
        fs::write(&path, bytes).unwrap();
    }
}

fn closed_store(directory: &Path) {
    let (store, _) = builder(directory, 4096, 4).open().unwrap();
    put_ok(&store, &keys(0..2), 4096);
}

#[test]
fn the_slots_that_a_superblock_states_take_no_memory() {
    const TEST: &str = "store::hostile::the_slots_that_a_superblock_states_take_no_memory";
    in_child(TEST, || {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        closed_store(path);
        state_groups(path, 64, 4096, u32::MAX);
        let before = peak();
        let stat = tools::stat(path, "model").unwrap();
        assert_eq!((stat.groups.len(), stat.groups[0].blocks), (64, 2));
        assert!(tools::why(path, "model", 0, &key(1)).unwrap().1.is_some());
        let grown = peak() - before;
        assert!(grown < 16 << 20, "{grown} bytes");
    });
}

#[test]
fn a_superblock_with_too_many_groups_or_too_large_slots_is_refused_with_the_limit() {
    for (groups, slot_bytes) in [(65, 4096), (100, 4096), (1, 1 << 32), (1, u64::MAX)] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        closed_store(path);
        state_groups(path, groups, slot_bytes, 4);
        let opened = builder(path, 4096, 4).open().map(drop);
        for error in [tools::stat(path, "model").map(drop), opened].map(Result::unwrap_err) {
            let StoreError::Catalog(error) = error else { panic!("{error}") };
            match error {
                CatalogError::TooManyGroups { groups: found, limit: 64 } => {
                    assert_eq!(found, usize::from(groups));
                }
                CatalogError::SlotTooLarge { group: 0, slot_bytes: found, .. } => {
                    assert_eq!(found, slot_bytes);
                }
                error => panic!("{error}"),
            }
        }
    }
}

#[test]
fn a_verification_reads_a_limited_number_of_bytes_at_once() {
    const TEST: &str = "store::hostile::a_verification_reads_a_limited_number_of_bytes_at_once";
    const LARGE: usize = 16 << 20;
    if or_skipped(TEST, no_sanitizer("AddressSanitizer keeps freed memory")).is_none() {
        return;
    }
    in_child(TEST, || {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let (store, _) = builder(path, u32::try_from(LARGE).unwrap(), 12).open().unwrap();
        // One by one, so that they take little memory.
        (0..12).for_each(|number| put_ok(&store, &[key(number)], LARGE));
        drop(store);
        let before = peak();
        let report = tools::verify(&[path.to_owned()], "model", None).unwrap();
        assert_eq!((report.blocks, report.damaged.len()), (12, 0));
        assert_eq!(report.bytes.get(), 12 * LARGE as u64);
        let grown = peak() - before;
        assert!(grown < 100 << 20, "{grown} bytes");
    });
}
