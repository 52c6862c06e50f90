//! Slab files: their names, slots and syncs.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use terrane_core::convert::to_u64;
use terrane_core::sync::lock;
use terrane_core::{
    Alignment, Allocate, ByteCount, Capability, CapabilityReport, CapabilityStatus, Durability,
    Memory, OsError, Reason, Requirement,
};
use terrane_storage::{DiskAllocator, DiskFile, DiskOptions, IoFile, StorageError};

use crate::disk::GroupSlots;
use crate::error::StoreError;
use crate::slab::options::SlabOptions;

/// The slab files of all groups.
#[derive(Debug)]
pub(super) struct SlabFiles {
    groups: Vec<SlabGroup>,
    granule: Alignment,
    durability: Durability,
    pub(super) capabilities: CapabilityReport,
}

#[derive(Debug)]
struct SlabGroup {
    slots: GroupSlots,
    /// The bytes between two slots.
    stride: u64,
    /// One for each directory.
    files: Vec<SlabFile>,
}

/// One slab file.
#[derive(Debug)]
pub(super) struct SlabFile {
    file: DiskFile,
    sync: SyncState,
}

/// The place of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlabPlace<'a> {
    pub(super) file: &'a SlabFile,
    pub(super) offset: u64,
}

impl SlabFiles {
    pub(super) fn open(
        folders: &[PathBuf],
        groups: &[GroupSlots],
        options: &SlabOptions,
    ) -> Result<Self, StoreError> {
        if folders.is_empty() {
            return Err(StoreError::NoDirectory);
        }
        let (granule, is_refused) = granule_for(folders, options)?;
        let mut options = *options;
        if is_refused {
            options.disk.direct = Requirement::Off;
        }
        let mut files = Self {
            groups: Vec::new(),
            granule,
            durability: options.disk.durability,
            capabilities: CapabilityReport::default(),
        };
        for (number, &slots) in groups.iter().enumerate() {
            let group = files.open_group(folders, number, slots, &options)?;
            files.groups.push(group);
        }
        if is_refused {
            let reason =
                Reason::Needs("slots that are aligned for it: a store that is created again");
            let status = CapabilityStatus::Refused(reason);
            files.capabilities.record(Capability::DirectIo, Requirement::Preferred, status);
        }
        Ok(files)
    }

    fn open_group(
        &mut self,
        folders: &[PathBuf],
        number: usize,
        slots: GroupSlots,
        options: &SlabOptions,
    ) -> Result<SlabGroup, StoreError> {
        let GroupSlots { slots: count, slot_bytes, .. } = slots;
        let too_large = || StoreError::SlotsTooLarge { group: number, slots: count, slot_bytes };
        let stride = ByteCount::new(slot_bytes).align_up(self.granule).map_err(|_| too_large())?;
        let mut files = Vec::new();
        for (index, folder) in folders.iter().enumerate() {
            let here = slots_in(index, folders.len(), count);
            let bytes = stride.checked_mul("slots", here).map_err(|_| too_large())?;
            if i64::try_from(bytes.get()).is_err() {
                return Err(too_large());
            }
            let path = folder.join(format!("slab.{number}.{index:03}"));
            let file = open_file(&path, bytes, options)?;
            let report = file.capabilities();
            let known = self.capabilities.outcomes().to_vec();
            let new = report.outcomes().iter().filter(|outcome| !known.contains(outcome));
            self.capabilities.extend(new.cloned());
            files.push(SlabFile { file, sync: SyncState::new() });
        }
        Ok(SlabGroup { slots, stride: stride.get(), files })
    }

    /// Requests begin and end at multiples of it.
    pub(super) const fn granule(&self) -> Alignment {
        self.granule
    }

    pub(super) fn stride(&self, group: u16) -> u64 {
        self.groups.get(usize::from(group)).map_or(0, |group| group.stride)
    }

    /// The bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.files().map(|file| file.file.length().get()).sum()
    }

    /// The number of directories.
    pub(super) fn folders(&self) -> u64 {
        self.groups.first().map_or(1, |group| to_u64(group.files.len()))
    }

    fn files(&self) -> impl Iterator<Item = &SlabFile> {
        self.groups.iter().flat_map(|group| &group.files)
    }

    /// The place of a slot. `None` if there is no such slot, or it has no room for `bytes` bytes.
    pub(super) fn place(&self, group: u16, slot: u32, bytes: u64) -> Option<SlabPlace<'_>> {
        let group = self.groups.get(usize::from(group))?;
        let fits = slot < group.slots.slots && (1..=group.slots.slot_bytes).contains(&bytes);
        let count = to_u64(group.files.len());
        let index = ByteCount::new(u64::from(slot) % count).to_usize();
        let file = group.files.get(index).filter(|_| fits)?;
        // The file's length was computed without overflow.
        Some(SlabPlace { file, offset: u64::from(slot) / count * group.stride })
    }

    /// Syncs every file that was written since its last sync.
    pub(super) fn sync(&self) -> Result<(), StoreError> {
        if self.durability == Durability::None {
            return Ok(());
        }
        let failed = |file: &SlabFile, source| StoreError::SyncFailed {
            path: file.file.path().to_owned(),
            source,
        };
        let mut outcome = Ok(());
        // A failure does not keep the other files from their sync.
        for file in self.files() {
            let result = file.sync.run(|| sync_file(&file.file));
            outcome = outcome.and(result.map_err(|source| failed(file, source)));
        }
        outcome
    }

    /// Frees the disk blocks of slots.
    pub(super) fn punch(&self, group: u16, slots: Range<u32>) -> Result<(), StoreError> {
        let Some(group) = self.groups.get(usize::from(group)) else { return Ok(()) };
        let end = slots.end.min(group.slots.slots);
        for (index, file) in group.files.iter().enumerate() {
            let first = slots_in(index, group.files.len(), slots.start);
            let count = slots_in(index, group.files.len(), end).saturating_sub(first);
            if count == 0 {
                continue;
            }
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // The open descriptor, because the path may name another file by now.
            fallocate(&file.file, flags, first * group.stride, count * group.stride)
                .map_err(|error| at(file.file.path(), "fallocate", &error.into()))?;
        }
        Ok(())
    }
}

impl SlabFile {
    /// The file as the queue accesses it, the alignment of memory for that, and whether it is direct.
    pub(super) fn target(&self) -> (IoFile, u64, bool) {
        let handle = self.file.handle();
        match (IoFile::direct(&handle), handle.direct) {
            (Some(file), Some(direct)) => (file, direct.memory_alignment.get(), true),
            _ => (IoFile::buffered(&handle), 1, false),
        }
    }

    /// Notes that bytes were written, before that is reported.
    pub(super) fn note_write(&self) {
        self.sync.is_written.store(true, Ordering::Release);
    }
}

/// The number of slots before `end` that are in the file at `index` of `files`.
fn slots_in(index: usize, files: usize, end: u32) -> u64 {
    u64::from(end).saturating_sub(to_u64(index)).div_ceil(to_u64(files))
}

/// The state of a file's syncs.
#[derive(Debug)]
struct SyncState {
    /// Whether bytes were written since the last sync began.
    is_written: AtomicBool,
    /// Why a sync failed. It is locked during a sync, so that a second caller waits for the first.
    failure: Mutex<Option<OsError>>,
}

impl SyncState {
    fn new() -> Self {
        Self { is_written: AtomicBool::new(false), failure: Mutex::new(None) }
    }

    /// Calls `sync` if bytes were written since the last one. Once a sync has failed, it returns that
    /// error instead.
    fn run(&self, sync: impl FnOnce() -> Result<(), OsError>) -> Result<(), OsError> {
        let mut failure = lock(&self.failure);
        if let Some(error) = *failure {
            return Err(error);
        }
        if self.is_written.swap(false, Ordering::AcqRel) {
            sync().inspect_err(|error| *failure = Some(*error))?;
        }
        Ok(())
    }
}

fn sync_file(file: &DiskFile) -> Result<(), OsError> {
    file.sync().map_err(|error| match error {
        StorageError::NoSpace { source, .. }
        | StorageError::File { source, .. }
        | StorageError::NotWritable { source, .. } => source,
        _ => OsError::new("fdatasync", Errno::IO.raw_os_error()),
    })
}

/// Whether direct I/O, which needs slots at multiples of `needed`, is not used for slots at multiples of
/// `granule`.
fn refuses_direct(
    granule: Alignment,
    needed: Alignment,
    direct: Requirement,
) -> Result<bool, StoreError> {
    if needed <= granule {
        return Ok(false);
    }
    if direct == Requirement::Required {
        let (recorded, needed) = (granule.get(), needed.get());
        return Err(StoreError::SlotAlignment { recorded, needed });
    }
    Ok(true)
}

/// The alignment of slots, and whether direct I/O is not used because it needs a larger one.
pub(super) fn granule_for(
    folders: &[PathBuf],
    options: &SlabOptions,
) -> Result<(Alignment, bool), StoreError> {
    let needed = granule_of_all(folders, options)?;
    let granule = options.slot_alignment.unwrap_or(needed);
    Ok((granule, refuses_direct(granule, needed, options.disk.direct)?))
}

/// The alignment of requests that suits the file systems of all folders: a page or more.
fn granule_of_all(folders: &[PathBuf], options: &SlabOptions) -> Result<Alignment, StoreError> {
    let widest = |granule: Alignment, (index, folder): (usize, &PathBuf)| {
        Ok(granule.max(granule_of(index, folder, options)?))
    };
    folders.iter().enumerate().try_fold(Alignment::PAGE, widest)
}

/// The alignment of requests that the file system of `folder` needs, the `index`-th of the tier.
fn granule_of(index: usize, folder: &Path, options: &SlabOptions) -> Result<Alignment, StoreError> {
    let disk = options.disk;
    if !options.read_only {
        // The allocator tests a scratch file, whose blocks need not be reserved or synced.
        let disk =
            DiskOptions { preallocate: Requirement::Off, durability: Durability::None, ..disk };
        return Ok(DiskAllocator::new(folder, disk)?.limits().granule);
    }
    let path = folder.join(format!("slab.0.{index:03}"));
    let file = DiskFile::open_read_only(&path, ByteCount::ZERO, &disk);
    let direct = file.ok().and_then(|file| file.handle().direct);
    Ok(direct.map_or(Alignment::PAGE, |direct| direct.offset_alignment))
}

/// Opens a slab file, and creates or extends it if necessary. A process that was killed may have left
/// it too short, or its blocks were freed after a resize.
fn open_file(path: &Path, bytes: ByteCount, options: &SlabOptions) -> Result<DiskFile, StoreError> {
    let disk = &options.disk;
    if options.read_only {
        return Ok(DiskFile::open_read_only(path, bytes, disk)?);
    }
    match DiskFile::open_extended(path, bytes, disk) {
        Err(StorageError::NotFound { .. }) => {
            let file = DiskFile::create_new(path, bytes, disk)?;
            sync_creation(path, options.disk.durability)?;
            Ok(file)
        }
        opened => Ok(opened?),
    }
}

/// Makes the name of a new file durable.
fn sync_creation(path: &Path, durability: Durability) -> Result<(), StoreError> {
    let Some(folder) = path.parent().filter(|_| durability != Durability::None) else {
        return Ok(());
    };
    let directory = File::open(folder).map_err(|error| at(folder, "open", &error))?;
    directory.sync_all().map_err(|error| at(folder, "fsync", &error))
}

fn at(path: &Path, operation: &'static str, error: &std::io::Error) -> StoreError {
    StoreError::SlabFile { path: path.to_owned(), source: OsError::from_io(operation, error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_whose_sync_failed_is_never_synced_again() {
        let state = SyncState::new();
        state.run(|| panic!("nothing was written")).unwrap();
        state.is_written.store(true, Ordering::Release);
        let failure = OsError::new("fdatasync", 5);
        assert_eq!(state.run(|| Err(failure)), Err(failure));
        state.is_written.store(true, Ordering::Release);
        assert_eq!(state.run(|| panic!("a second sync")), Err(failure));
    }

    #[test]
    fn slots_that_are_not_aligned_for_direct_io_are_read_through_the_page_cache() {
        let [small, large] = [4096, 16_384].map(|bytes| Alignment::new(bytes).unwrap());
        for direct in [Requirement::Off, Requirement::Preferred, Requirement::Required] {
            assert!(!refuses_direct(large, small, direct).unwrap());
            assert!(!refuses_direct(large, large, direct).unwrap());
        }
        assert!(refuses_direct(small, large, Requirement::Preferred).unwrap());
        let error = refuses_direct(small, large, Requirement::Required).unwrap_err();
        let is_right =
            matches!(error, StoreError::SlotAlignment { recorded: 4096, needed: 16_384 });
        assert!(is_right, "{error}");
    }

    #[test]
    fn slots_alternate_between_files() {
        for files in 1..4 {
            for end in 0..9 {
                let counts: Vec<u64> =
                    (0..files).map(|index| slots_in(index, files, end)).collect();
                let expected: Vec<u64> = (0..files)
                    .map(|index| (0..end).filter(|slot| *slot as usize % files == index).count())
                    .map(to_u64)
                    .collect();
                assert_eq!(counts, expected);
            }
        }
    }
}
