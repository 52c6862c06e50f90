//! Files of this machine, through POSIX.

use std::error::Error;
use std::fs;
use std::num::NonZeroUsize;
use std::sync::Arc;

use terrane_core::{ByteCount, Capability, CapabilityStatus};
use terrane_layout::{ElementFormat, LayoutConfig};
use terrane_nixl::{
    AgentBuilder, BackendConfig, FileAccess, NixlEngine, NixlEngineOptions, NixlStep, RequestError,
    probe,
};
use terrane_storage::{DiskAllocator, DiskOptions, SystemAllocator, SystemOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::InProcess;
use terrane_testkit::process::in_child;
use terrane_transfer::{Endpoint, Transfer, TransferError, TransferManager, WeakEndpoint};

use super::support::*;
use crate::support::posix;

#[test]
fn a_read_of_a_truncated_file_fails() {
    let pair = Pair::new();
    let manager = pair.manager();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let config = config(8);
    let file = Endpoint::new(registered(&files, &pair.here, config, CONTIGUOUS)).unwrap();
    let local = pair.local(config, CONTIGUOUS);
    let image = Image::scribble(&local, &InProcess, 1);
    let all: Vec<_> = (0..8).collect();
    let write = Transfer::new(&local, &file).blocks(&all, &all);
    end_of(manager.submit(write, ()).unwrap()).result.unwrap();

    let descriptor = file.base(0).unwrap().as_file().unwrap().file.descriptor;
    let path = format!("/proc/self/fd/{descriptor}");
    let opened = fs::OpenOptions::new().write(true).open(path).unwrap();
    opened.set_len(7 * 4096 + 100).unwrap();
    let read = |block| Transfer::new(&file, &local).blocks(&[block], &[block]);
    let error = end_of(manager.submit(read(7), ()).unwrap()).result.unwrap_err();
    let TransferError::Engine { source, .. } = &error else { panic!("{error:?}") };
    let cause = source.downcast_ref::<RequestError>();
    assert!(
        matches!(cause, Some(RequestError::FileEnds { length: 28_772, wanted: 32_768 })),
        "{:?}",
        error.source()
    );
    // Blocks before the end can be read.
    end_of(manager.submit(read(6), ()).unwrap()).result.unwrap();
    // A hold for writing succeeds, so the block is not incomplete: none of it was read.
    drop(local.hold_for_write(&[7]).unwrap());
    Image::of(&local, &InProcess).assert_equals(&image, "after the reads");
}

#[test]
fn an_error_of_the_disk_fails_the_transfer_and_frees_its_memory() {
    const TEST: &str =
        "engine::files::an_error_of_the_disk_fails_the_transfer_and_frees_its_memory";
    in_child(TEST, || {
        if probe().unwrap().package_version().as_deref() != Some("1.5.1") {
            eprintln!(
                "skipped: {TEST}: it is unknown when another release of NIXL reports a failed I/O"
            );
            return;
        }
        let pair = Pair::new();
        let manager = pair.manager();
        let directory = tempfile::tempdir().unwrap();
        let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
        let file = Endpoint::new(registered(&files, &pair.here, config(8), CONTIGUOUS)).unwrap();
        let local = pair.local(config(8), CONTIGUOUS);
        limit_file_size(5 * 4096 + 100);
        // The first block is written in part, and the others not at all.
        for block in 5..8 {
            let write = Transfer::new(&local, &file).blocks(&[block], &[block]);
            let error = end_of(manager.submit(write, ()).unwrap()).result.unwrap_err();
            let cause = error.source().and_then(|cause| cause.downcast_ref());
            let step = NixlStep::Transfer;
            assert!(
                matches!(cause, Some(RequestError::Status { step: s, peer: None, .. }) if *s == step),
                "{cause:?} of {error:?}"
            );
            assert!(
                local.hold_for_write(&[block]).is_ok() && file.hold_for_write(&[block]).is_ok()
            );
        }
        // The other blocks continue.
        let write = Transfer::new(&local, &file).blocks(&[0, 1, 2, 3, 4], &[0, 1, 2, 3, 4]);
        end_of(manager.submit(write, ()).unwrap()).result.unwrap();
        let ends = [local.downgrade(), file.downgrade()];
        drop((local, file));
        assert!(ends.iter().all(WeakEndpoint::has_gone), "the memory is kept");
    });
}

/// Limits the size of the files that this process writes, and ignores the signal of that limit.
fn limit_file_size(bytes: u64) {
    // SAFETY: ignoring a signal accesses no memory.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the structure outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
}

#[test]
fn requests_of_a_few_bytes_succeed_whatever_their_number() {
    let pair = Pair::new();
    let options = NixlEngineOptions {
        request_bytes: ByteCount::new(16),
        request_descriptors: NonZeroUsize::MIN,
        requests: NonZeroUsize::new(64).unwrap(),
        ..NixlEngineOptions::default()
    };
    let manager = TransferManager::new([pair.engine(options)]);
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = Endpoint::new(registered(&files, &pair.here, config(2), CONTIGUOUS)).unwrap();
    let local = pair.local(config(2), CONTIGUOUS);
    let image = Image::scribble(&local, &InProcess, 3);
    let mut expected = Image::of(&file, &InProcess);
    let write = Transfer::new(&local, &file).blocks(&[0], &[1]);
    let report = end_of(manager.submit(write, ()).unwrap()).result.unwrap();
    expected.transfer(&image, &[0], &[1], 0..2);
    Image::of(&file, &InProcess).assert_equals(&expected, "16 bytes a request");
    let times = report.engine_times.unwrap();
    assert_eq!((times.requests, times.descriptors), (256, 256));
}

#[test]
fn requests_with_direct_io_end_at_pages() {
    const TEST: &str = "requests_with_direct_io_end_at_pages";
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    if files.capabilities().status(&Capability::DirectIo) != Some(&CapabilityStatus::Granted) {
        eprintln!("skipped: {TEST}: {}", files.capabilities());
        return;
    }
    let agent = AgentBuilder::unnamed().backend(posix().file_access(FileAccess::Direct));
    let agent = agent.build().unwrap();
    // Pieces of two pages.
    let config = LayoutConfig::builder().num_blocks(4).num_layers(1).outer_dim(2).page_size(16);
    let config = config.inner_dim(256).element(ElementFormat::Width(2)).build().unwrap();
    let system = SystemAllocator::new(SystemOptions::default());
    let local = Endpoint::new(registered(&system, &agent, config, CONTIGUOUS)).unwrap();
    let file = Endpoint::new(registered(&files, &agent, config, CONTIGUOUS)).unwrap();
    let image = Image::scribble(&local, &InProcess, 2);
    let mut expected = Image::of(&file, &InProcess);
    expected.transfer(&image, &[0, 1, 2, 3], &[3, 1, 0, 2], 0..1);
    for bytes in [1, 5000, 12_289] {
        let request_bytes = ByteCount::new(bytes);
        let options = NixlEngineOptions { request_bytes, ..NixlEngineOptions::default() };
        let engine = Arc::new(NixlEngine::new(&agent, options).unwrap());
        let manager = TransferManager::new([engine as _]);
        let write = Transfer::new(&local, &file).blocks(&[0, 1, 2, 3], &[3, 1, 0, 2]);
        end_of(manager.submit(write, ()).unwrap()).result.unwrap();
        Image::of(&file, &InProcess).assert_equals(&expected, &format!("{bytes} a request"));
    }
}

/// POSIX has a fixed number of I/Os for all engines. Requests that find too few fail.
#[test]
fn transfers_share_the_ios_of_the_backend() {
    const BLOCKS: u32 = 1024;
    // 64 I/Os.
    let agent = AgentBuilder::unnamed().backend(posix()).build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = Endpoint::new(registered(&files, &agent, config(BLOCKS), CONTIGUOUS)).unwrap();
    let system = SystemAllocator::new(SystemOptions::default());
    let local = Endpoint::new(registered(&system, &agent, config(BLOCKS), CONTIGUOUS)).unwrap();
    let image = Image::scribble(&local, &InProcess, 8);
    let mut expected = Image::of(&file, &InProcess);
    let backwards: Vec<u32> = (0..BLOCKS).rev().collect();
    expected.transfer(&image, &(0..BLOCKS).collect::<Vec<_>>(), &backwards, 0..2);
    // Two engines with several transfers in flight each, of more descriptors than there are I/Os.
    let managers = [(); 2].map(|()| {
        let engine = NixlEngine::new(&agent, NixlEngineOptions::default()).unwrap();
        TransferManager::new([Arc::new(engine) as _])
    });
    let submitted: Vec<_> = (0..8)
        .zip(managers.iter().cycle())
        .map(|(part, manager)| {
            let from: Vec<u32> = (part * 128..(part + 1) * 128).collect();
            let to: Vec<u32> = from.iter().map(|block| BLOCKS - 1 - block).collect();
            manager.submit(Transfer::new(&local, &file).blocks(&from, &to), ()).unwrap()
        })
        .collect();
    submitted.into_iter().for_each(|completion| drop(end_of(completion).result.unwrap()));
    Image::of(&file, &InProcess).assert_equals(&expected, "with few I/Os");
}

/// POSIX allocates at most 65,536 I/Os, whatever its parameter is, and fails a request with more.
#[test]
fn requests_use_at_most_the_ios_that_posix_allocates() {
    const BLOCKS: u32 = 66_000;
    let posix = BackendConfig::new("POSIX").parameter("ios_pool_size", "100000");
    let agent = AgentBuilder::unnamed().telemetry(true).backend(posix).build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let config = LayoutConfig::builder().num_blocks(BLOCKS).num_layers(1).outer_dim(1).page_size(1);
    let config = config.inner_dim(8).element(ElementFormat::Width(2)).build().unwrap();
    let file = Endpoint::new(registered(&files, &agent, config, CONTIGUOUS)).unwrap();
    let system = SystemAllocator::new(SystemOptions::default());
    let local = Endpoint::new(registered(&system, &agent, config, CONTIGUOUS)).unwrap();
    let image = Image::scribble(&local, &InProcess, 8);
    let (all, backwards): (Vec<_>, Vec<_>) = (0..BLOCKS).map(|id| (id, BLOCKS - 1 - id)).unzip();
    let mut expected = Image::of(&file, &InProcess);
    expected.transfer(&image, &all, &backwards, 0..1);
    let request_descriptors = NonZeroUsize::new(100_000).unwrap();
    let options = NixlEngineOptions { request_descriptors, ..NixlEngineOptions::default() };
    let manager = TransferManager::new([Arc::new(NixlEngine::new(&agent, options).unwrap()) as _]);
    let write = Transfer::new(&local, &file).blocks(&all, &backwards);
    let times = end_of(manager.submit(write, ()).unwrap()).result.unwrap().engine_times.unwrap();
    assert_eq!((times.requests, times.descriptors), (2, 66_000));
    Image::of(&file, &InProcess).assert_equals(&expected, "with all I/Os");
}
