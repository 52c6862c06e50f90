//! Exports with forged keys. The import refuses some of them, and NIXL the others.

use terrane_wire::LayoutDescriptor;

use super::*;

/// The export with changed keys.
fn with_keys(described: &LayoutDescriptor, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let parts = MetadataParts::split(described.metadata()).unwrap();
    let mut keys = parts.keys.to_vec();
    change(&mut keys);
    let metadata = MetadataParts { connection: parts.connection, keys: &keys }.join().unwrap();
    let (geometry, storage) = (described.geometry().clone(), described.storage());
    let (agent, regions) = (described.agent().clone(), described.regions().to_vec());
    let changed = LayoutDescriptor::new(geometry, storage, agent, metadata, regions);
    changed.unwrap().encode().unwrap()
}

fn find(keys: &[u8], text: &[u8]) -> usize {
    keys.windows(text.len()).position(|window| window == text).unwrap()
}

/// The offset of the key count of the only section. The key follows after `|`: its length, the
/// memory's location in 24 bytes, UCX's data, and `|`.
fn count_in(keys: &[u8]) -> usize {
    find(keys, b"n\x08\0\0\0\0\0\0\0") + 9
}

fn number_at(keys: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(*keys.get(at..).unwrap().first_chunk().unwrap())
}

fn put(keys: &mut [u8], at: usize, number: u64) {
    keys.get_mut(at..at + 8).unwrap().copy_from_slice(&number.to_ne_bytes());
}

/// Overwrites all data that UCX needs.
fn damage(keys: &mut [u8]) {
    let length = count_in(keys) + 9;
    let end = length + 8 + usize::try_from(number_at(keys, length)).unwrap();
    keys.get_mut(length + 32..end).unwrap().fill(0xff);
}

/// NIXL drops a peer whose metadata it refuses, so such metadata is not passed to it.
#[test]
fn metadata_that_nixl_refuses_does_not_affect_known_peers() {
    let owner = agent();
    let both = AgentBuilder::unnamed().backend(BackendConfig::new("UCX"));
    let reader = both.backend(BackendConfig::new("POSIX")).build().unwrap();
    let (first, second) = (layout(&owner), layout(&owner));
    let known = reader.import(&owner.export(&first).unwrap()).unwrap();

    // Keys for a backend that the reader has, and that cannot reach peers.
    let hostile = with_keys(&owner.describe(&second).unwrap(), |keys| {
        let section = keys.get(find(keys, b"bknd")..).unwrap();
        let posix = [b"bknd", &5_u64.to_ne_bytes()[..], b"POSIX", section.get(15..).unwrap()];
        let posix = posix.concat();
        let sections = find(keys, b"nixlSecElms") + 19;
        put(keys, sections, 2);
        keys.extend(posix);
    });

    let error = reader.import(&hostile).unwrap_err();
    assert!(matches!(error, ImportError::BackendNotRemote { .. }), "{error}");
    read_all(&reader, &known);
    let honest = reader.import(&owner.export(&second).unwrap()).unwrap();
    assert_eq!(honest.peer(), known.peer());
    read_all(&reader, &honest);
    // A reader that does not know the peer is unchanged too.
    drop((known, honest));
    assert_eq!(reader.disconnect(), 1);
    assert!(reader.import(&hostile).is_err());
    assert_eq!((reader.peers(), reader.disconnect()), (vec![], 0));
    assert!(reader.import(&owner.export(&second).unwrap()).is_ok());
}

/// Only UCX detects this, and NIXL has dropped the peer by then.
#[test]
fn keys_that_ucx_refuses_cost_only_their_peer() {
    let (owner, other, reader) = (agent(), agent(), agent());
    let (first, second) = (layout(&owner), layout(&owner));
    let of_other = layout(&other);
    let unharmed = reader.import(&other.export(&of_other).unwrap()).unwrap();
    let damaged = with_keys(&owner.describe(&second).unwrap(), |keys| damage(keys));

    // For a known peer.
    let known = reader.import(&owner.export(&first).unwrap()).unwrap();
    let error = reader.import(&damaged).unwrap_err();
    match &error {
        ImportError::PeerLost { peer, .. } => assert_eq!(peer, owner.name()),
        _ => panic!("{error:?}"),
    }
    assert_eq!(reader.peers(), [(unharmed.peer(), other.name().clone())]);
    assert_eq!(reader.use_peer(known.peer()).unwrap_err(), PeerUnavailable::Unknown);
    // Its other layouts can be imported again.
    let again = reader.import(&owner.export(&first).unwrap()).unwrap();
    assert_ne!(again.peer(), known.peer());
    read_all(&reader, &again);
    drop(again);

    // A reader that does not know the peer.
    let stranger = agent();
    let error = stranger.import(&damaged).unwrap_err();
    assert!(matches!(error, ImportError::Load { .. }), "{error:?}");
    assert_eq!((stranger.peers(), stranger.disconnect()), (vec![], 0));
    read_all(&reader, &unharmed);
}

/// NIXL checks only the last key that begins no later than the region.
#[test]
fn a_layout_that_nixl_does_not_find_in_its_keys_is_refused() {
    let (owner, reader) = (agent(), agent());
    let (first, second) = (layout(&owner), layout(&owner));
    let known = reader.import(&owner.export(&first).unwrap()).unwrap();
    let hidden = with_keys(&owner.describe(&second).unwrap(), |keys| {
        let count = count_in(keys);
        let (length, place) = (count + 9, count + 17);
        let (address, bytes) = (number_at(keys, place), number_at(keys, place + 8));
        let mut inner = keys.get(length..).unwrap().to_vec();
        put(keys, place, address - 4096);
        put(keys, place + 8, bytes + 4096);
        put(&mut inner, 8, address - 2048);
        put(&mut inner, 16, 64);
        put(keys, count, 2);
        keys.extend(inner);
    });
    for reader in [&reader, &agent()] {
        let error = reader.import(&hidden).unwrap_err();
        match &error {
            ImportError::NotFound { peer } => assert_eq!(peer, owner.name()),
            _ => panic!("{error:?}"),
        }
    }
    read_all(&reader, &known);
}

/// The export as it would be if the memory had been registered in another span, `longer` bytes
/// longer. NIXL and UCX accept its key, but reads with the key fail: it claims a kind of device
/// memory that this machine does not have.
fn by_an_old_key(described: &LayoutDescriptor, longer: u64) -> Vec<u8> {
    const ROCM: u8 = 3;
    with_keys(described, |keys| {
        let place = count_in(keys) + 17;
        let length = number_at(keys, place + 8) + longer;
        put(keys, place + 8, length);
        // After the memory's location, and the set of domains for which UCX has keys.
        *keys.get_mut(place + 24 + 8).unwrap() = ROCM;
    })
}

/// An owner that registers the same memory again, and a reader.
struct Reregistered {
    owner: Agent,
    reader: Agent,
    source: Endpoint,
    described: LayoutDescriptor,
    /// The current export.
    export: Vec<u8>,
}

impl Reregistered {
    fn new() -> Self {
        let (owner, reader) = (agent(), agent());
        let source = Endpoint::new(layout(&owner)).unwrap();
        Pattern::new(SEED).fill(&source).unwrap();
        let described = owner.describe(source.layout()).unwrap();
        let export = described.encode().unwrap();
        Self { owner, reader, source, described, export }
    }

    /// Imports the export from before the second registration.
    fn import_old(&self, longer: u64) -> RemoteLayout {
        let old = self.reader.import(&by_an_old_key(&self.described, longer)).unwrap();
        assert!(read_request(&self.reader, &old, self.source.layout()).is_err(), "an old key");
        old
    }

    #[track_caller]
    fn is_refused(&self) {
        match self.reader.import(&self.export) {
            Err(ImportError::PeerChanged { peer, change: PeerChange::Registration }) => {
                assert_eq!(peer, *self.owner.name());
            }
            other => panic!("{other:?}"),
        }
    }

    /// The read succeeds, so it uses the current key.
    #[track_caller]
    fn is_read(&self, remote: &RemoteLayout) {
        let read = read_all(&self.reader, remote);
        Pattern::new(SEED).verify(&read).unwrap().assert_clean("read by the new key");
    }
}

/// NIXL would silently continue to use the old key.
#[test]
fn memory_registered_again_is_not_imported_beside_its_old_key() {
    let case = Reregistered::new();
    let old = case.import_old(0);
    case.is_refused();
    // The earlier state is unchanged.
    assert_eq!(case.reader.peers(), [(old.peer(), case.owner.name().clone())]);
    assert_eq!(case.import_old(0).endpoint().id(), old.endpoint().id());
    case.is_read(&case.reader.refresh(&case.export).unwrap());
    assert_eq!(case.reader.use_peer(old.peer()).unwrap_err(), PeerUnavailable::Unknown);
}

#[test]
fn memory_registered_again_is_read_with_its_new_key_once_the_old_one_is_unused() {
    for longer in [0, 4096] {
        let case = Reregistered::new();
        drop(case.import_old(longer));
        case.is_read(&case.reader.import(&case.export).unwrap());
    }
}

/// NIXL reloads a peer while another layout of it is in use, but not during its transfers.
#[test]
fn memory_registered_again_is_read_with_its_new_key_beside_other_layouts() {
    for longer in [0, 4096] {
        let case = Reregistered::new();
        let other = layout(&case.owner);
        let other = case.reader.import(&case.owner.export(&other).unwrap()).unwrap();
        let old = case.import_old(longer);
        assert_eq!(old.peer(), other.peer());
        drop(old);
        let in_flight = case.reader.use_peer(other.peer()).unwrap();
        if longer == 0 {
            case.is_refused();
        } else {
            // NIXL must still load another key.
            let error = case.reader.import(&case.export).unwrap_err();
            assert!(matches!(error, ImportError::PeerBusy { transfers: 1, .. }), "{error}");
        }
        drop(in_flight);
        let again = case.reader.import(&case.export).unwrap();
        assert_eq!(again.peer(), other.peer());
        case.is_read(&again);
        read_all(&case.reader, &other);
    }
}
