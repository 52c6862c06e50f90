//! Failures of the disk: the errors of transfers, and no leaks.

use std::error::Error;
use std::fs::File;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_core::{ByteCount, Durability, Requirement};
use terrane_layout::{LayoutBuilder, LayoutConfig};
use terrane_storage::{
    DiskAllocator, DiskFile, DiskOptions, FirstTouch, IoBackend, IoFailure, IoFailureReason,
    IoQueueOptions, SystemAllocator, SystemOptions,
};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::leaks::assert_no_growth;
use terrane_testkit::mounted::tmpfs;
use terrane_testkit::pattern::Pattern;
use terrane_testkit::process::{forbid_to_all_threads, in_child};
use terrane_transfer::engines::{DiskEngine, DiskEngineOptions};
use terrane_transfer::{Endpoint, Outcome, Transfer, TransferError, TransferManager};

use crate::foreign::panics_at_errors;
use crate::limits::limit_file_size;
use crate::support::*;

const BLOCKS: u32 = 8;
/// 16 tokens of 128 elements of 2 bytes.
const EVEN_PIECE: u64 = 4096;
/// 4 layers, K and V.
const EVEN_BLOCK: u64 = 8 * EVEN_PIECE;

fn even() -> LayoutConfig {
    shape().num_blocks(BLOCKS).page_size(16).inner_dim(128).build().unwrap()
}

/// An engine whose requests are no longer than a block, on each backend.
fn managers() -> [TransferManager; 2] {
    managers_with_requests_of(1)
}

fn managers_with_requests_of(blocks: u64) -> [TransferManager; 2] {
    [IoBackend::Auto, IoBackend::Threads].map(|backend| {
        let options = DiskEngineOptions {
            queue: IoQueueOptions { depth: 4, backend, ..IoQueueOptions::default() },
            request: ByteCount::new(blocks * EVEN_BLOCK),
            ..DiskEngineOptions::default()
        };
        TransferManager::new([Arc::new(DiskEngine::new(&options).unwrap()) as _])
    })
}

fn host() -> Endpoint {
    let options = SystemOptions {
        first_touch: FirstTouch::Threads(NonZeroUsize::MIN),
        ..SystemOptions::default()
    };
    // Each run is a layer of a block, so that errors name the failed block.
    endpoint_in(&SystemAllocator::new(options), even(), BLOCK_FIRST)
}

/// A layout in a new sparse file at `path`, whose disk blocks are not reserved.
fn sparse_file(path: &Path, direct: Requirement) -> Endpoint {
    let options = DiskOptions { direct, preallocate: Requirement::Off, ..DiskOptions::default() };
    let file = DiskFile::create_new(path, even().total_bytes(), &options).unwrap();
    let builder = LayoutBuilder::new(even()).fully_contiguous().adopt_memory([file]);
    Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
}

fn all_blocks(from: &Endpoint, to: &Endpoint) -> Transfer {
    let all: Vec<u32> = (0..BLOCKS).collect();
    Transfer::new(from, to).blocks(&all, &all)
}

/// The transfer ends with a failure of a run. Returns the blocks that the error names, and the
/// cause. The guard is returned, and both ends are free again.
#[track_caller]
fn fails(manager: &TransferManager, from: &Endpoint, to: &Endpoint) -> ((u32, u32), IoFailure) {
    transfer_fails(manager, from, to, all_blocks(from, to))
}

#[track_caller]
fn transfer_fails(
    manager: &TransferManager,
    from: &Endpoint,
    to: &Endpoint,
    transfer: Transfer,
) -> ((u32, u32), IoFailure) {
    let guard = Arc::new(());
    let completion = manager.submit(transfer, Arc::clone(&guard)).unwrap();
    let Outcome { guard: back, result } = end_of(completion);
    assert!(Arc::ptr_eq(&guard, &back), "another guard was returned");
    assert_unclaimed(from);
    assert_unclaimed(to);
    let error = result.unwrap_err();
    assert!(!error.is_refusal());
    let failure = error.source().unwrap().downcast_ref::<IoFailure>().unwrap().clone();
    match error {
        TransferError::Copy { source_block, destination_block, .. } => {
            ((source_block, destination_block), failure)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_that_is_truncated_during_use_is_named_with_block_and_offset() {
    for direct in [Requirement::Preferred, Requirement::Off] {
        for manager in managers() {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("blocks");
            let (host, file) = (host(), sparse_file(&path, direct));
            let pattern = Pattern::new(7);
            pattern.fill(&host).unwrap();
            run(&manager, all_blocks(&host, &file));

            // In the middle of block 5, whose third layer is then cut off.
            let cut = 5 * EVEN_BLOCK + 4 * EVEN_PIECE;
            let opened = File::options().write(true).open(&path).unwrap();
            opened.set_len(cut).unwrap();
            let ((from, to), failure) = fails(&manager, &file, &host);
            assert!((from, to) == (5, 5) || from > 5, "blocks {from} and {to}");
            assert_eq!(failure.reason, IoFailureReason::EndOfFile);
            assert!(failure.offset.get() >= cut, "{failure}");
            assert!(failure.missing() > ByteCount::ZERO);

            // With its old length, the file can be used again. The truncated blocks are written
            // again.
            opened.set_len(even().total_bytes().get()).unwrap();
            pattern.fill(&host).unwrap();
            run(&manager, all_blocks(&host, &file));
            run(&manager, all_blocks(&file, &host));
            pattern.verify(&host).unwrap().assert_clean("after the file was extended again");
        }
    }
}

#[test]
fn a_full_disk_is_named_with_block_and_offset() {
    in_child("disk_faults::a_full_disk_is_named_with_block_and_offset", || {
        let directory = tempfile::tempdir().unwrap();
        let room = 3 * EVEN_BLOCK;
        let _mounted = match tmpfs(directory.path(), room) {
            Ok(mounted) => mounted,
            Err(error) => {
                let test = "a_full_disk_is_named_with_block_and_offset";
                return eprintln!("skipped: {test}: a tmpfs cannot be mounted here: {error}");
            }
        };
        for manager in managers() {
            let path = directory.path().join("blocks");
            let (host, file) = (host(), sparse_file(&path, Requirement::Preferred));
            let (_, failure) = fails(&manager, &host, &file);
            assert!(failure.is_exhaustion(), "{failure}");
            assert!(failure.to_string().contains("free space"), "{failure}");
            // With room again, the same manager writes to the same file system.
            std::fs::remove_file(&path).unwrap();
            drop(file);
            let file = sparse_file(&path, Requirement::Preferred);
            run(&manager, Transfer::new(&host, &file).blocks(&[0, 1], &[6, 2]));
            std::fs::remove_file(&path).unwrap();
        }
    });
}

#[test]
fn a_limit_on_file_sizes_is_named_with_block_and_offset() {
    in_child("disk_faults::a_limit_on_file_sizes_is_named_with_block_and_offset", || {
        for direct in [Requirement::Preferred, Requirement::Off] {
            let directory = tempfile::tempdir().unwrap();
            for (number, manager) in managers().into_iter().enumerate() {
                limit_file_size(even().total_bytes().get());
                let path = directory.path().join(number.to_string());
                let (host, file) = (host(), sparse_file(&path, direct));
                let limit = 4 * EVEN_BLOCK;
                limit_file_size(limit);
                let ((from, to), failure) = fails(&manager, &host, &file);
                assert!(from >= 4 && from == to, "blocks {from} and {to}");
                assert!(failure.is_exhaustion(), "{failure}");
                assert!(failure.offset.get() >= limit, "{failure}");
                assert!(failure.to_string().contains("RLIMIT_FSIZE"), "{failure}");
                run(&manager, Transfer::new(&host, &file).blocks(&[7, 6], &[0, 3]));
            }
        }
    });
}

/// A failed run of many blocks is named by the block of the failure.
#[test]
fn the_block_is_that_in_which_a_long_run_stops() {
    for manager in managers_with_requests_of(3) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        let file = sparse_file(&path, Requirement::Preferred);
        let options = SystemOptions::default();
        let host = endpoint_in(&SystemAllocator::new(options), even(), CONTIGUOUS);
        let explained = manager.explain(&all_blocks(&file, &host)).unwrap();
        assert_eq!(explained.runs, 1);
        File::options().write(true).open(&path).unwrap().set_len(5 * EVEN_BLOCK + 512).unwrap();
        let (blocks, failure) = fails(&manager, &file, &host);
        // The second request and the third fail, in any order.
        let stopped_at = u32::try_from(failure.offset.get() / EVEN_BLOCK).unwrap();
        assert_eq!(blocks, (stopped_at, stopped_at), "{failure}");
        assert!(stopped_at >= 5, "{failure}");
    }
}

/// Between files, one read can be followed by several writes, some of which succeed.
#[test]
fn between_files_the_block_is_that_of_the_write_that_fails() {
    in_child("disk_faults::between_files_the_block_is_that_of_the_write_that_fails", || {
        for (number, manager) in managers_with_requests_of(4).into_iter().enumerate() {
            let directory = tempfile::tempdir().unwrap();
            limit_file_size(even().total_bytes().get());
            let file = |name| sparse_file(&directory.path().join(name), Requirement::Preferred);
            let (source, destination) = (file("source"), file("destination"));
            limit_file_size(7 * EVEN_BLOCK);
            let transfer = Transfer::new(&source, &destination);
            let transfer = transfer.blocks(&[0, 1, 2, 3], &[0, 4, 2, 7]);
            let (blocks, failure) = transfer_fails(&manager, &source, &destination, transfer);
            assert_eq!(blocks, (3, 7), "manager {number}: {failure}");
        }
    });
}

#[test]
fn a_failing_transfer_does_not_affect_others() {
    for manager in managers() {
        let directory = tempfile::tempdir().unwrap();
        let [bad, good] = ["bad", "good"].map(|name| directory.path().join(name));
        let host = host();
        let pattern = Pattern::new(9);
        pattern.fill(&host).unwrap();
        let [bad_file, good_file] =
            [&bad, &good].map(|path| sparse_file(path, Requirement::Preferred));
        File::options().write(true).open(&bad).unwrap().set_len(0).unwrap();
        let scratch: Vec<_> = (0..4).map(|_| self::host()).collect();
        let failing: Vec<_> = scratch
            .iter()
            .map(|scratch| manager.submit(all_blocks(&bad_file, scratch), ()).unwrap())
            .collect();
        let well = manager.submit(all_blocks(&host, &good_file), ()).unwrap();
        for completion in failing {
            let error = end_of(completion).result.unwrap_err();
            assert!(matches!(error, TransferError::Copy { .. }), "{error:?}");
        }
        end_of(well).result.unwrap();
        pattern.verify(&good_file).unwrap().assert_clean("beside transfers that failed");
    }
}

/// Many small requests, some of which complete before the deadline.
#[test]
fn a_deadline_ends_a_disk_transfer_in_the_middle() {
    let config = even().with_num_blocks(4096).unwrap();
    for backend in [IoBackend::Auto, IoBackend::Threads] {
        let options = DiskEngineOptions {
            queue: IoQueueOptions { depth: 1, backend, ..IoQueueOptions::default() },
            request: ByteCount::new(EVEN_PIECE),
            ..DiskEngineOptions::default()
        };
        let manager = TransferManager::new([Arc::new(DiskEngine::new(&options).unwrap()) as _]);
        let directory = tempfile::tempdir().unwrap();
        let files = DiskOptions { preallocate: Requirement::Off, ..DiskOptions::default() };
        let files = DiskAllocator::new(directory.path(), files).unwrap();
        let file = endpoint_in(&files, config, CONTIGUOUS);
        let system = SystemAllocator::new(SystemOptions::default());
        let host = endpoint_in(&system, config, CONTIGUOUS);

        let all: Vec<u32> = (0..4096).collect();
        // A deadline can pass before the first request has ended on a busy machine, or after the
        // last one on a fast machine. The test then tries a later or an earlier one.
        let mut patience = Duration::from_millis(30);
        let stopped_in_the_middle = (0..100).any(|_| {
            let begun = Instant::now();
            let transfer = Transfer::new(&host, &file).blocks(&all, &all);
            let completion = manager.submit(transfer.deadline(begun + patience), "guard").unwrap();
            let Outcome { guard, result } = end_of(completion);
            assert_eq!(guard, "guard");
            let Err(error) = result else {
                patience /= 2;
                return false;
            };
            let TransferError::DeadlineExceeded { done, total, after } = error else {
                panic!("{error:?}")
            };
            assert_eq!(total, config.total_bytes());
            let took = begun.elapsed();
            assert!(done < total && took >= patience && after <= took, "{done}, {after:?}");
            assert_unclaimed(&host);
            assert_unclaimed(&file);
            patience += patience / 2;
            !done.is_zero()
        });
        assert!(stopped_in_the_middle, "no deadline passed in the middle");
        run(&manager, Transfer::new(&host, &file).blocks(&[4095], &[0]));
    }
}

/// Engines, their buffers and threads, files and completions are all freed, with or without a
/// failure.
#[test]
fn engines_and_failed_transfers_leave_no_descriptor_and_no_mapping() {
    const TEST: &str =
        "disk_faults::engines_and_failed_transfers_leave_no_descriptor_and_no_mapping";
    // In a separate process, because mappings of other tests would count.
    in_child(TEST, || {
        let directory = tempfile::tempdir().unwrap();
        let [path, other] = ["blocks", "other"].map(|name| directory.path().join(name));
        // The bounce buffers of the transfer between two files are 8 requests of 4 MiB.
        assert_no_growth(8, ByteCount::mib(32), || {
            let engine = DiskEngine::new(&DiskEngineOptions::default()).unwrap();
            let manager = TransferManager::new([Arc::new(engine) as _]);
            let (host, file) = (host(), sparse_file(&path, Requirement::Preferred));
            let copy = sparse_file(&other, Requirement::Preferred);
            run(&manager, all_blocks(&host, &file).durability(Durability::Data));
            run(&manager, all_blocks(&file, &copy));
            File::options().write(true).open(&path).unwrap().set_len(EVEN_BLOCK).unwrap();
            fails(&manager, &file, &host);
            fails(&manager, &file, &copy);
            for path in [&path, &other] {
                std::fs::remove_file(path).unwrap();
            }
        });
    });
}

#[test]
fn transfers_end_when_a_late_sandbox_forbids_io_uring() {
    let test = "disk_faults::transfers_end_when_a_late_sandbox_forbids_io_uring";
    in_child(test, || {
        // A subscriber that panics changes nothing.
        tracing::subscriber::set_global_default(panics_at_errors()).unwrap();
        let [manager, _] = managers();
        let directory = tempfile::tempdir().unwrap();
        let (host, file) =
            (host(), sparse_file(&directory.path().join("blocks"), Requirement::Off));
        Pattern::new(3).fill(&host).unwrap();
        run(&manager, all_blocks(&host, &file));
        if let Err(error) = forbid_to_all_threads(&[libc::SYS_io_uring_enter], libc::EPERM) {
            return eprintln!("skipped: {test}: {error}");
        }
        let [later, _] = managers();
        for deadline in [None, Some(Instant::now() + Duration::from_secs(60))] {
            let mut transfer = all_blocks(&host, &file);
            if let Some(deadline) = deadline {
                transfer = transfer.deadline(deadline);
            }
            let completion = manager.submit(transfer, ()).unwrap();
            // An engine that uses threads from the start works.
            let error = match end_of(completion).result {
                Ok(_) => return eprintln!("skipped: {test}: io_uring was not offered before"),
                Err(error) => error,
            };
            assert!(format!("{:?}", error.source()).contains("io_uring_enter"), "{error:?}");
            assert_unclaimed(&host);
            assert_unclaimed(&file);
        }
        run(&later, all_blocks(&host, &file));
        drop(manager);
    });
}
