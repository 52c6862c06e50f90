//! Moves blocks between Terrane and a process that uses NIXL without Terrane, as the connector of a
//! serving engine does. The other process is `peer.py`, in Python.
//!
//! ```text
//! pip install nixl-cu12==1.5.1 numpy
//! cargo run --features nixl --example foreign
//! ```

use std::error::Error;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use terrane::core::{RemoteSpace, StorageKind};
use terrane::nixl::{probe, probe_file};
use terrane::prelude::*;
use terrane::wire::RegionDescriptor;
use terrane_testkit::pattern::Pattern;

fn main() -> Result<(), Box<dyn Error>> {
    find_nixl()?;
    let config = LayoutConfig::builder()
        .num_blocks(8)
        .num_layers(2)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(64)
        .element(ElementFormat::Width(2))
        .build()?;

    // An agent, blocks that are registered with it, and an engine for transfers.
    let agent = AgentBuilder::unnamed().backend(BackendConfig::new("UCX").required()).build()?;
    let layout = LayoutBuilder::new(config)
        .kind(LayoutKind::FullyContiguous)
        .allocate(&SystemAllocator::new(SystemOptions::default()))
        .register(&agent)
        .build()?;
    let geometry = layout.geometry().clone();
    let length = geometry.region_bytes(0);
    let own_metadata = agent.nixl_metadata(&layout)?;
    let blocks = Endpoint::new(layout)?;
    let computed = Pattern::new(1);
    computed.fill(&blocks)?;
    let engine = NixlEngine::new(&agent, NixlEngineOptions::default())?;
    let manager = TransferManager::new([Arc::new(engine) as _]);

    // The other process sends the address of its memory. Both processes know its strides.
    let block_bytes = length.get() / u64::from(config.num_blocks());
    let mut python = start(block_bytes, config.num_blocks())?;
    let mut output = BufReader::new(python.0.stdout.take().ok_or("no output")?);
    let peer_message = receive(&mut output)?;
    let metadata = bytes_of(peer_message["metadata"].as_str().ok_or("no metadata")?)?;
    let address = peer_message["address"].as_u64().ok_or("no address")?;
    let remote = agent.import_foreign(&ForeignLayout {
        geometry,
        storage: StorageKind::System,
        agent: "python-engine".into(),
        metadata: &[&metadata],
        regions: vec![RegionDescriptor::new(RemoteSpace::Host, address, length, [])],
    })?;

    // Send NIXL's metadata and the address of the blocks, so that the other process can reach them.
    let pieces = own_metadata.pieces().map(hexadecimal);
    let message =
        json!({"metadata": pieces, "address": own_metadata.regions[0].address(), "block": 3});
    let mut input = python.0.stdin.take().ok_or("no input")?;
    writeln!(input, "{message}")?;

    // Write block 0 to the other process's block 5, with a notification, and read it back into
    // block 2.
    let write = Transfer::new(&blocks, remote.endpoint()).blocks(&[0], &[5]).notify(*b"5");
    manager.submit(write, ())?.wait().result?;
    let read = Transfer::new(remote.endpoint(), &blocks).blocks(&[5], &[2]);
    manager.submit(read, ())?.wait().result?;

    // The other process writes the block to block 3, and sends a notification.
    let notifications = agent.wait_for_notifications(Instant::now() + Duration::from_secs(60))?;
    let notification = notifications.first().ok_or("the other process has written nothing")?;
    let verified = computed.verify_blocks(&blocks, &[2, 3], &[0, 0], 0..config.num_layers())?;
    drop(input);
    let status = python.0.wait()?;
    if !status.success() {
        return Err(format!("the other process failed ({status})").into());
    }
    if verified.mismatches > 0 {
        return Err(format!("{} B of {} are wrong", verified.mismatches, verified.bytes).into());
    }
    Ok(writeln!(io::stdout(), "{} verified, notified by {}", verified.bytes, notification.from)?)
}

/// The other process. A drop ends it, so that no process remains after an error.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        // Both fail if the process has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(block_bytes: u64, blocks: u32) -> io::Result<Peer> {
    Command::new("python3")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/foreign/peer.py"))
        .args([block_bytes.to_string(), blocks.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map(Peer)
}

/// Reads the next message. NIXL and UCX print other lines, which are skipped.
fn receive(from: &mut impl BufRead) -> Result<Value, Box<dyn Error>> {
    let is_message = |line: &io::Result<String>| line.as_ref().is_ok_and(|l| l.starts_with('{'));
    let line = from.lines().find(is_message).ok_or("the other process has ended")??;
    Ok(serde_json::from_str(&line)?)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes_of(text: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let byte = |at| Ok(u8::from_str_radix(text.get(at..at + 2).ok_or("half a byte")?, 16)?);
    (0..text.len()).step_by(2).map(byte).collect()
}

/// Uses the NIXL that the dynamic linker finds, or the file in the environment variable.
#[expect(clippy::disallowed_methods, reason = "the ban is for libraries; this is a program")]
fn find_nixl() -> Result<(), Box<dyn Error>> {
    match std::env::var_os("NIXL_CAPI_LIBRARY") {
        Some(file) if probe().is_err() => Ok(probe_file(file.as_ref()).map(drop)?),
        _ => Ok(()),
    }
}
