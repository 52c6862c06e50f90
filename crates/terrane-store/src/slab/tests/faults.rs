//! Full file systems, failed devices, refused calls and forked processes.

use terrane_core::{Durability, Requirement};
use terrane_storage::{DiskOptions, IoBackend, IoFailureReason};
use terrane_testkit::mounted::tmpfs;
use terrane_testkit::needs::or_skipped;
use terrane_testkit::process::{forbid, forbid_to_all_threads, in_child, in_fork};

use super::*;

const SPARSE: SlabOptions = SlabOptions {
    backend: IoBackend::Auto,
    registered: ByteCount::gib(4),
    disk: DiskOptions {
        direct: Requirement::Preferred,
        preallocate: Requirement::Off,
        unnamed: Requirement::Preferred,
        durability: Durability::Data,
        refuse_links: true,
    },
    depth: 4,
    request: ByteCount::mib(1),
    max_writes_while_reads_wait: 2,
    slot_alignment: None,
    read_only: false,
};

#[test]
fn a_full_file_system_refuses_the_files_and_leaves_nothing() {
    const TEST: &str =
        "slab::tests::faults::a_full_file_system_refuses_the_files_and_leaves_nothing";
    in_child(TEST, || {
        let folder = tempfile::tempdir().unwrap();
        let mounted = tmpfs(folder.path(), 1 << 20).map_err(Into::into);
        let Some(_mounted) = or_skipped(TEST, mounted) else { return };
        let paths = [folder.path().to_owned()];
        let groups = [group(4096, 16), group(1 << 20, 4)];
        let error = Slabs::open(&paths, &groups, &SlabOptions::default()).unwrap_err();
        let StoreError::Storage(StorageError::NoSpace { requested, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(requested, ByteCount::mib(4));
        assert!(!folder.path().join("slab.1.000").exists());
        let slabs = open_one(folder.path(), groups[0], &SlabOptions::default());
        write(&slabs, 15, &[1; 4096]);
        drop(slabs);
        // An existing file that cannot grow.
        let error = Slabs::open(&paths, &[group(4096, 2048)], &SlabOptions::default()).unwrap_err();
        assert!(matches!(error, StoreError::Storage(StorageError::NoSpace { .. })), "{error}");
    });
}

#[test]
fn a_write_without_space_makes_the_files_read_only() {
    const TEST: &str = "slab::tests::faults::a_write_without_space_makes_the_files_read_only";
    in_child(TEST, || {
        let folder = tempfile::tempdir().unwrap();
        let mounted = tmpfs(folder.path(), 4 << 20).map_err(Into::into);
        let Some(_mounted) = or_skipped(TEST, mounted) else { return };
        let slabs = open_one(folder.path(), group(1 << 20, 16), &SPARSE);
        let first = write(&slabs, 0, &[1; 1 << 20]);
        let mut memory: Vec<Guarded> = (1..16).map(|_| Guarded::new(&[(0, 1 << 20)])).collect();
        let results = Arc::new(Results::default());
        let requests = memory.iter_mut().enumerate().map(|(index, memory)| {
            let new = request(slot(index + 1), memory.buffers(), SlabDirection::Write);
            NewRequest { index, ..new }.to(&results)
        });
        let requests = requests.collect();
        // SAFETY: the memory is kept until all have ended.
        unsafe { slabs.submit(requests) };
        let ended = results.take(15);
        let is_full = |result: &SlabResult| matches!(result, Err(SlabFailure::Io(failure)) if failure.is_exhaustion());
        assert!(ended.iter().any(|(_, result)| is_full(result)), "{ended:?}");
        let refused = ended.iter().filter(|(_, r)| matches!(r, Err(SlabFailure::ReadOnly(_))));
        assert!(refused.count() >= 5, "{ended:?}");
        let Some(SlabFailure::ReadOnly(reason)) = slabs.refusal() else { panic!("not read-only") };
        assert!(matches!(*reason, StoreError::WriteFailed(_)), "{reason}");
        assert_eq!(read(&slabs, 0, 1 << 20, first).unwrap(), vec![1; 1 << 20]);
    });
}

#[test]
fn a_failed_device_makes_the_files_read_only_and_a_bad_sector_does_not() {
    const TEST: &str =
        "slab::tests::faults::a_failed_device_makes_the_files_read_only_and_a_bad_sector_does_not";
    in_child(TEST, || {
        for (call, is_write) in [(libc::SYS_preadv, false), (libc::SYS_pwritev, true)] {
            let folder = tempfile::tempdir().unwrap();
            let options = SlabOptions { backend: IoBackend::Threads, ..SlabOptions::default() };
            let slabs = open_one(folder.path(), group(4096, 4), &options);
            let sum = write(&slabs, 1, &[1; 4096]);
            let refused = forbid_to_all_threads(&[call], libc::EIO).map_err(Into::into);
            let Some(()) = or_skipped(TEST, refused) else { return };
            let mut memory = Guarded::new(&[(0, 4096)]);
            let direction = match is_write {
                true => SlabDirection::Write,
                false => SlabDirection::Read { checksum: sum },
            };
            let result = run(&slabs, request(1, memory.buffers(), direction));
            let Err(SlabFailure::Io(failure)) = result else { panic!("{result:?}") };
            assert!(
                matches!(failure.reason, IoFailureReason::Os(error) if error.code == libc::EIO)
            );
            let refusal = slabs.refusal();
            assert_eq!(matches!(refusal, Some(SlabFailure::ReadOnly(_))), is_write, "{refusal:?}");
        }
    });
}

#[test]
fn a_failed_sync_makes_the_files_read_only_and_is_not_repeated() {
    const TEST: &str =
        "slab::tests::faults::a_failed_sync_makes_the_files_read_only_and_is_not_repeated";
    in_child(TEST, || {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let paths: Vec<PathBuf> = folders.iter().map(|folder| folder.path().to_owned()).collect();
        let slabs = Slabs::open(&paths, &[group(4096, 4)], &SlabOptions::default()).unwrap();
        let sum = write(&slabs, 1, &[1; 4096]);
        slabs.sync().unwrap();
        write(&slabs, 1, &[1; 4096]);
        let outcome = thread::scope(|scope| {
            let sync = || forbid(&[libc::SYS_fdatasync], libc::EIO).map(|()| slabs.sync());
            scope.spawn(sync).join().unwrap()
        });
        let Some(outcome) = or_skipped(TEST, outcome.map_err(Into::into)) else { return };
        let check = |error: StoreError| {
            let StoreError::SyncFailed { path, source } = error else { panic!("{error}") };
            assert_eq!(path, paths[1].join("slab.0.001"));
            assert_eq!(source.code, libc::EIO);
        };
        check(outcome.unwrap_err());
        // This thread could sync, and does not.
        check(slabs.sync().unwrap_err());
        assert!(matches!(slabs.refusal(), Some(SlabFailure::ReadOnly(_))));
        let mut memory = Guarded::new(&[(0, 4096)]);
        let result = run(&slabs, request(0, memory.buffers(), SlabDirection::Write));
        assert!(matches!(result, Err(SlabFailure::ReadOnly(_))), "{result:?}");
        assert!(read(&slabs, 1, 4096, sum).is_ok());
    });
}

#[test]
fn a_queue_that_the_kernel_ends_turns_the_files_off() {
    const TEST: &str = "slab::tests::faults::a_queue_that_the_kernel_ends_turns_the_files_off";
    in_child(TEST, || {
        let folder = tempfile::tempdir().unwrap();
        let options = SlabOptions { backend: IoBackend::IoUring, ..SlabOptions::default() };
        let opened = Slabs::open(&[folder.path().to_owned()], &[group(4096, 4)], &options);
        let Some(slabs) = or_skipped(TEST, opened.map_err(Into::into)) else { return };
        write(&slabs, 1, &[1; 4096]);
        let refused = forbid_to_all_threads(&[libc::SYS_io_uring_enter], libc::EPERM);
        let Some(()) = or_skipped(TEST, refused.map_err(Into::into)) else { return };
        let mut memory = Guarded::new(&[(0, 4096)]);
        for _ in 0..3 {
            let result = run(&slabs, request(1, memory.buffers(), SlabDirection::Write));
            assert!(
                matches!(result, Err(SlabFailure::Io(_) | SlabFailure::Refused(_))),
                "{result:?}"
            );
        }
        assert!(matches!(slabs.refusal(), Some(SlabFailure::Refused(_))), "{:?}", slabs.refusal());
        slabs.close(in_a_second());
    });
}

#[test]
fn a_forked_process_gets_errors_and_joins_nothing() {
    const TEST: &str = "slab::tests::faults::a_forked_process_gets_errors_and_joins_nothing";
    in_child(TEST, || {
        let folder = tempfile::tempdir().unwrap();
        let slabs = open_one(folder.path(), group(4096, 4), &SlabOptions::default());
        let sum = write(&slabs, 1, &[1; 4096]);
        let mut slabs = Some(slabs);
        in_fork(|| {
            let slabs = slabs.take().unwrap();
            assert!(matches!(slabs.refusal(), Some(SlabFailure::Refused(_))));
            let mut memory = Guarded::new(&[(0, 4096)]);
            let result = run(&slabs, request(1, memory.buffers(), SlabDirection::Write));
            let Err(SlabFailure::Refused(error)) = result else { panic!("{result:?}") };
            assert!(matches!(*error, StoreError::Forked(_)));
            assert!(matches!(slabs.sync(), Err(StoreError::Forked(_))));
            assert!(matches!(slabs.punch(0, 0..1), Err(StoreError::Forked(_))));
            slabs.cancel(JobId::new(1));
            slabs.raise(JobId::new(1), Priority::High);
            slabs.close(in_a_second());
        });
        assert!(read(&slabs.unwrap(), 1, 4096, sum).is_ok());
    });
}

struct Panics;

impl SlabSink for Panics {
    fn block_ended(&self, _index: usize, _result: SlabResult) {
        panic!("a receiver of a test");
    }
}

#[test]
fn a_receiver_that_panics_does_not_end_the_thread() {
    let folder = tempfile::tempdir().unwrap();
    let slabs = open_one(folder.path(), group(4096, 4), &SPARSE);
    let mut memory = Guarded::new(&[(0, 4096)]);
    for _ in 0..3 {
        let written = request(0, memory.buffers(), SlabDirection::Write).to(&Arc::new(Panics));
        // SAFETY: the memory outlives the close below.
        unsafe { slabs.submit(vec![written]) };
    }
    let checksum = write(&slabs, 1, &[7; 4096]);
    assert_eq!(read(&slabs, 1, 4096, checksum).unwrap(), [7; 4096]);
    slabs.close(in_a_second());
}
