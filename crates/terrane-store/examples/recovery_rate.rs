//! How long it takes to open a store of N blocks, from its journal and from a checkpoint.
//!
//! `cargo run --release -p terrane-store --example recovery_rate -- 500000 [DIRECTORY]`

#![allow(clippy::print_stdout, reason = "it prints what it measures")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

use terrane_store::KeyHash;
use terrane_store::disk::{Catalog, CatalogOptions, GroupSlots, Namespace, PutRecord, Recovered};

/// The records of one append.
const BATCH: u32 = 64;

/// Openings that are measured.
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let blocks: u32 = arguments.next().map_or(Ok(500_000), |text| text.parse())?;
    let parent = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let directory = tempfile::tempdir_in(parent)?;
    let path = directory.path();

    let (catalog, _) = open(path, blocks, false)?;
    let start = Instant::now();
    for first in (0..blocks).step_by(usize::try_from(BATCH)?) {
        let slots = first..blocks.min(first + BATCH);
        let keys: Vec<[u8; 36]> = slots.clone().map(key).collect();
        let records: Vec<PutRecord<'_>> =
            slots.zip(&keys).map(|(slot, key)| record(slot, key)).collect();
        catalog.append_puts(&records)?;
    }
    println!("{blocks} blocks appended in {:.3} s", start.elapsed().as_secs_f64());
    catalog.sync()?;
    drop(catalog);
    measure("journal", path, blocks)?;

    let (catalog, _) = open(path, blocks, false)?;
    let start = Instant::now();
    let report = catalog.checkpoint(|writer| {
        (0..blocks).try_for_each(|slot| writer.add(&record(slot, &key(slot))))
    })?;
    let seconds = start.elapsed().as_secs_f64();
    println!("checkpoint of {} bytes written and synced in {seconds:.3} s", report.bytes);
    drop(catalog);
    measure("checkpoint", path, blocks)
}

fn measure(name: &str, path: &Path, blocks: u32) -> Result<(), Box<dyn Error>> {
    for keep_keys in [false, true] {
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let (_catalog, recovered) = open(path, blocks, keep_keys)?;
            if recovered.found != u64::from(blocks) {
                return Err(format!("{} blocks of {blocks} found", recovered.found).into());
            }
            times.push(recovered.took.as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let keys = if keep_keys { "with keys" } else { "without keys" };
        let (least, most) = (times[0], times[ROUNDS - 1]);
        let median = times[ROUNDS / 2];
        println!("{name}, {keys}: {median:.4} s (from {least:.4} to {most:.4} s)");
    }
    Ok(())
}

fn open(path: &Path, blocks: u32, keep_keys: bool) -> Result<(Catalog, Recovered), Box<dyn Error>> {
    let namespace = Namespace::new("model", [("rank", "0")])?;
    let groups = [GroupSlots { slot_bytes: 1 << 20, slots: blocks, fingerprint: [1; 16] }];
    let options = CatalogOptions { keep_keys, ..CatalogOptions::default() };
    Ok(Catalog::open(path, &namespace, &groups, options)?)
}

fn record(slot: u32, key: &[u8]) -> PutRecord<'_> {
    let number = u128::from(slot) + 1;
    let key_hash = number.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
    let key_hash = KeyHash::new(key_hash);
    PutRecord { key_hash, group: 0, slot, length: 1 << 20, checksum: u64::from(slot), key }
}

fn key(slot: u32) -> [u8; 36] {
    let mut key = [7; 36];
    key[..4].copy_from_slice(&slot.to_le_bytes());
    key
}
