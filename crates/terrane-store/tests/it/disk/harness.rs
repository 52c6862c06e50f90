//! A small store over the catalog: payloads in a slab, an index in memory, and a model of what must be
//! there after a crash.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use terrane_core::checksum::crc64;
use terrane_store::KeyHash;
use terrane_store::disk::{
    Catalog, CatalogError, CatalogOptions, Files, GroupSlots, Namespace, OpenFile, OpenMode,
    PutRecord, Recovered,
};

use super::recorder::{Change, History, Image, Recorder};

pub const SLOT: u64 = 1024;
pub const SLOTS: u32 = 16;
pub const SLAB: &str = "slab.0.000";

/// A key. Its block has the same content each time.
pub type Key = u32;

/// The actions of a user of a store.
#[derive(Clone, Debug)]
pub enum Step {
    /// Writes the payload, then the record.
    Put(Key, u32),
    /// Writes the record, then the payload.
    PutRecordFirst(Key, u32),
    Remove(Vec<Key>),
    Sync,
    Clear,
    /// Writes a checkpoint. The steps happen while it is written.
    Checkpoint(Vec<Step>),
    /// Closes the store and opens it again.
    Reopen,
}

/// The facts that the user knows, at a place of the log.
#[derive(Clone, Debug)]
pub enum Note {
    Puts(Key, u32),
    Removes(Vec<Key>),
    /// All that was done before the sync began, by number of notes.
    Synced(usize),
    Clears,
    Cleared,
    /// A put or a removal returned an error.
    Failed(Vec<Key>),
}

/// The blocks that must be readable, and those that may be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Expected {
    pub must: BTreeSet<Key>,
    pub may: BTreeSet<Key>,
}

pub fn payload(key: Key) -> Vec<u8> {
    // Shorter than a slot for some, so that lengths matter.
    let length = 1024 - 24 * (key as usize % 3);
    (0..length).map(|at| (key as usize * 31 + at * 7 + at / 256) % 256).map(byte).collect()
}

fn byte(number: usize) -> u8 {
    number.try_into().unwrap()
}

pub fn hash(key: Key) -> KeyHash {
    KeyHash::new(u128::from(key).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835) | 1)
}

/// The key of a hash, among those of the histories.
pub fn key_of(hash_of_key: KeyHash) -> Option<Key> {
    (0..100).find(|key| hash(*key) == hash_of_key)
}

pub fn sum(bytes: &[u8]) -> u64 {
    crc64(bytes)
}

pub fn namespace() -> Namespace {
    Namespace::new("model", [("model", "m"), ("rank", "0")]).unwrap()
}

pub fn groups() -> [GroupSlots; 1] {
    [GroupSlots { slot_bytes: SLOT, slots: SLOTS, fingerprint: [7; 16] }]
}

pub fn open<N>(files: &Recorder<N>) -> Result<(Catalog, Recovered), CatalogError>
where
    N: Clone + std::fmt::Debug + Send + Sync + 'static,
{
    let options = CatalogOptions { keep_keys: true, ..CatalogOptions::default() };
    Catalog::open_in(Arc::new(files.clone()), Path::new("store"), &namespace(), &groups(), options)
}

/// The key's bytes: those of some keys need further records.
pub fn key_bytes(key: Key) -> Vec<u8> {
    let length = if key % 5 == 4 { 60 } else { 4 };
    key.to_le_bytes().into_iter().cycle().take(length).collect()
}

pub fn record(key: Key, slot: u32, bytes: &[u8]) -> PutRecord<'_> {
    let content = payload(key);
    PutRecord {
        key_hash: hash(key),
        group: 0,
        slot,
        length: content.len() as u64,
        checksum: sum(&content),
        key: bytes,
    }
}

/// A store that is open.
pub struct Store {
    /// Takes the notes, at the place of the log where they are true.
    sink: Box<dyn FnMut(Note)>,
    pub catalog: Arc<Catalog>,
    slab: Box<dyn OpenFile>,
    /// A file whose sync failed is not synced again.
    slab_failed: bool,
    pub index: BTreeMap<Key, u32>,
    pub notes: usize,
}

impl Store {
    pub fn open(files: &Recorder<Note>, notes: usize) -> Result<Self, CatalogError> {
        let sink = files.clone();
        Self::open_in(Arc::new(files.clone()), notes, Box::new(move |note| sink.note(note)))
    }

    pub fn open_in(
        files: Arc<dyn Files>,
        notes: usize,
        sink: Box<dyn FnMut(Note)>,
    ) -> Result<Self, CatalogError> {
        let path = Path::new("store");
        let options = CatalogOptions::default();
        let (catalog, recovered) =
            Catalog::open_in(Arc::clone(&files), path, &namespace(), &groups(), options)?;
        let slab = files.open(SLAB, OpenMode::Existing).unwrap();
        let key = |hash| key_of(hash).expect("a key of the histories");
        let live = recovered.live.into_iter();
        let index = live.map(|live| (key(live.key_hash), live.slot)).collect();
        let catalog = Arc::new(catalog);
        Ok(Self { sink, catalog, slab, slab_failed: false, index, notes })
    }

    fn note(&mut self, note: Note) {
        (self.sink)(note);
        self.notes += 1;
    }

    /// Does a step. An error is one of the catalog; what was promised before it still holds.
    pub fn step(&mut self, step: &Step) -> Result<(), CatalogError> {
        match step {
            Step::Put(key, slot) | Step::PutRecordFirst(key, slot) => {
                self.note(Note::Puts(*key, *slot));
                self.index.retain(|_, taken| taken != slot);
                self.index.insert(*key, *slot);
                let is_first = matches!(step, Step::PutRecordFirst(..));
                let early = if is_first { self.put(*key, *slot) } else { Ok(()) };
                let content = payload(*key);
                let written = self.slab.write_at(&content, SLOT * u64::from(*slot));
                let late = if is_first { Ok(()) } else { self.put(*key, *slot) };
                let result = early.and(late);
                if result.is_err() || written.is_err() {
                    self.index.remove(key);
                    self.note(Note::Failed(vec![*key]));
                }
                result
            }
            Step::Remove(keys) => {
                self.note(Note::Removes(keys.clone()));
                self.index.retain(|key, _| !keys.contains(key));
                let hashes: Vec<KeyHash> = keys.iter().map(|key| hash(*key)).collect();
                let result = self.catalog.append_removes(&hashes);
                if result.is_err() {
                    self.note(Note::Failed(keys.clone()));
                }
                result
            }
            Step::Sync => {
                let notes = self.notes;
                self.slab_failed = self.slab_failed || self.slab.sync_data().is_err();
                self.catalog.sync()?;
                if !self.slab_failed {
                    self.note(Note::Synced(notes));
                }
                Ok(())
            }
            Step::Clear => {
                self.note(Note::Clears);
                self.index.clear();
                self.catalog.clear()?;
                self.note(Note::Cleared);
                Ok(())
            }
            Step::Checkpoint(steps) => self.checkpoint(steps),
            Step::Reopen => panic!("`run` reopens"),
        }
    }

    fn put(&self, key: Key, slot: u32) -> Result<(), CatalogError> {
        self.catalog.append_puts(&[record(key, slot, &key_bytes(key))])
    }

    /// Reads the first half of the index before the steps, and the other half after them.
    fn checkpoint(&mut self, steps: &[Step]) -> Result<(), CatalogError> {
        let catalog = Arc::clone(&self.catalog);
        let mut outcome = Ok(());
        let result = catalog.checkpoint(|writer| {
            let before = self.index.clone();
            let first: BTreeSet<Key> = before.keys().take(before.len() / 2).copied().collect();
            for key in &first {
                writer.add(&record(*key, before[key], &key_bytes(*key)))?;
            }
            for step in steps {
                outcome = outcome.clone().and(self.step(step));
            }
            for (key, slot) in self.index.iter().filter(|(key, _)| !first.contains(key)) {
                writer.add(&record(*key, *slot, &key_bytes(*key)))?;
            }
            Ok(())
        });
        result.map(|_| ()).and(outcome)
    }
}

/// Creates the file of the payloads.
pub fn create_slab(files: &dyn Files) {
    let slab = files.open(SLAB, OpenMode::Create).unwrap();
    slab.set_length(SLOT * u64::from(SLOTS)).unwrap();
}

/// A store that was created, and whose owner was killed: a close removes a journal without records.
pub fn created() -> Image {
    let files: Recorder<Note> = Recorder::new(Image::default(), None);
    let _catalog = open(&files).unwrap();
    create_slab(&files);
    files.image()
}

/// Does the steps. Without a fault they succeed.
pub fn run(files: &Recorder<Note>, steps: &[Step]) -> Result<(), CatalogError> {
    let mut store = Store::open(files, 0)?;
    let mut outcome = Ok(());
    for step in steps {
        if matches!(step, Step::Reopen) {
            let notes = store.notes;
            drop(store);
            store = Store::open(files, notes)?;
        } else {
            let result = store.step(step);
            outcome = outcome.and(result);
        }
    }
    outcome
}

/// The conditions that hold after a crash within the first `end` entries of a log.
pub fn expected(history: &History<Note>, end: usize) -> Expected {
    let mut expected = Expected::default();
    // The index of the user, with the number of the note that put each key.
    let mut index: BTreeMap<Key, (u32, usize)> = BTreeMap::new();
    let mut removed: BTreeMap<Key, usize> = BTreeMap::new();
    let notes = history.log[..end].iter().filter_map(|change| match change {
        Change::Note(note) => Some(note),
        _ => None,
    });
    for (number, note) in notes.enumerate() {
        match note {
            Note::Puts(key, slot) => {
                let evicted: Vec<Key> =
                    index.iter().filter(|(_, at)| at.0 == *slot).map(|(key, _)| *key).collect();
                for key in evicted.iter().chain([key]) {
                    index.remove(key);
                    expected.must.remove(key);
                }
                removed.remove(key);
                expected.may.insert(*key);
                index.insert(*key, (*slot, number));
            }
            Note::Removes(keys) => {
                for key in keys {
                    index.remove(key);
                    expected.must.remove(key);
                    removed.insert(*key, number);
                }
            }
            Note::Failed(keys) => {
                for key in keys {
                    index.remove(key);
                    removed.remove(key);
                    expected.must.remove(key);
                }
            }
            Note::Synced(notes) => {
                let durable = index.iter().filter(|(_, put)| put.1 < *notes);
                expected.must.extend(durable.map(|(key, _)| *key));
                let is_gone = |key: &Key| removed.get(key).is_some_and(|number| number < notes);
                expected.may.retain(|key| !is_gone(key));
            }
            Note::Clears => {
                index.clear();
                expected.must.clear();
            }
            Note::Cleared => {
                removed.clear();
                expected.may.clear();
            }
        }
    }
    expected
}

/// Opens the store that a crash left, and checks every block. Returns the readable keys and the log of
/// the opening.
pub fn check(
    image: &Image,
    expected: &Expected,
) -> Result<(BTreeSet<Key>, Recorder<Note>), String> {
    let files: Recorder<Note> = Recorder::new(image.clone(), None);
    let (catalog, recovered) = open(&files).map_err(|error| format!("does not open: {error}"))?;
    drop(catalog);
    if recovered.found != recovered.live.len() as u64 {
        return Err(format!("{} found, {} live", recovered.found, recovered.live.len()));
    }
    let slab = image.file(SLAB).cloned().unwrap_or_default();
    let (mut readable, mut slots) = (BTreeSet::new(), BTreeSet::new());
    let mut hashes = BTreeSet::new();
    for live in recovered.live {
        if !slots.insert(live.slot) || !hashes.insert(live.key_hash) {
            return Err(format!("a key or a slot twice: {live:?}"));
        }
        let from = usize::try_from(u64::from(live.slot) * SLOT).unwrap();
        let to = from + usize::try_from(live.length).unwrap();
        let Some(bytes) = slab.get(from..to).filter(|bytes| sum(bytes) == live.checksum) else {
            continue;
        };
        let key = key_of(live.key_hash).ok_or_else(|| format!("an unknown key: {live:?}"))?;
        if bytes != payload(key) {
            return Err(format!("key {key} has other bytes"));
        }
        if live.key.as_ref().is_some_and(|bytes| **bytes != key_bytes(key)[..]) {
            return Err(format!("key {key} has another name: {live:?}"));
        }
        readable.insert(key);
    }
    let lost: Vec<&Key> = expected.must.difference(&readable).collect();
    let wrong: Vec<&Key> = readable.difference(&expected.may).collect();
    if !lost.is_empty() || !wrong.is_empty() {
        return Err(format!("durable but absent: {lost:?}; removed but present: {wrong:?}"));
    }
    Ok((readable, files))
}
