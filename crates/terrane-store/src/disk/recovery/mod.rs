//! Finds the live blocks: the newest valid checkpoint, and all later journals on top of it.
//!
//! Recovery reads no payload. It reads every file once, on several threads, and needs memory in
//! proportion to the files.

mod losses;
mod merge;
mod scan;
mod slots;
mod source;

use std::num::NonZeroUsize;
use std::path::Path;

use terrane_core::convert::to_u64;

use super::error::CatalogError;
use super::failure::failure;
use super::files::Files;
use super::namespace::GroupSlots;
use super::record::RECORD;
use losses::Findings;
use merge::Merged;
use scan::{Marks, Scan};
use slots::Slots;
use source::Sources;

/// The state of a store.
#[derive(Debug)]
pub(crate) struct State {
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

/// Reads the state, and makes it durable: a process that was killed may have left records in the page
/// cache alone, and new records build on them.
pub(crate) fn recover(
    files: &dyn Files,
    directory: &Path,
    epoch: u64,
    groups: &[GroupSlots],
    settings: (NonZeroUsize, bool),
) -> Result<State, CatalogError> {
    let sources = Sources::read(files, directory, epoch)?;
    for source in &sources.sources {
        let synced = source.file.sync_data();
        synced.map_err(|error| failure(&directory.join(&source.name), error))?;
    }
    state_of(sources, directory, epoch, groups, settings)
}

/// Reads the state and changes nothing: another process may own the store.
pub(crate) fn read(
    files: &dyn Files,
    directory: &Path,
    epoch: u64,
    groups: &[GroupSlots],
    settings: (NonZeroUsize, bool),
) -> Result<State, CatalogError> {
    let sources = Sources::read(files, directory, epoch)?;
    state_of(sources, directory, epoch, groups, settings)
}

fn state_of(
    sources: Sources,
    directory: &Path,
    epoch: u64,
    groups: &[GroupSlots],
    (threads, keep_keys): (NonZeroUsize, bool),
) -> Result<State, CatalogError> {
    let checkpoint = sources.checkpoint.map(|checkpoint| checkpoint.first_sequence - 1);
    let slots = Slots::new(groups, checkpoint);
    let scan = Scan::new(directory, epoch, &sources.sources, &slots, keep_keys);
    let found = scan.run(threads)?;
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
    let mut merged = merge::merge(found, &slots, losses.first_kept)?;
    merged.dropped += without_slot;
    let records: u64 = sources.sources.iter().map(|source| source.records).sum();
    let journals = sources.sources.iter().filter(|source| source.kind.is_journal()).count();
    Ok(State {
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
