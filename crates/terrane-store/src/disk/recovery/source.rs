//! The files that a recovery reads, and their order.

use std::collections::HashMap;

use terrane_core::convert::{to_u64, to_usize};

use crate::disk::error::CatalogError;
use crate::disk::files::folder::Folder;
use crate::disk::files::{OpenFile, OpenMode};
use crate::disk::format::checkpoint::Header;
use crate::disk::format::names::{self, Name};
use crate::disk::format::record::{RECORD, RecordBytes, SEQUENCES, decode};

/// The longest file that is read: 2^30 records.
const LONGEST: u64 = 1 << 37;

/// The records of one look into a journal, of three, to find the number of its first record.
const LOOK: u64 = 512;

/// Whether a file is the checkpoint or a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A checkpoint, by its number.
    Checkpoint(u64),
    /// A journal, by its number.
    Journal(u64),
}

impl Kind {
    pub(crate) const fn is_journal(self) -> bool {
        matches!(self, Self::Journal(_))
    }
}

/// One file with records.
#[derive(Debug)]
pub(crate) struct Source {
    pub file: Box<dyn OpenFile>,
    pub name: String,
    pub kind: Kind,
    /// The sequence number of the first record of a journal, or of all records of a checkpoint.
    pub sequence: u64,
    /// Where the first record is.
    pub offset: u64,
    /// The records for which there is room in the file.
    pub records: u64,
    /// Whether the file ends within a record.
    pub has_rest: bool,
}

/// All files, in the order of their records.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    pub checkpoint: Option<Header>,
    /// The checkpoint, if there is one, and the journals of this epoch by number.
    pub sources: Vec<Source>,
    /// Files that are not needed.
    pub leftovers: Vec<String>,
    /// Damaged headers, and records of a checkpoint that its file no longer has.
    pub damaged: u64,
    /// A number above all records, those of leftovers included.
    pub next_sequence: u64,
    /// The highest number of a journal or a checkpoint.
    pub last_number: u64,
}

impl Sources {
    /// Lists the directory, and looks into each file.
    pub(crate) fn read(folder: &Folder, epoch: u64) -> Result<Self, CatalogError> {
        let (mut journals, mut checkpoints) = (Vec::new(), Vec::new());
        let mut found = Self { next_sequence: 1, ..Self::default() };
        for name in folder.list()? {
            match names::parse(&name) {
                Some(Name::Journal(number)) => journals.push(number),
                Some(Name::Checkpoint(number)) => checkpoints.push(number),
                Some(Name::Unfinished(_)) => found.leftovers.push(name),
                None => {}
            }
        }
        journals.sort_unstable();
        checkpoints.sort_unstable();
        found.last_number = journals.last().max(checkpoints.last()).copied().unwrap_or(0);
        for number in checkpoints.into_iter().rev() {
            found.add_checkpoint(folder, epoch, number)?;
        }
        for number in journals {
            found.add_journal(folder, epoch, number)?;
        }
        Ok(found)
    }

    /// Takes the newest valid checkpoint of this epoch. The others are leftovers.
    fn add_checkpoint(
        &mut self,
        folder: &Folder,
        epoch: u64,
        number: u64,
    ) -> Result<(), CatalogError> {
        let name = names::checkpoint(number);
        let (file, length) = open(folder, &name)?;
        let mut bytes = [0; RECORD];
        let read = file.read_at(&mut bytes, 0).map_err(|error| folder.failure(&name, error))?;
        let header = Header::decode(&bytes, number).filter(|_| read == RECORD);
        let Some(header) = header else {
            self.damaged += u64::from(self.checkpoint.is_none());
            self.leftovers.push(name);
            return Ok(());
        };
        self.next_sequence = self.next_sequence.max(header.first_sequence);
        if header.epoch != epoch || self.checkpoint.is_some() {
            self.leftovers.push(name);
            return Ok(());
        }
        let records = (length / to_u64(RECORD)).saturating_sub(1).min(header.records);
        self.damaged += header.records - records;
        self.checkpoint = Some(header);
        self.sources.push(Source {
            file,
            name,
            kind: Kind::Checkpoint(number),
            sequence: header.first_sequence - 1,
            offset: to_u64(RECORD),
            records,
            has_rest: false,
        });
        Ok(())
    }

    fn add_journal(
        &mut self,
        folder: &Folder,
        epoch: u64,
        number: u64,
    ) -> Result<(), CatalogError> {
        let name = names::journal(number);
        if self.checkpoint.is_some_and(|checkpoint| number < checkpoint.number) {
            self.leftovers.push(name);
            return Ok(());
        }
        let (file, length) = open(folder, &name)?;
        let records = length / to_u64(RECORD);
        let looked = look(file.as_ref(), records).map_err(|error| folder.failure(&name, error))?;
        // A journal without a valid record is taken to follow the one before it.
        let (sequence, found) = looked.unwrap_or((self.next_sequence, epoch));
        let is_misplaced = sequence < self.next_sequence;
        if is_misplaced {
            // The copy of another journal. One of another epoch has no records of this one.
            self.damaged += if found == epoch { records } else { 0 };
        } else {
            self.next_sequence = sequence + records;
        }
        if is_misplaced || found != epoch {
            self.leftovers.push(name);
            return Ok(());
        }
        let has_rest = length % to_u64(RECORD) != 0;
        let kind = Kind::Journal(number);
        self.sources.push(Source { file, name, kind, sequence, offset: 0, records, has_rest });
        Ok(())
    }
}

/// Opens a file, and returns its length.
fn open(folder: &Folder, name: &str) -> Result<(Box<dyn OpenFile>, u64), CatalogError> {
    let file = folder.open(name, OpenMode::Existing)?;
    let length = file.length().map_err(|error| folder.failure(name, error))?;
    if length > LONGEST {
        let file = folder.path.join(name);
        return Err(CatalogError::FileTooLong { file, length, limit: LONGEST });
    }
    Ok((file, length))
}

/// Finds the number of a journal's first record and its epoch, by what most records say at its
/// beginning, in its middle and at its end. `None` if no record there is valid.
fn look(file: &dyn OpenFile, records: u64) -> Result<Option<(u64, u64)>, terrane_core::OsError> {
    let last = records.saturating_sub(LOOK);
    let mut starts = [0, last / 2, last].to_vec();
    starts.dedup();
    let mut bytes = vec![0; to_usize(LOOK.min(records)) * RECORD];
    let mut votes: HashMap<(u64, u64), u32> = HashMap::new();
    for start in starts {
        let read = file.read_at(&mut bytes, start * to_u64(RECORD))?;
        let (found, _) = bytes.get(..read).unwrap_or_default().as_chunks::<RECORD>();
        for (index, record) in (start..).zip(found) {
            if let Some(vote) = vote(record, index) {
                *votes.entry(vote).or_default() += 1;
            }
        }
    }
    // If counts are equal, the lower number wins, so that the answer is the same each time.
    let most = votes.into_iter().max_by_key(|(vote, count)| (*count, std::cmp::Reverse(*vote)));
    Ok(most.map(|(vote, _)| vote))
}

fn vote(record: &RecordBytes, index: u64) -> Option<(u64, u64)> {
    let (stamp, _) = decode(record)?;
    let first = stamp.sequence.checked_sub(index).filter(|first| (1..SEQUENCES).contains(first))?;
    Some((first, stamp.epoch))
}
