//! Everything at once, for as long as is asked: puts, gets, removals, promotions, leases, clears, sizes
//! that change, damages on disk, and restarts. No byte is wrong, nothing is left, and memory stays flat.
//!
//! ```text
//! TERRANE_STORE_SOAK_SECONDS=600 cargo test --release -p terrane-store --test it soak
//! ```

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_store::{
    BlockResult, CompletionQueue, EvictionKind, JobOptions, Priority, Store, TierId, WritePolicy,
};
use terrane_testkit::leaks::FREES_AT_ONCE;
use terrane_testkit::process::{allow_seconds, in_child_with};
use terrane_testkit::random::Seeded;

use super::harness::{assert_at_rest, builder, found, key, process_bytes, soon, submit_put};

const TEST: &str = "store::soak::everything_at_once_leaves_no_wrong_byte_and_memory_flat";
const BLOCK: usize = 8192;
const SLOTS: u64 = 200;
const KEYS: usize = 600;
const PAGE: usize = 4096;

/// How long the threads work before the store is closed and opened again.
const SESSION: Duration = Duration::from_millis(300);

/// The resident memory may grow so much after the first sessions: allocators keep what they freed.
const MOST_GROWTH: u64 = 16 << 20;

#[expect(clippy::disallowed_methods, reason = "a longer run is asked for")]
fn seconds() -> u64 {
    std::env::var("TERRANE_STORE_SOAK_SECONDS").map_or(3, |count| count.parse().unwrap())
}

#[derive(Default)]
struct Totals {
    found: AtomicU64,
    absent: AtomicU64,
    damages: AtomicU64,
    clears: AtomicU64,
}

fn add(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

/// Uses the store until it is told to stop.
fn work(store: &Store, seed: u64, stop: &AtomicBool, totals: &Totals) {
    let mut random = Seeded::new(seed);
    let queue = CompletionQueue::new(16).unwrap();
    while !stop.load(Ordering::Relaxed) {
        let first = random.below(KEYS);
        let keys: Vec<_> = (first..first + 1 + random.below(6)).map(key).collect();
        let deadline = Instant::now() + Duration::from_micros(200 << random.below(12));
        let options = JobOptions::new().deadline(deadline);
        match random.below(16) {
            0..=4 => drop(submit_put(store, &keys, BLOCK, options).wait()),
            5 => drop(submit_put(store, &keys, BLOCK, options.durable(true))),
            6 => submit_put(store, &keys, BLOCK, options).cancel(),
            7 => {
                let options = options.queue(&queue, seed);
                submit_put(store, &keys, BLOCK, options).raise(Priority::High);
                let outcome = queue.wait(Some(soon())).unwrap();
                assert_eq!((outcome.tag, outcome.results.len()), (seed, keys.len()));
            }
            8 => drop(store.promote(&keys, TierId::new(0), options).unwrap().wait()),
            9 => {
                for result in store.remove(0, &keys[..1]).unwrap().wait().results {
                    let is_right = matches!(result, BlockResult::Done { .. } | BlockResult::Absent);
                    assert!(is_right, "{result}");
                }
            }
            10 => drop(store.acquire(0, &keys, Duration::from_millis(1))),
            // It checks each byte.
            _ => found(store, &keys, BLOCK).into_iter().for_each(|found| {
                add(if found { &totals.found } else { &totals.absent });
            }),
        }
    }
}

/// Opens a file for direct writes, as the store does. If direct and buffered writes were mixed, a sync
/// of the file could fail. Where direct I/O is not available, both are buffered.
fn open_directly(path: &Path) -> File {
    let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path);
    direct.or_else(|_| OpenOptions::new().write(true).open(path)).unwrap()
}

/// Changes sizes, clears, syncs, and damages blocks on disk until it is told to stop.
fn disturb(store: &Store, directory: &Path, seed: u64, stop: &AtomicBool, totals: &Totals) {
    let mut random = Seeded::new(seed);
    let slab = open_directly(&directory.join("model").join("slab.0.000"));
    // A page at a multiple of a page.
    let memory = vec![0x5a; 2 * PAGE];
    let page = &memory[memory.as_ptr().align_offset(PAGE)..][..PAGE];
    let events = store.events(64).unwrap();
    while !stop.load(Ordering::Relaxed) {
        match random.below(12) {
            0 => {
                assert!(store.clear().unwrap().wait().is_ok());
                add(&totals.clears);
            }
            1 => drop(store.sync().unwrap().wait()),
            2 | 3 => {
                let tier = TierId::new(u8::try_from(random.below(2)).unwrap());
                let slots = random.below(SLOTS.try_into().unwrap()).max(20);
                let bytes = ByteCount::from_usize(slots * BLOCK);
                store.resize(tier, bytes).unwrap();
            }
            4 => {
                let pages = BLOCK / PAGE * usize::try_from(SLOTS).unwrap();
                let at = random.below(pages) * PAGE;
                slab.write_all_at(page, at.try_into().unwrap()).unwrap();
                add(&totals.damages);
            }
            5 => {
                let mut text = String::new();
                store.snapshot().write_openmetrics(&mut text).unwrap();
                assert!(text.ends_with("# EOF\n"));
            }
            _ => while events.try_take().is_some() {},
        }
        thread::sleep(Duration::from_millis(2));
    }
}

fn session(directory: &Path, number: u64, totals: &Totals) {
    let policies = [WritePolicy::Through, WritePolicy::Back, WritePolicy::AfterUses(2)];
    let policy = policies[usize::try_from(number % 3).unwrap()];
    let eviction = if number.is_multiple_of(2) { EvictionKind::S3Fifo } else { EvictionKind::Lru };
    let builder = builder(directory, BLOCK.try_into().unwrap(), SLOTS).host(ByteCount::kib(512));
    let builder = builder.write_policy(policy).eviction(eviction).keep_keys(number % 4 < 2);
    let (store, _) = builder.open().unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for worker in 0..3 {
            let (store, stop) = (&store, &stop);
            scope.spawn(move || work(store, number * 10 + worker, stop, totals));
        }
        scope.spawn(|| disturb(&store, directory, number * 10 + 9, &stop, totals));
        thread::sleep(SESSION);
        stop.store(true, Ordering::Relaxed);
    });
    // Every second one is closed with jobs in flight.
    if number.is_multiple_of(2) {
        assert_at_rest(&store);
    }
    assert_eq!(store.close(soon()).left, 0);
}

#[test]
fn everything_at_once_leaves_no_wrong_byte_and_memory_flat() {
    in_child_with(TEST, &FREES_AT_ONCE, || {
        allow_seconds(u32::try_from(seconds()).unwrap().saturating_add(600));
        let directory = tempfile::tempdir().unwrap();
        let totals = Totals::default();
        let end = Instant::now() + Duration::from_secs(seconds());
        let mut growth = Vec::new();
        for number in 0.. {
            session(directory.path(), number, &totals);
            growth.push(process_bytes("VmRSS"));
            if Instant::now() >= end && growth.len() >= 4 {
                break;
            }
        }
        let settled = growth.len().div_ceil(4).max(3);
        let before = growth[..settled].iter().max().unwrap();
        let last = growth.last().unwrap();
        assert!(*last <= before + MOST_GROWTH, "{before} bytes grew to {last}: {growth:?}");
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        println!(
            "{} sessions, {} blocks found, {} absent, {} damages, {} clears, {before} to {last} bytes",
            growth.len(),
            get(&totals.found),
            get(&totals.absent),
            get(&totals.damages),
            get(&totals.clears),
        );
        assert!(get(&totals.found) > 0 && get(&totals.damages) > 0);
    });
}
