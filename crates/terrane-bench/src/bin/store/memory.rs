//! The endpoints, stores and keys of the measurements.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use terrane_core::{ByteCount, Region};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
use terrane_storage::{DiskFile, DiskOptions, SystemAllocator, SystemOptions};
use terrane_store::disk::Namespace;
use terrane_store::{BlockGroup, Blocks, DiskTier, Job, JobOptions, JobOutcome, Refused, Store};
use terrane_transfer::engines::{DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions};
use terrane_transfer::{Endpoint, TransferManager};

/// The number of blocks of a job.
pub const JOB: u32 = 64;

/// A layout of blocks of `block` bytes: one layer and one piece.
pub fn layout(blocks: u32, block: u32) -> Result<LayoutConfig> {
    Ok(LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(1)
        .outer_dim(1)
        .page_size(16)
        .inner_dim(block / 32)
        .element(ElementFormat::Width(2))
        .build()?)
}

/// Allocates blocks in system memory.
pub fn memory(blocks: u32, block: u32) -> Result<Endpoint> {
    let allocator = SystemAllocator::new(SystemOptions::default());
    let builder = LayoutBuilder::new(layout(blocks, block)?).fully_contiguous();
    Ok(Endpoint::new(builder.allocate(&allocator).unregistered().build()?)?)
}

/// Creates a file of blocks.
pub fn create(path: &Path, blocks: u32, block: u32) -> Result<DiskFile> {
    let size = layout(blocks, block)?.total_bytes();
    DiskFile::create_new(path, size, &DiskOptions::default())
        .with_context(|| format!("cannot make a file of {size} at {path:?}"))
}

/// The blocks of an existing file.
pub fn file(path: &Path, blocks: u32, block: u32) -> Result<Endpoint> {
    let config = layout(blocks, block)?;
    let size = config.total_bytes();
    let file = DiskFile::open_existing(path, size, &DiskOptions::default())?;
    let region = Region::new(file).view(ByteCount::ZERO, size)?;
    let builder = LayoutBuilder::new(config).fully_contiguous().adopt([region]);
    Ok(Endpoint::new(builder.unregistered().build()?)?)
}

/// A manager with the store's engines, for the baselines.
pub fn manager() -> Result<TransferManager> {
    let disk = DiskEngine::new(&DiskEngineOptions::default())?;
    let host = HostEngine::new(HostEngineOptions::default())?;
    Ok(TransferManager::new([Arc::new(disk) as _, Arc::new(host) as _]))
}

/// Opens a store of `slots` blocks with the layout of `memory`, on disk alone.
pub fn disk_store(directory: &Path, memory: &Endpoint, slots: u32) -> Result<Store> {
    let group = BlockGroup::of_layout("kv", memory.layout());
    let block = memory.layout().geometry().block_bytes();
    let capacity = block.checked_mul("slots", slots.into())?;
    let (store, _) = Store::builder()
        .group(group)
        .disk(DiskTier::new(directory, capacity))
        .namespace(namespace()?)
        .open()?;
    Ok(store)
}

/// The path of the slab file of a store on disk with one group.
pub fn slab(directory: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(directory)?;
    let paths: Vec<PathBuf> =
        entries.map(|entry| Ok(entry?.path().join("slab.0.000"))).collect::<Result<_>>()?;
    paths.into_iter().find(|path| path.exists()).context("the store has no slab file")
}

pub fn namespace() -> Result<Namespace> {
    Ok(Namespace::new("bench", [("model", "bench")])?)
}

/// Returns `count` keys of 36 bytes, in the form of a serving engine's keys. Different generations
/// have different keys.
pub fn keys(generation: u64, count: u32) -> Vec<[u8; 36]> {
    let mut random = terrane_testkit::random::Seeded::new(generation);
    (0..count)
        .map(|number| {
            let mut key = [0; 36];
            for part in key.chunks_mut(8) {
                part.copy_from_slice(&random.next_u64().to_le_bytes()[..part.len()]);
            }
            key[..4].copy_from_slice(&number.to_le_bytes());
            key
        })
        .collect()
}

/// Waits for a job. Fails if a block failed.
pub fn finish<G>(job: Result<Job, Refused<G>>) -> Result<JobOutcome> {
    let outcome = job.map_err(|refused| anyhow!(refused.cause))?.wait();
    let first = outcome.results.iter().find(|result| !result.is_ok());
    ensure!(first.is_none(), "a block failed: {first:?}");
    Ok(outcome)
}

pub fn put(store: &Store, keys: &[[u8; 36]], memory: &Endpoint, ids: &[u32]) -> Result<()> {
    finish(store.put(keys, Blocks::new(memory, ids), JobOptions::new(), ())).map(drop)
}

pub fn get(store: &Store, keys: &[[u8; 36]], memory: &Endpoint, ids: &[u32]) -> Result<()> {
    finish(store.get(keys, Blocks::new(memory, ids), JobOptions::new(), ())).map(drop)
}
