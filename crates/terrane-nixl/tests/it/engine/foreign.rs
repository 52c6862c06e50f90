//! Blocks that a Terrane agent exchanges with a NIXL agent in Python.

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use terrane_core::{ByteCount, Memory};
use terrane_layout::{Geometry, PhysicalLayout};
use terrane_nixl::{
    Agent, ForeignLayout, ImportError, NixlEngine, NixlEngineOptions, Notification, RequestError,
};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::{InProcess, PieceAccess};
use terrane_transfer::{Endpoint, Transfer, TransferError, TransferManager};

use super::peer_process::{TIMEOUT, free};
use super::python::*;
use super::support::*;

const BLOCKS: u32 = 8;
const BLOCK: usize = 4096;
const NAME: &str = "engine-0";

/// An agent with blocks, and an engine.
struct Side {
    agent: Agent,
    local: Endpoint,
    manager: TransferManager,
}

impl Side {
    fn new(blocks: u32, options: NixlEngineOptions) -> Self {
        let agent = agent();
        let local = registered(&HeapAllocator::system(), &agent, config(blocks), CONTIGUOUS);
        let local = Endpoint::new(local).unwrap();
        let engine = NixlEngine::new(&agent, options).unwrap();
        let manager = TransferManager::new([std::sync::Arc::new(engine) as _]);
        Self { agent, local, manager }
    }

    fn submit(&self, transfer: Transfer) {
        end_of(self.manager.submit(transfer, ()).unwrap()).result.unwrap();
    }

    /// The only notification, once it has arrived.
    fn next_notification(&self) -> Notification {
        let mut notifications =
            self.agent.wait_for_notifications(Instant::now() + TIMEOUT).unwrap();
        assert_eq!(notifications.len(), 1, "{notifications:?}");
        notifications.pop().unwrap()
    }
}

fn geometry(blocks: u32) -> Geometry {
    Geometry::new(&config(blocks), CONTIGUOUS).unwrap()
}

fn memory_of(layout: &PhysicalLayout) -> (terrane_core::Location, usize) {
    let [region] = layout.regions() else { panic!("one region") };
    (region.location(), region.length().to_usize())
}

fn bytes_of(end: &Endpoint) -> Vec<u8> {
    let (at, length) = memory_of(end.layout());
    let mut bytes = vec![0; length];
    // SAFETY: the region is memory of this process and is alive; no transfer with it is in flight.
    unsafe { InProcess.read(at, &mut bytes) }.unwrap();
    bytes
}

fn fill(end: &Endpoint, bytes: &[u8]) {
    let (at, length) = memory_of(end.layout());
    assert_eq!(bytes.len(), length);
    // SAFETY: as above.
    unsafe { InProcess.write(at, bytes) }.unwrap();
}

/// Bytes that identify their origin.
fn pattern(seed: usize) -> Vec<u8> {
    let count = BLOCK * usize::try_from(BLOCKS).unwrap();
    (0..count).map(|n| u8::try_from((n * 7 + n / BLOCK + seed) % 251).unwrap()).collect()
}

/// The bytes of a block.
fn block(bytes: &[u8], number: usize) -> &[u8] {
    &bytes[number * BLOCK..][..BLOCK]
}

fn copy(from: &[u8], block_from: usize, to: &mut [u8], block_to: usize) {
    to[block_to * BLOCK..][..BLOCK].copy_from_slice(block(from, block_from));
}

/// Each side writes and reads blocks of the other side, and notifies it.
fn exchange(side: &Side, python: &mut Python, layout: &ForeignLayout<'_>) {
    let (mut ours, mut theirs) = (pattern(3), pattern(5));
    fill(&side.local, &ours);
    python.ask(&format!("fill {}", hexadecimal(&theirs)));
    let remote = side.agent.import_foreign(layout).unwrap();

    let write = Transfer::new(&side.local, remote.endpoint()).blocks(&[0, 2], &[1, 6]);
    side.submit(write.notify(*b"two blocks"));
    let name = side.agent.name();
    assert_eq!(python.ask("notifications 1"), format!("{name}:{}", hexadecimal(b"two blocks")));
    copy(&ours, 0, &mut theirs, 1);
    copy(&ours, 2, &mut theirs, 6);
    assert!(python.bytes("bytes") == theirs, "written to Python's memory");
    side.submit(Transfer::new(remote.endpoint(), &side.local).blocks(&[7, 6], &[4, 1]));
    copy(&theirs, 7, &mut ours, 4);
    copy(&theirs, 6, &mut ours, 1);
    assert!(bytes_of(&side.local) == ours, "read from Python's memory");

    // The other way round: Python has NIXL's metadata of these blocks, and their location.
    let metadata = side.agent.nixl_metadata(side.local.layout()).unwrap();
    for piece in metadata.pieces() {
        assert_eq!(python.ask(&format!("add {}", hexadecimal(piece))), name.as_str());
    }
    let [region] = &metadata.regions[..] else { panic!("one region") };
    let address = |block: usize| region.address() + u64::try_from(block * BLOCK).unwrap();
    let message = hexadecimal(b"written");
    let write = format!("move WRITE {} {} {BLOCK} {name} {message}", 3 * BLOCK, address(5));
    assert_eq!(python.ask(&write), "DONE");
    let notification = side.next_notification();
    assert_eq!(
        (notification.from.as_str(), &notification.message[..]),
        (layout.agent.as_str(), &b"written"[..])
    );
    copy(&theirs, 3, &mut ours, 5);
    assert!(bytes_of(&side.local) == ours, "written by Python");
    let message = hexadecimal(b"read");
    let read = format!("move READ {} {} {BLOCK} {name} {message}", 2 * BLOCK, address(0));
    assert_eq!(python.ask(&read), "DONE");
    assert_eq!(side.next_notification().message, b"read");
    copy(&ours, 0, &mut theirs, 2);
    assert!(python.bytes("bytes") == theirs, "read by Python");

    // Messages without a transfer.
    side.agent.notify(remote.peer(), b"hello").unwrap();
    assert_eq!(python.ask("notifications 1"), format!("{name}:{}", hexadecimal(b"hello")));
    python.ask(&format!("notify {name} {}", hexadecimal(b"hello to you")));
    assert_eq!(side.next_notification().message, b"hello to you");
}

#[test]
fn a_python_agent_and_a_terrane_agent_write_read_and_notify() {
    const TEST: &str = "engine::foreign::a_python_agent_and_a_terrane_agent_write_read_and_notify";
    let Some(site) = site(TEST) else { return };
    let side = Side::new(BLOCKS, NixlEngineOptions::default());
    for command in ["metadata", "partial"] {
        let mut python = Python::start(&site, &format!("engine-{command}"), pattern(0).len());
        let metadata = python.bytes(command);
        let pieces = [&metadata[..]];
        let layout = python.layout(geometry(BLOCKS), &pieces);
        exchange(&side, &mut python, &layout);
    }
}

#[test]
fn a_python_agent_that_registers_more_is_the_same_peer() {
    const TEST: &str = "engine::foreign::a_python_agent_that_registers_more_is_the_same_peer";
    let Some(site) = site(TEST) else { return };
    let agent = agent();
    let mut python = Python::start(&site, NAME, pattern(0).len());
    let metadata = python.bytes("metadata");
    let pieces = [&metadata[..]];
    let layout = python.layout(geometry(BLOCKS), &pieces);
    let first = agent.import_foreign(&layout).unwrap();
    python.ask("register_more 1000000");
    let grown = python.bytes("metadata");
    assert!(grown.len() > metadata.len());
    let again = agent.import_foreign(&ForeignLayout { metadata: &[&grown], ..layout.clone() });
    assert_eq!(again.unwrap().endpoint().id(), first.endpoint().id());
    // Incomplete metadata is refused, without an effect.
    let refused = |layout: ForeignLayout<'_>| agent.import_foreign(&layout).unwrap_err();
    let cut = &metadata[..metadata.len() - 1];
    let error = refused(ForeignLayout { metadata: &[cut], ..layout.clone() });
    assert!(matches!(error, ImportError::Metadata(_)), "{error}");
    let error = refused(ForeignLayout { agent: "engine-1".into(), ..layout.clone() });
    assert!(matches!(error, ImportError::OtherAgent { .. }), "{error}");
    let geometry = geometry(1_000_000);
    let length = geometry.region_bytes(0);
    let [region] = &layout.regions[..] else { panic!("one region") };
    let regions =
        vec![terrane_wire::RegionDescriptor::new(region.space(), region.address(), length, [])];
    let error = refused(ForeignLayout { geometry, regions, ..layout.clone() });
    assert!(matches!(error, ImportError::NotCovered { region: 0, .. }), "{error}");
    assert_eq!(agent.peers().len(), 1);
}

/// The number of times that an agent is killed.
const ROUNDS: usize = 30;
/// The number of blocks of a transfer that is interrupted: 8 MiB, each block a request.
const MANY: u32 = 2048;

/// Starts a transfer of all blocks, kills the other process once some have been copied, and waits for
/// the end. Returns whether the transfer failed.
fn killed_in_the_middle(side: &Side, python: &mut Python, transfer: Transfer) -> bool {
    let all: Vec<u32> = (0..MANY).collect();
    let deadline = Instant::now() + TIMEOUT;
    // Blocks that an earlier read left incomplete may be written to the next process.
    let transfer = transfer.blocks(&all, &all).allow_incomplete();
    let transfer = transfer.deadline(deadline).notify(*b"all");
    let completion = side.manager.submit(transfer, ()).unwrap();
    while completion.copied().is_zero() && !completion.has_ended() {
        thread::yield_now();
    }
    python.kill();
    match end_of(completion).result {
        Ok(_) => false,
        Err(error @ (TransferError::Copy { .. } | TransferError::Engine { .. })) => {
            let cause = error.source().and_then(|cause| cause.downcast_ref());
            assert!(matches!(cause, Some(RequestError::PeerLost { .. })), "{error:?}");
            true
        }
        Err(error) => panic!("{error:?}"),
    }
}

/// The process is killed while each side writes to the other and reads from it.
#[test]
fn a_python_agent_that_is_killed_in_the_middle_is_replaced_under_its_name() {
    const TEST: &str =
        "engine::foreign::a_python_agent_that_is_killed_in_the_middle_is_replaced_under_its_name";
    let Some(site) = site(TEST) else { return };
    let options = NixlEngineOptions {
        request_bytes: ByteCount::from_usize(BLOCK),
        requests: const { NonZeroUsize::new(3).unwrap() },
        ..NixlEngineOptions::default()
    };
    let side = Side::new(MANY, options);
    let offered = registered(&HeapAllocator::system(), &side.agent, config(16), CONTIGUOUS);
    let local_metadata = side.agent.nixl_metadata(&offered).unwrap();
    let size = BLOCK * usize::try_from(MANY).unwrap();
    let (mut before, mut cut_short) = (None, 0);
    for round in 0..ROUNDS {
        let mut python = Python::start(&site, NAME, size);
        let metadata = python.bytes("metadata");
        let pieces = [&metadata[..]];
        let layout = python.layout(geometry(MANY), &pieces);
        let remote = if before.is_some() {
            let error = side.agent.import_foreign(&layout).unwrap_err();
            assert!(matches!(error, ImportError::PeerChanged { .. }), "{error}");
            side.agent.refresh_foreign(&layout).unwrap()
        } else {
            side.agent.import_foreign(&layout).unwrap()
        };
        let whole = hexadecimal(&local_metadata.whole().unwrap());
        assert_eq!(python.ask(&format!("add {whole}")), side.agent.name().as_str());
        let (region, name) = (&local_metadata.regions[0], side.agent.name());
        let hammer = format!("hammer {} {} {name}", region.address(), region.length().get());
        assert_eq!(python.ask(&hammer), "begun");
        let notifications = side.agent.wait_for_notifications(Instant::now() + TIMEOUT).unwrap();
        assert!(!notifications.is_empty(), "nothing from the process that writes and reads");

        let transfer = match round % 2 {
            0 => Transfer::new(&side.local, remote.endpoint()),
            _ => Transfer::new(remote.endpoint(), &side.local),
        };
        cut_short += usize::from(killed_in_the_middle(&side, &mut python, transfer));
        for block in [0, MANY / 2, MANY - 1] {
            free(&side.local, block);
        }
        before = Some(remote);
    }
    assert!(cut_short > 0, "none of {ROUNDS} in the middle");

    // The agent still works.
    let _ = side.agent.notifications().unwrap();
    after_all(&site, &side);
}

/// Another process with the same name exchanges blocks with the agent.
fn after_all(site: &PathBuf, killer: &Side) {
    let mut python = Python::start(site, NAME, pattern(0).len());
    let metadata = python.bytes("metadata");
    let pieces = [&metadata[..]];
    let layout = python.layout(geometry(BLOCKS), &pieces);
    let local = registered(&HeapAllocator::system(), &killer.agent, config(BLOCKS), CONTIGUOUS);
    let side = Side {
        agent: killer.agent.clone(),
        local: Endpoint::new(local).unwrap(),
        manager: killer.manager.clone(),
    };
    let _remote = side.agent.refresh_foreign(&layout).unwrap();
    exchange(&side, &mut python, &layout);
}
