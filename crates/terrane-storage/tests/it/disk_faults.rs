//! Files that cannot be created or opened. Nothing remains after the error.

use std::ffi::{CString, OsStr};
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};

use terrane_core::{
    Allocate, ByteCount, Capability, CapabilityStatus, Memory, Reason, RegionRequest, Requirement,
};
use terrane_storage::{
    DiskAllocator, DiskFile, DiskOptions, IoBuffer, IoFile, IoQueue, IoQueueOptions, IoRequest,
    StorageError,
};
use terrane_testkit::mounted::tmpfs;
use terrane_testkit::process::{forbid, in_child};

use crate::support::{
    ResourceUsage, buffer, count, entries, ignore_limit_signal, limit_file_size, skipped,
};

const SPARSE: DiskOptions = DiskOptions {
    direct: Requirement::Preferred,
    preallocate: Requirement::Off,
    unnamed: Requirement::Preferred,
    durability: terrane_core::Durability::None,
    refuse_links: false,
};

/// Every way to create a file, with each way to set its length.
fn every_creation(directory: &Path, bytes: ByteCount) -> Vec<StorageError> {
    let mut errors = Vec::new();
    for preallocate in [Requirement::Preferred, Requirement::Off] {
        for unnamed in [Requirement::Preferred, Requirement::Off] {
            let options = DiskOptions { preallocate, unnamed, ..SPARSE };
            errors.extend(DiskFile::scratch(directory, bytes, &options).err());
        }
        let options = DiskOptions { preallocate, ..SPARSE };
        errors.extend(DiskFile::create_new(&directory.join("new"), bytes, &options).err());
    }
    errors
}

#[test]
fn paths_that_name_no_usable_file() {
    let directory = tempfile::tempdir().unwrap();
    let join = |name: &str| directory.path().join(name);
    let open = |path: &Path, bytes| DiskFile::open_existing(path, count(bytes), &SPARSE);

    let nul = directory.path().join(OsStr::from_bytes(b"a\0b"));
    for error in [
        open(&nul, 1).unwrap_err(),
        DiskFile::create_new(&nul, count(1), &SPARSE).unwrap_err(),
        DiskFile::scratch(&nul, count(1), &SPARSE).unwrap_err(),
    ] {
        assert!(matches!(error, StorageError::PathContainsNul { .. }), "{error:?}");
    }
    for error in [
        open(&join("missing"), 0).unwrap_err(),
        DiskFile::create_new(&join("missing/new"), count(1), &SPARSE).unwrap_err(),
        DiskFile::scratch(&join("missing"), count(1), &SPARSE).unwrap_err(),
    ] {
        assert!(matches!(error, StorageError::NotFound { .. }), "{error:?}");
    }

    let fifo = join("fifo");
    let path = CString::new(fifo.as_os_str().as_bytes()).unwrap();
    // SAFETY: the string is NUL-terminated and outlives the call.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    for (path, expected) in [
        (fifo.as_path(), "a FIFO"),
        (directory.path(), "a directory"),
        (Path::new("/dev/null"), "a device"),
    ] {
        let error = open(path, 0).unwrap_err();
        assert!(
            matches!(error, StorageError::NotAFile { found, .. } if found == expected),
            "{error:?}"
        );
    }
    // Readable by all users and writable by no user, not even root.
    let error = open(Path::new("/proc/sys/kernel/osrelease"), 0).unwrap_err();
    assert!(matches!(error, StorageError::NotWritable { .. }), "{error:?}");
}

#[test]
fn existing_files_are_never_changed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("old");
    std::fs::write(&path, b"precious").unwrap();
    let error = DiskFile::create_new(&path, count(1), &SPARSE).unwrap_err();
    assert!(matches!(error, StorageError::AlreadyExists { .. }));
    let error = DiskFile::open_existing(&path, count(9), &SPARSE).unwrap_err();
    assert!(matches!(
        error,
        StorageError::FileTooShort { length, needed, .. }
            if length == count(8) && needed == count(9)
    ));
    let options = DiskOptions { direct: Requirement::Required, ..SPARSE };
    let _ = DiskFile::open_existing(&path, count(8), &options);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn a_directory_without_write_permission() {
    // No user can create a file there, not even root.
    for unnamed in [Requirement::Preferred, Requirement::Off] {
        let options = DiskOptions { unnamed, ..SPARSE };
        for error in [
            DiskFile::scratch(Path::new("/proc"), count(1), &options).unwrap_err(),
            DiskFile::create_new(Path::new("/proc/new"), count(1), &options).unwrap_err(),
        ] {
            assert!(matches!(error, StorageError::NotWritable { .. }), "{error:?}");
        }
    }
}

#[test]
fn the_next_scratch_file_removes_the_file_of_a_killed_process() {
    let test = "disk_faults::the_next_scratch_file_removes_the_file_of_a_killed_process";
    in_child(test, || {
        let directory = tempfile::tempdir().unwrap();
        let named = DiskOptions { unnamed: Requirement::Off, ..SPARSE };
        // A process that cannot unlink leaves the same file as one that is killed just before the
        // unlink.
        let thread = std::thread::scope(|scope| {
            let leave = || {
                forbid(&[libc::SYS_unlink, libc::SYS_unlinkat], libc::EPERM)?;
                DiskFile::scratch(directory.path(), count(1), &named).unwrap_err();
                Ok(())
            };
            scope.spawn(leave).join().unwrap()
        });
        if let Err(error) = thread {
            let error: std::io::Error = error;
            return skipped(test, error);
        }
        assert_eq!(entries(directory.path()), 1, "the file was left behind");
        let _file = DiskFile::scratch(directory.path(), count(1), &named).unwrap();
        assert_eq!(entries(directory.path()), 0);

        // A file with bytes belongs to another program, even under this name.
        let precious = directory.path().join(".terrane-scratch-0");
        std::fs::write(&precious, b"precious").unwrap();
        let _file = DiskFile::scratch(directory.path(), count(1), &named).unwrap();
        assert_eq!(std::fs::read(&precious).unwrap(), b"precious");
    });
}

#[test]
fn scratch_files_are_made_by_many_threads_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let named = DiskOptions { unnamed: Requirement::Off, ..SPARSE };
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    DiskFile::scratch(directory.path(), count(1), &named).unwrap();
                }
            });
        }
    });
    assert_eq!(entries(directory.path()), 0);
}

#[test]
fn a_file_above_the_limit_on_sizes_is_refused_before_the_kernel_sends_its_signal() {
    let test = "a_file_above_the_limit_on_sizes_is_refused_before_the_kernel_sends_its_signal";
    in_child(&format!("disk_faults::{test}"), || {
        let directory = tempfile::tempdir().unwrap();
        limit_file_size((1 << 20) - 1);
        // The second length is below the limit before it is rounded up to whole pages.
        for bytes in [2 << 20, (1 << 20) - 1] {
            let errors = every_creation(directory.path(), count(bytes));
            assert_eq!(errors.len(), 6);
            assert!(errors.iter().all(StorageError::is_exhaustion), "{errors:?}");
        }
        assert_eq!(entries(directory.path()), 0);
        DiskFile::scratch(directory.path(), count(1 << 19), &SPARSE).unwrap();
    });
}

#[test]
fn no_space_leaves_nothing_behind() {
    in_child("disk_faults::no_space_leaves_nothing_behind", || {
        let directory = tempfile::tempdir().unwrap();
        let _mounted = match tmpfs(directory.path(), 256 << 10) {
            Ok(mounted) => mounted,
            Err(error) => return skipped("no_space_leaves_nothing_behind", error),
        };
        let before = ResourceUsage::now().descriptors;
        let errors = every_creation(directory.path(), ByteCount::mib(1));
        // The three creations that reserve blocks; the others are sparse.
        assert_eq!(errors.len(), 3, "{errors:?}");
        for error in &errors {
            assert!(matches!(error, StorageError::NoSpace { .. }), "{error:?}");
        }
        std::fs::remove_file(directory.path().join("new")).unwrap();
        assert_eq!(entries(directory.path()), 0);
        assert_eq!(ResourceUsage::now().descriptors, before);

        let allocator = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
        let error = allocator.allocate(&RegionRequest::new(ByteCount::mib(1))).unwrap_err();
        assert!(error.is_exhaustion(), "{error:?}");
        allocator.allocate(&RegionRequest::new(ByteCount::kib(64))).unwrap();
    });
}

#[test]
fn a_file_that_is_long_enough_opens_on_a_full_disk() {
    in_child("disk_faults::a_file_that_is_long_enough_opens_on_a_full_disk", || {
        let directory = tempfile::tempdir().unwrap();
        let _mounted = match tmpfs(directory.path(), 256 << 10) {
            Ok(mounted) => mounted,
            Err(error) => return skipped("a_file_that_is_long_enough_opens_on_a_full_disk", error),
        };
        let path = directory.path().join("sparse");
        drop(DiskFile::create_new(&path, ByteCount::mib(1), &SPARSE).unwrap());
        let preferred = DiskOptions { preallocate: Requirement::Preferred, ..SPARSE };
        let file = DiskFile::open_extended(&path, ByteCount::mib(1), &preferred).unwrap();
        let report = file.capabilities();
        let status = report.status(&Capability::Preallocation);
        assert!(
            matches!(status, Some(CapabilityStatus::Refused(Reason::Os(error))) if error.code == libc::ENOSPC),
            "{status:?}"
        );
        let error = DiskFile::open_extended(&path, ByteCount::mib(2), &preferred).unwrap_err();
        assert!(matches!(error, StorageError::NoSpace { .. }), "{error:?}");
        let required = DiskOptions { preallocate: Requirement::Required, ..SPARSE };
        let error = DiskFile::open_extended(&path, ByteCount::mib(1), &required).unwrap_err();
        assert!(matches!(error, StorageError::Capability { .. }), "{error:?}");
    });
}

#[test]
fn a_limit_on_file_sizes_leaves_nothing_behind() {
    in_child("disk_faults::a_limit_on_file_sizes_leaves_nothing_behind", || {
        let directory = tempfile::tempdir().unwrap();
        ignore_limit_signal();
        limit_file_size(1 << 20);
        let before = ResourceUsage::now().descriptors;
        let errors = every_creation(directory.path(), ByteCount::mib(2));
        assert_eq!(errors.len(), 6);
        for error in &errors {
            assert!(error.is_exhaustion(), "{error:?}");
        }
        assert_eq!(entries(directory.path()), 0);
        assert_eq!(ResourceUsage::now().descriptors, before);
    });
}

#[test]
fn impossible_lengths_leave_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    for bytes in [u64::MAX, u64::MAX - 8192, 1 << 63, i64::MAX as u64 - 4096] {
        let errors = every_creation(directory.path(), count(bytes));
        assert_eq!(errors.len(), 6, "{bytes}");
        assert_eq!(entries(directory.path()), 0);
    }
}

#[test]
fn a_requirement_that_is_not_met_leaves_nothing_behind() {
    let shm = Path::new("/dev/shm");
    let Ok(directory) = tempfile::tempdir_in(shm) else {
        return skipped("a_requirement_that_is_not_met_leaves_nothing_behind", "no /dev/shm");
    };
    let options = DiskOptions { direct: Requirement::Required, ..SPARSE };
    let path = directory.path().join("new");
    for error in [
        DiskFile::create_new(&path, count(4096), &options).unwrap_err(),
        DiskFile::scratch(directory.path(), count(4096), &options).unwrap_err(),
        DiskAllocator::new(directory.path(), options).unwrap_err(),
    ] {
        assert!(matches!(error, StorageError::Capability(_)), "{error:?}");
    }
    assert_eq!(entries(directory.path()), 0);

    // An existing file stays.
    std::fs::write(&path, [0; 4096]).unwrap();
    DiskFile::open_existing(&path, count(4096), &options).unwrap_err();
    assert!(path.exists());
}

/// The child writes only to a scratch file until it is killed.
#[test]
fn a_killed_process_leaves_no_scratch_file() {
    const DIRECTORY: &str = "TERRANE_STORAGE_KILLED_IN";
    #[expect(clippy::disallowed_methods, reason = "the child reads the directory")]
    if let Some(directory) = std::env::var_os(DIRECTORY) {
        write_until_killed(Path::new(&directory));
    }
    let directory = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["disk_faults::a_killed_process_leaves_no_scratch_file", "--exact", "--nocapture"])
        .env(DIRECTORY, directory.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("writing")), "the child did not start");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(entries(directory.path()), 0);
}

fn write_until_killed(directory: &Path) -> ! {
    // An alarm, in case the parent is killed. SAFETY: the call takes plain numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let files: Vec<DiskFile> = [Requirement::Preferred, Requirement::Off]
        .map(|unnamed| {
            let options = DiskOptions { unnamed, ..SPARSE };
            DiskFile::scratch(directory, ByteCount::mib(8), &options).unwrap()
        })
        .into();
    let mut queue = IoQueue::new(&IoQueueOptions::default()).unwrap();
    let mut bytes = vec![1_u8; 1 << 20];
    let pieces: [IoBuffer; 1] = [buffer(&mut bytes)];
    let mut announced = false;
    loop {
        for file in &files {
            for token in 0..8 {
                let target = IoFile::buffered(&file.handle());
                let request = IoRequest::write(token, target, count(token << 20), &pieces);
                // SAFETY: this function owns all values, and never returns.
                unsafe { queue.submit(&request) }.unwrap();
            }
        }
        queue.flush().unwrap();
        if !announced {
            println!("writing");
            announced = true;
        }
        while queue.in_flight() > 0 {
            queue.wait(None, &mut Vec::new()).unwrap();
        }
    }
}
