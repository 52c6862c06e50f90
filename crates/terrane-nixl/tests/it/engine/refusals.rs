//! Transfers that the engine declines, and the reasons.

use std::error::Error;

use terrane_core::{Allocate, StorageKind};
use terrane_layout::LayoutBuilder;
use terrane_nixl::{ForgetOutcome, NixlEngine, NixlEngineOptions, NixlError, RequestError};
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::process::{forbid, in_child};
use terrane_transfer::{
    Declined, DeviceOrder, Durability, Endpoint, Side, Transfer, TransferError, TransferManager,
};

use super::support::*;

fn unregistered(allocator: &impl Allocate) -> Endpoint {
    let builder = LayoutBuilder::new(config(4)).kind(CONTIGUOUS).allocate(allocator);
    Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
}

#[track_caller]
fn declined(manager: &TransferManager, transfer: &Transfer) -> Declined {
    match manager.explain(transfer) {
        Err(TransferError::NoEngine { declined, .. }) => declined[0].1,
        other => panic!("{other:?}"),
    }
}

fn peer_of(end: &Endpoint) -> terrane_core::PeerId {
    let StorageKind::Remote(peer) = end.kind() else { panic!("{end:?}") };
    peer
}

#[test]
fn ends_that_are_not_registered_with_the_agent_are_declined() {
    let (pair, other) = (Pair::new(), agent());
    let manager = pair.manager();
    let remote = pair.remote(config(4), CONTIGUOUS);
    let nowhere = unregistered(&HeapAllocator::system());
    let elsewhere =
        Endpoint::new(registered(&HeapAllocator::system(), &other, config(4), CONTIGUOUS)).unwrap();
    for end in [&nowhere, &elsewhere] {
        let write = Transfer::new(end, &remote);
        assert_eq!(declined(&manager, &write), Declined::NotRegistered(Side::Source));
        let read = Transfer::new(&remote, end);
        assert_eq!(declined(&manager, &read), Declined::NotRegistered(Side::Destination));
    }
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let (file, local) = (unregistered(&files), pair.local(config(4), CONTIGUOUS));
    let write = Transfer::new(&local, &file);
    assert_eq!(declined(&manager, &write), Declined::NotRegistered(Side::Destination));
    assert!(manager.explain(&write).unwrap_err().to_string().contains("register(&agent)"));
}

#[test]
fn pairs_without_local_memory_or_without_a_target_are_declined() {
    let pair = Pair::new();
    let manager = pair.manager();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = || Endpoint::new(registered(&files, &pair.here, config(4), CONTIGUOUS)).unwrap();
    let local = || pair.local(config(4), CONTIGUOUS);
    let remote = || pair.remote(config(4), CONTIGUOUS);
    for (from, to) in [
        (local(), local()),
        (file(), file()),
        (remote(), remote()),
        (file(), remote()),
        (remote(), file()),
    ] {
        assert_eq!(declined(&manager, &Transfer::new(&from, &to)), Declined::Kinds);
    }
}

#[test]
fn each_end_is_copied_by_a_backend_that_accepted_it() {
    let pair = Pair::new();
    let manager = pair.manager();
    let (local, remote) = (pair.local(config(4), CONTIGUOUS), pair.remote(config(4), CONTIGUOUS));
    let path = |from, to| {
        manager
            .explain(&Transfer::new(from, to).blocks(&[0, 2], &[0, 2]))
            .unwrap()
            .path()
            .into_owned()
    };
    assert_eq!(path(&local, &remote), "UCX write, 2 descriptors");
    assert_eq!(path(&remote, &local), "UCX read, 2 descriptors");
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = Endpoint::new(registered(&files, &pair.here, config(4), CONTIGUOUS)).unwrap();
    assert_eq!(path(&local, &file), "POSIX write, 2 descriptors");
    assert_eq!(path(&file, &local), "POSIX read, 2 descriptors");

    // UCX did not register this memory, and POSIX cannot reach a peer.
    let posix =
        pair.here.registrar([("POSIX", terrane_nixl::BackendRequirement::Required)]).unwrap();
    let system = HeapAllocator::system();
    let builder = LayoutBuilder::new(config(4)).kind(CONTIGUOUS).allocate(&system);
    let half = Endpoint::new(builder.register(&posix).build().unwrap()).unwrap();
    assert_eq!(declined(&manager, &Transfer::new(&half, &remote)), Declined::NoCommonBackend);
    assert_eq!(path(&half, &file), "POSIX write, 2 descriptors");
}

#[test]
fn unsupported_options_are_declined() {
    let pair = Pair::new();
    let manager = pair.manager();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = Endpoint::new(registered(&files, &pair.here, config(4), CONTIGUOUS)).unwrap();
    let local = pair.local(config(4), CONTIGUOUS);
    let durable = Transfer::new(&local, &file).durability(Durability::Data);
    assert_eq!(declined(&manager, &durable), Declined::Durability);
    let ordered = Transfer::new(&local, &file).device_order(DeviceOrder::AlreadySynchronised);
    assert!(matches!(manager.explain(&ordered), Err(TransferError::OrderWithoutDevice)));
}

#[test]
fn a_forgotten_peer_is_declined() {
    let pair = Pair::new();
    let manager = pair.manager();
    let (local, remote) = (pair.local(config(4), CONTIGUOUS), pair.remote(config(4), CONTIGUOUS));
    let transfer = || Transfer::new(&local, &remote).blocks(&[0], &[0]);
    end_of(manager.submit(transfer(), ()).unwrap()).result.unwrap();
    // A waiting transfer has been accepted and has not begun.
    let hold = local.hold_for_write(&[1]).unwrap();
    let waiting = Transfer::new(&local, &remote).blocks(&[1], &[1]).after(&hold.ticket());
    let waiting = manager.submit(waiting, ()).unwrap();
    assert_eq!(pair.here.forget(peer_of(&remote)).unwrap(), ForgetOutcome::Now);
    assert_eq!(declined(&manager, &transfer()), Declined::UnknownPeer);
    drop(hold);
    let error = end_of(waiting).result.unwrap_err();
    let cause = error.source().unwrap().downcast_ref::<RequestError>().unwrap();
    assert!(matches!(cause, RequestError::Declined(Declined::UnknownPeer)), "{cause}");
    assert!(pair.here.notify(peer_of(&remote), b"?").is_err());
}

#[test]
fn peers_of_another_agent_are_declined() {
    let (pair, other) = (Pair::new(), Pair::new());
    let (local, remote) = (pair.local(config(4), CONTIGUOUS), other.remote(config(4), CONTIGUOUS));
    let transfer = Transfer::new(&local, &remote);
    assert_eq!(declined(&pair.manager(), &transfer), Declined::UnknownPeer);
}

#[test]
fn an_engine_whose_thread_cannot_be_started_is_an_error() {
    in_child("engine::refusals::an_engine_whose_thread_cannot_be_started_is_an_error", || {
        let agent = agent();
        let new = || NixlEngine::new(&agent, NixlEngineOptions::default());
        drop(new().unwrap());
        // As at the limit on threads.
        forbid(&[libc::SYS_clone, libc::SYS_clone3], libc::EAGAIN).unwrap();
        let error = new().map(drop).unwrap_err();
        let NixlError::Thread { source } = &error else { panic!("{error:?}") };
        assert_eq!(source.kind(), std::io::ErrorKind::WouldBlock, "{source}");
    });
}
