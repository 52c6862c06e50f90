//! Endpoints whose memory the disk engine registers with io_uring.

use std::sync::Arc;

use terrane_core::{
    ByteCount, Capability, CapabilityReport, CapabilityStatus, ForeignMemory, HostAddress,
    Location, Region, Requirement, Span, StorageKind,
};
use terrane_layout::{LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_storage::{DiskAllocator, DiskOptions, IoMemory, IoQueueOptions};
use terrane_testkit::conformance::copy_engine::check_transfer;
use terrane_testkit::mapping::AddressRange;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::InProcess;
use terrane_transfer::engines::{DiskEngine, DiskEngineOptions};
use terrane_transfer::{Endpoint, TransferManager};

use crate::support::*;

/// 8 blocks of 8 pieces of 4 KiB.
fn pieces() -> LayoutConfig {
    shape().page_size(16).inner_dim(128).build().unwrap()
}

/// A range of the size of an endpoint.
fn range() -> AddressRange {
    AddressRange::new(pieces().total_bytes().to_usize())
}

/// An endpoint over a mapping of the whole range, which it owns.
fn mapped(range: &AddressRange, kind: LayoutKind) -> Endpoint {
    let config = pieces();
    let mapping = range.map(None);
    let span = Span {
        kind: StorageKind::System,
        location: Location::Host(HostAddress::new(mapping.address())),
        length: config.total_bytes(),
    };
    // SAFETY: the mapping is private to this endpoint, zeroed, and lives as long as its memory.
    let region = Region::new(unsafe { ForeignMemory::new(span, mapping) });
    let regions = match kind {
        LayoutKind::FullyContiguous => {
            vec![region.view(ByteCount::ZERO, config.total_bytes()).unwrap()]
        }
        LayoutKind::LayerSeparate { .. } => {
            let each = ByteCount::new(config.total_bytes().get() / 4);
            let begin = |layer| ByteCount::new(each.get() * layer);
            (0..4).map(|layer| region.view(begin(layer), each).unwrap()).collect()
        }
    };
    let builder = LayoutBuilder::new(config).kind(kind).adopt(regions);
    Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
}

fn registered(end: &Endpoint) -> u64 {
    end.io_memory().iter().map(|memory| memory.registered().get()).sum()
}

fn length(end: &Endpoint) -> u64 {
    end.io_memory().iter().map(|memory| IoMemory::length(memory).get()).sum()
}

/// A file with direct I/O, and an engine that registers memory; `None` if the machine has neither.
fn file_and_manager(
    test: &str,
    options: &DiskEngineOptions,
) -> Option<(Endpoint, TransferManager)> {
    let directory = tempfile::tempdir().unwrap();
    let options_of_file = DiskOptions { direct: Requirement::Preferred, ..DiskOptions::default() };
    let allocator = DiskAllocator::new(directory.path(), options_of_file).unwrap();
    let file = endpoint_in(&allocator, pieces(), BLOCK_FIRST);
    let is_granted = |report: CapabilityReport, capability| {
        report.status(&capability) == Some(&CapabilityStatus::Granted)
    };
    let direct = is_granted(file.layout().capabilities(), Capability::DirectIo);
    let engine = DiskEngine::new(options).unwrap();
    if !direct || !is_granted(engine.capabilities(), Capability::RegisteredBuffers) {
        eprintln!("skipped: {test}: no direct I/O, or no registered buffers");
        return None;
    }
    Some((file, TransferManager::new([Arc::new(engine) as _])))
}

/// Copies all blocks to the file and back, in another order, and compares every byte.
#[track_caller]
fn copy_and_check(manager: &TransferManager, memory: &Endpoint, file: &Endpoint, seed: u64) {
    let all: Vec<u32> = (0..8).collect();
    let reversed: Vec<u32> = all.iter().rev().copied().collect();
    for (from, to) in [(memory, file), (file, memory)] {
        Image::scribble(from, &InProcess, seed);
        Image::scribble(to, &InProcess, seed + 1);
        check_transfer(manager, &InProcess, (from, &all), (to, &reversed), 0..4);
    }
}

#[test]
fn registered_endpoints_keep_their_bytes() {
    let test = "registered_endpoints_keep_their_bytes";
    let Some((file, manager)) = file_and_manager(test, &DiskEngineOptions::default()) else {
        return;
    };
    for kind in [CONTIGUOUS, OUTER_FIRST] {
        let memory = mapped(&range(), kind);
        for round in 0..4 {
            copy_and_check(&manager, &memory, &file, 10 * round);
        }
        assert_eq!((registered(&memory), memory.io_memory().len()), (length(&memory), 1));
    }
}

/// Registered buffers of a dropped endpoint would receive the bytes of the next one.
#[test]
fn an_endpoint_at_the_addresses_of_a_dropped_one_gets_its_own_bytes() {
    let test = "an_endpoint_at_the_addresses_of_a_dropped_one_gets_its_own_bytes";
    let Some((file, manager)) = file_and_manager(test, &DiskEngineOptions::default()) else {
        return;
    };
    let range = range();
    for round in 0..10 {
        let memory = mapped(&range, CONTIGUOUS);
        copy_and_check(&manager, &memory, &file, 10 * round);
        assert_eq!(registered(&memory), length(&memory), "round {round}");
        copy_and_check(&manager, &memory, &file, 10 * round + 5);
        // The last transfer has ended, so this unmaps the memory.
        drop(memory);
    }
}

#[test]
fn an_engine_registers_no_more_than_its_limit() {
    let test = "an_engine_registers_no_more_than_its_limit";
    let bytes = pieces().total_bytes();
    let queue = IoQueueOptions { registered: bytes, ..IoQueueOptions::default() };
    let options = DiskEngineOptions { queue, ..DiskEngineOptions::default() };
    let Some((file, manager)) = file_and_manager(test, &options) else { return };
    let ends = [(); 2].map(|()| mapped(&range(), CONTIGUOUS));
    for (round, end) in ends.iter().enumerate() {
        copy_and_check(&manager, end, &file, round as u64);
        copy_and_check(&manager, end, &file, round as u64);
    }
    assert_eq!(ends.each_ref().map(registered), [bytes.get(), 0]);
    drop(manager);
    assert_eq!(ends.each_ref().map(registered), [0, 0]);
}
