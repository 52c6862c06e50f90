//! Both superblocks on disk: read, created, repaired and replaced.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use terrane_core::OsError;

use crate::disk::error::CatalogError;
use crate::disk::files::OpenMode;
use crate::disk::files::folder::{Folder, failure};
use crate::disk::format::names::{self, SUPERBLOCKS};
use crate::disk::format::namespace::{GroupSlots, Namespace};
use crate::disk::format::superblock::{FORMAT_VERSION, Found, SUPERBLOCK, Secret, Superblock};
use crate::disk::stripes::{Placement, Stripes, check_first};

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
    folder: &Folder,
    namespace: &Namespace,
    groups: &[GroupSlots],
    stripes: Option<&Stripes>,
) -> Result<Loaded, CatalogError> {
    let [first, second] = SUPERBLOCKS;
    let found = [read(folder, first)?, read(folder, second)?];
    for (name, found) in SUPERBLOCKS.iter().zip(&found) {
        match found {
            Some(Found::Version(found)) => return Err(unsupported(folder, name, *found)),
            Some(Found::TooMuch(error)) => return Err(error.as_ref().clone()),
            _ => {}
        }
    }
    let blocks = found.each_ref().map(|found| match found {
        Some(Found::Valid(block)) => Some(block.as_ref()),
        _ => None,
    });
    let generation = |block: Option<&Superblock>| block.map(|block| block.generation);
    let newer = usize::from(generation(blocks[1]) > generation(blocks[0]));
    let Some(newest) = blocks[newer] else {
        return create(folder, namespace, groups, (stripes, &found));
    };
    let differences = newest.differences(namespace, groups);
    if !differences.is_empty() {
        let directory = folder.path.clone();
        return Err(CatalogError::NamespaceDiffers { directory, differences });
    }
    if let Some(stripes) = stripes {
        stripes.check(&folder.path, (newest.placement, &newest.secret))?;
    }
    let mut superblock = newest.clone();
    let failed = |(name, error): (&str, OsError)| folder.failure(name, error);
    // The newer copy must be durable before the older one is overwritten.
    let (name, other) = (SUPERBLOCKS[newer], SUPERBLOCKS[1 - newer]);
    sync(folder, name)?;
    let repaired = blocks[0] != blocks[1];
    if superblock.groups != groups {
        superblock.groups = groups.to_vec();
        superblock.generation += 1;
        replace(folder, &superblock, [other, name]).map_err(failed)?;
    } else if repaired {
        replace(folder, &superblock, [other]).map_err(failed)?;
    } else {
        sync(folder, other)?;
    }
    Ok(Loaded { superblock, repaired })
}

/// The newer of the valid copies, without a change of any file.
pub(crate) fn newest(folder: &Folder) -> Result<Superblock, CatalogError> {
    let mut newest: Option<Superblock> = None;
    let (mut damaged, mut foreign) = (None, None);
    for name in SUPERBLOCKS {
        match read(folder, name)? {
            Some(Found::Valid(block))
                if newest.as_ref().is_none_or(|other| other.generation < block.generation) =>
            {
                newest = Some(*block);
            }
            Some(Found::Version(found)) => {
                return Err(unsupported(folder, name, found));
            }
            Some(Found::TooMuch(error)) => return Err(*error),
            // Damage of the first bytes looks like this, too. The other copy may be valid.
            Some(Found::Foreign) => foreign = Some(folder.path.join(name)),
            Some(Found::Damaged) => damaged = Some(name.to_owned()),
            Some(Found::Valid(_)) | None => {}
        }
    }
    newest.ok_or_else(|| match (foreign, damaged) {
        (Some(file), _) => CatalogError::ForeignSuperblock { file },
        (None, Some(file)) => {
            CatalogError::SuperblockDamaged { directory: folder.path.clone(), file }
        }
        (None, None) => CatalogError::NotFound { path: folder.path.join(SUPERBLOCKS[0]) },
    })
}

/// The placement that the newer of the valid copies records, and the secret, if one is valid. An opening checks
/// it again under its lock.
pub(crate) fn placement(folder: &Folder) -> Option<(Placement, Secret)> {
    let valid = SUPERBLOCKS.into_iter().filter_map(|name| match read(folder, name) {
        Ok(Some(Found::Valid(block))) => Some(block),
        _ => None,
    });
    valid.max_by_key(|block| block.generation).map(|block| (block.placement, block.secret))
}

/// Writes and syncs the copies, one after the other. An error has the name of the file.
pub(crate) fn replace<const N: usize>(
    folder: &Folder,
    superblock: &Superblock,
    order: [&'static str; N],
) -> Result<(), (&'static str, OsError)> {
    let bytes = superblock.bytes();
    order.into_iter().try_for_each(|name| {
        let file = folder.files.open(name, OpenMode::Create);
        let written =
            file.and_then(|file| file.write_at(&bytes, 0).and_then(|()| file.sync_data()));
        written.map_err(|error| (name, error))
    })
}

fn create(
    folder: &Folder,
    namespace: &Namespace,
    groups: &[GroupSlots],
    (stripes, found): (Option<&Stripes>, &[Option<Found>; 2]),
) -> Result<Loaded, CatalogError> {
    for (name, found) in SUPERBLOCKS.iter().zip(found) {
        if *found == Some(Found::Foreign) {
            return Err(CatalogError::ForeignSuperblock { file: folder.path.join(name) });
        }
    }
    if found.iter().all(Option::is_none) {
        check_first(folder)?;
    }
    // Journals are created after both superblocks and their names are durable. So without a
    // journal, the rest of a superblock was left by a creation that was cut short.
    let present = folder.list()?;
    let is_data = |name: &String| names::parse(name).is_some() || name.starts_with("slab.");
    if let Some(file) = present.into_iter().filter(is_data).min() {
        return Err(CatalogError::SuperblockDamaged { directory: folder.path.clone(), file });
    }
    let superblock = Superblock {
        generation: 1,
        epoch: 1,
        secret: Secret(random_secret().map_err(|error| failure(&folder.path, error))?),
        namespace: namespace.clone(),
        groups: groups.to_vec(),
        placement: stripes.map_or(Placement::default(), Stripes::placement),
    };
    if let Some(stripes) = stripes {
        stripes.create(&folder.path, &superblock.secret)?;
    }
    let written = replace(folder, &superblock, SUPERBLOCKS);
    written.map_err(|(name, error)| folder.failure(name, error))?;
    Ok(Loaded { superblock, repaired: false })
}

fn unsupported(folder: &Folder, name: &str, found: u32) -> CatalogError {
    let (file, supported) = (folder.path.join(name), FORMAT_VERSION);
    CatalogError::UnsupportedVersion { file, found, supported }
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

fn read(folder: &Folder, name: &str) -> Result<Option<Found>, CatalogError> {
    let file = match folder.files.open(name, OpenMode::Existing) {
        Err(error) if error.code == Errno::NOENT.raw_os_error() => return Ok(None),
        opened => opened.map_err(|error| folder.failure(name, error))?,
    };
    let mut bytes = vec![0; SUPERBLOCK];
    let length = file.read_at(&mut bytes, 0).map_err(|error| folder.failure(name, error))?;
    bytes.truncate(length);
    Ok(Some(Superblock::decode(&bytes)))
}

fn sync(folder: &Folder, name: &str) -> Result<(), CatalogError> {
    let file = folder.open(name, OpenMode::Existing)?;
    file.sync_data().map_err(|error| folder.failure(name, error))
}
