//! Finds the live blocks: the newest valid checkpoint, and all later journals on top of it.
//!
//! Recovery reads no payload. It reads every file once, on several threads, and needs memory in
//! proportion to the files. `source` lists the files, `scan` reads them, `slots` and `merge` choose
//! the record of each slot and key, and `losses` tells damage from torn writes.

mod losses;
mod merge;
mod scan;
mod slots;
mod source;

use std::num::NonZeroUsize;

use terrane_core::convert::to_u64;

use super::error::CatalogError;
use crate::disk::files::folder::Folder;
use crate::disk::format::namespace::GroupSlots;
use crate::disk::format::record::RECORD;
use losses::Findings;
use merge::Merged;
use scan::{Marks, Scan};
use slots::LatestOfSlots;
use source::Sources;

/// The state of a store that was found in its files.
#[derive(Debug)]
pub(crate) struct FoundState {
    pub merged: Merged,
    pub torn: u64,
    pub damaged: u64,
    pub bytes: u64,
    pub journals: u64,
    /// The number of the next record.
    pub next_sequence: u64,
    /// The tombstones of this epoch.
    pub tombstones: u64,
    /// The highest number of a journal or a checkpoint.
    pub last_number: u64,
    pub checkpoint: Option<u64>,
    /// Files that are not needed.
    pub leftovers: Vec<String>,
}

/// How the state is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub threads: NonZeroUsize,
    pub keep_keys: bool,
    /// Whether the state is made durable: a process that was killed may have left records in the page
    /// cache alone, and new records build on them. Otherwise another process may own the store.
    pub syncs: bool,
}

/// Reads the state.
pub(crate) fn read(
    folder: &Folder,
    epoch: u64,
    groups: &[GroupSlots],
    reading: Reading,
) -> Result<FoundState, CatalogError> {
    let sources = Sources::read(folder, epoch)?;
    for source in sources.sources.iter().filter(|_| reading.syncs) {
        source.file.sync_data().map_err(|error| folder.failure(&source.name, error))?;
    }
    let checkpoint = sources.checkpoint.map(|checkpoint| checkpoint.first_sequence - 1);
    let records = sources.sources.iter().map(|source| source.records).sum();
    let slots = LatestOfSlots::new(groups, checkpoint, records);
    let scan = Scan::new(folder, epoch, &sources.sources, &slots, reading.keep_keys);
    let found = scan.run(reading.threads)?;
    let mut marks = vec![Marks::default(); sources.sources.len()];
    let (mut gaps, mut removes, mut without_slot) = (Vec::new(), Vec::new(), 0);
    for scanned in &found {
        for (all, own) in marks.iter_mut().zip(&scanned.marks) {
            all.add(*own);
        }
        gaps.extend_from_slice(&scanned.gaps);
        removes.extend(scanned.removes.iter().flatten().map(|(_, sequence)| *sequence));
        without_slot += scanned.without_slot;
    }
    let findings = Findings {
        checkpoint: sources.checkpoint,
        sources: &sources.sources,
        marks: &marks,
        gaps: &gaps,
        removes: &removes,
    };
    let losses = findings.losses();
    let mut merged = merge::merge(found, &slots, losses.first_kept);
    merged.dropped += without_slot;
    let journals = sources.sources.iter().filter(|source| source.kind.is_journal()).count();
    Ok(FoundState {
        merged,
        torn: losses.torn,
        damaged: sources.damaged + losses.damaged,
        bytes: records.saturating_mul(to_u64(RECORD)),
        journals: to_u64(journals),
        next_sequence: sources.next_sequence,
        tombstones: losses.tombstones,
        last_number: sources.last_number,
        checkpoint: sources.checkpoint.map(|checkpoint| checkpoint.number),
        leftovers: sources.leftovers,
    })
}
