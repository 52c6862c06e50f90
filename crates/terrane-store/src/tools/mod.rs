//! Reads, verifies and repairs a store's directory, without opening the store.
//!
//! [`list`], [`stat`], [`why`] and [`verify`] create, lock and change no file. So they work beside the
//! process that has the store open, on a file system that is mounted read-only, and in a directory
//! without write permission. Beside an owner they report the store as of a sequence number. [`scrub`]
//! and [`clear`] change the store, so they are refused while a process owns it.

mod reading;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use terrane_core::ByteCount;
use terrane_core::convert::to_u64;

use crate::disk::{
    Catalog, CatalogError, CatalogOptions, GroupSlots, Inspected, LiveRecord, LiveRecords,
    StoreOwner, inspect,
};
use crate::error::StoreError;
use crate::key::KeyHasher;
use crate::store::query::event::KeyName;
use reading::read_all;

/// The blocks of a store by its records. Their bytes have not been read.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreListing {
    /// The number of the last record that was read.
    pub as_of: u64,
    /// The process that has the store open, if one has and left its name.
    pub owner: Option<StoreOwner>,
    /// The blocks, by group and slot.
    pub blocks: Vec<ListedBlock>,
}

/// A block by its record.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListedBlock {
    /// Its group.
    pub group: u16,
    /// Its key, or the hash of its key if the record has no more.
    pub key: KeyName,
    /// Its slot in the group.
    pub slot: u32,
    /// Its length in bytes.
    pub length: u64,
    /// The CRC-64/NVME of its bytes.
    pub checksum: u64,
    /// The number of its record.
    pub sequence: u64,
}

/// Numbers about a store's directory.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreStat {
    /// The number of the last record that was read.
    pub as_of: u64,
    /// Whether a process has the store open.
    pub is_open: bool,
    /// That process, if it left its name.
    pub owner: Option<StoreOwner>,
    /// The fields of the namespace with their values.
    pub fields: Vec<(String, String)>,
    /// The number of clears since the store was created, plus one.
    pub epoch: u64,
    /// The groups.
    pub groups: Vec<GroupStat>,
    /// The number of directories of the disk tier. `None` if the store does not record it.
    pub directories: Option<u32>,
    /// The bytes that slots are aligned to in the slab files. `None` if the store does not record them.
    pub slot_alignment: Option<ByteCount>,
    /// The bytes of the journals and the checkpoint.
    pub metadata: ByteCount,
    /// Records that are torn, or not yet durable.
    pub torn: u64,
    /// Records that were durable and are damaged or missing.
    pub damaged: u64,
    /// Blocks that a later opening will not use.
    pub dropped: u64,
}

/// Numbers about a group of a store's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupStat {
    /// The bytes of a slot.
    pub slot_bytes: ByteCount,
    /// The number of slots.
    pub slots: u32,
    /// The number of blocks.
    pub blocks: u64,
    /// The bytes of the blocks.
    pub bytes: ByteCount,
}

/// The result of [`verify`] and [`scrub`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ScrubReport {
    /// The number of the last record that was read.
    pub as_of: u64,
    /// The blocks that were read, and those whose read failed.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: ByteCount,
    /// The blocks whose bytes differ from their checksum.
    pub damaged: Vec<ListedBlock>,
    /// The blocks whose read failed. Their bytes may be whole: a device that is back returns them.
    pub unreadable: Vec<UnreadableBlock>,
    /// The blocks that the store replaced or removed while they were read.
    pub changed: u64,
    /// The time that it took.
    pub took: Duration,
}

/// A block whose read failed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct UnreadableBlock {
    /// The block.
    pub block: ListedBlock,
    /// The error of its read.
    pub error: Arc<StoreError>,
}

/// The blocks of the store `name` in `directory`.
///
/// # Errors
///
/// [`StoreError::Catalog`] if there is no such store, or its files cannot be read.
pub fn list(directory: &Path, name: &str) -> Result<StoreListing, StoreError> {
    let found = inspect(directory, name)?;
    let (as_of, owner) = (found.as_of, found.owner);
    Ok(StoreListing { as_of, owner, blocks: sorted(found.live) })
}

/// Numbers about the store `name` in `directory`.
///
/// # Errors
///
/// As [`list`].
pub fn stat(directory: &Path, name: &str) -> Result<StoreStat, StoreError> {
    let found = inspect(directory, name)?;
    let (blocks, bytes) = (0, ByteCount::ZERO);
    let empty = |group: &GroupSlots| GroupStat {
        slot_bytes: ByteCount::new(group.slot_bytes),
        slots: group.slots,
        blocks,
        bytes,
    };
    let mut groups: Vec<GroupStat> = found.groups.iter().map(empty).collect();
    for record in found.live.iter() {
        if let Some(group) = groups.get_mut(usize::from(record.group)) {
            group.blocks += 1;
            group.bytes = ByteCount::new(group.bytes.get().saturating_add(record.length));
        }
    }
    Ok(StoreStat {
        as_of: found.as_of,
        is_open: found.is_live,
        owner: found.owner,
        fields: found.namespace.fields().to_vec(),
        epoch: found.epoch,
        groups,
        directories: Some(found.placement.directories).filter(|&directories| directories > 0),
        slot_alignment: found.placement.alignment().map(|bytes| ByteCount::new(bytes.get())),
        metadata: ByteCount::new(found.bytes),
        torn: found.torn,
        damaged: found.damaged,
        dropped: found.dropped,
    })
}

/// The block of a key by its record, if there is one, and the number of the last record that was read.
///
/// # Errors
///
/// As [`list`], and [`StoreError::Key`].
pub fn why(
    directory: &Path,
    name: &str,
    group: u16,
    key: &[u8],
) -> Result<(u64, Option<ListedBlock>), StoreError> {
    let found = inspect(directory, name)?;
    let hash = KeyHasher::new(&found.secret.0).hash_in_group(group, key);
    let hash = hash.map_err(|source| StoreError::Key { index: 0, source })?;
    let block = found.live.into_iter().find(|record| record.key_hash == hash);
    Ok((found.as_of, block.map(listed)))
}

/// Reads all blocks of the store `name` and verifies their checksums, at most `rate` bytes a
/// second. Without a rate, or with 0, there is no limit. `directories` are those of the disk tier,
/// in their order.
///
/// # Errors
///
/// As [`list`], also if the store has other directories; and the errors of the slab files.
pub fn verify(
    directories: &[PathBuf],
    name: &str,
    rate: Option<ByteCount>,
) -> Result<ScrubReport, StoreError> {
    let first = directories.first().ok_or(StoreError::NoDirectory)?;
    verify_found(directories, name, inspect(first, name)?, rate)
}

/// Verifies the blocks that were found. A store may have been opened since then.
fn verify_found(
    directories: &[PathBuf],
    name: &str,
    found: Inspected,
    rate: Option<ByteCount>,
) -> Result<ScrubReport, StoreError> {
    let first = directories.first().ok_or(StoreError::NoDirectory)?;
    let mut report = read_all(directories, name, found, rate)?;
    let failed = |report: &ScrubReport| report.damaged.len() + report.unreadable.len();
    let before = failed(&report);
    if before > 0 {
        // The store may have reused a slot while it was read. A checkpoint may know less of a key, and
        // equal bytes in a slot are equally damaged: the key does not count.
        let place = |block: &ListedBlock| (block.group, block.slot, block.length, block.checksum);
        let now: HashSet<_> = list(first, name)?.blocks.iter().map(place).collect();
        report.damaged.retain(|block| now.contains(&place(block)));
        report.unreadable.retain(|unreadable| now.contains(&place(&unreadable.block)));
        report.changed = to_u64(before - failed(&report));
    }
    Ok(report)
}

/// As [`verify`], and removes the damaged blocks. It keeps those whose read failed.
///
/// # Errors
///
/// As [`verify`], and [`CatalogError::Owned`] with the process that has the store open.
pub fn scrub(
    directories: &[PathBuf],
    name: &str,
    rate: Option<ByteCount>,
) -> Result<ScrubReport, StoreError> {
    let first = directories.first().ok_or(StoreError::NoDirectory)?;
    let catalog = own(first, name)?;
    let found = inspect(first, name)?;
    let secret = found.secret.0;
    let report = read_all(directories, name, found, rate)?;
    let hasher = KeyHasher::new(&secret);
    let hash = |block: &ListedBlock| match &block.key {
        KeyName::Bytes(bytes) => hasher.hash_in_group(block.group, bytes).ok(),
        KeyName::Hash(hash) => Some(*hash),
    };
    let keys: Vec<_> = report.damaged.iter().filter_map(hash).collect();
    catalog.append_removes(&keys)?;
    catalog.sync()?;
    Ok(report)
}

/// Removes all blocks of the store `name` in `directory`.
///
/// # Errors
///
/// As [`list`], and [`CatalogError::Owned`] with the process that has the store open.
pub fn clear(directory: &Path, name: &str) -> Result<(), StoreError> {
    Ok(own(directory, name)?.clear()?)
}

/// Owns a store that exists.
fn own(directory: &Path, name: &str) -> Result<Catalog, CatalogError> {
    let found = inspect(directory, name)?;
    if found.is_live {
        let directory = directory.join(name);
        return Err(CatalogError::Owned { directory, owner: found.owner });
    }
    let options = CatalogOptions::default();
    Ok(Catalog::open(directory, &found.namespace, &found.groups, options)?.0)
}

fn sorted(live: LiveRecords) -> Vec<ListedBlock> {
    let mut blocks: Vec<ListedBlock> = live.into_iter().map(listed).collect();
    blocks.sort_by_key(|block| (block.group, block.slot));
    blocks
}

fn listed(record: LiveRecord) -> ListedBlock {
    let LiveRecord { key_hash, sequence, length, checksum, slot, group, key } = record;
    let key = match key {
        Some(key) if !key.is_empty() => KeyName::Bytes(key.into()),
        _ => KeyName::Hash(key_hash),
    };
    ListedBlock { group, key, slot, length, checksum, sequence }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use super::*;
    use crate::disk::Namespace;
    use crate::store::Store;
    use crate::store::job::blocks::{Blocks, Spans};
    use crate::store::job::options::JobOptions;
    use crate::store::open::builder::{BlockGroup, DiskTier};

    fn put(directory: &Path, key: &str, byte: u8) {
        let (store, _) = Store::builder()
            .group(BlockGroup::new("kv", 4096))
            .disk(DiskTier::new(directory, ByteCount::kib(4)))
            .namespace(Namespace::new("model", [("model", "llama")]).unwrap())
            .open()
            .unwrap();
        let mut block = vec![byte; 4096];
        let mut spans = Spans::new();
        spans.add(NonNull::from(&mut block[..]).cast(), block.len());
        // SAFETY: the job gets the block as its guard.
        #[expect(unsafe_code, reason = "the job gets the block as its guard")]
        let source = unsafe { Blocks::spans(spans) };
        assert!(store.put(&[key], source, JobOptions::new(), block).unwrap().wait().is_ok());
    }

    #[test]
    fn a_block_that_a_store_replaced_since_it_was_found_is_not_damaged() {
        let directory = tempfile::tempdir().unwrap();
        put(directory.path(), "before", 1);
        let found = inspect(directory.path(), "model").unwrap();
        assert!(!found.is_live);
        // A store is opened, and uses the only slot for another block.
        put(directory.path(), "after", 2);
        let directories = [directory.path().to_owned()];
        let report = verify_found(&directories, "model", found, None).unwrap();
        assert_eq!((report.blocks, report.changed, report.damaged), (1, 1, Vec::new()));
        assert_eq!(verify(&directories, "model", None).unwrap().damaged, []);
    }

    #[test]
    fn one_valid_superblock_suffices_whatever_the_other_has() {
        let directory = tempfile::tempdir().unwrap();
        put(directory.path(), "key", 1);
        let folder = directory.path().join("model");
        for name in ["superblock.a", "superblock.b"] {
            let whole = std::fs::read(folder.join(name)).unwrap();
            // The first bytes name the format, and the last ones are the checksum.
            for at in [0, whole.len() - 1] {
                let mut bytes = whole.clone();
                bytes[at] ^= 1;
                std::fs::write(folder.join(name), bytes).unwrap();
                assert_eq!(list(directory.path(), "model").unwrap().blocks.len(), 1);
                assert_eq!(scrub(&[directory.path().to_owned()], "model", None).unwrap().blocks, 1);
            }
            std::fs::write(folder.join(name), whole).unwrap();
        }
    }
}
