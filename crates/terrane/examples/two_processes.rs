//! Exports blocks from one process. A second process reads them and verifies every byte.
//!
//! `cargo run --release --features nixl --example two_processes`

#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "an example may do both")]

use std::error::Error;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

use terrane::prelude::*;

fn main() -> Result<(), Box<dyn Error>> {
    // The path where `cargo xtask nixl` puts NIXL. `LD_LIBRARY_PATH` finds other installations.
    if let Some(library) = std::env::var_os("NIXL_CAPI_LIBRARY") {
        terrane::nixl::probe_file(library.as_ref())?;
    }
    let agent = AgentBuilder::unnamed().backend(BackendConfig::new("UCX")).build()?;
    if std::env::args().any(|argument| argument == "read") { read(&agent) } else { export(&agent) }
}

/// The byte at this position of the exported memory.
fn byte(position: usize) -> u8 {
    u8::try_from(position % 251).unwrap_or_default()
}

fn export(agent: &Agent) -> Result<(), Box<dyn Error>> {
    let config = LayoutConfig::builder().num_blocks(16).num_layers(32).outer_dim(2).page_size(16);
    let config = config.inner_dim(8 * 128).element(ElementFormat::Width(2)).build()?;
    let bytes: Vec<u8> = (0..config.total_bytes().to_usize()).map(byte).collect();
    let layout = LayoutBuilder::new(config).fully_contiguous();
    let layout = layout.adopt_memory([HostBytes::from(bytes)]).register(agent).build()?;
    let program = std::env::current_exe()?;
    let mut reader = Command::new(program).arg("read").stdin(Stdio::piped()).spawn()?;
    reader.stdin.take().ok_or("the reader has no input")?.write_all(&agent.export(&layout)?)?;
    if reader.wait()?.success() { Ok(()) } else { Err("the reader failed".into()) }
}

fn read(agent: &Agent) -> Result<(), Box<dyn Error>> {
    let mut exported = Vec::new();
    std::io::stdin().read_to_end(&mut exported)?;
    let remote = agent.import(&exported)?;
    let same_layout = || LayoutBuilder::from_geometry(remote.geometry().clone());
    let system = SystemAllocator::new(SystemOptions::default());
    let local = Endpoint::new(same_layout().allocate(&system).register(agent).build()?)?;
    let path = std::env::temp_dir().join(format!("two-processes-{}", std::process::id()));
    let disk = NamedFileAllocator::new(&path, DiskOptions::default())?;
    let file = Endpoint::new(same_layout().allocate(&disk).unregistered().build()?)?;

    let manager = TransferManager::builder().disk()?.nixl(agent)?.build();
    let blocks: Vec<u32> = (0..remote.geometry().num_blocks()).collect();
    let read = Transfer::new(remote.endpoint(), &local).blocks(&blocks, &blocks);
    println!("read: {}", manager.submit(read, ())?.wait().result?);
    manager.submit(Transfer::new(&local, &file).blocks(&blocks, &blocks), ())?.wait().result?;
    let received = std::fs::read(&path)?;
    std::fs::remove_file(&path)?;
    assert!(received.iter().enumerate().all(|(at, found)| *found == byte(at)), "a byte differs");
    println!("{} bytes verified", received.len());
    Ok(())
}
