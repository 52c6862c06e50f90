//! Both superblocks on disk: read, created, repaired and replaced.

use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use terrane_core::OsError;

use super::error::CatalogError;
use super::failure::failure;
use super::files::{Files, OpenMode};
use super::names::{self, SUPERBLOCKS};
use super::namespace::{GroupSlots, Namespace};
use super::superblock::{FORMAT_VERSION, Found, SUPERBLOCK, Secret, Superblock};

/// The superblock of an open store.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub superblock: Superblock,
    /// Whether one copy was missing, old or damaged.
    pub repaired: bool,
}

/// Reads the superblock, or creates it in a directory without data.
///
/// Both copies are equal and durable afterwards: a process that was killed may have left one in the
/// page cache alone. Their names are durable after the caller's sync of the directory.
pub(crate) fn load(
    files: &dyn Files,
    directory: &Path,
    namespace: &Namespace,
    groups: &[GroupSlots],
) -> Result<Loaded, CatalogError> {
    let [first, second] = SUPERBLOCKS;
    let found = [read(files, directory, first)?, read(files, directory, second)?];
    for (name, found) in SUPERBLOCKS.iter().zip(&found) {
        if let Some(Found::Version(found)) = found {
            let (file, supported) = (directory.join(name), FORMAT_VERSION);
            return Err(CatalogError::UnsupportedVersion { file, found: *found, supported });
        }
    }
    let blocks = found.each_ref().map(|found| match found {
        Some(Found::Valid(block)) => Some(block.as_ref()),
        _ => None,
    });
    let generation = |block: Option<&Superblock>| block.map(|block| block.generation);
    let newer = usize::from(generation(blocks[1]) > generation(blocks[0]));
    let Some(newest) = blocks[newer] else {
        return create(files, directory, namespace, groups, &found);
    };
    let differences = newest.differences(namespace, groups);
    if !differences.is_empty() {
        let directory = directory.to_owned();
        return Err(CatalogError::NamespaceDiffers { directory, differences });
    }
    let mut superblock = newest.clone();
    // The newer copy must be durable before the older one is overwritten.
    let (name, other) = (SUPERBLOCKS[newer], SUPERBLOCKS[1 - newer]);
    sync(files, directory, name)?;
    let repaired = blocks[0] != blocks[1];
    if superblock.groups != groups {
        superblock.groups = groups.to_vec();
        superblock.generation += 1;
        replace(files, directory, &superblock, [other, name]).map_err(named)?;
    } else if repaired {
        let written = write(files, other, &superblock.bytes());
        written.map_err(|error| failure(&directory.join(other), error))?;
    } else {
        sync(files, directory, other)?;
    }
    Ok(Loaded { superblock, repaired })
}

/// The newer of the valid copies, without a change of any file.
pub(crate) fn newest(files: &dyn Files, directory: &Path) -> Result<Superblock, CatalogError> {
    let mut newest: Option<Superblock> = None;
    let mut damaged = None;
    for name in SUPERBLOCKS {
        match read(files, directory, name)? {
            Some(Found::Valid(block))
                if newest.as_ref().is_none_or(|other| other.generation < block.generation) =>
            {
                newest = Some(*block);
            }
            Some(Found::Version(found)) => {
                let (file, supported) = (directory.join(name), FORMAT_VERSION);
                return Err(CatalogError::UnsupportedVersion { file, found, supported });
            }
            Some(Found::Foreign) => {
                return Err(CatalogError::ForeignSuperblock { file: directory.join(name) });
            }
            Some(Found::Damaged) => damaged = Some(name.to_owned()),
            Some(Found::Valid(_)) | None => {}
        }
    }
    newest.ok_or_else(|| match damaged {
        Some(file) => CatalogError::SuperblockDamaged { directory: directory.to_owned(), file },
        None => CatalogError::NotFound { path: directory.join(SUPERBLOCKS[0]) },
    })
}

/// Writes and syncs one copy, then the other. An error names the file.
pub(crate) fn replace(
    files: &dyn Files,
    directory: &Path,
    superblock: &Superblock,
    order: [&str; 2],
) -> Result<(), (PathBuf, OsError)> {
    let bytes = superblock.bytes();
    order.iter().try_for_each(|name| {
        write(files, name, &bytes).map_err(|error| (directory.join(name), error))
    })
}

fn create(
    files: &dyn Files,
    directory: &Path,
    namespace: &Namespace,
    groups: &[GroupSlots],
    found: &[Option<Found>; 2],
) -> Result<Loaded, CatalogError> {
    for (name, found) in SUPERBLOCKS.iter().zip(found) {
        if *found == Some(Found::Foreign) {
            return Err(CatalogError::ForeignSuperblock { file: directory.join(name) });
        }
    }
    // Journals are created after both superblocks and their names are durable. Without them, what there is of a
    // superblock was left by a creation that was cut short.
    let present = files.list().map_err(|error| failure(directory, error))?;
    let is_data = |name: &String| names::parse(name).is_some() || name.starts_with("slab.");
    if let Some(file) = present.into_iter().filter(is_data).min() {
        return Err(CatalogError::SuperblockDamaged { directory: directory.to_owned(), file });
    }
    let superblock = Superblock {
        generation: 1,
        epoch: 1,
        secret: secret(directory)?,
        namespace: namespace.clone(),
        groups: groups.to_vec(),
    };
    replace(files, directory, &superblock, SUPERBLOCKS).map_err(named)?;
    Ok(Loaded { superblock, repaired: false })
}

fn named((file, error): (PathBuf, OsError)) -> CatalogError {
    failure(&file, error)
}

fn secret(directory: &Path) -> Result<Secret, CatalogError> {
    random_secret().map(Secret).map_err(|error| failure(directory, error))
}

/// Sixteen bytes that no other process can guess.
pub(crate) fn random_secret() -> Result<[u8; 16], OsError> {
    let mut secret = [0; 16];
    let mut filled = 0;
    while let Some(rest) = secret.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match getrandom(rest, GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(OsError::new("getrandom", error.raw_os_error())),
        }
    }
    Ok(secret)
}

fn read(files: &dyn Files, directory: &Path, name: &str) -> Result<Option<Found>, CatalogError> {
    let failed = |error| failure(&directory.join(name), error);
    let file = match files.open(name, OpenMode::Existing) {
        Err(error) if error.code == Errno::NOENT.raw_os_error() => return Ok(None),
        opened => opened.map_err(failed)?,
    };
    let mut bytes = vec![0; SUPERBLOCK];
    let length = file.read_at(&mut bytes, 0).map_err(failed)?;
    bytes.truncate(length);
    Ok(Some(Superblock::decode(&bytes)))
}

fn write(files: &dyn Files, name: &str, bytes: &[u8]) -> Result<(), OsError> {
    let file = files.open(name, OpenMode::Create)?;
    file.write_at(bytes, 0)?;
    file.sync_data()
}

fn sync(files: &dyn Files, directory: &Path, name: &str) -> Result<(), CatalogError> {
    let synced = files.open(name, OpenMode::Existing).and_then(|file| file.sync_data());
    synced.map_err(|error| failure(&directory.join(name), error))
}
