//! Layouts of agents without Terrane: NIXL's own metadata, whole, in pieces, and damaged.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use terrane_core::StorageKind;
use terrane_layout::{Axis, AxisSteps, Geometry, Section, SectionName};
use terrane_testkit::damage::Damage;
use terrane_wire::{RegionDescriptor, WireLimits};

use super::super::metadata::{ConnectionInfo, KeyLocation, MemoryKey, Metadata};
use super::*;

/// A layout as an agent without Terrane describes it, with the agent's whole metadata.
fn foreign<'a>(
    owner: &Agent,
    layout: &PhysicalLayout,
    metadata: &'a [&'a [u8]],
) -> ForeignLayout<'a> {
    let region = |region: &terrane_core::Region| {
        let address = region.location().as_host().unwrap().get();
        RegionDescriptor::new(terrane_core::RemoteSpace::Host, address, region.length(), [])
    };
    ForeignLayout {
        geometry: layout.geometry().clone(),
        storage: StorageKind::System,
        agent: owner.name().clone(),
        metadata,
        regions: layout.regions().iter().map(region).collect(),
    }
}

fn filled(owner: &Agent) -> Endpoint {
    let end = Endpoint::new(layout(owner)).unwrap();
    Pattern::new(SEED).fill(&end).unwrap();
    end
}

fn verify(read: &Endpoint) {
    Pattern::new(SEED).verify(read).unwrap().assert_clean("read from a foreign agent");
}

#[test]
fn whole_metadata_of_nixl_gives_access_to_a_layout() {
    let (owner, reader) = (agent(), agent());
    let (source, _other) = (filled(&owner), layout(&owner));
    let whole = owner.raw().get_local_md().unwrap();
    let pieces = [&whole[..]];
    let remote = reader.import_foreign(&foreign(&owner, source.layout(), &pieces)).unwrap();
    assert_eq!(
        (remote.agent(), remote.regions()[0].backends()),
        (owner.name(), &["UCX".into()][..])
    );
    verify(&read_all(&reader, &remote));
    // Other pieces of the same agent's metadata describe the same layout.
    let told = owner.nixl_metadata(source.layout()).unwrap();
    let again = reader.import_foreign(&foreign(&owner, source.layout(), &told.pieces())).unwrap();
    assert_eq!(again.endpoint().id(), remote.endpoint().id());
    let joined = told.whole().unwrap();
    let again = reader.import_foreign(&foreign(&owner, source.layout(), &[&joined])).unwrap();
    assert_eq!(again.endpoint().id(), remote.endpoint().id());
    // An export of the agent belongs to the same peer, too.
    let export = owner.export(source.layout()).unwrap();
    assert_eq!(reader.import(&export).unwrap().peer(), remote.peer());
}

/// NIXL loads the pieces without Terrane.
#[test]
fn nixl_takes_the_metadata_of_a_layout_in_pieces_and_whole() {
    let owner = agent();
    let source = layout(&owner);
    let told = owner.nixl_metadata(&source).unwrap();
    assert_eq!(told.regions, owner.describe(&source).unwrap().regions());
    let whole = told.whole().unwrap();
    for pieces in [&told.pieces()[..], &[&whole]] {
        let reader = agent();
        for piece in pieces {
            assert_eq!(reader.raw().load_remote_md(piece).unwrap(), owner.name().as_str());
        }
        let mut list = XferDescList::new(nixl_sys::MemType::Dram).unwrap();
        let (address, length) = (told.regions[0].address(), told.regions[0].length().to_usize());
        list.add_desc(usize::try_from(address).unwrap(), length, 0);
        assert!(reader.raw().check_remote_metadata(owner.name().as_str(), Some(&list)));
    }
}

#[test]
fn longer_metadata_belongs_to_the_same_peer() {
    let (owner, reader) = (agent(), agent());
    let source = filled(&owner);
    let whole = owner.raw().get_local_md().unwrap();
    let first = reader.import_foreign(&foreign(&owner, source.layout(), &[&whole])).unwrap();
    // Also while it is in use, because NIXL need not load anything.
    let in_flight = reader.use_peer(first.peer()).unwrap();
    let further = filled(&owner);
    let grown = owner.raw().get_local_md().unwrap();
    assert!(grown.len() > whole.len());
    let again = reader.import_foreign(&foreign(&owner, source.layout(), &[&grown])).unwrap();
    assert_eq!(again.endpoint().id(), first.endpoint().id());
    drop(in_flight);
    let second = reader.import_foreign(&foreign(&owner, further.layout(), &[&grown])).unwrap();
    assert_eq!(second.peer(), first.peer());
    verify(&read_all(&reader, &second));
    verify(&read_all(&reader, &first));
}

/// A layout that no config describes: rows of K and V next to each other, with padding between
/// blocks.
#[test]
fn strides_of_any_kind_are_imported() {
    let (owner, reader) = (agent(), agent());
    let row = |name, offset| {
        Section::new(name, 2)
            .at(0, offset)
            .axis(Axis::Block, AxisSteps::new(3, 4608))
            .axis(Axis::Token, AxisSteps::new(16, 256))
            .axis(Axis::Element, AxisSteps::new(64, 2))
    };
    let sections = [row(SectionName::K, 0), row(SectionName::V, 128)];
    let geometry = Geometry::from_sections(sections).unwrap();
    let build = |agent: &Agent| {
        let builder = LayoutBuilder::from_geometry(geometry.clone());
        builder.allocate(&HeapAllocator::system()).register(agent).build().unwrap()
    };
    let source = build(&owner);
    let whole = owner.raw().get_local_md().unwrap();
    let pieces = [&whole[..]];
    let remote = reader.import_foreign(&foreign(&owner, &source, &pieces)).unwrap();
    assert_eq!(remote.geometry(), &geometry);
    // The result equals that of Terrane's export.
    let exported = owner.describe(&source).unwrap();
    assert_eq!((exported.geometry(), exported.fingerprint()), (&geometry, remote.fingerprint()));
    assert_eq!(remote.expect(build(&reader).geometry()), Ok(()));
}

#[test]
fn a_region_is_limited_to_the_bytes_of_the_layout() {
    let (owner, reader) = (agent(), agent());
    let source = filled(&owner);
    let whole = owner.raw().get_local_md().unwrap();
    let pieces = [&whole[..]];
    let of_blocks =
        |blocks| Geometry::new(&config().with_num_blocks(blocks).unwrap(), KIND).unwrap();
    let half =
        ForeignLayout { geometry: of_blocks(4), ..foreign(&owner, source.layout(), &pieces) };
    let remote = reader.import_foreign(&half).unwrap();
    assert_eq!(remote.regions()[0].length(), of_blocks(4).region_bytes(0));
    let error =
        reader.import_foreign(&ForeignLayout { geometry: of_blocks(9), ..half }).unwrap_err();
    assert!(error.to_string().contains("the geometry requires"), "{error}");
}

#[test]
fn incomplete_metadata_is_refused_with_the_missing_part() {
    let (owner, other, reader) = (agent(), agent(), agent());
    let (source, of_other) = (layout(&owner), layout(&other));
    let whole = owner.raw().get_local_md().unwrap();
    let refused = |pieces: &[&[u8]]| {
        let error = reader.import_foreign(&foreign(&owner, &source, pieces)).unwrap_err();
        assert_eq!((reader.peers(), reader.disconnect()), (vec![], 0), "{error}");
        error
    };
    for end in 0..whole.len() {
        let error = refused(&[&whole[..end]]);
        assert!(matches!(error, ImportError::Metadata(_)), "{end}: {error}");
    }
    match refused(&[&other.raw().get_local_md().unwrap()]) {
        ImportError::OtherAgent { described, found } => {
            assert_eq!((&described, found.as_str()), (owner.name(), other.name().as_str()));
        }
        error => panic!("{error}"),
    }
    let told = owner.nixl_metadata(&source).unwrap();
    for pieces in [&[][..], &[&told.keys[..]]] {
        let error = refused(pieces);
        assert!(matches!(error, ImportError::NoConnection { .. }), "{error}");
    }
    let error = refused(&[&told.connection]);
    assert!(matches!(error, ImportError::NotCovered { region: 0, .. }), "{error}");
    // The process that had the name before.
    let (name, blocks) = (owner.name().clone(), told.regions.clone());
    drop(source);
    drop(owner);
    let again = AgentBuilder::new(name).backend(BackendConfig::new("UCX")).build().unwrap();
    let source = layout(&again);
    let now = again.nixl_metadata(&source).unwrap();
    let pieces = [&told.connection[..], &now.connection, &now.keys];
    let error = reader.import_foreign(&foreign(&again, &source, &pieces)).unwrap_err();
    assert!(matches!(error, ImportError::TwoConnections { .. }), "{error}");
    // Regions that the agent has not registered, or no longer.
    let whole = again.raw().get_local_md().unwrap();
    let pieces = [&whole[..]];
    let mut outside = foreign(&again, &source, &pieces);
    let inside = outside.regions[0].clone();
    for address in [inside.address() - 4096, inside.address() + 4096, u64::MAX - 10] {
        let (space, length) = (inside.space(), inside.length());
        outside.regions = vec![RegionDescriptor::new(space, address, length, [])];
        let error = reader.import_foreign(&outside).unwrap_err();
        assert!(matches!(error, ImportError::NotCovered { region: 0, .. }), "{error}");
    }
    drop((blocks, of_other));
    // This agent's own memory is no peer's.
    let own = reader.raw().get_local_md().unwrap();
    let mine = layout(&reader);
    let error = reader.import_foreign(&foreign(&reader, &mine, &[&own])).unwrap_err();
    assert!(
        matches!(error, ImportError::OwnLayout { .. } | ImportError::NotCovered { .. }),
        "{error}"
    );
}

#[test]
fn metadata_of_more_than_the_limits_is_refused() {
    let (owner, reader) = (agent(), agent());
    let source = layout(&owner);
    let whole = owner.raw().get_local_md().unwrap();
    let refused =
        |pieces: &[&[u8]]| reader.import_foreign(&foreign(&owner, &source, pieces)).unwrap_err();
    let limit = WireLimits::DEFAULT.metadata.to_usize();
    let long = vec![b'|'; limit + 1 - whole.len()];
    match refused(&[&whole, &long]) {
        ImportError::MetadataTooLong { actual, limit } => assert_eq!(actual.get(), limit.get() + 1),
        error => panic!("{error}"),
    }
    assert!(matches!(refused(&[&whole, &long[1..]]), ImportError::Metadata(_)));
    // Each piece has few connections, and all of them have too many.
    let names: Vec<String> = (0..64).map(|index| format!("B{index}")).collect();
    let connections = names.iter().map(|name| ConnectionInfo { backend: name, data: b"?" });
    let agent = owner.name().as_str();
    let more = Metadata { agent, connections: connections.collect(), memory: vec![] }.write();
    match refused(&[&whole, &more]) {
        ImportError::Metadata(error) => assert!(error.expected.contains("64"), "{error}"),
        error => panic!("{error}"),
    }
}

/// NIXL would refuse all of it, and drop the peer.
#[test]
fn keys_of_local_backends_are_not_passed_to_nixl() {
    let owner = agent();
    let both = AgentBuilder::unnamed().backend(BackendConfig::new("UCX"));
    let reader = both.backend(BackendConfig::new("POSIX")).build().unwrap();
    let source = filled(&owner);
    let whole = owner.raw().get_local_md().unwrap();
    let mut metadata = Metadata::parse(&whole).unwrap();
    let key = metadata.memory[0];
    for backend in ["POSIX", "FOO"] {
        metadata
            .memory
            .push(MemoryKey { location: KeyLocation { backend, ..key.location }, key: b"?" });
    }
    let more = metadata.write();
    let remote = reader.import_foreign(&foreign(&owner, source.layout(), &[&more])).unwrap();
    verify(&read_all(&reader, &remote));
}

#[test]
fn a_restarted_foreign_agent_is_refreshed() {
    let (owner, reader) = (agent(), agent());
    let (name, old) = (owner.name().clone(), layout(&owner));
    let whole = owner.raw().get_local_md().unwrap();
    let before = reader.import_foreign(&foreign(&owner, &old, &[&whole])).unwrap();
    let _hangs = reader.use_peer(before.peer()).unwrap();
    drop((old, owner));
    let owner = AgentBuilder::new(name).backend(BackendConfig::new("UCX")).build().unwrap();
    let new = filled(&owner);
    let whole = owner.raw().get_local_md().unwrap();
    let pieces = [&whole[..]];
    let now = foreign(&owner, new.layout(), &pieces);
    let error = reader.import_foreign(&now).unwrap_err();
    assert!(matches!(error, ImportError::PeerChanged { .. }), "{error}");
    let after = reader.refresh_foreign(&now).unwrap();
    assert_ne!(after.peer(), before.peer());
    verify(&read_all(&reader, &after));
}

/// Agents in Python can get backends at any time.
#[test]
fn an_agent_that_gets_another_backend_is_the_same_process() {
    let (owner, reader, other) = (agent(), agent(), agent());
    let source = filled(&owner);
    let whole = owner.raw().get_local_md().unwrap();
    let first = reader.import_foreign(&foreign(&owner, source.layout(), &[&whole])).unwrap();
    let mut metadata = Metadata::parse(&whole).unwrap();
    metadata.connections.insert(0, ConnectionInfo { backend: "FOO", data: b"somewhere" });
    let more = metadata.write();
    let pieces = [&more[..]];
    let now = foreign(&owner, source.layout(), &pieces);
    // Its bytes are in use, also for another agent.
    let error = other.import_foreign(&now).unwrap_err();
    assert!(matches!(error, ImportError::InUse { .. }), "{error}");
    let error = reader.import_foreign(&now).unwrap_err();
    assert!(matches!(error, ImportError::PeerChanged { .. }), "{error}");
    let in_flight = reader.use_peer(first.peer()).unwrap();
    let error = reader.refresh_foreign(&now).unwrap_err();
    assert!(matches!(error, ImportError::PeerBusy { transfers: 1, .. }), "{error}");
    drop(in_flight);
    let again = reader.refresh_foreign(&now).unwrap();
    verify(&read_all(&reader, &again));
    drop((first, again));
    assert!(other.import_foreign(&now).is_ok());
}

#[test]
fn damaged_metadata_is_refused_or_gives_access_to_all_regions() {
    let (owner, reader) = (agent(), agent());
    let (source, _more) = (layout(&owner), layout(&owner));
    let whole = owner.raw().get_local_md().unwrap();
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
    let run = runner.run(&Damage::up_to(4), |damage| {
        let mut bytes = whole.clone();
        damage.iter().for_each(|damage| damage.apply(&mut bytes));
        match reader.describe_foreign(&foreign(&owner, &source, &[&bytes])) {
            Ok(described) => {
                let described = std::sync::Arc::new(described);
                prop_assert!(!reader.check(&described).unwrap().usable.is_empty());
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
        Ok(())
    });
    run.unwrap();
}
