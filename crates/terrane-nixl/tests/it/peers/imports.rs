//! Imports, their refusals, and the peers that they create.

use std::sync::Barrier;

use terrane_core::{Capability, CapabilityStatus, Memory, PeerId, StorageKind};
use terrane_layout::{BlockDimension, Geometry, LayoutKind};
use terrane_nixl::{
    AgentBuilder, BackendConfig, ForgetError, ForgetOutcome, ImportError, PeerChange,
};
use terrane_wire::{GeometryField, WireError, WireLimits};

use super::support::*;
use crate::support::posix;

#[test]
fn an_import_is_an_endpoint_in_the_peers_memory() {
    let (owner, reader) = (agent(), agent());
    for kind in LayoutKind::ALL {
        let layout = layout(&owner, kind);
        let remote = reader.import(&owner.export(&layout).unwrap()).unwrap();
        assert_eq!((remote.agent(), remote.storage()), (owner.name(), StorageKind::System));
        assert_eq!(remote.geometry(), layout.geometry());
        assert_eq!(remote.fingerprint(), layout.fingerprint());
        let end = remote.endpoint();
        assert_eq!(end.kind(), StorageKind::Remote(remote.peer()));
        for (remote, region) in end.layout().regions().iter().zip(layout.regions()) {
            let remote = remote.location().as_remote().unwrap();
            assert_eq!(remote.address, region.location().as_host().unwrap().get());
        }
        assert_eq!(end.layout().verify().unwrap().pieces, 8 * 4 * 2);
        // No address is one of this process.
        assert_eq!(end.layout().host_address(0, 0, 0), None);
    }
}

#[test]
fn an_agents_own_export_is_refused() {
    let agent = agent();
    let bytes = agent.export(&layout(&agent, CONTIGUOUS)).unwrap();
    let error = agent.import(&bytes).unwrap_err();
    assert!(matches!(error, ImportError::OwnLayout { .. }), "{error}");
    // Like from another process: within this process names are unique.
    let name = agent.name().clone();
    drop(agent);
    let error = named(&name).import(&bytes).unwrap_err();
    assert!(matches!(error, ImportError::OwnName { .. }), "{error}");
}

#[test]
fn importing_the_same_bytes_twice_returns_the_same_layout() {
    let (owner, reader) = (agent(), agent());
    let layout = layout(&owner, CONTIGUOUS);
    let bytes = owner.export(&layout).unwrap();
    let first = reader.import(&bytes).unwrap();
    let second = reader.import(&bytes).unwrap();
    assert_eq!(first.endpoint().id(), second.endpoint().id());
    let (peer, end) = (first.peer(), first.endpoint().clone());
    drop((first, second));
    // A remaining endpoint, such as a transfer's, still counts as the layout.
    let third = reader.import(&bytes).unwrap();
    assert_eq!((third.peer(), third.endpoint().id()), (peer, end.id()));
    drop((third, end));
    assert_eq!((reader.peers(), reader.peer_name(peer)), (vec![], None));
    assert_ne!(reader.import(&bytes).unwrap().peer(), peer);
}

#[test]
fn layouts_of_one_peer_share_it() {
    let (owner, reader) = (agent(), agent());
    let kind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };
    let layouts = [layout(&owner, CONTIGUOUS), layout(&owner, kind)];
    let [a, b] = layouts.each_ref().map(|layout| reader.import(&owner.export(layout).unwrap()));
    let (a, b) = (a.unwrap(), b.unwrap());
    assert_eq!(a.peer(), b.peer());
    assert_ne!(a.endpoint().id(), b.endpoint().id());
    drop(a);
    assert_eq!(reader.peers(), [(b.peer(), owner.name().clone())]);
    drop(b);
    assert_eq!(reader.peers(), []);
}

#[test]
fn the_same_bytes_are_not_imported_as_another_layout() {
    let (owner, reader) = (agent(), agent());
    let layout = layout(&owner, CONTIGUOUS);
    let described = owner.describe(&layout).unwrap();
    let first = reader.import(&described.encode().unwrap()).unwrap();
    let geometry = Geometry::new(&config().with_num_blocks(4).unwrap(), CONTIGUOUS).unwrap();
    let [region] = described.regions() else { panic!("one region") };
    let half = region.length().get() / 2;
    let half = terrane_wire::LayoutDescriptor::new(
        geometry,
        described.storage(),
        described.agent().clone(),
        described.metadata().to_vec(),
        vec![terrane_wire::RegionDescriptor::new(
            region.space(),
            region.address() + half,
            half.into(),
            region.backends().iter().cloned(),
        )],
    )
    .unwrap()
    .encode()
    .unwrap();
    let error = reader.import(&half).unwrap_err();
    assert!(matches!(error, ImportError::Overlap { region: 0, .. }), "{error}");
    drop(first);
    assert!(reader.import(&half).is_ok());
}

/// Each agent would track only its own transfers.
#[test]
fn one_agent_of_a_process_has_the_bytes_of_a_peer() {
    let (owner, first, second) = (agent(), agent(), agent());
    let layouts = [layout(&owner, CONTIGUOUS), layout(&owner, CONTIGUOUS)];
    let [bytes, others] = layouts.each_ref().map(|layout| owner.export(layout).unwrap());
    let held = first.import(&bytes).unwrap();
    let refused = || match second.import(&bytes) {
        Err(ImportError::InUse { region: 0, peer, by }) => {
            assert_eq!((&peer, &by), (owner.name(), first.name()));
        }
        other => panic!("{other:?}"),
    };
    refused();
    // Layouts of other bytes are independent.
    let further = second.import(&others).unwrap();
    refused();
    // An endpoint keeps the bytes claimed like the layout.
    let end = held.endpoint().clone();
    drop(held);
    refused();
    drop(end);
    let held = second.import(&bytes).unwrap();
    assert!(matches!(first.import(&bytes), Err(ImportError::InUse { .. })));
    // A forgotten layout cannot be used, even if it still lives.
    second.forget(held.peer()).unwrap();
    let again = first.refresh(&bytes).unwrap();
    drop((held, further));
    refused();
    drop(again);
    assert!(second.import(&bytes).is_ok());
}

#[test]
fn a_geometry_is_expected_or_only_its_shape() {
    let (owner, reader) = (agent(), agent());
    let layout = layout(&owner, CONTIGUOUS);
    let remote = reader.import(&owner.export(&layout).unwrap()).unwrap();
    assert_eq!(remote.expect(layout.geometry()), Ok(()));
    let geometry = |config| Geometry::new(config, CONTIGUOUS).unwrap();
    let more = config().with_num_blocks(100).unwrap();
    let more = geometry(&more);
    let mismatch = remote.expect(&more).unwrap_err();
    assert_eq!(mismatch.difference.field, GeometryField::NumBlocks);
    assert!(mismatch.to_string().contains("num_blocks is 100 here and 8 there"), "{mismatch}");
    assert_eq!(remote.expect_shape(&more), Ok(()));
    let deeper = config().with_num_layers(5).unwrap();
    let deeper = geometry(&deeper);
    let mismatch = remote.expect_shape(&deeper).unwrap_err();
    assert!(mismatch.to_string().contains("num_layers is 5 here and 4 there"), "{mismatch}");
}

#[test]
fn bytes_that_describe_no_layout_are_refused() {
    let (owner, reader) = (agent(), agent());
    let layout = layout(&owner, CONTIGUOUS);
    let bytes = owner.export(&layout).unwrap();
    let mut damaged = bytes.clone();
    damaged[40] ^= 1;
    for bytes in [&b""[..], b"hello", &bytes[..bytes.len() - 1], &damaged] {
        let error = reader.import(bytes).unwrap_err();
        assert!(matches!(error, ImportError::Wire(_)), "{error}");
    }
    let limits = WireLimits { metadata: 10.into(), ..WireLimits::default() };
    let error = reader.import_within(&bytes, &limits).unwrap_err();
    assert!(matches!(error, ImportError::Wire(WireError::OverLimit { .. })), "{error}");
    assert_eq!(reader.peers(), []);
}

/// Well-formed descriptions with false contents.
#[test]
fn metadata_that_does_not_fit_the_description_is_refused() {
    let (owner, other, reader) = (agent(), agent(), agent());
    let layout = layout(&owner, CONTIGUOUS);
    let described = owner.describe(&layout).unwrap();
    // Kept alive: it is unchanged, whatever is refused meanwhile.
    let remote = reader.import(&described.encode().unwrap()).unwrap();

    for metadata in [vec![], vec![9; 3], [&[4, 0, 0, 0][..], b"nixlSerDes|"].concat()] {
        let error = reader.import(&with_metadata(&described, metadata)).unwrap_err();
        assert!(matches!(error, ImportError::Metadata(_)), "{error}");
    }
    let cut = described.metadata().len() - 5;
    let error = reader.import(&with_metadata(&described, described.metadata()[..cut].to_vec()));
    assert!(matches!(error, Err(ImportError::Metadata(_))), "{error:?}");

    let of_other = other.describe(&super::support::layout(&other, CONTIGUOUS)).unwrap();
    let error = reader.import(&with_metadata(&described, of_other.metadata().to_vec()));
    match error {
        Err(ImportError::OtherAgent { found, .. }) => assert_eq!(found, other.name().as_str()),
        other => panic!("{other:?}"),
    }

    let error = reader.import(&moved(&described, 64)).unwrap_err();
    assert!(matches!(error, ImportError::NotCovered { region: 0, .. }), "{error}");

    assert_eq!(reader.peers(), [(remote.peer(), owner.name().clone())]);
    let again = reader.import(&described.encode().unwrap()).unwrap();
    assert_eq!(again.endpoint().id(), remote.endpoint().id());
}

#[test]
fn agents_need_a_backend_in_common() {
    let (owner, reader) = (agent(), agent_with("POSIX"));
    let layout = layout(&owner, CONTIGUOUS);
    match reader.import(&owner.export(&layout).unwrap()) {
        Err(ImportError::NoCommonBackend { theirs, ours, .. }) => {
            assert_eq!((theirs, ours), (vec!["UCX".into()], vec!["POSIX".into()]));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_forgotten_peer_returns_as_another_peer() {
    let (owner, reader) = (agent(), agent());
    let layout = layout(&owner, CONTIGUOUS);
    let bytes = owner.export(&layout).unwrap();
    let first = reader.import(&bytes).unwrap();
    assert_eq!(reader.peer_name(first.peer()).as_ref(), Some(owner.name()));
    assert_eq!(reader.forget(first.peer()).unwrap(), ForgetOutcome::Now);
    assert_eq!((reader.peer_name(first.peer()), reader.peers()), (None, vec![]));
    let gone = reader.forget(first.peer());
    assert!(matches!(gone, Err(ForgetError::UnknownPeer { .. })), "{gone:?}");
    assert!(reader.forget(PeerId::next()).is_err());
    let second = reader.import(&bytes).unwrap();
    assert_ne!(first.peer(), second.peer());
    assert_ne!(first.endpoint().id(), second.endpoint().id());
    assert_eq!(reader.peers(), [(second.peer(), owner.name().clone())]);
}

#[test]
fn a_restarted_peer_is_refreshed() {
    let (owner, reader) = (agent(), agent());
    let name = owner.name().clone();
    let old = layout(&owner, CONTIGUOUS);
    let before = reader.import(&owner.export(&old).unwrap()).unwrap();
    drop((old, owner));
    let owner = named(&name);
    let new = layout(&owner, CONTIGUOUS);
    let bytes = owner.export(&new).unwrap();
    match reader.import(&bytes) {
        Err(ImportError::PeerChanged { peer, change }) => {
            assert_eq!((peer, change), (name.clone(), PeerChange::Connection));
        }
        other => panic!("{other:?}"),
    }
    // The known peer is unchanged.
    assert_eq!(reader.peer_name(before.peer()), Some(name.clone()));
    let after = reader.refresh(&bytes).unwrap();
    assert_ne!(before.peer(), after.peer());
    assert_eq!(reader.peers(), [(after.peer(), name)]);
    assert_eq!(reader.peer_name(before.peer()), None);
    drop(before);
    assert_eq!(reader.peers().len(), 1);
    // None of its layouts lives, so an import suffices.
    drop(after);
    assert!(reader.import(&bytes).is_ok());
}

#[test]
fn refreshing_an_unchanged_peer_makes_it_another_peer() {
    let (owner, reader) = (agent(), agent());
    let layout = layout(&owner, CONTIGUOUS);
    let bytes = owner.export(&layout).unwrap();
    let first = reader.refresh(&bytes).unwrap();
    let second = reader.refresh(&bytes).unwrap();
    assert_ne!(first.peer(), second.peer());
    assert_eq!(reader.peers(), [(second.peer(), owner.name().clone())]);
}

/// Threads drop, forget and import concurrently. Nothing is lost or leaked.
#[test]
fn threads_import_and_forget_concurrently() {
    let (owner, reader) = (agent(), agent());
    let layouts = [layout(&owner, CONTIGUOUS), layout(&owner, CONTIGUOUS)];
    let exports = layouts.each_ref().map(|layout| owner.export(layout).unwrap());
    let start = Barrier::new(4);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (reader, bytes, start) = (&reader, &exports[thread % 2], &start);
            scope.spawn(move || {
                start.wait();
                for round in 0..100 {
                    let remote = reader.import(bytes).unwrap();
                    if (round + thread) % 5 == 0 {
                        // Another thread may have been first.
                        let _ = reader.forget(remote.peer());
                    }
                    drop(remote);
                }
            });
        }
    });
    assert_eq!(reader.peers(), []);
    assert_eq!(reader.disconnect(), 1);
    assert_eq!(reader.disconnect(), 0);
}

/// A peer may have backends that this agent lacks. Their keys are ignored.
#[test]
fn keys_for_missing_backends_are_ignored() {
    let (owner, reader) = (agent(), agent());
    let layout = layout(&owner, CONTIGUOUS);
    let described = owner.describe(&layout).unwrap();
    let metadata = described.metadata();
    let (head, keys) = {
        let (length, rest) = metadata.split_first_chunk::<4>().unwrap();
        let length = usize::try_from(u32::from_le_bytes(*length)).unwrap();
        (&metadata[..4 + length], &rest[length..])
    };
    let find = |text: &[u8], in_: &[u8]| in_.windows(text.len()).position(|w| w == text).unwrap();
    let count = find(b"nixlSecElms", keys) + b"nixlSecElms".len() + 8;
    let section = find(b"bknd", keys);
    let mut other = keys[section..].to_vec();
    let name = find(b"UCX", &other);
    other[name..name + 3].copy_from_slice(b"FOO");
    for first in [true, false] {
        let mut more = keys.to_vec();
        more[count..count + 8].copy_from_slice(&2_u64.to_ne_bytes());
        let at = if first { section } else { more.len() };
        more.splice(at..at, other.iter().copied());
        let bytes = with_metadata(&described, [head, &more].concat());
        let remote = reader.import(&bytes).unwrap();
        assert_eq!(remote.agent(), owner.name());
    }
}

/// An agent knows the form of its own metadata even if no peer can reach it.
#[test]
fn an_agent_that_no_peer_reaches_checks_imports() {
    let owner = agent();
    let bytes = owner.export(&layout(&owner, CONTIGUOUS)).unwrap();
    for reader in [AgentBuilder::unnamed().build().unwrap(), agent_with("POSIX")] {
        let report = reader.capabilities();
        let status = report.status(&Capability::CheckedMetadata);
        assert_eq!(status, Some(&CapabilityStatus::Granted), "{reader:?}");
        let error = reader.import(&bytes).unwrap_err();
        assert!(matches!(error, ImportError::NoCommonBackend { .. }), "{error}");
    }
}

/// POSIX has also accepted the memory, and no peer reaches memory through it.
#[test]
fn an_imported_layout_is_reached_by_backends_with_keys() {
    let both = || AgentBuilder::unnamed().backend(posix()).backend(BackendConfig::new("UCX"));
    let (owner, reader) = (both().build().unwrap(), both().build().unwrap());
    let layout = layout(&owner, CONTIGUOUS);
    let remote = reader.import(&owner.export(&layout).unwrap()).unwrap();
    let [region] = remote.regions() else { panic!("one region") };
    assert_eq!(region.backends(), ["POSIX".into(), "UCX".into()]);
    let registrations = remote.endpoint().layout().registrations();
    let accepted: Vec<_> = registrations[0].record.accepted().map(|name| name.as_str()).collect();
    assert_eq!(accepted, ["UCX"]);
}
