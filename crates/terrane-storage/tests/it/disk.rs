//! The guarantees of disk files.

use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};

use terrane_core::{
    Alignment, Allocate, ByteCount, Capability, CapabilityStatus, Durability, Memory, Region,
    RegionRequest, Requirement, StorageKind,
};
use terrane_storage::{
    DiskAllocator, DiskFile, DiskOptions, IoFile, IoRequest, NamedFileAllocator, StorageError,
};
use terrane_storage::{SystemAllocator, SystemOptions};

use crate::support::{count, drain, entries, queues, skipped};

const OPTIONS: DiskOptions = DiskOptions {
    direct: Requirement::Preferred,
    preallocate: Requirement::Preferred,
    unnamed: Requirement::Preferred,
    durability: Durability::None,
    refuse_links: false,
};

#[test]
fn scratch_files_have_no_name() {
    let directory = tempfile::tempdir().unwrap();
    for unnamed in [Requirement::Preferred, Requirement::Off] {
        let options = DiskOptions { unnamed, ..OPTIONS };
        let file = DiskFile::scratch(directory.path(), count(5000), &options).unwrap();
        assert_eq!(entries(directory.path()), 0);
        assert!(file.is_scratch());
        assert_eq!(file.kind(), StorageKind::Disk);
        assert_eq!(file.length(), count(8192), "whole granules");
        let other = DiskFile::scratch(directory.path(), count(5000), &options).unwrap();
        assert_ne!(file.handle().identity, other.handle().identity);
    }
}

#[test]
fn a_file_of_zero_bytes_uses_no_block() {
    let directory = tempfile::tempdir().unwrap();
    let allocator = DiskAllocator::new(directory.path(), OPTIONS).unwrap();
    let file = allocator.allocate(&RegionRequest::new(ByteCount::ZERO)).unwrap();
    assert_eq!(file.length(), ByteCount::ZERO);
    // SAFETY: the file keeps the descriptor open.
    let descriptor = unsafe { BorrowedFd::borrow_raw(file.handle().descriptor) };
    let metadata = std::fs::File::from(descriptor.try_clone_to_owned().unwrap()).metadata();
    assert_eq!(metadata.unwrap().blocks(), 0);
    file.sync().unwrap();
}

#[test]
fn named_files_stay_and_only_their_owner_may_read_them() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    let options = DiskOptions { durability: Durability::Full, ..OPTIONS };
    let file = DiskFile::create_new(&path, count(4096), &options).unwrap();
    assert_eq!(file.path(), path);
    file.sync().unwrap();
    drop(file);
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (4096, 0o600));

    let again = DiskFile::open_existing(&path, count(4096), &OPTIONS).unwrap();
    assert_eq!(again.handle().identity.inode, metadata.ino());
    drop(again);
    assert!(path.exists());
}

#[test]
fn an_existing_file_keeps_its_bytes_and_its_length() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("odd");
    std::fs::write(&path, [3; 5001]).unwrap();
    let file = DiskFile::open_existing(&path, count(5000), &OPTIONS).unwrap();
    assert_eq!(file.length(), count(5001));
    drop(file);
    assert_eq!(std::fs::read(&path).unwrap(), [3; 5001]);
}

#[test]
fn both_descriptors_of_a_file_that_is_opened_for_reading_cannot_write() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("read");
    std::fs::write(&path, [3; 8192]).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
    let file = DiskFile::open_read_only(&path, count(8192), &OPTIONS).unwrap();
    let handle = file.handle();
    let descriptors = [Some(handle.descriptor), handle.direct.map(|d| d.descriptor)];
    for descriptor in descriptors.into_iter().flatten() {
        // SAFETY: the call takes plain numbers.
        let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
        assert_eq!(flags & libc::O_ACCMODE, libc::O_RDONLY);
    }
    let missing = DiskFile::open_read_only(&directory.path().join("none"), count(1), &OPTIONS);
    assert!(matches!(missing, Err(StorageError::NotFound { .. })));
}

#[test]
fn both_descriptors_close_on_exec() {
    let directory = tempfile::tempdir().unwrap();
    let file = DiskFile::scratch(directory.path(), count(4096), &OPTIONS).unwrap();
    let handle = file.handle();
    let descriptors = [Some(handle.descriptor), handle.direct.map(|d| d.descriptor)];
    for descriptor in descriptors.into_iter().flatten() {
        // SAFETY: the call takes plain numbers.
        let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFD) };
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    }
}

#[test]
fn blocks_are_reserved_on_request() {
    let directory = tempfile::tempdir().unwrap();
    for (preallocate, wanted) in [(Requirement::Preferred, true), (Requirement::Off, false)] {
        let options = DiskOptions { preallocate, ..OPTIONS };
        let path = directory.path().join(format!("{preallocate:?}"));
        let file = DiskFile::create_new(&path, ByteCount::mib(1), &options).unwrap();
        let report = file.capabilities();
        let status = report.status(&Capability::Preallocation).unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(metadata.len(), 1 << 20);
        if wanted && *status != CapabilityStatus::Granted {
            skipped("blocks_are_reserved_on_request", format!("{status:?}"));
        } else {
            assert_eq!(metadata.blocks() * 512 >= 1 << 20, wanted, "{status:?}");
        }
    }
}

#[test]
fn an_existing_file_is_extended_and_its_blocks_are_reserved_again() {
    let test = "an_existing_file_is_extended_and_its_blocks_are_reserved_again";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("short");
    let missing = DiskFile::open_extended(&path, count(1), &OPTIONS);
    assert!(matches!(missing, Err(StorageError::NotFound { .. })));
    std::fs::write(&path, [3; 5001]).unwrap();
    let sparse = DiskOptions { preallocate: Requirement::Off, ..OPTIONS };
    for (bytes, expected) in [(1 << 20, 1 << 20), (4096, 1 << 20)] {
        let file = DiskFile::open_extended(&path, count(bytes), &sparse).unwrap();
        assert_eq!(file.length(), count(expected));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), expected);
    }
    let bytes = std::fs::read(&path).unwrap();
    assert!(bytes[..5001].iter().all(|&byte| byte == 3));
    assert!(bytes[5001..].iter().all(|&byte| byte == 0));
    let reserving = DiskOptions { preallocate: Requirement::Preferred, ..OPTIONS };
    let file = DiskFile::open_extended(&path, ByteCount::mib(1), &reserving).unwrap();
    let report = file.capabilities();
    let status = report.status(&Capability::Preallocation).unwrap();
    if *status != CapabilityStatus::Granted {
        return skipped(test, format!("{status:?}"));
    }
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 >= 1 << 20);
}

/// The report and the handle agree, and direct I/O works with exactly the alignment of the handle.
#[test]
fn direct_io_works_with_the_alignment_of_the_handle() {
    let test = "direct_io_works_with_the_alignment_of_the_handle";
    // Under the target directory, because the system's directory for temporary files may be in memory.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = DiskFile::scratch(directory.path(), ByteCount::mib(1), &OPTIONS).unwrap();
    let report = file.capabilities();
    let Some(direct) = file.handle().direct else {
        assert!(matches!(report.status(&Capability::DirectIo), Some(CapabilityStatus::Refused(_))));
        return skipped(test, report);
    };
    assert_eq!(report.status(&Capability::DirectIo), Some(&CapabilityStatus::Granted));
    let system = SystemAllocator::new(SystemOptions::default());
    let memory = system.allocate_memory(&RegionRequest::new(ByteCount::mib(1))).unwrap();
    let at = |offset| terrane_storage::IoBuffer {
        address: memory.location().as_host().unwrap().checked_add(count(offset)).unwrap(),
        length: count(direct.offset_alignment.get()),
    };
    for mut queue in queues(test, 4) {
        let target = IoFile::direct(&file.handle()).unwrap();
        let block = direct.offset_alignment.get();
        let pieces = [at(direct.memory_alignment.get()), at(64 << 10)];
        // SAFETY: memory and file outlive the drain.
        unsafe { queue.submit(&IoRequest::write(1, target, count(block), &pieces)) }.unwrap();
        assert_eq!(drain(&mut queue)[0].outcome, Ok(()));
        // SAFETY: memory and file outlive the drain.
        unsafe { queue.submit(&IoRequest::read(2, target, count(1), &pieces)) }.unwrap();
        let failure = drain(&mut queue).remove(0).outcome.unwrap_err();
        assert!(failure.to_string().contains("multiples"), "{failure}");
    }
}

#[test]
fn memory_file_systems_have_no_direct_io() {
    let directory = std::path::Path::new("/dev/shm");
    if !directory.is_dir() {
        return skipped("memory_file_systems_have_no_direct_io", "no /dev/shm");
    }
    let file = DiskFile::scratch(directory, count(4096), &OPTIONS).unwrap();
    assert_eq!(file.handle().direct, None);
    let report = file.capabilities();
    assert!(
        matches!(report.status(&Capability::DirectIo), Some(CapabilityStatus::Refused(_))),
        "{report}"
    );

    let options = DiskOptions { direct: Requirement::Off, ..OPTIONS };
    let file = DiskFile::scratch(directory, count(4096), &options).unwrap();
    assert_eq!(
        file.capabilities().status(&Capability::DirectIo),
        Some(&CapabilityStatus::NotTried)
    );
}

#[test]
fn the_allocators_regions_are_disjoint_and_outlive_it() {
    let directory = tempfile::tempdir().unwrap();
    let allocator = DiskAllocator::new(directory.path(), OPTIONS).unwrap();
    assert!(allocator.limits().alignment >= Alignment::PAGE);
    assert_eq!(allocator.limits().alignment, allocator.limits().granule);
    let request = RegionRequest::new(count(10_000)).aligned_to(Alignment::HUGE_PAGE);
    let regions: Vec<Region> =
        (0..3).map(|_| Region::new(allocator.allocate(&request).unwrap())).collect();
    drop(allocator);
    for (index, region) in regions.iter().enumerate() {
        assert_eq!(region.length(), count(12_288));
        assert!(regions[..index].iter().all(|other| !other.span().overlaps(&region.span())));
        let position = region.location().as_file().unwrap();
        // SAFETY: the region keeps the descriptor open.
        let descriptor = unsafe { BorrowedFd::borrow_raw(position.file.descriptor) };
        let file = std::fs::File::from(descriptor.try_clone_to_owned().unwrap());
        file.write_all_at(b"terrane", position.offset.get()).unwrap();
        let mut back = [1; 8];
        file.read_exact_at(&mut back, position.offset.get()).unwrap();
        assert_eq!(back, *b"terrane\0", "fresh bytes are zero");
    }
}

#[test]
fn a_named_file_allocator_creates_its_file_once_and_not_for_zero_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("blocks");
    let allocator = NamedFileAllocator::new(&path, OPTIONS).unwrap();
    assert_eq!(entries(directory.path()), 0, "no file before the first request");
    allocator.allocate(&RegionRequest::new(ByteCount::ZERO)).unwrap();
    allocator.allocate(&RegionRequest::new(count(u64::MAX))).unwrap_err();
    assert_eq!(entries(directory.path()), 0);
    let file = allocator.allocate(&RegionRequest::new(count(5000))).unwrap();
    assert_eq!((file.path(), file.is_scratch(), file.length()), (&*path, false, count(8192)));
    allocator.allocate(&RegionRequest::new(count(1))).unwrap_err();
    drop(file);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 8192, "it stays");
}

#[test]
fn links_are_followed_unless_the_options_refuse_them() {
    let directory = tempfile::tempdir().unwrap();
    let [target, link] = ["target", "link"].map(|name| directory.path().join(name));
    drop(DiskFile::create_new(&target, ByteCount::kib(4), &OPTIONS).unwrap());
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let refusing = DiskOptions { refuse_links: true, ..OPTIONS };
    for open in [DiskFile::open_existing, DiskFile::open_extended, DiskFile::open_read_only] {
        assert!(open(&link, ByteCount::kib(4), &OPTIONS).is_ok());
        assert!(open(&target, ByteCount::kib(4), &refusing).is_ok());
        let error = open(&link, ByteCount::kib(4), &refusing).unwrap_err();
        let is_right = matches!(error, StorageError::NotAFile { found: "a symbolic link", .. });
        assert!(is_right, "{error}");
    }
    // Links in the path of the directory are followed.
    let below = directory.path().join("below");
    std::os::unix::fs::symlink(directory.path(), &below).unwrap();
    assert!(DiskFile::open_existing(&below.join("target"), ByteCount::kib(4), &refusing).is_ok());
}
