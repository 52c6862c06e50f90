//! When lists are prepared and released, and that requests created from them copy the right bytes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects by panicking")]

use std::ptr::NonNull;

use terrane_core::{ByteCount, HostAddress, Location, Memory, Registered, StorageKind};
use terrane_layout::{
    BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, PhysicalLayout,
};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::{InProcess, Pattern};
use terrane_transfer::{Completion, Transfer, TransferManager};

use super::*;
use crate::agent::builder::AgentBuilder;
use crate::agent::config::BackendConfig;
use crate::engine::NixlEngine;
use crate::peers::remote::RemoteLayout;

const BLOCKS: u32 = 32;
/// One piece for each block, layer and outer.
const PIECES: usize = 32 * 3 * 2;

fn config() -> LayoutConfig {
    let config = LayoutConfig::builder().num_blocks(BLOCKS).num_layers(3).outer_dim(2);
    config.page_size(4).inner_dim(24).element(ElementFormat::Width(2)).build().unwrap()
}

fn agent() -> Agent {
    AgentBuilder::unnamed().backend(BackendConfig::new("UCX")).build().unwrap()
}

fn layout(agent: &Agent, kind: LayoutKind) -> PhysicalLayout {
    let system = HeapAllocator::system();
    let builder = LayoutBuilder::new(config()).kind(kind).allocate(&system);
    builder.register(agent).build().unwrap()
}

/// No two pieces of a block are adjacent.
const LAYERS_APART: LayoutKind =
    LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };

/// An agent with an engine and an end, and blocks of another agent.
struct Setup {
    owner: Agent,
    blocks: Endpoint,
    reader: Agent,
    remote: RemoteLayout,
    local: Endpoint,
    engine: Arc<NixlEngine>,
    manager: TransferManager,
}

impl Setup {
    fn new(options: NixlEngineOptions) -> Self {
        let (owner, reader) = (agent(), agent());
        let blocks = Endpoint::new(layout(&owner, LayoutKind::FullyContiguous)).unwrap();
        let remote = reader.import(&owner.export(blocks.layout()).unwrap()).unwrap();
        let local = Endpoint::new(layout(&reader, LAYERS_APART)).unwrap();
        let engine = Arc::new(NixlEngine::new(&reader, options).unwrap());
        let manager = TransferManager::new([Arc::clone(&engine) as _]);
        Self { owner, blocks, reader, remote, local, engine, manager }
    }

    fn submit(&self, write: bool) -> Completion<()> {
        let (all, back): (Vec<u32>, Vec<u32>) = (0..BLOCKS).map(|id| (id, BLOCKS - 1 - id)).unzip();
        let (from, to) = match write {
            true => (&self.local, self.remote.endpoint()),
            false => (self.remote.endpoint(), &self.local),
        };
        self.manager.submit(Transfer::new(from, to).blocks(&all, &back), ()).unwrap()
    }

    /// Copies all blocks in reverse order, and verifies them.
    #[track_caller]
    fn copy_and_verify(&self, write: bool) {
        static SEED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let pattern = Pattern::new(SEED.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
        let (from, to) = match write {
            true => (&self.local, &self.blocks),
            false => (&self.blocks, &self.local),
        };
        pattern.fill(from).unwrap();
        self.submit(write).wait().result.unwrap();
        let (all, back): (Vec<u32>, Vec<u32>) = (0..BLOCKS).map(|id| (BLOCKS - 1 - id, id)).unzip();
        let seen = pattern.verify_with(to, &all, &back, 0..3, &InProcess).unwrap();
        assert_eq!(seen.mismatches, 0, "{seen:?}");
    }

    /// The lists of the two ends, if they have any.
    fn lists(&self) -> [Option<Arc<PreparedList>>; 2] {
        let ends = self.engine.context.prepared.lock();
        [&self.local, self.remote.endpoint()].map(|end| ends.get(&(end.id(), 0))?.list.clone())
    }

    fn has_lists(&self) -> [bool; 2] {
        self.lists().map(|list| list.is_some())
    }

    fn count(&self) -> usize {
        self.engine.context.prepared.lock().values().filter(|known| known.list.is_some()).count()
    }
}

fn at_once() -> NixlEngineOptions {
    NixlEngineOptions { prepare_threshold: 0, ..NixlEngineOptions::default() }
}

fn same(one: &[Option<Arc<PreparedList>>; 2], other: &[Option<Arc<PreparedList>>; 2]) -> [bool; 2] {
    [0, 1].map(|end| match (&one[end], &other[end]) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        _ => false,
    })
}

#[test]
fn lists_are_prepared_after_equal_work_without_them() {
    for (prepare_threshold, without) in [(0, 0), (1, 1), (3, 3)] {
        let setup =
            Setup::new(NixlEngineOptions { prepare_threshold, ..NixlEngineOptions::default() });
        for write in [true, false, true].into_iter().cycle().take(without) {
            setup.copy_and_verify(write);
            assert_eq!(setup.has_lists(), [false; 2], "{prepare_threshold}");
        }
        setup.copy_and_verify(true);
        let first = setup.lists();
        assert!(first.iter().all(Option::is_some), "{prepare_threshold}");
        setup.copy_and_verify(false);
        setup.copy_and_verify(true);
        assert_eq!(same(&first, &setup.lists()), [true; 2]);
    }
}

#[test]
fn ends_of_too_many_pieces_have_no_lists() {
    for (prepared_descriptors, expected) in [(PIECES, true), (PIECES - 1, false), (0, false)] {
        let setup = Setup::new(NixlEngineOptions { prepared_descriptors, ..at_once() });
        setup.copy_and_verify(true);
        setup.copy_and_verify(false);
        assert_eq!(setup.has_lists(), [expected; 2], "{prepared_descriptors}");
    }
}

#[test]
fn joined_pieces_are_listed() {
    let mut setup = Setup::new(at_once());
    setup.local = Endpoint::new(layout(&setup.reader, LayoutKind::FullyContiguous)).unwrap();
    // A block is a run of six pieces.
    setup.copy_and_verify(true);
    setup.copy_and_verify(false);
    assert_eq!(setup.count(), 0);
    // A block is three runs of two pieces.
    let kind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
    setup.local = Endpoint::new(layout(&setup.reader, kind)).unwrap();
    setup.copy_and_verify(true);
    setup.copy_and_verify(false);
    assert_eq!(setup.has_lists(), [true; 2]);
}

#[test]
fn a_request_that_ends_within_a_piece_is_listed() {
    let setup = Setup::new(NixlEngineOptions { request_bytes: ByteCount::new(1000), ..at_once() });
    setup.copy_and_verify(true);
    setup.copy_and_verify(false);
    // The first request has five pieces and a part of one. No other request begins at a piece; the
    // last request ends with one.
    assert_eq!(setup.has_lists(), [false; 2]);
}

/// NIXL loads more keys of the peer for a further layout.
#[test]
fn lists_are_prepared_again_when_nixl_loads_keys_of_the_peer() {
    let setup = Setup::new(NixlEngineOptions::default());
    setup.copy_and_verify(true);
    setup.copy_and_verify(true);
    let first = setup.lists();
    assert!(first.iter().all(Option::is_some));
    let further = layout(&setup.owner, LAYERS_APART);
    let _further = setup.reader.import(&setup.owner.export(&further).unwrap()).unwrap();
    setup.copy_and_verify(false);
    assert_eq!(setup.has_lists(), [true, false], "the list of the former keys was kept");
    setup.copy_and_verify(true);
    setup.copy_and_verify(false);
    assert_eq!(same(&first, &setup.lists()), [true, false]);
    assert_eq!(setup.has_lists(), [true; 2]);
}

/// NIXL drops its data of a peer when a connection breaks.
#[test]
fn no_request_uses_data_that_nixl_has_dropped() {
    let setup = Setup::new(at_once());
    setup.copy_and_verify(true);
    let first = setup.lists();
    setup.reader.raw().invalidate_remote_md(&setup.reader.nixl_name_of(&setup.owner)).unwrap();
    setup.submit(true).wait().result.unwrap_err();
    assert_eq!(setup.has_lists(), [false; 2]);
    let again = setup.reader.import(&setup.owner.export(setup.blocks.layout()).unwrap()).unwrap();
    assert_eq!(again.endpoint().id(), setup.remote.endpoint().id());
    for write in [true, false, true] {
        setup.copy_and_verify(write);
    }
    assert_eq!(same(&first, &setup.lists()), [false; 2]);
    assert_eq!(setup.has_lists(), [true; 2]);
}

/// As above, but no transfer is submitted before NIXL loads the peer again.
#[test]
fn lists_from_before_a_peer_was_loaded_again_are_not_used() {
    let setup = Setup::new(at_once());
    setup.copy_and_verify(true);
    let first = setup.lists();
    setup.reader.raw().invalidate_remote_md(&setup.reader.nixl_name_of(&setup.owner)).unwrap();
    setup.reader.import(&setup.owner.export(setup.blocks.layout()).unwrap()).unwrap();
    setup.copy_and_verify(true);
    setup.copy_and_verify(false);
    assert_eq!(same(&first, &setup.lists()), [true, false]);
    assert_eq!(setup.has_lists(), [true; 2]);
}

#[test]
fn a_peer_that_is_forgotten_or_refreshed_has_other_lists() {
    let mut setup = Setup::new(at_once());
    let export = setup.owner.export(setup.blocks.layout()).unwrap();
    for round in 0..4 {
        setup.copy_and_verify(true);
        setup.copy_and_verify(false);
        assert_eq!(setup.has_lists(), [true; 2]);
        setup.remote = match round {
            0 => setup.reader.refresh(&export).unwrap(),
            1 => {
                setup.reader.forget(setup.remote.peer()).unwrap();
                setup.reader.import(&export).unwrap()
            }
            _ => {
                setup.reader.forget(setup.remote.peer()).unwrap();
                assert_eq!(setup.reader.disconnect(), 1);
                setup.reader.import(&export).unwrap()
            }
        };
        // The lists of the old endpoint are released when the new endpoint is used.
        setup.copy_and_verify(round % 2 == 0);
        assert_eq!(setup.count(), 2, "{round}");
    }
}

/// Memory that exists for the whole process.
#[derive(Debug)]
struct Fixed {
    bytes: NonNull<u8>,
    length: ByteCount,
}

// SAFETY: only the test uses the bytes, through this value, and never frees them.
unsafe impl Send for Fixed {}
// SAFETY: as above.
unsafe impl Sync for Fixed {}

// SAFETY: all results are constant, and the bytes are initialised and never freed.
unsafe impl Memory for Fixed {
    fn kind(&self) -> StorageKind {
        StorageKind::System
    }

    fn location(&self) -> Location {
        Location::Host(HostAddress::new(self.bytes))
    }

    fn length(&self) -> ByteCount {
        self.length
    }
}

/// Memory for two layouts.
fn fixed() -> NonNull<u8> {
    let pages = vec![[0_u64; 512]; 2 * PIECES * 192 / 4096].leak();
    NonNull::from(&mut pages[0]).cast()
}

fn layout_in(bytes: NonNull<u8>, agent: &Agent) -> PhysicalLayout {
    let length = ByteCount::from_usize(PIECES * 192);
    let builder = LayoutBuilder::new(config()).kind(LayoutKind::FullyContiguous);
    builder.adopt_memory([Fixed { bytes, length }]).register(agent).build().unwrap()
}

#[test]
fn an_endpoint_at_the_address_of_a_dropped_one_has_its_own_list() {
    let mut setup = Setup::new(at_once());
    setup.blocks = Endpoint::new(layout(&setup.owner, LAYERS_APART)).unwrap();
    setup.remote =
        setup.reader.import(&setup.owner.export(setup.blocks.layout()).unwrap()).unwrap();
    let bytes = fixed();
    for round in 0..3 {
        // The old layout is dropped, and so deregistered.
        setup.local = Endpoint::new(layout(&setup.reader, LAYERS_APART)).unwrap();
        setup.local = Endpoint::new(layout_in(bytes, &setup.reader)).unwrap();
        setup.copy_and_verify(true);
        setup.copy_and_verify(false);
        assert_eq!(setup.has_lists(), [true; 2], "{round}");
        assert_eq!(setup.count(), 2, "{round}");
    }
}

/// NIXL could use either registration for a piece, and the other one may end first.
#[test]
fn memory_that_another_registration_overlaps_has_no_list() {
    let mut setup = Setup::new(NixlEngineOptions::default());
    setup.blocks = Endpoint::new(layout(&setup.owner, LAYERS_APART)).unwrap();
    setup.remote =
        setup.reader.import(&setup.owner.export(setup.blocks.layout()).unwrap()).unwrap();
    let bytes = fixed();
    setup.local = Endpoint::new(layout_in(bytes, &setup.reader)).unwrap();
    // SAFETY: the memory has the length of two layouts.
    let middle = unsafe { bytes.add(PIECES * 192 / 2) };
    let other = Fixed { bytes: middle, length: ByteCount::from_usize(PIECES * 192) };
    let other = Registered::new(&setup.reader, other).unwrap();
    for write in [true, false, true, false] {
        setup.copy_and_verify(write);
        assert!(!setup.has_lists()[0]);
    }
    drop(other);
    for write in [true, false, true] {
        setup.copy_and_verify(write);
    }
    assert_eq!(setup.has_lists(), [true; 2]);
}

/// The endpoint keeps the longer registration, and the list with it.
#[test]
fn memory_within_a_longer_registration_has_a_list() {
    let mut setup = Setup::new(at_once());
    setup.blocks = Endpoint::new(layout(&setup.owner, LAYERS_APART)).unwrap();
    setup.remote =
        setup.reader.import(&setup.owner.export(setup.blocks.layout()).unwrap()).unwrap();
    let bytes = fixed();
    let all = Fixed { bytes, length: ByteCount::from_usize(2 * PIECES * 192) };
    let all = Registered::new(&setup.reader, all).unwrap();
    setup.local = Endpoint::new(layout_in(bytes, &setup.reader)).unwrap();
    setup.copy_and_verify(true);
    let lists = setup.lists();
    assert!(lists.iter().all(Option::is_some));
    drop(all);
    setup.copy_and_verify(true);
    setup.copy_and_verify(false);
    assert_eq!(same(&lists, &setup.lists()), [true; 2]);
    // Peers reach it by the same registration.
    let reader = agent();
    let export = setup.reader.export(setup.local.layout()).unwrap();
    drop(reader.import(&export).unwrap());
}

/// With a layout of the same memory in the same span, there is one registration that both share.
#[test]
fn a_shared_registration_counts_as_the_endpoints_own() {
    let mut setup = Setup::new(at_once());
    setup.blocks = Endpoint::new(layout(&setup.owner, LAYERS_APART)).unwrap();
    setup.remote =
        setup.reader.import(&setup.owner.export(setup.blocks.layout()).unwrap()).unwrap();
    let bytes = fixed();
    let other = layout_in(bytes, &setup.reader);
    setup.local = Endpoint::new(layout_in(bytes, &setup.reader)).unwrap();
    setup.copy_and_verify(true);
    assert_eq!(setup.has_lists(), [true; 2]);
    drop(other);
    setup.copy_and_verify(true);
    setup.copy_and_verify(false);
}

#[test]
fn lists_keep_the_agent_and_drop_with_the_engine() {
    let Setup { owner, blocks, reader, remote, local, engine, manager } = {
        let setup = Setup::new(at_once());
        setup.copy_and_verify(true);
        setup
    };
    let name = reader.name().clone();
    let prepared = Arc::downgrade(&engine.context.prepared);
    let list =
        engine.context.prepared.lock().values().find_map(|known| known.list.clone()).unwrap();
    drop((reader, remote, local, manager, engine));
    // The engine's thread has ended.
    assert!(prepared.upgrade().is_none());
    AgentBuilder::new(name.clone()).build().unwrap_err();
    drop(list);
    drop(AgentBuilder::new(name).build().unwrap());
    drop((blocks, owner));
}
