//! Blocks that are written to another process and read from it, for every kind of memory at either
//! end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_core::{Allocate, Register};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_nixl::{Agent, AgentBuilder, BackendConfig, NixlEngine, NixlEngineOptions};
use terrane_testkit::pattern::{Pattern, PieceAccess};
use terrane_testkit::peer::{Link, Peer, with_peer};
use terrane_transfer::{CopyEngine, DeviceOrder, Endpoint, Transfer, TransferManager};

/// The layout of serving engines on a device.
pub const SEPARATE: LayoutKind = LayoutKind::ALL[2];
pub const CONTIGUOUS: LayoutKind = LayoutKind::ALL[0];

const BLOCKS: u32 = 24;
const LAYERS: u32 = 4;
const TIMEOUT: Duration = Duration::from_secs(120);

/// The blocks that this process writes to the peer, and those that it reads: sources and
/// destinations.
const WRITTEN: ([u32; 8], [u32; 8]) = ([0, 1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 12, 13, 14, 15]);
const READ: ([u32; 4], [u32; 4]) = ([20, 21, 3, 2], [16, 17, 18, 23]);

/// The seeds of the blocks of this process and of the peer.
const MINE: Pattern = Pattern::new(1);
const THEIRS: Pattern = Pattern::new(2);

/// Writes blocks to a peer's memory, which verifies them, and reads other blocks of the peer. No
/// other byte changes at either end. Each process reports when its blocks may be used again.
pub fn exchange_with_process<A: Allocate, B: Allocate>(
    test: &str,
    here: (&A, LayoutKind),
    there: (&B, LayoutKind),
    access: &impl PieceAccess,
    order: Option<DeviceOrder>,
) {
    with_peer(
        test,
        |peer| write_and_read(peer, here, access, order),
        |link| serve(link, there, access),
    );
}

fn write_and_read<A: Allocate>(
    peer: &mut Peer,
    (memory, kind): (&A, LayoutKind),
    access: &impl PieceAccess,
    order: Option<DeviceOrder>,
) {
    let agent = agent();
    let local = end(memory, &agent, kind);
    MINE.fill_with(&local, &all(), access).unwrap();
    let remote = agent.import(&peer.link().receive()).unwrap();
    let engine = NixlEngine::new(&agent, NixlEngineOptions::default()).unwrap();
    let manager = TransferManager::new([Arc::new(engine) as Arc<dyn CopyEngine>]);
    let make = |transfer: Transfer| {
        let transfer = match &order {
            Some(order) => transfer.device_order(order.clone()),
            None => transfer,
        };
        eprintln!("{}", manager.submit(transfer, ()).unwrap().wait().result.unwrap());
    };
    let write = Transfer::new(&local, remote.endpoint()).blocks(&WRITTEN.0, &WRITTEN.1);
    make(write.notify(b"written".as_slice()));
    let read = Transfer::new(remote.endpoint(), &local).blocks(&READ.0, &READ.1);
    make(read.notify(b"read".as_slice()));
    assert_blocks(&local, THEIRS, &READ.1, &READ.0, access);
    assert_blocks(&local, MINE, &others(&READ.1), &others(&READ.1), access);
    assert_eq!(peer.link().receive(), b"looked");
}

fn serve<B: Allocate>(
    link: &mut Link,
    (memory, kind): (&B, LayoutKind),
    access: &impl PieceAccess,
) {
    let agent = agent();
    let end = end(memory, &agent, kind);
    THEIRS.fill_with(&end, &all(), access).unwrap();
    link.send(&agent.export(end.layout()).unwrap());
    let mut messages = Vec::new();
    let deadline = Instant::now() + TIMEOUT;
    while messages.len() < 2 {
        let found = agent.wait_for_notifications(deadline).unwrap();
        assert!(!found.is_empty(), "messages only {messages:?}");
        messages.extend(found.into_iter().map(|notification| notification.message));
    }
    assert_eq!(messages, [b"written".to_vec(), b"read".to_vec()]);
    assert_blocks(&end, MINE, &WRITTEN.1, &WRITTEN.0, access);
    assert_blocks(&end, THEIRS, &others(&WRITTEN.1), &others(&WRITTEN.1), access);
    link.send(b"looked");
}

fn agent() -> Agent {
    let ucx = BackendConfig::new("UCX").required();
    AgentBuilder::unnamed().backend(ucx).telemetry(true).build().unwrap()
}

/// Blocks of 4 layers of K and V of 64 KiB each, registered.
fn end<A: Allocate>(memory: &A, agent: &impl Register, kind: LayoutKind) -> Endpoint {
    let config = LayoutConfig::builder().num_blocks(BLOCKS).num_layers(LAYERS).outer_dim(2);
    let config = config.page_size(16).inner_dim(2048).element(ElementFormat::Width(2));
    let layout = LayoutBuilder::new(config.build().unwrap()).kind(kind).allocate(memory);
    Endpoint::new(layout.register(agent).build().unwrap()).unwrap()
}

fn all() -> Vec<u32> {
    (0..BLOCKS).collect()
}

fn others(blocks: &[u32]) -> Vec<u32> {
    all().into_iter().filter(|id| !blocks.contains(id)).collect()
}

/// Asserts that blocks have the contents of the blocks `as_of`.
#[track_caller]
fn assert_blocks(
    end: &Endpoint,
    pattern: Pattern,
    blocks: &[u32],
    as_of: &[u32],
    by: &impl PieceAccess,
) {
    let seen = pattern.verify_with(end, blocks, as_of, 0..LAYERS, by).unwrap();
    assert_eq!((seen.mismatches, seen.first), (0, None), "of {} bytes", seen.bytes);
    assert!(!seen.bytes.is_zero());
}
