//! Tiers that change their size while jobs use their slots.

use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_store::{BlockGroup, Blocks, EvictionKind, JobOptions, Store, TierId, WritePolicy};
use terrane_testkit::random::Seeded;
use terrane_transfer::Endpoint;

use super::harness::{assert_at_rest, builder, disk, found, key, keys, put_ok, soon, submit_put};
use super::memory_tiers::engine_layout;

const BLOCK: usize = 8192;
const SLOTS: u64 = 64;
const KEYS: usize = 200;
/// A file with holes may have a block for the list of its parts.
const OF_FILE_SYSTEM: u64 = 4096;
const HOST: TierId = TierId::new(0);
const DISK: TierId = TierId::new(1);

fn slots(count: u64) -> ByteCount {
    ByteCount::new(count * 8192)
}

/// Puts, gets, pins and promotes until it is told to stop.
fn work(store: &Store, seed: u64, stop: &AtomicBool) {
    let mut random = Seeded::new(seed);
    while !stop.load(Ordering::Relaxed) {
        let first = random.below(KEYS);
        let keys: Vec<_> = (first..first + 1 + random.below(5)).map(key).collect();
        match random.below(8) {
            0..=3 => drop(submit_put(store, &keys, BLOCK, JobOptions::new()).wait()),
            4 => submit_put(store, &keys, BLOCK, JobOptions::new()).cancel(),
            5 => drop(store.promote(&keys, HOST, JobOptions::new()).unwrap().wait()),
            6 => drop(store.acquire(0, &keys, Duration::from_millis(1))),
            _ => drop(found(store, &keys, BLOCK)),
        }
    }
}

/// The bytes that the file system has for the blocks on disk.
fn allocated(directory: &Path) -> u64 {
    let slab = directory.join("model").join("slab.0.000");
    std::fs::metadata(slab).unwrap().blocks() * 512
}

/// Whether the file system frees parts of a file.
fn has_holes(directory: &Path) -> bool {
    let file = tempfile::tempfile_in(directory).unwrap();
    file.set_len(8192).unwrap();
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: the call takes numbers, and the descriptor is open.
    unsafe { libc::fallocate(file.as_raw_fd(), mode, 0, 4096) == 0 }
}

/// Waits until the tiers have no block and no disk space beyond these slots. No further resize helps.
#[track_caller]
fn assert_fits(store: &Store, directory: &Path, limits: [u64; 2]) {
    let until = soon();
    loop {
        let groups = store.snapshot().tiers.into_iter().map(|tier| tier.groups[0]);
        let groups: Vec<_> = groups.collect();
        let fits = groups.iter().zip(limits).all(|(group, limit)| {
            let limit = usize::try_from(limit).unwrap();
            let known = group.blocks + group.free + group.quarantined;
            group.slots == limit && group.blocks <= limit && (known, group.in_use) == (limit, 0)
        });
        let allocated = allocated(directory);
        if fits && (allocated <= limits[1] * 8192 + OF_FILE_SYSTEM || !has_holes(directory)) {
            return;
        }
        assert!(Instant::now() < until, "{limits:?}, {allocated} bytes: {groups:#?}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn shrink_while_jobs_run(policy: WritePolicy, eviction: EvictionKind) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let builder = builder(path, 8192, SLOTS).host(slots(SLOTS));
    let (store, _) = builder.write_policy(policy).eviction(eviction).open().unwrap();
    let mut random = Seeded::new(7);
    for round in 0..30 {
        let stop = AtomicBool::new(false);
        let limits = [1 + random.below(20), 4 + random.below(20)];
        let limits = limits.map(|limit| u64::try_from(limit).unwrap());
        thread::scope(|scope| {
            for worker in 0..3 {
                let (store, stop) = (&store, &stop);
                scope.spawn(move || work(store, round * 10 + worker, stop));
            }
            for _ in 0..3 {
                thread::sleep(Duration::from_millis(2));
                // The last size of the round is the small one, and jobs run on after it.
                for (tier, limit) in [HOST, DISK].into_iter().zip(limits) {
                    assert_eq!(store.resize(tier, slots(SLOTS)).unwrap(), slots(SLOTS));
                    thread::sleep(Duration::from_millis(1));
                    assert_eq!(store.resize(tier, slots(limit)).unwrap(), slots(limit));
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_at_rest(&store);
        assert_fits(&store, path, limits);
    }
    // All slots can be used again.
    store.resize(HOST, slots(SLOTS)).unwrap();
    store.resize(DISK, slots(SLOTS)).unwrap();
    assert!(store.clear().unwrap().wait().is_ok());
    put_ok(&store, &keys(500..500 + 64), BLOCK);
    assert_eq!(found(&store, &keys(500..500 + 64), BLOCK), [true; 64]);
    assert_at_rest(&store);
    assert_eq!(store.close(soon()).left, 0);
}

#[test]
fn a_tier_that_is_written_through_shrinks_while_jobs_use_its_slots() {
    shrink_while_jobs_run(WritePolicy::Through, EvictionKind::S3Fifo);
}

#[test]
fn a_tier_that_is_written_back_shrinks_while_jobs_use_its_slots() {
    shrink_while_jobs_run(WritePolicy::Back, EvictionKind::Lru);
}

#[test]
fn a_tier_that_writes_used_blocks_shrinks_while_jobs_use_its_slots() {
    shrink_while_jobs_run(WritePolicy::AfterUses(2), EvictionKind::S3Fifo);
}

#[test]
fn blocks_that_a_smaller_disk_tier_evicted_are_absent_at_the_old_size() {
    let directory = tempfile::tempdir().unwrap();
    let open = || builder(directory.path(), 8192, 16).open().unwrap();
    let (store, _) = open();
    put_ok(&store, &keys(0..16), BLOCK);
    let only_tier = TierId::new(0);
    let lease = store.acquire(0, &keys(14..15), Duration::from_secs(600));
    store.resize(only_tier, slots(4)).unwrap();
    // It leaves with its last pin.
    drop(lease);
    assert_fits_disk(&store, 4);
    let before = found(&store, &keys(0..16), BLOCK);
    assert_eq!(before.iter().filter(|&&found| found).count(), 4);
    assert_at_rest(&store);
    drop(store);

    let (store, recovery) = open();
    assert_eq!((recovery.found, recovery.damaged), (4, 0));
    assert_eq!(found(&store, &keys(0..16), BLOCK), before);
    assert_eq!(store.snapshot().misses.corrupt, 0);
    // The tier has its old size again.
    put_ok(&store, &keys(100..112), BLOCK);
    assert_eq!(found(&store, &keys(0..16), BLOCK), before);
}

#[test]
fn a_read_only_disk_tier_that_shrinks_keeps_the_bytes_of_its_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let (store, _) = builder(path, 8192, 16).open().unwrap();
    let durable = JobOptions::new().durable(true);
    assert!(submit_put(&store, &keys(0..16), BLOCK, durable).wait().is_ok());
    drop(store);
    let read_only = disk(path, 16 * 8192).read_only(true);
    let (store, _) = builder(path, 8192, 16).disk(read_only).open().unwrap();
    store.resize(TierId::new(0), slots(4)).unwrap();
    assert_eq!(store.snapshot().tiers[0].groups[0].blocks, 4);
    // The close does what the resize left for later.
    drop(store);
    let (store, recovery) = builder(path, 8192, 16).open().unwrap();
    assert_eq!(recovery.found, 16);
    assert_eq!(found(&store, &keys(0..16), BLOCK), [true; 16]);
}

#[test]
fn blocks_whose_slots_were_free_when_the_disk_tier_shrank_are_absent_at_the_old_size() {
    const BLOCK: usize = 32_768;
    let directory = tempfile::tempdir().unwrap();
    let builder = || builder(directory.path(), 32_768, 16).eviction(EvictionKind::Lru);
    let (store, _) = builder().open().unwrap();
    put_ok(&store, &keys(0..16), BLOCK);
    store.touch(0, &keys(4..16));
    // It evicts the blocks of four keys, writes nothing, and leaves their slots free.
    let engine = Endpoint::new(engine_layout(4)).unwrap();
    let written = engine.hold_for_write(&[0, 1, 2, 3]).unwrap();
    let source = Blocks::new(&engine, &[0, 1, 2, 3]);
    let outcome = store.put(&keys(100..104), source, JobOptions::new(), ()).unwrap().wait();
    assert!(outcome.results.iter().all(|result| !result.is_ok()), "{outcome:?}");
    drop(written);
    assert_eq!(store.snapshot().tiers[0].groups[0].free, 4);
    store.resize(TierId::new(0), ByteCount::new(4 * 32_768)).unwrap();
    let before = found(&store, &keys(0..16), BLOCK);
    assert_eq!(before.iter().filter(|&&found| found).count(), 4);
    drop(store);

    let (store, recovery) = builder().open().unwrap();
    assert_eq!((recovery.found, recovery.damaged), (4, 0));
    assert_eq!(found(&store, &keys(0..16), BLOCK), before);
    assert_eq!(store.snapshot().misses.corrupt, 0);
}

/// Waits until a store of one tier has no block beyond this number of slots.
#[track_caller]
fn assert_fits_disk(store: &Store, limit: usize) {
    let until = soon();
    while store.snapshot().tiers[0].groups[0].blocks > limit {
        assert!(Instant::now() < until, "{:#?}", store.snapshot());
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn new_blocks_are_hit_in_a_tier_that_shrank() {
    let group = BlockGroup::new("kv", 8192);
    let (store, _) = Store::builder().group(group).host(slots(20 * SLOTS)).open().unwrap();
    store.resize(HOST, slots(SLOTS)).unwrap();
    let count = usize::try_from(SLOTS).unwrap();
    // Blocks that were hot fill the main queue of S3-FIFO.
    for _ in 0..6 {
        put_ok(&store, &keys(0..count), BLOCK);
    }
    let mut hits = 0;
    for number in count..2 * count {
        put_ok(&store, &[key(number)], BLOCK);
        // Each block is used again after three others.
        hits += store.prefix(0, &[key(number - 3)]);
    }
    assert!(hits > count / 2, "{hits} of {count}");
    assert_at_rest(&store);
}
