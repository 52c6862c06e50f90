//! The disk engine explains its path and the reason, before and after the copy, and uses that path.

use std::error::Error;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use terrane_core::{
    Alignment, Allocate, ByteCount, Capability, CapabilityStatus, Durability, FileHandle,
    FileIdentity, FilePosition, ForeignMemory, Location, Memory, Reason, Region, RegionRequest,
    Requirement, Span, StorageKind,
};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_storage::{
    DiskAllocator, DiskOptions, HugePages, IoBackend, IoQueueOptions, SystemAllocator,
    SystemOptions,
};
use terrane_testkit::conformance::copy_engine::{check_transfer, end_of};
use terrane_testkit::model::Image;
use terrane_testkit::pattern::{InProcess, Pattern};
use terrane_transfer::engines::{DiskEngine, DiskEngineOptions};
use terrane_transfer::{Endpoint, Explanation, Transfer, TransferManager};

use crate::support::*;

/// Pieces of 4 KiB: 16 tokens of 128 elements of 2 bytes.
fn even() -> LayoutConfig {
    shape().page_size(16).inner_dim(128).build().unwrap()
}

/// Pieces of 60 bytes, which are not aligned for direct I/O.
fn odd() -> LayoutConfig {
    config(8)
}

fn manager(options: &DiskEngineOptions) -> TransferManager {
    TransferManager::new([Arc::new(DiskEngine::new(options).unwrap()) as _])
}

fn file(directory: &Path, config: LayoutConfig, kind: LayoutKind, direct: Requirement) -> Endpoint {
    let options = DiskOptions { direct, ..DiskOptions::default() };
    endpoint_in(&DiskAllocator::new(directory, options).unwrap(), config, kind)
}

fn mapped(config: LayoutConfig, kind: LayoutKind) -> Endpoint {
    endpoint_in(&SystemAllocator::new(SystemOptions::default()), config, kind)
}

/// Host memory that begins one byte after a page.
fn askew(config: LayoutConfig) -> Endpoint {
    let bytes = config.total_bytes();
    let one = ByteCount::new(1);
    let request = RegionRequest::new(bytes.checked_add(one).unwrap());
    let memory = SystemAllocator::new(SystemOptions::default()).allocate(&request).unwrap();
    let region = Region::new(memory).view(one, bytes).unwrap();
    let builder = LayoutBuilder::new(config).fully_contiguous().adopt([region]);
    Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
}

fn has_direct_io(end: &Endpoint) -> bool {
    end.layout().capabilities().status(&Capability::DirectIo) == Some(&CapabilityStatus::Granted)
}

/// Explains a transfer of all blocks in reverse, executes it and compares every byte.
#[track_caller]
fn execute_and_check(manager: &TransferManager, from: &Endpoint, to: &Endpoint) -> Explanation {
    let all: Vec<u32> = (0..8).collect();
    let reversed: Vec<u32> = all.iter().rev().copied().collect();
    let transfer = Transfer::new(from, to).blocks(&all, &reversed);
    let explained = manager.explain(&transfer).unwrap();
    assert_eq!((explained.source, explained.destination), (from.kind(), to.kind()));
    assert_eq!(explained.pieces, 8 * 4 * 2);
    assert_eq!(explained.bytes, from.layout().geometry().total_bytes());
    assert!(explained.predicted > Duration::ZERO);

    Image::scribble(from, &InProcess, 1);
    Image::scribble(to, &InProcess, 2);
    let report = check_transfer(manager, &InProcess, (from, &all), (to, &reversed), 0..4);
    // No measurement in between changes the prediction.
    assert_eq!(report.explanation, explained);
    assert!(report.copied > Duration::ZERO && report.bytes_per_second() > 0.0);
    let text = report.to_string();
    for part in [&*explained.path(), &*explained.reason(), "by disk", "predicted", "took"] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    explained
}

#[test]
fn the_path_follows_from_the_file_and_the_alignment_of_both_ends() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let manager = manager(&DiskEngineOptions::default());
    let direct = file(directory, even(), CONTIGUOUS, Requirement::Preferred);
    if !has_direct_io(&direct) {
        return eprintln!(
            "skipped: the_path_follows_from_the_file_and_the_alignment_of_both_ends: no direct I/O \
             in {directory:?}"
        );
    }
    let buffered = file(directory, even(), BLOCK_FIRST, Requirement::Off);
    let odd_file = file(directory, odd(), CONTIGUOUS, Requirement::Preferred);
    let pages = mapped(even(), OUTER_FIRST);
    let cases: [(Endpoint, Endpoint, &str, &str); 11] = [
        (pages.clone(), direct.clone(), "direct vectored", "aligned in file and memory"),
        (direct.clone(), pages.clone(), "direct vectored", "aligned in file and memory"),
        (askew(even()), direct.clone(), "direct staged", "not in memory"),
        (direct.clone(), askew(even()), "direct staged", "not in memory"),
        (pages.clone(), buffered.clone(), "buffered", "the file has no direct I/O"),
        (buffered.clone(), askew(even()), "buffered", "the file has no direct I/O"),
        (mapped(odd(), BLOCK_FIRST), odd_file.clone(), "buffered", "pieces are aligned to 4 B"),
        (odd_file, mapped(odd(), CONTIGUOUS), "buffered", "and direct I/O needs"),
        (direct.clone(), buffered.clone(), "direct read, buffered write", "in the destination"),
        (buffered, direct.clone(), "buffered read, direct write", "in the source, the file has no"),
        (
            file(directory, even(), OUTER_FIRST, Requirement::Preferred),
            direct,
            "direct read and write",
            "through the engine's buffers",
        ),
    ];
    for (from, to, path, reason) in &cases {
        let explained = execute_and_check(&manager, from, to);
        assert_eq!(explained.path(), *path, "{explained}");
        assert!(explained.reason().contains(reason), "{explained}");
    }
}

/// A file per layer, on several file systems if the machine has several.
#[test]
fn a_layout_may_be_in_several_files() {
    let here = tempfile::tempdir().unwrap();
    let manager = manager(&DiskEngineOptions::default());
    let in_files = |directories: [&Path; 4]| {
        let files = directories.map(|directory| {
            let bytes = ByteCount::new(even().total_bytes().get() / 4);
            let files = DiskAllocator::new(directory, DiskOptions::default()).unwrap();
            files.allocate(&RegionRequest::new(bytes)).unwrap()
        });
        let builder = LayoutBuilder::new(even()).kind(BLOCK_FIRST).adopt_memory(files);
        Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
    };
    let pages = mapped(even(), OUTER_FIRST);
    let one = file(here.path(), even(), CONTIGUOUS, Requirement::Preferred);
    let mut cases = vec![(in_files([here.path(); 4]), has_direct_io(&one))];
    match tempfile::tempdir_in("/dev/shm") {
        // Files in memory have no direct I/O, and one file without it decides for the layout.
        Ok(there) => {
            let directories = [here.path(), there.path(), here.path(), there.path()];
            cases.push((in_files(directories), false));
        }
        Err(error) => eprintln!("skipped: a_layout_may_be_in_several_files: /dev/shm: {error}"),
    }
    for (files, is_direct) in &cases {
        for (from, to) in [(&pages, files), (files, &pages), (&one, files), (files, &one)] {
            let explained = execute_and_check(&manager, from, to);
            let is_buffered = explained.path().contains("buffered");
            assert_eq!(is_buffered, !is_direct, "{explained}");
        }
        let all: Vec<u32> = (0..8).collect();
        run(&manager, Transfer::new(&pages, files).blocks(&all, &all).durability(Durability::Full));
    }
}

#[test]
fn the_alignment_class_is_that_of_each_end() {
    let directory = tempfile::tempdir().unwrap();
    let manager = manager(&DiskEngineOptions::default());
    let explained = |from: &Endpoint, to: &Endpoint| {
        let transfer = Transfer::new(from, to).blocks(&[1], &[2]);
        let explained = manager.explain(&transfer).unwrap();
        (explained.source_alignment, explained.destination_alignment)
    };
    let file = |config| file(directory.path(), config, CONTIGUOUS, Requirement::Preferred);
    let four = Alignment::new(4).unwrap();
    assert_eq!(
        explained(&mapped(even(), OUTER_FIRST), &file(even())),
        (Alignment::PAGE, Alignment::PAGE)
    );
    assert_eq!(explained(&askew(even()), &file(even())), (Alignment::BYTE, Alignment::PAGE));
    assert_eq!(explained(&file(odd()), &mapped(odd(), BLOCK_FIRST)), (four, four));
    // Blocks can begin at pages while their pieces do not.
    let padded = odd().with_block_alignment(Alignment::PAGE).unwrap();
    assert_eq!(explained(&file(padded), &file(odd())), (four, four));
}

#[test]
fn spans_before_and_after_coalescing_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let manager = manager(&DiskEngineOptions::default());
    let all: Vec<u32> = (0..8).collect();
    let runs = |from: &Endpoint, to: &Endpoint| {
        let transfer = Transfer::new(from, to).blocks(&all, &all);
        let explained = manager.explain(&transfer).unwrap();
        assert_eq!(explained.mean_run().get() * explained.runs, explained.bytes.get());
        (explained.pieces, explained.runs)
    };
    let file = file(directory.path(), even(), CONTIGUOUS, Requirement::Preferred);
    assert_eq!(runs(&mapped(even(), CONTIGUOUS), &file), (64, 1));
    assert_eq!(runs(&mapped(even(), BLOCK_FIRST), &file), (64, 32));
    assert_eq!(runs(&mapped(even(), OUTER_FIRST), &file), (64, 64));
}

/// The durability of a file and that of a transfer both apply. `/dev/null` accepts every write and
/// no sync, so a requested sync fails.
#[test]
fn files_are_synced_only_on_request() {
    let sink = |durability| {
        let file = File::options().write(true).open("/dev/null").unwrap();
        let metadata = file.metadata().unwrap();
        let identity = FileIdentity { file_system: metadata.dev(), inode: metadata.ino() };
        let handle =
            FileHandle { descriptor: file.as_raw_fd(), direct: None, identity, durability };
        let position = FilePosition { file: handle, offset: ByteCount::ZERO };
        let span = Span {
            kind: StorageKind::Disk,
            location: Location::File(position),
            length: even().total_bytes(),
        };
        // SAFETY: the file is the owner and stays open, and the test reads none of the written
        // bytes.
        let memory = unsafe { ForeignMemory::new(span, file) };
        let builder = LayoutBuilder::new(even()).fully_contiguous().adopt_memory([memory]);
        Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
    };
    let source = mapped(even(), CONTIGUOUS);
    for backend in [IoBackend::Auto, IoBackend::Threads] {
        let options = DiskEngineOptions {
            queue: IoQueueOptions { backend, ..IoQueueOptions::default() },
            ..DiskEngineOptions::default()
        };
        let manager = manager(&options);
        for (stated, asked) in [
            (Durability::None, Durability::None),
            (Durability::None, Durability::Data),
            (Durability::None, Durability::Full),
            (Durability::Data, Durability::None),
            (Durability::Full, Durability::Data),
        ] {
            let sink = sink(stated);
            let transfer = Transfer::new(&source, &sink).blocks(&[0, 1], &[4, 5]);
            let outcome = end_of(manager.submit(transfer.durability(asked), "guard").unwrap());
            assert_eq!(outcome.guard, "guard");
            let syncs = stated.max(asked) != Durability::None;
            assert_eq!(outcome.result.is_err(), syncs, "{stated:?}, {asked:?}");
            if let Err(error) = outcome.result {
                let cause = error.source().unwrap().to_string();
                assert!(cause.contains("sync"), "{cause}");
            }
            assert_unclaimed(&sink);
        }
    }
}

#[test]
fn capabilities_of_engines_are_returned_by_the_manager() {
    let options = DiskEngineOptions {
        queue: IoQueueOptions { backend: IoBackend::Threads, ..IoQueueOptions::default() },
        ..DiskEngineOptions::default()
    };
    let manager = manager(&options);
    let report = manager.engines()[0].capabilities();
    assert_eq!(report.status(&Capability::IoUring), Some(&CapabilityStatus::NotTried));
    let needs = CapabilityStatus::Refused(Reason::Needs("io_uring"));
    assert_eq!(report.status(&Capability::RegisteredBuffers), Some(&needs));
    let default = TransferManager::with_default_engines().unwrap();
    let reports: Vec<_> =
        default.engines().iter().map(|engine| engine.capabilities().outcomes().len()).collect();
    assert_eq!(reports, [0, 2]);
}

/// A file whose direct I/O needs a stricter alignment than that of the engine's requests.
#[test]
fn files_that_need_more_than_page_alignment_use_the_page_cache() {
    let directory = tempfile::tempdir().unwrap();
    let manager = manager(&DiskEngineOptions::default());
    let strict = Alignment::new(64 << 10).unwrap();
    let config = even().with_block_alignment(strict).unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let bytes = ByteCount::new(8 * strict.get());
    let file = files.allocate(&RegionRequest::new(bytes)).unwrap();
    let mut position = file.location().as_file().unwrap();
    let Some(direct) = &mut position.file.direct else {
        eprintln!("skipped: what_direct_io_wants_beyond_pages: the file system has no direct I/O");
        return;
    };
    direct.memory_alignment = strict;
    let location = Location::File(position);
    let span = Span { kind: StorageKind::Disk, location, length: bytes };
    // SAFETY: the file is the owner.
    let memory = unsafe { ForeignMemory::new(span, file) };
    let builder = LayoutBuilder::new(config).fully_contiguous().adopt_memory([memory]);
    let strict = Endpoint::new(builder.unregistered().build().unwrap()).unwrap();
    let explained = execute_and_check(&manager, &mapped(even(), CONTIGUOUS), &strict);
    assert_eq!(explained.path(), "buffered");
    assert!(explained.reason().contains("needs 64 KiB"), "{explained}");
}

/// 16 blocks of `layers` pieces. A page has `inner` elements of 2 bytes for each of 16 tokens.
fn sixteen_blocks(layers: u32, inner: u32) -> LayoutConfig {
    let builder = LayoutConfig::builder().num_blocks(16).num_layers(layers).outer_dim(1);
    builder.page_size(16).inner_dim(inner).element(ElementFormat::Width(2)).build().unwrap()
}

/// 18 MiB in pieces of 18 KiB, scattered in memory and adjacent in the file.
#[test]
fn short_pieces_use_the_faster_path_once_both_were_measured() {
    let config = sixteen_blocks(64, 576);
    for registered in [ByteCount::ZERO, ByteCount::gib(1)] {
        check_faster_path("short_pieces", config, mapped(config, BLOCK_FIRST), registered);
    }
}

#[test]
fn long_pieces_on_small_pages_use_the_faster_path_once_both_were_measured() {
    let config = sixteen_blocks(1, 1 << 15);
    let options = SystemOptions { huge_pages: HugePages::None, ..SystemOptions::default() };
    for registered in [ByteCount::ZERO, ByteCount::gib(1)] {
        let memory = endpoint_in(&SystemAllocator::new(options.clone()), config, CONTIGUOUS);
        check_faster_path("long_pieces_on_small_pages", config, memory, registered);
    }
}

fn check_faster_path(test: &str, config: LayoutConfig, memory: Endpoint, registered: ByteCount) {
    let directory = tempfile::tempdir().unwrap();
    let queue = IoQueueOptions { registered, ..IoQueueOptions::default() };
    let manager = manager(&DiskEngineOptions { queue, ..DiskEngineOptions::default() });
    let disk = file(directory.path(), config, CONTIGUOUS, Requirement::Preferred);
    if !has_direct_io(&disk) {
        eprintln!("skipped: {test}: there is no direct I/O");
        return;
    }
    let blocks: Vec<u32> = (0..16).collect();
    // The first write registers the memory. The paths of registered memory are measured apart.
    let mut registered_writes = 0;
    for round in 0..7 {
        let pattern = Pattern::new(u64::try_from(round).unwrap());
        pattern.fill(&memory).unwrap();
        for (from, to) in [(&memory, &disk), (&disk, &memory)] {
            let is_registered = memory.io_memory().iter().any(|m| !m.registered().is_zero());
            let is_write = from.kind() == StorageKind::System;
            registered_writes += usize::from(is_write && is_registered);
            let measured = match (is_write, is_registered) {
                (true, true) => registered_writes - 1,
                _ => round,
            };
            let expected =
                ["vectored", "vectored", "staged", "staged"].get(measured).copied().unwrap_or("");
            let transfer = Transfer::new(from, to).blocks(&blocks, &blocks);
            let report = end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
            let (path, reason) = (report.explanation.path(), report.explanation.reason());
            assert!(path.starts_with("direct") && path.contains(expected), "{report}");
            let why = if expected.is_empty() { "faster here" } else { "being measured" };
            assert!(reason.contains(why), "{report}");
            pattern.verify(to).unwrap().assert_clean("the destination");
            if from.kind() == StorageKind::System {
                Pattern::new(99).fill(&memory).unwrap();
            }
        }
    }
}
