//! The conformance suite of copy engines, and the formats of the other engines.

use std::any::Any;
use std::num::NonZeroUsize;
use std::sync::Arc;

use terrane_core::ByteCount;
use terrane_layout::{LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_nixl::NixlEngineOptions;
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::{EngineFixture, check_copy_engine};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::PieceAccess;
use terrane_transfer::{CopyEngine, DeviceOrder, Endpoint};

use super::support::*;

/// Two agents of one process, with UCX between them.
struct Peers {
    pair: Pair,
    options: NixlEngineOptions,
}

impl EngineFixture for Peers {
    fn engine(&self) -> Arc<dyn CopyEngine> {
        self.pair.engine(self.options.clone())
    }

    fn ends(&self) -> &[&'static str] {
        &["here", "there"]
    }

    fn serves(&self, source: &str, destination: &str) -> bool {
        source != destination
    }

    fn endpoint(&self, end: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        match end {
            "here" => self.pair.local(config, kind),
            _ => self.pair.remote(config, kind),
        }
    }

    /// Memory of a device that no agent has registered.
    fn unserved(&self, config: LayoutConfig) -> Option<Endpoint> {
        Some(on_a_device(config))
    }

    /// The blocks of devices are not part of this suite.
    fn unreached(&self) -> Option<(DeviceOrder, Box<dyn Any>)> {
        None
    }

    fn least_relayouts(&self) -> usize {
        20
    }

    fn access(&self) -> &dyn PieceAccess {
        &PeersInProcess
    }
}

fn on_a_device(config: LayoutConfig) -> Endpoint {
    let allocator = HeapAllocator::simulated_device(0);
    let builder = LayoutBuilder::new(config).fully_contiguous().allocate(&allocator);
    Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
}

#[test]
fn peers_conform() {
    check_copy_engine(&Peers { pair: Pair::new(), options: NixlEngineOptions::default() });
}

#[test]
fn requests_that_end_within_runs_conform() {
    let options = NixlEngineOptions {
        request_bytes: ByteCount::new(997),
        request_descriptors: NonZeroUsize::new(3).unwrap(),
        requests: NonZeroUsize::new(2).unwrap(),
        ..NixlEngineOptions::default()
    };
    check_copy_engine(&Peers { pair: Pair::new(), options });
}

#[test]
fn requests_from_prepared_lists_conform() {
    let options = NixlEngineOptions { prepare_threshold: 0, ..NixlEngineOptions::default() };
    check_copy_engine(&Peers { pair: Pair::new(), options: options.clone() });
    let request_descriptors = NonZeroUsize::new(3).unwrap();
    let requests = NonZeroUsize::new(2).unwrap();
    let options = NixlEngineOptions { request_descriptors, requests, ..options };
    check_copy_engine(&Peers { pair: Pair::new(), options });
}

/// Files and system memory, with POSIX between them.
struct Files {
    pair: Pair,
    directory: tempfile::TempDir,
}

impl EngineFixture for Files {
    fn engine(&self) -> Arc<dyn CopyEngine> {
        self.pair.engine(NixlEngineOptions::default())
    }

    fn ends(&self) -> &[&'static str] {
        &["memory", "file"]
    }

    fn serves(&self, source: &str, destination: &str) -> bool {
        source != destination
    }

    fn endpoint(&self, end: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        if end == "memory" {
            return self.pair.local(config, kind);
        }
        let files = DiskAllocator::new(self.directory.path(), DiskOptions::default()).unwrap();
        Endpoint::new(registered(&files, &self.pair.here, config, kind)).unwrap()
    }

    /// Memory of a device that no agent has.
    fn unserved(&self, config: LayoutConfig) -> Option<Endpoint> {
        Some(on_a_device(config))
    }

    /// The blocks of devices are not part of this suite.
    fn unreached(&self) -> Option<(DeviceOrder, Box<dyn Any>)> {
        None
    }

    fn least_relayouts(&self) -> usize {
        20
    }
}

#[test]
fn files_conform() {
    let directory = tempfile::tempdir().unwrap();
    check_copy_engine(&Files { pair: Pair::new(), directory });
}
