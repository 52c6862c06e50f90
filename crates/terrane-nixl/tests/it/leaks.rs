//! Repeated operations leak nothing.

use terrane_core::{Allocate, ByteCount, Region, RegionRequest, Register};
use terrane_nixl::BackendConfig;
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::leaks::{FREES_AT_ONCE, assert_no_growth};
use terrane_testkit::process::in_child_with;

use crate::support::{agent, memory, posix};

/// Fails if 20,000 calls of `action` leak a descriptor, or 128 bytes each. UCX allocates about a
/// MiB once, at any time.
fn no_growth(action: impl Fn()) {
    let rounds = 100;
    assert_no_growth(200, ByteCount::new(128 * rounds), || (0..rounds).for_each(|_| action()));
}

#[test]
fn thousands_of_registrations_leak_nothing() {
    in_child_with("leaks::thousands_of_registrations_leak_nothing", &FREES_AT_ONCE, || {
        let directory = tempfile::tempdir().unwrap();
        let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
        let agent = agent([BackendConfig::new("UCX"), posix()]);
        let host = Region::new(memory(ByteCount::kib(64)));
        let request = RegionRequest::new(ByteCount::kib(64));
        let file = Region::new(files.allocate(&request).unwrap());
        // One registration stays, so that lists do not become empty.
        let _kept = agent.register(memory(ByteCount::kib(4))).unwrap();
        no_growth(|| {
            let host = agent.register(host.clone()).unwrap();
            assert_eq!(host.record().accepted().count(), 2);
            drop(agent.register(file.clone()).unwrap());
        });
    });
}

#[test]
fn refused_registrations_leak_nothing() {
    in_child_with("leaks::refused_registrations_leak_nothing", &FREES_AT_ONCE, || {
        let agent = agent([posix(), BackendConfig::new("UCX").required()]);
        let directory = tempfile::tempdir().unwrap();
        let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
        let file = Region::new(files.allocate(&RegionRequest::new(ByteCount::kib(64))).unwrap());
        no_growth(|| {
            assert!(agent.register(file.clone()).is_err());
        });
    });
}

#[test]
fn agents_leak_no_descriptor_and_no_mapping() {
    in_child_with("leaks::agents_leak_no_descriptor_and_no_mapping", &FREES_AT_ONCE, || {
        assert_no_growth(24, ByteCount::mib(1), || {
            let agent = agent([BackendConfig::new("UCX"), posix()]);
            drop(agent.register(memory(ByteCount::kib(64))).unwrap());
        });
    });
}
