//! Tests with access to an agent's internals: NIXL's access through an import, and a peer's state
//! while transfers with it are in flight.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects by panicking")]

use nixl_sys::{XferDescList, XferOp, XferRequest, XferStatus};
use terrane_core::{Capability, CapabilityStatus, Memory, Requirement};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, PhysicalLayout};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::Pattern;
use terrane_testkit::{peer, process};
use terrane_transfer::Endpoint;

mod foreign;
mod hostile;
mod keys;

use super::error::{ImportError, PeerChange};
use super::foreign::ForeignLayout;
use super::forget::ForgetOutcome;
use super::metadata::parts::MetadataParts;
use super::peer_use::{PeerUnavailable, Readiness};
use super::remote::RemoteLayout;
use super::table::PeerTable;
use crate::agent::Agent;
use crate::agent::builder::AgentBuilder;
use crate::agent::config::BackendConfig;

const KIND: LayoutKind = LayoutKind::FullyContiguous;
const SEED: u64 = 7;

fn agent() -> Agent {
    AgentBuilder::unnamed().backend(BackendConfig::new("UCX")).build().unwrap()
}

fn config() -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(8)
        .num_layers(4)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(64)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap()
}

fn layout(agent: &Agent) -> PhysicalLayout {
    LayoutBuilder::new(config())
        .kind(KIND)
        .allocate(&HeapAllocator::system())
        .register(agent)
        .build()
        .unwrap()
}

impl Agent {
    /// The name under which NIXL knows the latest peer of this name.
    pub(crate) fn nixl_name_of(&self, peer: &Agent) -> String {
        let loaded = self.peer_table().loaded();
        loaded.peers.get(peer.name()).unwrap().peer.nixl_name.as_str().to_owned()
    }
}

/// A NIXL request that reads all of a peer's layout into one of the same kind.
fn read_request(
    agent: &Agent,
    remote: &RemoteLayout,
    local: &PhysicalLayout,
) -> Result<XferRequest, nixl_sys::NixlError> {
    let [region] = local.regions() else { panic!("one region") };
    let [there] = remote.regions() else { panic!("one region") };
    let length = there.length().to_usize();
    let list = |address: u64| {
        let mut list = XferDescList::new(nixl_sys::MemType::Dram).unwrap();
        list.add_desc(usize::try_from(address).unwrap(), length, 0);
        list
    };
    let here = list(region.location().as_host().unwrap().get());
    let there = list(there.address());
    let (_, name) = agent.peer_names(remote.peer()).unwrap();
    let name = name.as_str();
    agent.raw().create_xfer_req(XferOp::Read, &here, &there, name, None)
}

/// Reads all of a peer's layout through NIXL into one of the same kind.
fn read_all(agent: &Agent, remote: &RemoteLayout) -> Endpoint {
    let local = layout(agent);
    let _peer = agent.use_peer(remote.peer()).unwrap();
    let (raw, request) = (agent.raw(), read_request(agent, remote, &local).unwrap());
    let mut in_flight = raw.post_xfer_req(&request, None).unwrap();
    while in_flight {
        in_flight = matches!(raw.get_xfer_status(&request).unwrap(), XferStatus::InProgress);
        std::thread::yield_now();
    }
    drop(request);
    Endpoint::new(local).unwrap()
}

#[test]
fn nixl_reaches_imported_memory() {
    let (owner, reader) = (agent(), agent());
    let source = layout(&owner);
    let bytes = owner.export(&source).unwrap();
    let source = Endpoint::new(source).unwrap();
    Pattern::new(SEED).fill(&source).unwrap();
    let remote = reader.import(&bytes).unwrap();
    let read = read_all(&reader, &remote);
    Pattern::new(SEED).verify(&read).unwrap().assert_clean("read from another agent");
}

#[test]
fn two_processes() {
    peer::with_peer(
        "peers::tests::two_processes",
        |other| {
            let bytes = other.link().receive();
            let reader = agent();
            let remote = reader.import(&bytes).unwrap();
            assert_eq!(reader.peer_name(remote.peer()).as_ref(), Some(remote.agent()));
            let read = read_all(&reader, &remote);
            Pattern::new(SEED).verify(&read).unwrap().assert_clean("read from another process");
            assert_eq!(reader.forget(remote.peer()).unwrap(), ForgetOutcome::Now);
            other.link().send(b"read");
        },
        |link| {
            let owner = agent();
            let layout = layout(&owner);
            let bytes = owner.export(&layout).unwrap();
            let end = Endpoint::new(layout).unwrap();
            Pattern::new(SEED).fill(&end).unwrap();
            link.send(&bytes);
            assert_eq!(link.receive(), b"read");
        },
    );
}

#[test]
fn a_peer_with_transfers_in_flight_is_forgotten_after_them() {
    let (owner, reader) = (agent(), agent());
    let layout = layout(&owner);
    let bytes = owner.export(&layout).unwrap();
    let remote = reader.import(&bytes).unwrap();
    let name = reader.nixl_name_of(&owner);
    let (first, second) =
        (reader.use_peer(remote.peer()).unwrap(), reader.use_peer(remote.peer()).unwrap());
    assert_eq!(reader.forget(remote.peer()).unwrap(), ForgetOutcome::AfterTransfers(2));

    // No new transfer begins, and the name stays reserved until those in flight have ended.
    assert!(reader.use_peer(remote.peer()).is_err());
    assert_eq!((reader.peer_name(remote.peer()), reader.peers()), (None, vec![]));
    let busy = |result: Result<RemoteLayout, ImportError>, expected| match result {
        Err(ImportError::PeerBusy { transfers, .. }) => assert_eq!(transfers, expected),
        other => panic!("{other:?}"),
    };
    busy(reader.import(&bytes), 2);
    drop(first);
    busy(reader.refresh(&bytes), 1);
    // Nothing removes the peer from NIXL before that, either.
    assert_eq!(reader.disconnect(), 0);
    assert!(reader.raw().check_remote_metadata(&name, None));
    drop(second);

    let again = reader.import(&bytes).unwrap();
    assert_ne!(again.peer(), remote.peer());
    // The remaining values of the first peer do not affect the second.
    drop(remote);
    assert_eq!(reader.peers(), [(again.peer(), owner.name().clone())]);
    read_all(&reader, &again);
}

#[test]
fn a_transfer_keeps_the_peer_of_a_dropped_layout() {
    let (owner, reader) = (agent(), agent());
    let layout = layout(&owner);
    let remote = reader.import(&owner.export(&layout).unwrap()).unwrap();
    let name = remote.agent().clone();
    let nixl_name = reader.nixl_name_of(&owner);
    let transfer = reader.use_peer(remote.peer()).unwrap();
    let peer = remote.peer();
    drop(remote);
    assert_eq!((reader.disconnect(), reader.peers()), (0, vec![(peer, name.clone())]));
    drop(transfer);
    assert_eq!(reader.peers(), []);
    assert!(reader.raw().check_remote_metadata(&nixl_name, None));
    assert_eq!(reader.disconnect(), 1);
    assert!(!reader.raw().check_remote_metadata(&nixl_name, None));
}

/// NIXL forgets a peer by itself when a connection breaks, without a report.
#[test]
fn a_peer_that_nixl_has_lost_is_loaded_again() {
    let (owner, reader) = (agent(), agent());
    let source = Endpoint::new(layout(&owner)).unwrap();
    Pattern::new(SEED).fill(&source).unwrap();
    let bytes = owner.export(source.layout()).unwrap();
    let lose = || reader.raw().invalidate_remote_md(&reader.nixl_name_of(&owner)).unwrap();
    let check = |remote: &RemoteLayout| {
        let read = read_all(&reader, remote);
        Pattern::new(SEED).verify(&read).unwrap().assert_clean("read after a loss");
    };
    // While a layout lives, which can be used again.
    let remote = reader.import(&bytes).unwrap();
    lose();
    let in_flight = reader.use_peer(remote.peer()).unwrap();
    let error = reader.import(&bytes).unwrap_err();
    assert!(matches!(error, ImportError::PeerBusy { transfers: 1, .. }), "{error}");
    drop(in_flight);
    let again = reader.import(&bytes).unwrap();
    assert_eq!(again.peer(), remote.peer());
    check(&again);
    check(&remote);
    // After the peer was forgotten, by `refresh`, and without any live layout.
    lose();
    reader.forget(remote.peer()).unwrap();
    check(&reader.import(&bytes).unwrap());
    lose();
    check(&reader.refresh(&bytes).unwrap());
    lose();
    check(&reader.import(&bytes).unwrap());
}

/// A process that hangs keeps its transfers, but not its name.
#[test]
fn a_process_gets_the_name_of_one_with_transfers_in_flight() {
    let (owner, reader) = (agent(), agent());
    let (name, old) = (owner.name().clone(), layout(&owner));
    let before = reader.import(&owner.export(&old).unwrap()).unwrap();
    let hangs = reader.use_peer(before.peer()).unwrap();
    let old_name = reader.nixl_name_of(&owner);
    drop((old, owner));

    let owner = AgentBuilder::new(name.clone()).backend(BackendConfig::new("UCX")).build().unwrap();
    let new = Endpoint::new(layout(&owner)).unwrap();
    Pattern::new(SEED).fill(&new).unwrap();
    let bytes = owner.export(new.layout()).unwrap();
    let error = reader.import(&bytes).unwrap_err();
    assert!(matches!(error, ImportError::PeerChanged { .. }), "{error}");
    let after = reader.refresh(&bytes).unwrap();
    let verify = |read: &Endpoint| {
        Pattern::new(SEED).verify(read).unwrap().assert_clean("read from the new process");
    };
    verify(&read_all(&reader, &after));
    assert_eq!(reader.peers(), [(after.peer(), name.clone())]);
    assert_eq!(reader.use_peer(before.peer()).unwrap_err(), PeerUnavailable::Unknown);
    // NIXL knows both processes until the old one has no request in flight.
    assert_eq!(reader.disconnect(), 0);
    assert!(reader.raw().check_remote_metadata(&old_name, None));

    // Transfers with the new process count.
    let in_flight = reader.use_peer(after.peer()).unwrap();
    let error = reader.refresh(&bytes).unwrap_err();
    assert!(matches!(error, ImportError::PeerBusy { transfers: 1, .. }), "{error}");
    drop(hangs);
    assert!(!reader.raw().check_remote_metadata(&old_name, None));
    drop((before, in_flight));
    assert_eq!(reader.peers(), [(after.peer(), name)]);
    verify(&read_all(&reader, &after));
}

/// A peer that was forgotten needs no refresh.
#[test]
fn a_process_gets_the_name_of_a_forgotten_one_with_transfers_in_flight() {
    let (owner, reader) = (agent(), agent());
    let (name, old) = (owner.name().clone(), layout(&owner));
    let before = reader.import(&owner.export(&old).unwrap()).unwrap();
    let hangs = reader.use_peer(before.peer()).unwrap();
    assert_eq!(reader.forget(before.peer()).unwrap(), ForgetOutcome::AfterTransfers(1));
    drop((old, owner));
    let owner = AgentBuilder::new(name.clone()).backend(BackendConfig::new("UCX")).build().unwrap();
    let new = layout(&owner);
    let after = reader.import(&owner.export(&new).unwrap()).unwrap();
    read_all(&reader, &after);
    drop(hangs);
    read_all(&reader, &after);
    assert_eq!(reader.peers(), [(after.peer(), name)]);
}

/// Reloading a peer takes as long as connecting. No submission waits for that.
#[test]
fn transfers_begin_while_nixl_loads_the_peer_and_post_afterwards() {
    let (owner, reader) = (agent(), agent());
    let layout = layout(&owner);
    let remote = reader.import(&owner.export(&layout).unwrap()).unwrap();
    let known = reader.peer_table().get(remote.peer()).unwrap();
    let loaded = reader.peer_table().loaded();
    let reloading = known.reload().unwrap_or_else(|busy| panic!("{busy} in flight"));
    let begun = reader.use_peer(remote.peer()).unwrap();
    assert_eq!(begun.readiness(), Readiness::Later);
    assert_eq!(reader.peer_name(remote.peer()).as_ref(), Some(owner.name()));
    std::thread::scope(|scope| {
        let notify = scope.spawn(|| reader.notify(remote.peer(), b"later"));
        assert_eq!(owner.notifications().unwrap(), []);
        drop((reloading, loaded));
        notify.join().unwrap().unwrap();
    });
    assert_eq!(begun.readiness(), Readiness::Ready);
    assert_eq!(known.reload().err(), Some(1));
    drop(begun);
    assert!(known.reload().is_ok());
}

/// Layouts of one peer are imported and dropped, and one stays: NIXL and the tables keep only the
/// live ones.
#[test]
fn unused_keys_are_dropped() {
    let (owner, reader) = (agent(), agent());
    let kept = layout(&owner);
    let kept = reader.import(&owner.export(&kept).unwrap()).unwrap();
    // Kept alive, so that each has a different address.
    let others: Vec<PhysicalLayout> = (0..320).map(|_| layout(&owner)).collect();
    for other in &others {
        let remote = reader.import(&owner.export(other).unwrap()).unwrap();
        assert_eq!(remote.peer(), kept.peer());
    }
    let loaded = reader.peer_table().loaded();
    let peer = loaded.peers.get(owner.name()).unwrap();
    let held = (peer.keys.len(), peer.layouts.len());
    assert!(held.0 < 300 && held.1 < 300, "{held:?} keys and layouts, and one lives");
    drop(loaded);
    read_all(&reader, &kept);
}

/// A peer is imported and dropped a thousand times. Only a connection remains.
#[test]
fn repeated_imports_leak_nothing() {
    const TEST: &str = "peers::tests::repeated_imports_leak_nothing";
    // In a separate process, because the test counts open files.
    process::in_child(TEST, || {
        let (owner, reader) = (agent(), agent());
        let layout = layout(&owner);
        let bytes = owner.export(&layout).unwrap();
        let mut open = 0;
        for round in 0..1000 {
            let remote = reader.import(&bytes).unwrap();
            if round % 2 == 0 {
                assert_eq!(reader.forget(remote.peer()).unwrap(), ForgetOutcome::Now);
            }
            drop(remote);
            if round == 0 {
                open = open_files();
            }
        }
        // UCX opens and closes some of its own files in between.
        assert!(open_files() < open + 100, "{open} files became {}", open_files());
        let loaded = reader.peer_table().loaded();
        assert_eq!((loaded.peers.len(), reader.peer_table().all().len()), (1, 0));
        drop(loaded);
        assert_eq!(reader.disconnect(), 1);
        assert!(reader.peer_table().loaded().peers.is_empty());
    });
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// NIXL keeps the connections of the peers that ended last.
#[test]
fn peers_that_ended_long_ago_are_disconnected() {
    let reader = agent();
    // Without progress threads: there are many agents, and nothing is read.
    let ucx = || BackendConfig::new("UCX");
    let owners: Vec<(Agent, PhysicalLayout)> = (0..34)
        .map(|_| {
            let owner = AgentBuilder::unnamed().progress_thread(None).backend(ucx());
            let owner = owner.build().unwrap();
            let layout = layout(&owner);
            (owner, layout)
        })
        .collect();
    let imported = owners.iter().map(|(owner, layout)| {
        drop(reader.import(&owner.export(layout).unwrap()).unwrap());
        reader.nixl_name_of(owner)
    });
    let names: Vec<String> = imported.collect();
    let is_known = |name: &String| reader.raw().check_remote_metadata(name, None);
    let known: Vec<bool> = names.iter().map(is_known).collect();
    assert_eq!(known.iter().position(|known| *known), Some(2), "{known:?}");
    assert_eq!(reader.disconnect(), 32);
}

/// An agent whose library seems to write metadata in another form.
fn agent_of_unknown_form(checks: Requirement) -> Agent {
    let builder = AgentBuilder::unnamed().metadata_checks(checks);
    let agent = builder.backend(BackendConfig::new("UCX")).build().unwrap();
    assert_eq!(agent.peer_table().reachable::<()>(|| Ok(None)), Ok(None));
    agent
}

#[test]
fn a_failed_query_of_the_own_metadata_is_repeated() {
    let table = PeerTable::default();
    let found = || Ok(Some(vec!["UCX".into()]));
    assert_eq!(table.reachable(|| Err("busy")), Err("busy"));
    assert_eq!(table.reachable::<&str>(found), Ok(Some(&["UCX".into()][..])));
    assert_eq!(table.reachable(|| Err("not called")), Ok(Some(&["UCX".into()][..])));
}

#[test]
fn metadata_of_an_unknown_form_is_refused() {
    let (owner, reader) = (agent(), agent_of_unknown_form(Requirement::Required));
    let layout = layout(&owner);
    let report = reader.capabilities();
    let status = report.status(&Capability::CheckedMetadata);
    assert!(matches!(status, Some(CapabilityStatus::Refused(_))), "{status:?}");
    let error = reader.import(&owner.export(&layout).unwrap()).unwrap_err();
    assert!(matches!(error, ImportError::UnknownForm), "{error}");
    assert_eq!((reader.peers(), reader.disconnect()), (vec![], 0));
}

#[test]
fn metadata_is_loaded_unchecked_if_the_caller_permits_it() {
    let without_checks = AgentBuilder::unnamed().metadata_checks(Requirement::Off);
    let without_checks = without_checks.backend(BackendConfig::new("UCX")).build().unwrap();
    for reader in [agent_of_unknown_form(Requirement::Preferred), without_checks] {
        let report = reader.capabilities();
        assert_ne!(report.status(&Capability::CheckedMetadata), Some(&CapabilityStatus::Granted));
        let owner = agent();
        let fill = |layout, seed| {
            let endpoint = Endpoint::new(layout).unwrap();
            Pattern::new(seed).fill(&endpoint).unwrap();
            endpoint
        };
        let verify = |remote: &RemoteLayout, seed| {
            let read = read_all(&reader, remote);
            Pattern::new(seed).verify(&read).unwrap().assert_clean("read without checks");
        };
        let first = fill(layout(&owner), 1);
        let exported = owner.export(first.layout()).unwrap();
        let remote = reader.import(&exported).unwrap();
        verify(&remote, 1);
        // A further layout, while the first one lives.
        let second = fill(layout(&owner), 2);
        let further = reader.import(&owner.export(second.layout()).unwrap()).unwrap();
        verify(&further, 2);
        verify(&remote, 1);
        assert_eq!(reader.import(&exported).unwrap().endpoint().id(), remote.endpoint().id());
        // A peer in use keeps its name, and can return after it has ended.
        let in_use = reader.use_peer(remote.peer()).unwrap();
        let error = reader.refresh(&exported).unwrap_err();
        assert!(matches!(error, ImportError::PeerBusy { transfers: 1, .. }), "{error}");
        drop((in_use, remote, further));
        verify(&reader.import(&exported).unwrap(), 1);
        // A lack of common backends is still detected.
        let posix = BackendConfig::new("POSIX").parameter("ios_pool_size", "64");
        let other = AgentBuilder::unnamed().metadata_checks(Requirement::Off).backend(posix);
        let error = other.build().unwrap().import(&exported).unwrap_err();
        assert!(matches!(error, ImportError::NoCommonBackend { .. }), "{error}");
    }
}
