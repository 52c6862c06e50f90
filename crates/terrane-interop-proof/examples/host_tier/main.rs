//! A host tier for pegainfer: its trait `HostTier` over a block store of Terrane.
//!
//! Blocks of a prompt are saved to pinned memory and to disk. They are then loaded to other pages,
//! from each of the two. Every byte is compared. Without a GPU, the engine's arenas and the tier are
//! in system memory.
//!
//! ```text
//! cargo run -p terrane-interop-proof --example host_tier
//! ```

mod arenas;
mod block_on;
mod contract;
mod engine;
mod store_tier;

use std::io::{self, Write};
use std::path::Path;

use anyhow::bail;
use terrane::prelude::*;
use terrane::store::disk::Namespace;
use terrane::store::{BlockGroup, DiskTier, MemoryTier, Store, WritePolicy};

use block_on::block_on;
use contract::{HostTier, KvBlockGuard, TierQuery};
use engine::Engine;
use store_tier::StoreTier;

/// The pages of the engine, and the blocks of host memory.
const PAGES: usize = 8;
const HOST_BLOCKS: u64 = 4;

fn main() -> anyhow::Result<()> {
    let device = Context::primary(DeviceId::new(0)).ok();
    let engine = Engine::new(device.as_ref(), (4, PAGES, 32 << 10))?;
    let cache = engine.cache()?;
    let directory = std::env::temp_dir().join(format!("terrane-host-tier-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let result = run(&engine, &cache, device.as_ref(), &directory);
    std::fs::remove_dir_all(&directory)?;
    let verified = result?;
    Ok(writeln!(io::stdout(), "{}: {verified} bytes of blocks verified", cache.kind())?)
}

fn run(
    engine: &Engine,
    cache: &Endpoint,
    device: Option<&Context>,
    directory: &Path,
) -> anyhow::Result<usize> {
    let tier = StoreTier::new(open(cache, device, directory)?, vec![cache.clone()])?;
    let hash = |block: u64| block.to_be_bytes().to_vec();
    let hashes: Vec<Vec<u8>> = (0..6).map(hash).collect();

    // The engine computes six blocks. The guards keep their pages until they have been read.
    for page in 0..6 {
        engine.write(page, 100 + u64::try_from(page)?)?;
    }
    let guards = (0..6).map(|page| KvBlockGuard(Box::new(page))).collect();
    let save = tier.save((0..6).collect(), hashes.clone(), guards);
    block_on(tier.flush())?;
    block_on(save)?;

    // Other requests use the pages. Then the prompt comes again, and gets other pages.
    for page in 0..PAGES {
        engine.write(page, 0)?;
    }
    let TierQuery::Hit(hit) = block_on(tier.query("request 1", hashes, false))? else {
        bail!("the tier has none of the blocks");
    };
    let blocks = hit.blocks;
    let pages: Vec<i32> = (2..8).rev().collect();
    block_on(tier.load(hit, pages.clone()))?;
    for (number, &page) in (100..).zip(&pages) {
        if engine.read(usize::try_from(page)?)? != engine.content(number) {
            bail!("page {page} has wrong bytes");
        }
    }
    // A hit that the engine declines is not pinned any more.
    if let TierQuery::Hit(hit) = block_on(tier.query("request 2", vec![hash(0)], true))? {
        tier.release(hit);
    }
    Ok(blocks * engine.page_bytes())
}

/// Opens the store: a tier of host memory, and below it a tier on disk.
fn open(cache: &Endpoint, device: Option<&Context>, directory: &Path) -> anyhow::Result<Store> {
    let slot = cache.layout().geometry().block_bytes().align_up(Alignment::PAGE)?;
    let bytes = slot.checked_mul("blocks", HOST_BLOCKS)?;
    let (manager, host) = match device {
        Some(context) => {
            let pinned = PinnedAllocator::new(context, PinnedOptions::default())?;
            let manager = TransferManager::builder().devices([context])?.build();
            (manager, MemoryTier::allocated("pinned", bytes, pinned))
        }
        None => (TransferManager::with_default_engines()?, MemoryTier::system("host", bytes)),
    };
    let namespace = Namespace::new("demo", [("model", "llama-3.1-8b"), ("dtype", "bfloat16")])?;
    let (store, _) = Store::builder()
        .group(BlockGroup::of_layout("kv", cache.layout()))
        .memory_tier(host)
        .disk(DiskTier::new(directory, ByteCount::mib(16)))
        .write_policy(WritePolicy::Back)
        .namespace(namespace)
        .manager(&manager)
        .open()?;
    Ok(store)
}
