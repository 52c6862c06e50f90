//! The directories of a striped tier, and the alignment of slots: recorded, and refused if others are passed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use terrane_core::checksum::crc64;
use terrane_store::{BlockGroup, Store, StoreBuilder, StoreError, tools};

use super::harness::{builder, disk, found, keys, namespace, put_ok};

const BLOCK: usize = 8192;

/// A store of eight blocks in these directories.
fn striped(directories: &[&Path]) -> StoreBuilder {
    let (first, others) = directories.split_first().unwrap();
    let tier = others.iter().fold(disk(first, 8 * 8192), |tier, other| tier.also_in(other));
    Store::builder().group(BlockGroup::new("kv", 8192)).disk(tier).namespace(namespace())
}

fn owned(directories: &[&Path]) -> Vec<PathBuf> {
    directories.iter().map(|directory| (*directory).to_owned()).collect()
}

/// Changes the superblocks of the store in `directory`, and makes their checksums right.
fn change(directory: &Path, at: usize, field: &[u8]) {
    for name in ["superblock.a", "superblock.b"] {
        let path = directory.join("model").join(name);
        let mut bytes = fs::read(&path).unwrap();
        bytes[at..at + field.len()].copy_from_slice(field);
        let sum = crc64(&bytes[..4088]);
        bytes[4088..].copy_from_slice(&sum.to_le_bytes());
        fs::write(&path, bytes).unwrap();
    }
}

#[test]
fn a_store_opens_in_its_own_directories_in_their_order_only() {
    let folders = [(); 4].map(|()| tempfile::tempdir().unwrap());
    let [a, b, c, d] = folders.each_ref().map(|folder| folder.path());
    drop({
        let (store, _) = striped(&[a, b]).open().unwrap();
        put_ok(&store, &keys(0..8), BLOCK);
        store
    });
    // Another store, in the same place of whose tier `d` is.
    drop(striped(&[c, d]).open().unwrap());
    for wrong in [&[a][..], &[b, a], &[a, c], &[a, d], &[a, a], &[a, b, c], &[b]] {
        let result = striped(wrong).open().map(|_| ());
        let error = result.expect_err(&format!("{wrong:?}"));
        assert!(matches!(error, StoreError::Catalog(_)), "{error}");
        let text = error.to_string();
        assert!(text.contains("order"), "{text}");
        if wrong[0] == a {
            let refused =
                [tools::verify, tools::scrub].map(|tool| tool(&owned(wrong), "model", None));
            for refused in refused {
                let error = refused.map(|_| ()).expect_err(&format!("{wrong:?}"));
                assert_eq!(error.to_string(), text);
            }
        }
    }
    // A refused opening creates nothing in a directory that is not of the store.
    let empty = tempfile::tempdir().unwrap();
    let owner = || fs::read(a.join("model/owner")).unwrap();
    let before = owner();
    let error = striped(&[a, empty.path()]).open().map(drop).unwrap_err();
    assert!(error.to_string().contains("order"), "{error}");
    assert_eq!((fs::read_dir(&empty).unwrap().count(), owner()), (0, before));
    let report = tools::scrub(&owned(&[a, b]), "model", None).unwrap();
    assert_eq!((report.blocks, report.damaged.len()), (8, 0));
    let (store, recovery) = striped(&[a, b]).open().unwrap();
    assert_eq!(recovery.found, 8);
    assert_eq!(found(&store, &keys(0..8), BLOCK), [true; 8]);
}

#[test]
fn a_store_without_one_of_its_drives_names_the_directory_and_the_remedy() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [a, b] = folders.each_ref().map(|folder| folder.path());
    drop(striped(&[a, b]).open().unwrap());
    let refused = || striped(&[a, b]).open().map(drop).unwrap_err().to_string();
    let remedy = "mount all its drives, and pass all directories of the store in their order; if a drive is \
                  lost, remove the store's folders in the other directories";
    let folder = |directory: &Path| directory.join("model");
    // The mount point of the drive is empty, and then gone.
    for (moved, found) in [
        (folder(b), "it has no file of that store"),
        (b.to_owned(), "it does not exist"),
        (folder(a), "it is directory 1 of a store that is not in the first directory"),
    ] {
        let aside = moved.with_extension("aside");
        fs::rename(&moved, &aside).unwrap();
        let text = refused();
        let expected =
            format!("{:?} was passed as directory 1 of the store in {:?}", folder(b), folder(a));
        assert!(text.starts_with(&expected), "{text}");
        assert!(text.contains(found) && text.contains(remedy), "{text}");
        let _ = fs::remove_dir_all(&moved);
        fs::rename(&aside, &moved).unwrap();
    }
    let text = striped(&[a]).open().map(drop).unwrap_err().to_string();
    assert!(
        text.contains("has 2 directories and 1 were passed") && text.contains(remedy),
        "{text}"
    );
    drop(striped(&[a, b]).open().unwrap());
}

#[test]
fn the_recorded_alignment_of_slots_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let open = || builder(path, 8192, 8).open().unwrap().0;
    drop(open());
    // As on a file system whose direct I/O needs 32 KiB.
    change(path, 52, &32_768_u32.to_le_bytes());
    fs::remove_file(path.join("model/slab.0.000")).unwrap();
    let store = open();
    put_ok(&store, &keys(0..2), BLOCK);
    let slots = store.snapshot().tiers[0].groups[0].slots;
    drop(store);
    assert_eq!(slots, 2, "64 KiB have two slots");
    assert_eq!(path.join("model/slab.0.000").metadata().unwrap().len(), 2 * 32_768);
    let report = tools::verify(&owned(&[path]), "model", None).unwrap();
    assert_eq!((report.blocks, report.damaged.len()), (2, 0));
    assert_eq!(found(&open(), &keys(0..2), BLOCK), [true; 2]);
}

#[test]
fn a_store_that_records_no_directories_opens_as_before() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [a, b] = folders.each_ref().map(|folder| folder.path());
    drop({
        let (store, _) = striped(&[a, b]).open().unwrap();
        put_ok(&store, &keys(0..8), BLOCK);
        store
    });
    change(a, 48, &[0; 8]);
    let _ = fs::remove_file(b.join("model/stripe.001"));
    let report = tools::scrub(&owned(&[a, b]), "model", None).unwrap();
    assert_eq!((report.blocks, report.damaged.len()), (8, 0));
    for _ in 0..2 {
        let (store, _) = striped(&[a, b]).open().unwrap();
        assert_eq!(found(&store, &keys(0..8), BLOCK), [true; 8]);
    }
    assert!(!b.join("model/stripe.001").exists());
}

#[test]
fn a_new_store_records_its_directories_and_the_alignment_of_its_slots() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [a, b] = folders.each_ref().map(|folder| folder.path());
    let (store, _) = striped(&[a, b]).open().unwrap();
    let stat = tools::stat(a, "model").unwrap();
    assert_eq!(stat.directories, Some(2));
    let alignment = stat.slot_alignment.unwrap().get();
    assert!(alignment >= 4096 && 8192_u64.next_multiple_of(alignment) == slot_bytes(&store));
    let bytes = fs::read(a.join("model/superblock.a")).unwrap();
    assert_eq!(bytes[48..52], 2_u32.to_le_bytes());
    assert_eq!(u64::from(u32::from_le_bytes(bytes[52..56].try_into().unwrap())), alignment);
    assert_eq!(bytes[56..64], [0; 8]);
    // The file of the second directory names the store by a hash, and not by its secret.
    let stripe = fs::read(b.join("model/stripe.001")).unwrap();
    assert_eq!((stripe.len(), &stripe[..8]), (64, &b"TRSTRIPE"[..]));
    assert!(!stripe.windows(8).any(|window| window == &bytes[32..40]));
    let mode = fs::metadata(b.join("model/stripe.001")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // They stay when the store is cleared, and when it is opened with another number of slots.
    drop(store);
    tools::clear(a, "model").unwrap();
    let tier = disk(a, 4 * 8192).also_in(b);
    let smaller = Store::builder().group(BlockGroup::new("kv", 8192)).disk(tier);
    drop(smaller.namespace(namespace()).open().unwrap());
    let stat = tools::stat(a, "model").unwrap();
    assert_eq!((stat.epoch, stat.directories), (2, Some(2)));
    assert_eq!(stat.slot_alignment.unwrap().get(), alignment);
    assert_eq!(fs::read(b.join("model/stripe.001")).unwrap(), stripe);
}

/// The bytes between two slots, from the length of the first file.
fn slot_bytes(store: &Store) -> u64 {
    let slots = store.snapshot().tiers[0].groups[0].slots;
    (8 * 8192) / u64::try_from(slots).unwrap()
}
