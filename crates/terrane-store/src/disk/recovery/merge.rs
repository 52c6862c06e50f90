//! One block for each key and for each slot.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use terrane_core::convert::to_usize;

use super::scan::Scanned;
use super::slots::LatestOfSlots;
use crate::disk::live::LiveRecord;
use crate::key::KeyHash;
use crate::parallel::fold;

/// All findings for the keys of one part.
#[derive(Debug, Default)]
struct Part {
    /// Those of each thread.
    puts: Vec<Vec<LiveRecord>>,
    removes: Vec<(KeyHash, u64)>,
}

/// The live blocks, and the number of those that were dropped.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    pub parts: Vec<Vec<LiveRecord>>,
    pub dropped: u64,
}

/// Takes the latest record of each key, unless it was removed later, its slot has another block, or
/// the record is older than `first_kept`.
pub(crate) fn merge(found: Vec<Scanned>, slots: &LatestOfSlots, first_kept: u64) -> Merged {
    let threads = (found.len(), "terrane-recovery");
    let parts = gather(found).into_iter();
    let merged = fold(threads, parts, Merged::default, |merged, part| {
        let (live, dropped) = merge_part(part, slots, first_kept);
        merged.parts.extend(live);
        merged.dropped += dropped;
    });
    let mut all = Merged::default();
    for merged in merged {
        all.parts.extend(merged.parts);
        all.dropped += merged.dropped;
    }
    all
}

fn gather(found: Vec<Scanned>) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for scanned in found {
        parts.resize_with(parts.len().max(scanned.puts.len()), Part::default);
        let findings = scanned.puts.into_iter().zip(scanned.removes);
        for (part, (puts, removes)) in parts.iter_mut().zip(findings) {
            part.puts.push(puts);
            part.removes.extend(removes);
        }
    }
    parts
}

fn merge_part(
    mut part: Part,
    slots: &LatestOfSlots,
    first_kept: u64,
) -> (Vec<Vec<LiveRecord>>, u64) {
    part.removes.sort_unstable();
    let puts: Vec<&LiveRecord> = part.puts.iter().flatten().collect();
    let mut is_live = latest_of_each_key(&puts);
    // In a loop of its own, so that cache misses overlap.
    let has_slot: Vec<bool> =
        puts.iter().map(|put| slots.is_latest(put.group, put.slot, put.sequence)).collect();
    let mut dropped = 0;
    let found = puts.into_iter().zip(has_slot).zip(&mut is_live);
    for ((put, has_slot), is_live) in found.filter(|(_, is_live)| **is_live) {
        *is_live = false;
        if removed_at(&part.removes, put.key_hash) > Some(put.sequence) {
            continue;
        }
        if put.sequence < first_kept {
            dropped += 1;
        } else {
            *is_live = has_slot && slots.claim(put.group, put.slot, put.sequence);
        }
    }
    let mut flags = is_live.into_iter();
    part.puts.iter_mut().for_each(|puts| puts.retain(|_| flags.next().unwrap_or(false)));
    (part.puts, dropped)
}

/// For each record whether it is the latest of its key.
fn latest_of_each_key(puts: &[&LiveRecord]) -> Vec<bool> {
    let mut is_latest = vec![true; puts.len()];
    let key = |at: usize| puts.get(at).map_or(KeyHash::new(0), |put| put.key_hash);
    let mut latest: HashTable<u32> = HashTable::with_capacity(puts.len());
    let widen = |at: u32| to_usize(at.into());
    // 2^32 records would be 512 GiB of journals, and checkpoints keep those far shorter.
    for (at, put) in (0_u32..).zip(puts) {
        let is_key = |&other: &u32| key(widen(other)) == put.key_hash;
        match latest.entry(spread(put.key_hash), is_key, |&other| spread(key(widen(other)))) {
            Entry::Vacant(place) => {
                place.insert(at);
            }
            Entry::Occupied(mut place) => {
                let other = puts.get(widen(*place.get()));
                let is_later = other.is_none_or(|other| other.sequence <= put.sequence);
                let older = if is_later { std::mem::replace(place.get_mut(), at) } else { at };
                if let Some(is_latest) = is_latest.get_mut(widen(older)) {
                    *is_latest = false;
                }
            }
        }
    }
    is_latest
}

/// The keys of a part have equal upper bits.
fn spread(key: KeyHash) -> u64 {
    key.mixed().rotate_left(u64::BITS / 2)
}

/// The number of the last removal of a key.
fn removed_at(removes: &[(KeyHash, u64)], key_hash: KeyHash) -> Option<u64> {
    let end = removes.partition_point(|(hash, _)| *hash <= key_hash);
    let last = end.checked_sub(1).and_then(|last| removes.get(last));
    last.filter(|(hash, _)| *hash == key_hash).map(|(_, sequence)| *sequence)
}
