//! Queries of resident keys.

use std::hint::black_box;
use std::io::Write;
use std::ptr::NonNull;

use anyhow::{Context, Result, ensure};
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::ByteCount;
use terrane_store::{BlockGroup, Blocks, JobOptions, Presence, Spans, Store};
use terrane_testkit::random::Seeded;

use crate::{Arguments, memory};

/// The maximum nanoseconds per key in batches of 64.
const BATCHED_NS: f64 = 150.0;

/// The maximum nanoseconds per key without a batch.
const ALONE_NS: f64 = 400.0;

/// The maximum bytes per block in the index.
const INDEX_BYTES: f64 = 96.0;

const BATCH: usize = 64;

/// The size of a block. Queries never read blocks.
const BLOCK: u32 = 64;

/// The distance between two blocks of a host tier, because blocks begin on page boundaries.
const STRIDE: u64 = 4096;

/// The number of keys of one measured call.
const QUERIES: u32 = 64 * 1024;

pub fn measure<W: Write>(
    arguments: &Arguments,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let batched = format!("presence of {} resident keys, batches of {BATCH}", arguments.keys);
    let alone = format!("presence of {} resident keys, one by one", arguments.keys);
    let index = "memory for a block of the index and of a tier";
    if ![batched.as_str(), alone.as_str(), index].iter().any(|case| reporter.wants(case)) {
        return Ok(());
    }
    let keys = memory::keys(3, arguments.keys);
    let before = resident_bytes()?;
    let bytes = ByteCount::new(STRIDE).checked_mul("blocks", arguments.keys.into())?;
    let (store, _) = Store::builder().group(BlockGroup::new("kv", BLOCK)).host(bytes).open()?;
    fill(&store, &keys)?;
    let resident = store.prefix(0, &keys);
    ensure!(resident == keys.len(), "{resident} of {} keys are resident", keys.len());
    let mut random = Seeded::new(5);
    let looked_up: Vec<[u8; 36]> = (0..QUERIES).map(|_| keys[random.below(keys.len())]).collect();
    let mut found = vec![Presence::Absent; BATCH];
    let mut ready = 0;
    for (name, size, limit) in [(&batched, BATCH, BATCHED_NS), (&alone, 1, ALONE_NS)] {
        if !reporter.wants(name) {
            continue;
        }
        let spread = settings.time_batch(QUERIES, || {
            for keys in looked_up.chunks(size) {
                store.presence(0, keys, &mut found[..keys.len()]);
                ready += black_box(&found)[..keys.len()].iter().filter(|p| p.is_ready()).count();
            }
        });
        let ns = spread.scaled(1e9);
        let row = Measurement::new(name.as_str(), ns, "ns", Direction::LowerIsBetter);
        reporter.report(&row.within(limit))?;
    }
    ensure!(ready.is_multiple_of(usize::try_from(QUERIES)?), "a resident key was not found");
    if reporter.wants(index) {
        // The resident memory of the blocks is exact, because the store touches it when it
        // allocates it.
        let tiers = store.snapshot().tiers;
        let blocks = tiers.first().context("the store has no tier")?.capacity.get();
        let each = (resident_bytes()? - before - blocks as f64) / f64::from(arguments.keys);
        let spread = terrane_bench::Spread::single(each);
        let row = Measurement::new(index, spread, "bytes", Direction::LowerIsBetter);
        reporter.report(&row.within(INDEX_BYTES))?;
    }
    Ok(())
}

/// Returns the resident memory of the process, in bytes.
fn resident_bytes() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: f64 = line.context("no VmRSS")?.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024.0)
}

#[expect(unsafe_code, reason = "the spans are the buffer of this function")]
fn fill(store: &Store, keys: &[[u8; 36]]) -> Result<()> {
    let mut buffer = [7_u8; 64];
    let start = NonNull::from(&mut buffer).cast();
    for keys in keys.chunks(4096) {
        let mut spans = Spans::new();
        for _ in keys {
            spans.add(start, buffer.len());
        }
        // SAFETY: the buffer outlives the job, which only reads it.
        let blocks = unsafe { Blocks::spans(spans) };
        memory::finish(store.put(keys, blocks, JobOptions::new(), ()))?;
    }
    Ok(())
}
