//! Layouts in the memory of a peer: planned and claimed like any other, and declined by every
//! engine that does not support peers.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use terrane_core::{
    ByteCount, DeviceId, Location, Memory, PeerId, RemoteAddress, RemoteSpace, StorageKind,
};
use terrane_layout::{LayoutBuilder, LayoutKind};
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::conformance::memory::the_location_fits_the_kind;
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
};
use terrane_transfer::{
    CopyEngine, CopyFailure, CopyJob, Declined, Durability, Endpoint, OnlyPath, Orphaned, Planner,
    Quote, Report, Side, Transfer, TransferError, TransferManager, TransferOptions, TransferPlan,
};

use crate::support::*;

/// A registration that a peer states.
#[derive(Debug)]
struct PeerMemory {
    at: RemoteAddress,
    length: ByteCount,
}

// SAFETY: no code of this process can access the address.
unsafe impl Memory for PeerMemory {
    fn kind(&self) -> StorageKind {
        StorageKind::Remote(self.at.peer)
    }

    fn location(&self) -> Location {
        Location::Remote(self.at)
    }

    fn length(&self) -> ByteCount {
        self.length
    }
}

/// 8 blocks of a peer, starting at this address, one region after the other.
fn of_peer(peer: PeerId, space: RemoteSpace, address: u64, kind: LayoutKind) -> Endpoint {
    try_of_peer(peer, space, address, kind).unwrap()
}

fn try_of_peer(
    peer: PeerId,
    space: RemoteSpace,
    address: u64,
    kind: LayoutKind,
) -> Option<Endpoint> {
    let region = config(8).num_blocks() * 2 * u32::try_from(PIECE).unwrap();
    let (regions, length) = match kind {
        CONTIGUOUS => (1, ByteCount::new(u64::from(region) * 4)),
        _ => (4, ByteCount::new(u64::from(region))),
    };
    let memory = (0..regions).map(|n| {
        let at = RemoteAddress { peer, space, address: address + n * length.get() };
        PeerMemory { at, length }
    });
    let builder = LayoutBuilder::new(config(8)).kind(kind).adopt_memory(memory).unregistered();
    Endpoint::new(builder.build().unwrap()).ok()
}

#[test]
fn locations_of_peers_fit_their_kind() {
    let at = RemoteAddress { peer: PeerId::next(), space: RemoteSpace::Host, address: 4096 };
    the_location_fits_the_kind(&PeerMemory { at, length: ByteCount::new(1) });
}

#[test]
fn no_engine_of_this_machine_copies_memory_of_a_peer() {
    let system = SystemAllocator::new(SystemOptions::default());
    let disk = Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap());
    let host = Arc::new(
        HostEngine::new(HostEngineOptions {
            threads: NonZeroUsize::MIN,
            ..HostEngineOptions::default()
        })
        .unwrap(),
    );
    let relay =
        RelayEngine::new(host.clone(), disk.clone(), system, &RelayOptions::default()).unwrap();
    let manager = TransferManager::new([host as _, disk as _, Arc::new(relay) as _]);
    let local = endpoint(config(8), CONTIGUOUS);
    let spaces = [RemoteSpace::Host, RemoteSpace::Device(DeviceId::new(0)), RemoteSpace::File(0)];
    for space in spaces {
        let peer = PeerId::next();
        let remote = of_peer(peer, space, 4096, OUTER_FIRST);
        for (from, to) in [(&local, &remote), (&remote, &local), (&remote, &remote)] {
            let cause = refused(&manager, Transfer::new(from, to).blocks(&[0], &[1]));
            assert_says(&cause, &[&format!("peer {peer}"), "host", "disk", "relay"]);
            let TransferError::NoEngine { declined, .. } = cause else { panic!("{cause:?}") };
            assert!(declined.iter().all(|(_, why)| *why == Declined::Kinds), "{declined:?}");
        }
    }
}

#[test]
fn plans_locate_runs_in_the_memory_of_the_peer() {
    let (local, peer) = (endpoint(config(8), CONTIGUOUS), PeerId::next());
    let remote = of_peer(peer, RemoteSpace::Host, 1 << 20, CONTIGUOUS);
    let transfer = Transfer::new(&local, &remote).blocks(&[2, 3, 5], &[0, 1, 2]);
    let plan = Planner::new().plan(&transfer).unwrap();
    assert_eq!((plan.pieces(), plan.run_count()), (24, 2));
    let at: Vec<_> = plan
        .runs()
        .iter()
        .filter_map(|run| plan.location(run, Side::Destination)?.as_remote())
        .map(|at| (at.peer, at.address))
        .collect();
    assert_eq!(at, [(peer, 1 << 20), (peer, (1 << 20) + 2 * 8 * PIECE)]);
}

#[test]
fn bytes_of_a_peer_belong_to_one_endpoint() {
    let (peer, other) = (PeerId::next(), PeerId::next());
    let held = of_peer(peer, RemoteSpace::Host, 4096, CONTIGUOUS);
    assert!(try_of_peer(peer, RemoteSpace::Host, 4100, CONTIGUOUS).is_none());
    drop(try_of_peer(other, RemoteSpace::Host, 4100, CONTIGUOUS).unwrap());
    drop(try_of_peer(peer, RemoteSpace::File(0), 4100, CONTIGUOUS).unwrap());
    drop(held);
    drop(try_of_peer(peer, RemoteSpace::Host, 4100, CONTIGUOUS).unwrap());
}

#[test]
fn durability_is_refused_for_a_peer() {
    let manager = TransferManager::with_default_engines().unwrap();
    let local = endpoint(config(8), CONTIGUOUS);
    let remote = of_peer(PeerId::next(), RemoteSpace::File(0), 4096, CONTIGUOUS);
    let transfer = Transfer::new(&local, &remote).durability(Durability::Data);
    assert!(matches!(refused(&manager, transfer), TransferError::DurabilityWithoutFile { .. }));
}

/// An engine whose peer does not answer, so it orphans every transfer.
#[derive(Debug, Default)]
struct Unanswered {
    remains: Mutex<Vec<Orphaned>>,
    told: Mutex<Vec<Vec<u8>>>,
}

// SAFETY: it accesses no byte.
unsafe impl CopyEngine for Unanswered {
    fn name(&self) -> &'static str {
        "unanswered"
    }

    fn quote(&self, plan: &TransferPlan, _: &TransferOptions) -> Result<Quote, Declined> {
        if ![plan.source(), plan.destination()].iter().any(|end| end.kind().is_remote()) {
            return Err(Declined::Kinds);
        }
        Ok(Quote::constant(Duration::ZERO, &OnlyPath { path: "none", reason: "a test" }))
    }

    fn submit(&self, job: CopyJob) {
        if let Some(message) = &job.options().notification {
            self.told.lock().unwrap().push(message.to_vec());
        }
        let failure = CopyFailure::Engine { source: "the peer does not answer".into() };
        self.remains.lock().unwrap().push(job.orphan(failure));
    }
}

/// The error of an unanswered transfer.
#[track_caller]
fn assert_unanswered(result: Result<Report, TransferError>) {
    let error = result.unwrap_err();
    let first: &dyn std::error::Error = &error;
    let mut causes = std::iter::successors(Some(first), |error| error.source());
    assert!(causes.any(|cause| cause.to_string() == "the peer does not answer"), "{error:?}");
}

#[test]
fn an_orphaned_part_ends_its_transfer_and_keeps_its_blocks() {
    let engine = Arc::new(Unanswered::default());
    let host = Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap());
    let (bounce, options) = (HeapAllocator::pinned(), RelayOptions::default());
    let relay = RelayEngine::new(host, engine.clone(), bounce, &options).unwrap();
    let manager = TransferManager::new([Arc::new(relay) as _]);
    let local = endpoint(config(8), CONTIGUOUS);
    let remote = of_peer(PeerId::next(), RemoteSpace::Host, 4096, CONTIGUOUS);
    let transfer = Transfer::new(&local, &remote).blocks(&[1, 2], &[3, 4]);
    assert_unanswered(end_of(manager.submit(transfer, ()).unwrap()).result);
    assert!(local.hold_for_write(&[1]).unwrap_err().is_conflict());
    assert!(remote.hold_for_read(&[4]).unwrap_err().is_conflict());
    let remains = std::mem::take(&mut *engine.remains.lock().unwrap());
    assert!(!remains.is_empty());
    drop(remains);
    assert_unclaimed(&local);
    assert_unclaimed(&remote);
}

#[test]
fn an_orphaned_transfer_ends_and_keeps_its_memory() {
    let engine = Arc::new(Unanswered::default());
    let manager = TransferManager::new([engine.clone() as _]);
    let local = endpoint(config(8), CONTIGUOUS);
    let remote = of_peer(PeerId::next(), RemoteSpace::Host, 4096, CONTIGUOUS);
    let guard = Arc::new(());
    let transfer = Transfer::new(&remote, &local).blocks(&[1, 2], &[3, 4]).notify(*b"read");
    let completion = manager.submit(transfer, Arc::clone(&guard)).unwrap();
    let ticket = completion.ticket();
    let outcome = end_of(completion);
    assert!(Arc::ptr_eq(&outcome.guard, &guard), "another guard was returned");
    assert_unanswered(outcome.result);
    assert_eq!(*engine.told.lock().unwrap(), [b"read"]);
    // A transfer that runs after it fails, and one that uses its blocks is refused.
    let after = Transfer::new(&remote, &local).blocks(&[5], &[5]).after(&ticket);
    let after = end_of(manager.submit(after, ()).unwrap()).result.unwrap_err();
    assert!(matches!(after, TransferError::PredecessorFailed { .. }), "{after}");
    assert!(local.hold_for_read(&[4]).unwrap_err().is_conflict());
    assert!(remote.hold_for_write(&[1]).unwrap_err().is_conflict());
    drop(local.hold_for_write(&[0, 5]).unwrap());
    // It also keeps the memory.
    let weak = local.downgrade();
    drop(local);
    assert!(!weak.has_gone());
    let remains = engine.remains.lock().unwrap().pop();
    drop(remains);
    assert!(weak.has_gone());
    assert_unclaimed(&remote);
}

#[test]
fn a_notification_needs_a_peer() {
    let manager = TransferManager::with_default_engines().unwrap();
    let [a, b] = [(); 2].map(|()| endpoint(config(8), CONTIGUOUS));
    let cause = refused(&manager, Transfer::new(&a, &b).notify(*b"?"));
    assert_says(&cause, &["notification", "system"]);
}
