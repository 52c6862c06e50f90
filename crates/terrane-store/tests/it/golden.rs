//! A store of format 1 that an earlier build wrote: this build reads it, and writes the same bytes.
//!
//! `tests/golden/format-1` was written by [`write`]. This writes another one, after a change that keeps
//! the format:
//!
//! ```text
//! TERRANE_STORE_WRITE_GOLDEN=1 cargo test -p terrane-store --test it golden
//! ```

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use terrane_core::checksum::crc64;
use terrane_core::{ByteCount, Durability, Requirement};
use terrane_store::disk::{
    Catalog, CatalogError, CatalogOptions, GroupSlots, Namespace, PutRecord,
};
use terrane_store::{
    BlockGroup, BlockResult, Blocks, DiskTier, JobOptions, Recovery, Spans, Store, StoreError,
    tools,
};

/// The folder of the namespace.
const NAME: &str = "llama-8b";

/// Whole blocks, and short ones that a page is not a multiple of.
const GROUPS: [(&str, u32); 2] = [("kv", 4096), ("state", 1000)];

/// The keys of the golden store: their group, their name and the bytes of their block.
const KEYS: [(u16, &str, usize); 6] = [
    (0, "prefix 0", 4096),
    (0, "prefix 1", 4096),
    (0, "tail of 17 bytes", 17),
    (1, "prefix 0", 1000),
    // Longer than a record: two records follow it.
    (1, LONG, 999),
    (0, "after the checkpoint", 4095),
];

const LONG: &str = "a key of more than 48 bytes continues in the records that follow its own, \
                    88 bytes in each of them, until all of it is there: this one has 180 bytes, so \
                    that there are two of them.......";

/// A key that was put and removed.
const REMOVED: (u16, &str, usize) = (0, "removed", 100);

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/format-1")
}

/// The block of a key. Nothing but this file may define it.
fn content(key: &str, bytes: usize) -> Vec<u8> {
    let first = key.bytes().fold(0_u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte));
    (0..bytes).map(|at| first.wrapping_add((at * 7 % 251).try_into().unwrap())).collect()
}

fn namespace() -> Namespace {
    Namespace::new(NAME, [("model", "llama-3.1-8b"), ("rank", "0"), ("rope", "8.0")]).unwrap()
}

/// Opens the store in `directory`. Its files look the same on every file system.
fn open(directory: &Path) -> Result<(Store, Recovery), StoreError> {
    // The capacity is divided equally: 4 slots for each group.
    let disk = DiskTier::new(directory, ByteCount::kib(32))
        .direct_io(Requirement::Off)
        .preallocate(Requirement::Off)
        .durability(Durability::Data);
    let groups = GROUPS.iter().map(|&(name, bytes)| BlockGroup::new(name, bytes));
    let builder = groups.fold(Store::builder(), terrane_store::StoreBuilder::group);
    builder.disk(disk).namespace(namespace()).open()
}

fn put(store: &Store, (group, key, bytes): (u16, &str, usize)) {
    let mut block = content(key, bytes);
    let mut spans = Spans::new();
    spans.add(std::ptr::NonNull::from(&mut block[..]).cast(), bytes);
    // SAFETY: the job gets the block as its guard.
    let source = unsafe { Blocks::spans(spans) };
    let options = JobOptions::new().group(group).durable(true);
    let outcome = store.put(&[key], source, options, block).unwrap().wait();
    assert!(outcome.is_ok(), "{outcome:?}");
}

fn get(store: &Store, (group, key, bytes): (u16, &str, usize)) -> (BlockResult, Vec<u8>) {
    let mut block = vec![0xee; bytes];
    let mut spans = Spans::new();
    spans.add(std::ptr::NonNull::from(&mut block[..]).cast(), bytes);
    // SAFETY: the block outlives the wait, and nothing else uses it until then.
    let destination = unsafe { Blocks::spans(spans) };
    let options = JobOptions::new().group(group);
    let outcome = store.get(&[key], destination, options, ()).unwrap().wait();
    (outcome.results[0].clone(), block)
}

/// Writes the golden store: puts and a removal, a checkpoint, and one more put. Superblocks that are in
/// `directory` already are used, because the secret of a new store is random.
fn write(directory: &Path) {
    let [before @ .., after] = KEYS;
    let (store, recovery) = open(directory).unwrap();
    assert_eq!(recovery.found, 0);
    before.iter().for_each(|&key| put(&store, key));
    put(&store, REMOVED);
    assert!(store.remove(REMOVED.0, &[REMOVED.1]).unwrap().wait().is_ok());
    drop(store);
    checkpoint(directory);
    let (store, recovery) = open(directory).unwrap();
    assert_eq!(recovery.found, 5);
    put(&store, after);
}

/// Writes the blocks to a checkpoint in the order of their slots.
fn checkpoint(directory: &Path) {
    let stat = tools::stat(directory, NAME).unwrap();
    let groups: Vec<GroupSlots> = superblock_groups(directory, stat.groups.len());
    let options = CatalogOptions { keep_keys: true, recovery_threads: NonZeroUsize::new(1) };
    let (catalog, recovered) = Catalog::open(directory, &namespace(), &groups, options).unwrap();
    let mut live: Vec<_> = recovered.live.iter().collect();
    live.sort_by_key(|live| (live.group, live.slot));
    let add = |writer: &mut terrane_store::disk::CheckpointWriter<'_>| {
        live.iter().try_for_each(|live| {
            writer.add(&PutRecord {
                key_hash: live.key_hash,
                group: live.group,
                slot: live.slot,
                length: live.length,
                checksum: live.checksum,
                key: live.key.as_deref().unwrap(),
            })
        })
    };
    assert_eq!(catalog.checkpoint(add).unwrap().blocks, 5);
}

/// The groups as a superblock states them.
fn superblock_groups(directory: &Path, count: usize) -> Vec<GroupSlots> {
    let bytes = fs::read(directory.join(NAME).join("superblock.a")).unwrap();
    let group = |number: usize| {
        let at = 64 + number * 32;
        GroupSlots {
            slot_bytes: u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()),
            slots: u32::from_le_bytes(bytes[at + 8..at + 12].try_into().unwrap()),
            fingerprint: bytes[at + 16..at + 32].try_into().unwrap(),
        }
    };
    (0..count).map(group).collect()
}

/// The names of the files of a store, without those that name its owner.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory.join(NAME)).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != "lock" && name != "owner");
    names.sort();
    names
}

fn copy(from: &Path, names: &[String], to: &Path) {
    fs::create_dir(to.join(NAME)).unwrap();
    for name in names {
        fs::copy(from.join(NAME).join(name), to.join(NAME).join(name)).unwrap();
    }
}

/// A copy of the golden store that a test may change.
fn copied() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    copy(&golden(), &names(&golden()), directory.path());
    directory
}

#[test]
fn a_store_of_format_1_is_opened_and_has_its_blocks() {
    let directory = copied();
    let listed = tools::list(directory.path(), NAME).unwrap();
    let mut keys: Vec<String> = listed.blocks.iter().map(|block| block.key.to_string()).collect();
    keys.sort();
    let hexadecimal = |text: &str| {
        let digits: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
        format!("0x{digits}")
    };
    let mut expected: Vec<String> = KEYS.iter().map(|(_, key, _)| hexadecimal(key)).collect();
    expected.sort();
    assert_eq!(keys, expected);
    let (store, recovery) = open(directory.path()).unwrap();
    assert_eq!((recovery.found, recovery.torn, recovery.damaged, recovery.dropped), (6, 0, 0, 0));
    for (group, key, bytes) in KEYS {
        let (result, block) = get(&store, (group, key, bytes));
        assert!(result.is_ok(), "{key}: {result}");
        assert!(block == content(key, bytes), "wrong bytes for {key}");
    }
    assert!(matches!(get(&store, REMOVED).0, BlockResult::Absent));
    // It goes on as a store of today.
    let (group, key, bytes) = (1, "new", 12);
    put(&store, (group, key, bytes));
    drop(store);
    let (store, recovery) = open(directory.path()).unwrap();
    assert_eq!(recovery.found, 7);
    assert_eq!(get(&store, (group, key, bytes)).1, content(key, bytes));
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the golden store is written on request")]
fn the_files_of_format_1_are_written_byte_for_byte() {
    let asked = std::env::var_os("TERRANE_STORE_WRITE_GOLDEN").is_some();
    let directory = tempfile::tempdir().unwrap();
    if !asked {
        // With the secret of the golden store.
        let superblocks = ["superblock.a", "superblock.b"].map(String::from);
        copy(&golden(), &superblocks, directory.path());
    }
    write(directory.path());
    let written = names(directory.path());
    if asked {
        let _ = fs::remove_dir_all(golden());
        fs::create_dir_all(golden()).unwrap();
        copy(directory.path(), &written, &golden());
    }
    assert_eq!(written, names(&golden()));
    for name in &written {
        let read = |directory: &Path| fs::read(directory.join(NAME).join(name)).unwrap();
        let (new, old) = (read(directory.path()), read(&golden()));
        let differs = new.iter().zip(&old).position(|(new, old)| new != old);
        assert!(
            new == old,
            "{name} has {} bytes, not {}; first at {differs:?}",
            new.len(),
            old.len()
        );
    }
}

#[test]
fn a_store_of_another_version_is_refused_and_stays_as_it_is() {
    let directory = copied();
    for name in ["superblock.a", "superblock.b"] {
        let path = directory.path().join(NAME).join(name);
        let mut bytes = fs::read(&path).unwrap();
        bytes[8] = 2;
        let sum = crc64(&bytes[..4088]);
        bytes[4088..].copy_from_slice(&sum.to_le_bytes());
        fs::write(&path, bytes).unwrap();
    }
    let is_version = |error: &StoreError| {
        let StoreError::Catalog(error) = error else { return false };
        matches!(error, CatalogError::UnsupportedVersion { found: 2, supported: 1, .. })
    };
    let error = open(directory.path()).unwrap_err();
    assert!(is_version(&error), "{error}");
    let error = tools::list(directory.path(), NAME).unwrap_err();
    assert!(is_version(&error), "{error}");
    for name in names(&golden()).iter().filter(|name| !name.starts_with("superblock")) {
        let read = |directory: &Path| fs::read(directory.join(NAME).join(name)).unwrap();
        assert!(read(directory.path()) == read(&golden()), "{name} was changed");
    }
}
