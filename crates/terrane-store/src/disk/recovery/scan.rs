//! Reads all records, on several threads, in chunks of bounded memory.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use terrane_core::OsError;
use terrane_core::convert::{to_u64, to_usize};

use super::slots::LatestOfSlots;
use super::source::{Kind, Source};
use crate::disk::error::CatalogError;
use crate::disk::files::folder::Folder;
use crate::disk::format::record::{
    BATCH, Content, KEY_HEAD, Mark, PutFields, RECORD, RecordBytes, Stamp, are_whole, decode,
    decode_whole, key_head, key_part, key_parts,
};
use crate::disk::live::LiveRecord;
use crate::key::KeyHash;
use crate::parallel::on_threads;

/// The records that a thread reads at once: they fit into a core's cache.
const CHUNK: u64 = 2048;

/// About as many blocks as a part has, so that its hashes stay in a core's cache.
const PART: u64 = 8192;

/// The most parts.
const MOST_PARTS: u64 = 1024;

/// Consecutive records that are not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    /// The file, by its index.
    pub source: usize,
    /// The first record, by its index in the file.
    pub start: u64,
    pub records: u64,
}

/// The marks of one file.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Marks {
    /// The last mark, after its sequence number.
    pub last: Option<(u64, Mark)>,
    /// Whether the first record opens a session.
    pub starts_session: bool,
}

impl Marks {
    pub(crate) fn add(&mut self, other: Self) {
        let number = |last: Option<(u64, Mark)>| last.map(|(sequence, _)| sequence);
        if number(other.last) > number(self.last) {
            self.last = other.last;
        }
        self.starts_session |= other.starts_session;
    }
}

/// The findings of one thread.
#[derive(Debug, Default)]
pub(crate) struct Scanned {
    /// Blocks by the part of their key.
    pub puts: Vec<Vec<LiveRecord>>,
    /// Keys that were removed, with the number of the record, by the part of their key.
    pub removes: Vec<Vec<(KeyHash, u64)>>,
    /// The marks of each file.
    pub marks: Vec<Marks>,
    /// Runs of invalid records, in any order.
    pub gaps: Vec<Gap>,
    /// Blocks whose slots do not exist.
    pub without_slot: u64,
}

/// The values that the threads of a scan share.
#[derive(Debug)]
pub(crate) struct Scan<'a> {
    folder: &'a Folder,
    pub epoch: u64,
    pub sources: &'a [Source],
    pub slots: &'a LatestOfSlots,
    pub keep_keys: bool,
    parts: usize,
    chunks: Vec<(usize, u64)>,
    next: AtomicUsize,
    has_failed: AtomicBool,
}

impl<'a> Scan<'a> {
    pub(crate) fn new(
        folder: &'a Folder,
        epoch: u64,
        sources: &'a [Source],
        slots: &'a LatestOfSlots,
        keep_keys: bool,
    ) -> Self {
        let total: u64 = sources.iter().map(|source| source.records).sum();
        let parts = to_usize((total / PART).clamp(1, MOST_PARTS).next_power_of_two());
        let chunks_of = |(index, source): (usize, &Source)| {
            (0..source.records.div_ceil(CHUNK)).map(move |chunk| (index, chunk * CHUNK))
        };
        let chunks = sources.iter().enumerate().flat_map(chunks_of).collect();
        let (next, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { folder, epoch, sources, slots, keep_keys, parts, chunks, next, has_failed }
    }

    /// Reads all files. Every thread returns what it found.
    pub(crate) fn run(&self, threads: NonZeroUsize) -> Result<Vec<Scanned>, CatalogError> {
        let threads = threads.get().min(self.chunks.len());
        on_threads(threads, "terrane-recovery", || self.work(threads)).into_iter().collect()
    }

    fn work(&self, threads: usize) -> Result<Scanned, CatalogError> {
        let total: u64 = self.sources.iter().map(|source| source.records).sum();
        // A little more than an even share, so that a part seldom grows.
        let share = to_usize(total) / self.parts / threads.max(1);
        let mut worker = Worker {
            scan: self,
            found: Scanned {
                puts: (0..self.parts).map(|_| Vec::with_capacity(share + share / 8)).collect(),
                removes: vec![Vec::new(); self.parts],
                marks: vec![Marks::default(); self.sources.len()],
                ..Scanned::default()
            },
            bytes: vec![0; to_usize(CHUNK) * RECORD],
        };
        while !self.has_failed.load(Ordering::Relaxed) {
            let chunk = self.chunks.get(self.next.fetch_add(1, Ordering::Relaxed));
            let Some(&(index, start)) = chunk else { break };
            let Some(source) = self.sources.get(index) else { break };
            if let Err(error) = worker.read(source, index, start) {
                self.has_failed.store(true, Ordering::Relaxed);
                return Err(self.folder.failure(&source.name, error));
            }
        }
        Ok(worker.found)
    }
}

struct Worker<'a, 's> {
    scan: &'s Scan<'a>,
    found: Scanned,
    bytes: Vec<u8>,
}

impl Worker<'_, '_> {
    /// Reads the chunk of file `index` that begins at record `start`.
    fn read(&mut self, source: &Source, index: usize, start: u64) -> Result<(), OsError> {
        let wanted = CHUNK.min(source.records - start);
        let mut bytes = std::mem::take(&mut self.bytes);
        let chunk = bytes.get_mut(..to_usize(wanted) * RECORD).unwrap_or_default();
        let read = source.file.read_at(chunk, source.offset + start * to_u64(RECORD))?;
        let (records, _) = bytes.get(..read).unwrap_or_default().as_chunks::<RECORD>();
        let mut is_whole = false;
        for (at, record) in records.iter().enumerate() {
            if at % BATCH == 0 {
                let batch = records.get(at..).and_then(|rest| rest.first_chunk());
                is_whole = batch.is_some_and(are_whole);
            }
            let position = start + to_u64(at);
            let decoded = if is_whole { decode_whole(record) } else { decode(record) };
            match self.content(source, position, decoded) {
                Some((sequence, Content::Put(fields))) => {
                    let rest = records.get(at + 1..).unwrap_or_default();
                    let key = self.key(source, position, (record, &fields), rest)?;
                    self.put(sequence, fields, key);
                }
                Some((sequence, Content::Remove(key_hash))) => {
                    let part = self.part(key_hash);
                    if let Some(removes) = self.found.removes.get_mut(part) {
                        removes.push((key_hash, sequence));
                    }
                }
                Some((sequence, Content::Mark(mark))) => {
                    let starts_session = mark.starts_session && position == 0;
                    if let Some(marks) = self.found.marks.get_mut(index) {
                        marks.add(Marks { last: Some((sequence, mark)), starts_session });
                    }
                }
                Some((_, Content::KeyPart(_))) => {}
                None => self.add_gap(Gap { source: index, start: position, records: 1 }),
            }
        }
        // The file was cut after its length was read.
        let found = to_u64(records.len());
        if found < wanted {
            self.add_gap(Gap { source: index, start: start + found, records: wanted - found });
        }
        self.bytes = bytes;
        Ok(())
    }

    /// The number and content of a decoded record, if the record belongs at this position.
    fn content(
        &self,
        source: &Source,
        position: u64,
        decoded: Option<(Stamp, Content)>,
    ) -> Option<(u64, Content)> {
        let (stamp, content) = decoded?;
        let is_in_place = match source.kind {
            Kind::Journal(_) => {
                let is_of_journal =
                    !matches!(content, Content::Put(fields) if fields.checkpoint != 0);
                stamp.sequence == source.sequence + position && is_of_journal
            }
            Kind::Checkpoint(number) => {
                let is_of_checkpoint = match content {
                    Content::Put(fields) => fields.checkpoint == number,
                    Content::KeyPart(_) => true,
                    Content::Remove(_) | Content::Mark(_) => false,
                };
                stamp.sequence == source.sequence && is_of_checkpoint
            }
        };
        (stamp.epoch == self.scan.epoch && is_in_place).then_some((stamp.sequence, content))
    }

    /// The key of a `Put` at `position`, if it is kept and all its records are valid. `rest` holds
    /// the records of the chunk after it; records of the next chunk are read.
    fn key(
        &self,
        source: &Source,
        position: u64,
        (record, fields): (&RecordBytes, &PutFields),
        rest: &[RecordBytes],
    ) -> Result<Option<Box<[u8]>>, OsError> {
        let length = usize::from(fields.key_length);
        if !self.scan.keep_keys || length == 0 {
            return Ok(None);
        }
        let mut key = Vec::with_capacity(length);
        key.extend_from_slice(key_head(record, fields.key_length));
        if length <= KEY_HEAD {
            return Ok(Some(key.into()));
        }
        let parts = key_parts(length);
        let mut more = Vec::new();
        let records = match rest.get(..parts) {
            Some(records) => records,
            None => {
                more.resize(parts * RECORD, 0);
                let offset = source.offset + (position + 1) * to_u64(RECORD);
                let read = source.file.read_at(&mut more, offset)?;
                more.get(..read).unwrap_or_default().as_chunks::<RECORD>().0
            }
        };
        for (part, record) in records.iter().enumerate() {
            match self.content(source, position + 1 + to_u64(part), decode(record)) {
                Some((_, Content::KeyPart(number))) if usize::from(number) == part => {
                    key.extend_from_slice(key_part(record, part, fields.key_length));
                }
                _ => return Ok(None),
            }
        }
        Ok((key.len() == length).then(|| key.into()))
    }

    fn put(&mut self, sequence: u64, fields: PutFields, key: Option<Box<[u8]>>) {
        let PutFields { key_hash, group, slot, length, checksum, .. } = fields;
        if !self.scan.slots.has(group, slot, length) {
            self.found.without_slot += 1;
            return;
        }
        self.scan.slots.note(group, slot, sequence);
        let part = self.part(key_hash);
        if let Some(puts) = self.found.puts.get_mut(part) {
            puts.push(LiveRecord { key_hash, sequence, length, checksum, slot, group, key });
        }
    }

    /// The part of a key. The keys of a part are neighbours in an index, too.
    fn part(&self, key_hash: KeyHash) -> usize {
        // The number of parts is a power of two.
        let shift = u64::BITS - self.scan.parts.trailing_zeros();
        to_usize(key_hash.mixed().checked_shr(shift).unwrap_or(0))
    }

    fn add_gap(&mut self, gap: Gap) {
        match self.found.gaps.last_mut() {
            Some(last) if last.source == gap.source && last.start + last.records == gap.start => {
                last.records += gap.records;
            }
            _ => self.found.gaps.push(gap),
        }
    }
}
