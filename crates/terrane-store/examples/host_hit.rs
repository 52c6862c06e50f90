//! Measures the submission of a get that is one block of a host tier, beside the transfer alone:
//! `host_hit [ROUNDS]`.
//!
//! Instructions of each are counted by
//!
//! ```text
//! valgrind --tool=callgrind --toggle-collect='host_hit::get' host_hit 1000
//! valgrind --tool=callgrind --toggle-collect='host_hit::transfer' host_hit 1000
//! ```

use std::error::Error;
use std::io::Write;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_store::{BlockGroup, Blocks, Job, JobOptions, Store};
use terrane_transfer::{Completion, Endpoint, Transfer, TransferManager};

const BLOCK: u32 = 64 << 10;
const BLOCKS: u32 = 16;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn memory(blocks: u32) -> Result<Endpoint> {
    let config = LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(1)
        .outer_dim(1)
        .page_size(16)
        .inner_dim(BLOCK / 32)
        .element(ElementFormat::Width(2))
        .build()?;
    let allocator = SystemAllocator::new(SystemOptions::default());
    let builder = LayoutBuilder::new(config).fully_contiguous();
    Ok(Endpoint::new(builder.allocate(&allocator).unregistered().build()?)?)
}

#[inline(never)]
fn get(store: &Store, key: &[u8; 36], to: &Endpoint) -> Result<Job> {
    Ok(store.get(&[key], Blocks::new(to, &[5]), JobOptions::new(), ())?)
}

#[inline(never)]
fn transfer(manager: &TransferManager, from: &Endpoint, to: &Endpoint) -> Result<Completion<()>> {
    Ok(manager.submit(Transfer::new(from, to).blocks(&[0], &[5]), ()).map_err(|no| no.cause)?)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn main() -> Result<()> {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(20_000);
    let (source, to) = (memory(1)?, memory(BLOCKS)?);
    let group = BlockGroup::of_layout("kv", to.layout());
    let (store, _) = Store::builder().group(group).host(ByteCount::mib(16)).open()?;
    let key = [7; 36];
    let stored = store.put(&[key], Blocks::new(&to, &[5]), JobOptions::new(), ())?.wait();
    let manager = TransferManager::with_default_engines()?;
    let (mut gets, mut transfers) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let begun = Instant::now();
        let job = get(&store, &key, &to)?;
        gets.push(begun.elapsed());
        let is_ok = job.wait().is_ok();
        let begun = Instant::now();
        let completion = transfer(&manager, &source, &to)?;
        transfers.push(begun.elapsed());
        completion.wait().result?;
        if !is_ok || !stored.is_ok() {
            return Err("the block was not read".into());
        }
    }
    let (get, transfer) = (median(gets), median(transfers));
    let times = get.as_secs_f64() / transfer.as_secs_f64();
    let mut out = std::io::stdout().lock();
    Ok(writeln!(out, "get {get:?}, transfer {transfer:?}: {times:.2} times")?)
}
