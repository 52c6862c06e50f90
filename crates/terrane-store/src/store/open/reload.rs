//! Adds the blocks of earlier sessions, which the catalog found, to the index.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::KeyHash;
use crate::disk::{LiveRecord, LiveRecords};
use crate::index::StoredBlock;
use crate::parallel::fold;
use crate::store::key_names::KeyNames;
use crate::store::slot_table::SlotTable;

/// Fills the empty slot tables of the disk tier, on `threads` threads, this one included.
pub(crate) fn reload(
    tables: &[Arc<SlotTable>],
    live: LiveRecords,
    names: &KeyNames,
    threads: NonZeroUsize,
) {
    let mut parts: Vec<_> = live.into_parts().into_iter().enumerate().collect();
    let threads = threads.get().min(parts.len());
    // Neighbouring parts fill one shard of the index. In this order, several threads fill different
    // shards.
    let stride = parts.len().div_ceil(threads.max(1)).max(1);
    parts.sort_unstable_by_key(|&(index, _)| (index % stride, index));
    let begin = || vec![Vec::new(); tables.len()];
    fold((threads, "terrane-load"), parts.into_iter(), begin, |blocks, (_, part)| {
        add_part(&part, blocks, names);
        for (table, blocks) in tables.iter().zip(blocks) {
            table.index.insert_all(blocks);
            blocks.clear();
        }
    });
}

/// Adds the blocks of a part to those of their group, and the names of their keys.
fn add_part(part: &[LiveRecord], blocks: &mut [Vec<(KeyHash, StoredBlock)>], names: &KeyNames) {
    for record in part {
        let length = u32::try_from(record.length).ok();
        let (Some(length), Some(blocks)) = (length, blocks.get_mut(usize::from(record.group)))
        else {
            continue;
        };
        if let (true, Some(key)) = (names.keeps_all, &record.key)
            && !key.is_empty()
        {
            names.insert(record.key_hash, key);
        }
        let (slot, checksum) = (record.slot, record.checksum);
        blocks.push((record.key_hash, StoredBlock { slot, length, checksum }));
    }
}
