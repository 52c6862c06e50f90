//! The directories of a tier and the alignment of its slots. A store that records them is not
//! opened with other ones.
//!
//! The superblock records the number of directories and the alignment. Each further directory has a
//! file `stripe.NNN`, which identifies its store and its index. A new store makes these files
//! durable before its superblocks. So a store that exists has all of them. They do not change
//! afterwards.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;
use terrane_core::Alignment;

use crate::disk::error::{CatalogError, FoundStripe};
use crate::disk::files::folder::{Folder, failure};
use crate::disk::files::{Files, OpenMode};
use crate::disk::format::bytes::{array_at, crc, put, u32_at, u64_at};
use crate::disk::format::names;
use crate::disk::format::superblock::{FORMAT_VERSION, Secret};
use crate::key::KeyHasher;

/// The bytes of a stripe file. They are in one sector.
const STRIPE_BYTES: usize = 64;
const MAGIC: [u8; 8] = *b"TRSTRIPE";
/// The offset of the checksum.
const END: usize = STRIPE_BYTES - 8;

/// The hash of this text under a store's secret identifies the store. The secret is not in a stripe
/// file.
const IDENTITY: &[u8] = b"terrane stripe";

/// The largest alignment that is recorded. A slab file needs buffers of that size.
const MOST_ALIGNMENT: u64 = 1 << 24;

/// The number of directories and the alignment of slots that a superblock records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placement {
    /// The number of directories; 0 if it is unknown.
    pub directories: u32,
    /// The alignment of slots in bytes; 0 if it is unknown.
    pub alignment: u32,
}

impl Placement {
    /// Whether a superblock of a store can have these values.
    pub(crate) fn is_possible(self) -> bool {
        self.alignment == 0 || recordable(self.alignment.into()).is_some()
    }

    /// The alignment, if it is known.
    pub(crate) fn alignment(self) -> Option<Alignment> {
        recordable(self.alignment.into())
    }

    /// Checks that `passed` has as many folders as the store records, if it records a number.
    pub(crate) fn check_count(self, passed: &[PathBuf]) -> Result<(), CatalogError> {
        let recorded = self.directories;
        let is_right = u32::try_from(passed.len()).is_ok_and(|passed| passed == recorded);
        if recorded == 0 || is_right {
            return Ok(());
        }
        Err(CatalogError::DirectoryCount { recorded, passed: passed.to_owned() })
    }
}

/// The alignment of so many bytes, if a superblock can record it.
fn recordable(bytes: u64) -> Option<Alignment> {
    let is_recorded = (Alignment::PAGE.get()..=MOST_ALIGNMENT).contains(&bytes);
    Alignment::new(bytes).ok().filter(|_| is_recorded)
}

/// The further directories of a tier, and the alignment of its slots.
#[derive(Clone, Debug)]
pub struct Stripes {
    /// The alignment in bytes; 0 if it is not recorded.
    alignment: u32,
    others: Vec<Folder>,
}

impl Stripes {
    /// A tier of one directory, whose slots begin at multiples of `slot_alignment`. Alignments from
    /// 4 KiB to 16 MiB are recorded, and others are not.
    #[must_use]
    pub fn new(slot_alignment: Alignment) -> Self {
        let recorded = recordable(slot_alignment.get()).map_or(0, Alignment::get);
        Self { alignment: u32::try_from(recorded).unwrap_or(0), others: Vec::new() }
    }

    /// A tier of one directory with the recorded alignment.
    pub(crate) const fn recorded(placement: Placement) -> Self {
        Self { alignment: placement.alignment, others: Vec::new() }
    }

    /// Adds the files of the next directory. `directory` is its path, for messages.
    ///
    /// The caller owns the directory until the catalog is closed.
    #[must_use]
    pub fn also_in(mut self, files: Arc<dyn Files>, directory: &Path) -> Self {
        self.others.push(Folder { files, path: directory.to_owned() });
        self
    }

    /// The placement that a new store records.
    pub(crate) fn placement(&self) -> Placement {
        let others = u32::try_from(self.others.len()).unwrap_or(u32::MAX);
        Placement { directories: others.saturating_add(1), alignment: self.alignment }
    }

    /// Checks the directories and the alignment against the store in `first`.
    pub(crate) fn check(
        &self,
        first: &Path,
        (recorded, secret): (Placement, &Secret),
    ) -> Result<(), CatalogError> {
        let others = self.others.iter().map(|folder| folder.path.clone());
        let passed: Vec<PathBuf> = [first.to_owned()].into_iter().chain(others).collect();
        recorded.check_count(&passed)?;
        if recorded.alignment != 0 && recorded.alignment != self.alignment {
            return Err(CatalogError::SlotAlignmentDiffers {
                directory: first.to_owned(),
                recorded: recorded.alignment,
                requested: self.alignment,
            });
        }
        let identity = identity(secret);
        for (index, folder) in (1..).zip(&self.others) {
            let found = match read(folder, index)? {
                StripeFile::Valid(found) if found == identity => continue,
                // A store that records no directories may have been created without these files.
                StripeFile::Missing if recorded.directories == 0 => continue,
                _ if recorded.directories == 0 && !has_slab(folder, index)? => continue,
                StripeFile::Missing => found_in(folder, &identity)?,
                StripeFile::Damaged => FoundStripe::Damaged { file: names::stripe(index) },
                StripeFile::Valid(_) => FoundStripe::OtherStore { index },
            };
            return Err(differs(first, folder, index, found));
        }
        Ok(())
    }

    /// Writes the stripe files of a new store in `first` and makes them durable. Its superblocks
    /// come later.
    pub(crate) fn create(&self, first: &Path, secret: &Secret) -> Result<(), CatalogError> {
        let identity = identity(secret);
        for (index, folder) in (1..).zip(&self.others) {
            let found = match read(folder, index)? {
                StripeFile::Missing => continue,
                // Left by a creation that was cut short: slab files are created after the
                // superblocks.
                _ if !has_slab(folder, index)? => continue,
                StripeFile::Damaged => FoundStripe::Damaged { file: names::stripe(index) },
                StripeFile::Valid(_) => FoundStripe::NotInFirst { index },
            };
            return Err(differs(first, folder, index, found));
        }
        for (index, folder) in (1..).zip(&self.others) {
            let name = names::stripe(index);
            let file = folder.open(&name, OpenMode::Create)?;
            let written = file.write_at(&encode(index, &identity), 0);
            written
                .and_then(|()| file.sync_data())
                .map_err(|error| folder.failure(&name, error))?;
            folder.files.sync_directory().map_err(|error| failure(&folder.path, error))?;
        }
        Ok(())
    }
}

/// Refuses a folder for a new store if it is a further directory of another store.
pub(crate) fn check_first(folder: &Folder) -> Result<(), CatalogError> {
    let names = folder.list()?;
    let mut indices: Vec<u32> = names.iter().filter_map(|name| names::parse_stripe(name)).collect();
    indices.sort_unstable();
    for index in indices {
        if matches!(read(folder, index)?, StripeFile::Valid(_)) && has_slab(folder, index)? {
            let found = FoundStripe::OtherStore { index };
            return Err(differs(&folder.path, folder, 0, found));
        }
    }
    Ok(())
}

fn differs(first: &Path, folder: &Folder, index: u32, found: FoundStripe) -> CatalogError {
    let (first, directory) = (first.to_owned(), folder.path.clone());
    CatalogError::StripeDiffers { first, directory, index, found }
}

/// Whether the slots of directory `index` of a store are in `folder`.
fn has_slab(folder: &Folder, index: u32) -> Result<bool, CatalogError> {
    let suffix = format!(".{index:03}");
    let is_slab = |name: &String| name.starts_with("slab.") && name.ends_with(&suffix);
    Ok(folder.list()?.iter().any(is_slab))
}

/// The content of a folder without the expected file: it may be another directory of this store.
fn found_in(folder: &Folder, identity: &[u8; 16]) -> Result<FoundStripe, CatalogError> {
    for name in folder.list()? {
        if let Some(index) = names::parse_stripe(&name)
            && matches!(read(folder, index)?, StripeFile::Valid(found) if found == *identity)
        {
            return Ok(FoundStripe::SameStore { index });
        }
    }
    Ok(FoundStripe::Nothing)
}

fn identity(secret: &Secret) -> [u8; 16] {
    let hash = KeyHasher::new(&secret.0).hash(IDENTITY);
    // The text is neither empty nor too long.
    hash.map(|hash| hash.get().to_le_bytes()).unwrap_or_default()
}

/// The content of a stripe file.
enum StripeFile {
    Missing,
    Damaged,
    /// The identity of its store.
    Valid([u8; 16]),
}

fn read(folder: &Folder, index: u32) -> Result<StripeFile, CatalogError> {
    let name = names::stripe(index);
    let file = match folder.files.open(&name, OpenMode::Existing) {
        Err(error) if error.code == Errno::NOENT.raw_os_error() => return Ok(StripeFile::Missing),
        opened => opened.map_err(|error| folder.failure(&name, error))?,
    };
    let mut bytes = [0; STRIPE_BYTES];
    let length = file.read_at(&mut bytes, 0).map_err(|error| folder.failure(&name, error))?;
    let is_whole = length == STRIPE_BYTES && bytes.starts_with(&MAGIC);
    if !is_whole || crc(&bytes[..END]) != u64_at(&bytes, END) {
        return Ok(StripeFile::Damaged);
    }
    match u32_at(&bytes, 8) {
        FORMAT_VERSION if u32_at(&bytes, 12) == index => {
            Ok(StripeFile::Valid(array_at(&bytes, 16)))
        }
        FORMAT_VERSION => Ok(StripeFile::Damaged),
        found => {
            let (file, supported) = (folder.path.join(name), FORMAT_VERSION);
            Err(CatalogError::UnsupportedVersion { file, found, supported })
        }
    }
}

fn encode(index: u32, identity: &[u8; 16]) -> [u8; STRIPE_BYTES] {
    let mut bytes = [0; STRIPE_BYTES];
    put(&mut bytes, 0, &MAGIC);
    put(&mut bytes, 8, &FORMAT_VERSION.to_le_bytes());
    put(&mut bytes, 12, &index.to_le_bytes());
    put(&mut bytes, 16, identity);
    let sum = crc(&bytes[..END]);
    put(&mut bytes, END, &sum.to_le_bytes());
    bytes
}
