//! The time to open a store again, and the size of its metadata writes.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;
use std::time::Instant;

use anyhow::{Result, ensure};
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::{ByteCount, Durability};
use terrane_store::{BlockGroup, Blocks, DiskTier, JobOptions, Recovery, Spans, Store};

use crate::{Arguments, memory};

/// The maximum seconds for 500,000 blocks and for ten million.
const LIMITS: [(u32, f64); 2] = [(500_000, 0.1), (10_000_000, 2.0)];

/// The maximum share of metadata in the written payload, in percent.
const METADATA_PERCENT: f64 = 1.0;

/// The size of the blocks for the share of metadata.
const LARGE: u32 = 256 << 10;

pub fn measure<W: Write>(
    arguments: &Arguments,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let blocks = arguments.blocks;
    let [warm, cold] =
        ["warm", "cold"].map(|state| format!("opening {blocks} blocks again, {state}"));
    if reporter.wants(&warm) || reporter.wants(&cold) {
        let folder = tempfile::tempdir_in(&arguments.directory)?;
        let (store, _) = open(folder.path(), blocks, 512)?;
        fill(&store, 1, blocks, 512)?;
        drop(store);
        let limit = LIMITS.iter().find(|(count, _)| *count == blocks);
        for (case, is_cold) in [(warm, false), (cold, true)] {
            if !reporter.wants(&case) {
                continue;
            }
            let mut seconds = Vec::new();
            for _ in 0..settings.repeats.max(1) {
                if is_cold {
                    drop_pages(folder.path())?;
                }
                let begun = Instant::now();
                let (store, recovery) = open(folder.path(), blocks, 512)?;
                seconds.push(begun.elapsed().as_secs_f64());
                ensure!(recovery.found == u64::from(blocks), "{recovery:?}");
                drop(store);
            }
            let spread = Spread::of(&seconds).unwrap_or(Spread::single(f64::NAN));
            let row = Measurement::new(case, spread, "s", Direction::LowerIsBetter);
            reporter.report(&match limit {
                _ if is_cold => row.without_target("the disk decides it"),
                Some((_, limit)) => row.within(*limit),
                None => row.without_target("the limits are for 500,000 and 10,000,000 blocks"),
            })?;
        }
    }
    let metadata = "metadata written for blocks of 256 KiB";
    if reporter.wants(metadata) {
        let folder = tempfile::tempdir_in(&arguments.directory)?;
        let slots = 1024;
        let (store, _) = open(folder.path(), slots, LARGE)?;
        // Blocks replace each other, so the store also writes checkpoints.
        let rounds = 8;
        let before = written()?;
        for round in 0..rounds {
            fill(&store, round + 2, slots, LARGE)?;
        }
        let whole = written()? - before;
        let payload = f64::from(LARGE) * f64::from(slots) * rounds as f64;
        let share = (whole - payload) / payload * 100.0;
        let row = Measurement::new(metadata, Spread::single(share), "%", Direction::LowerIsBetter);
        reporter.report(&row.within(METADATA_PERCENT))?;
        drop(store);
    }
    Ok(())
}

fn open(folder: &Path, slots: u32, block: u32) -> Result<(Store, Recovery)> {
    let slot = block.next_multiple_of(4096);
    let bytes = ByteCount::new(slot.into()).checked_mul("slots", slots.into())?;
    let tier = DiskTier::new(folder, bytes).durability(Durability::None);
    let group = BlockGroup::new("kv", block);
    Ok(Store::builder().group(group).disk(tier).namespace(memory::namespace()?).open()?)
}

/// Removes the files of the store in a directory from the page cache.
#[expect(unsafe_code, reason = "a system call")]
fn drop_pages(directory: &Path) -> Result<()> {
    for folder in std::fs::read_dir(directory)? {
        for file in std::fs::read_dir(folder?.path())? {
            let file = File::open(file?.path())?;
            // Only written pages leave the cache.
            file.sync_all()?;
            // SAFETY: the descriptor is open, and the call has no pointers.
            let error =
                unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
            ensure!(error == 0, "posix_fadvise failed: {error}");
        }
    }
    Ok(())
}

/// Returns the bytes that this process has written to devices.
fn written() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/self/io")?;
    let line = text.lines().find_map(|line| line.strip_prefix("write_bytes:"));
    Ok(line.unwrap_or_default().trim().parse()?)
}

#[expect(unsafe_code, reason = "the spans are the buffer of this function")]
fn fill(store: &Store, generation: u64, blocks: u32, block: u32) -> Result<()> {
    let size = usize::try_from(block)?;
    let mut buffer = vec![7_u8; size + 4096];
    let skip = buffer.as_ptr().align_offset(4096);
    let start = NonNull::from(&mut buffer[skip]);
    for keys in memory::keys(generation, blocks).chunks(1024) {
        let mut spans = Spans::new();
        for _ in keys {
            spans.add(start, size);
        }
        // SAFETY: the buffer outlives the job, which only reads it.
        let blocks = unsafe { Blocks::spans(spans) };
        memory::finish(store.put(keys, blocks, JobOptions::new(), ()))?;
    }
    Ok(())
}
