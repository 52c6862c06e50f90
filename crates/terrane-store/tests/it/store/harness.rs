//! Stores for tests, and blocks whose bytes follow from their key.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use terrane_core::{ByteCount, Requirement};
use terrane_store::disk::Namespace;
use terrane_store::{
    BlockGroup, BlockResult, Blocks, DiskTier, Job, JobOptions, JobOutcome, Spans, Store,
    StoreBuilder, tools,
};

pub const KIB: u32 = 1024;

pub fn namespace() -> Namespace {
    Namespace::new("model", [("model", "llama-3.1-8b"), ("rank", "0")]).unwrap()
}

/// A disk tier whose file reserves nothing: many tests run at once.
pub fn disk(directory: &Path, bytes: u64) -> DiskTier {
    DiskTier::new(directory, ByteCount::new(bytes)).preallocate(Requirement::Off)
}

/// One group of opaque blocks on disk, with this many slots.
pub fn builder(directory: &Path, block_bytes: u32, slots: u64) -> StoreBuilder {
    let slot = u64::from(block_bytes).next_multiple_of(4096);
    Store::builder()
        .group(BlockGroup::new("kv", block_bytes))
        .disk(disk(directory, slot * slots))
        .namespace(namespace())
}

pub fn open(directory: &Path, block_bytes: u32, slots: u64) -> Store {
    builder(directory, block_bytes, slots).open().unwrap().0
}

/// The slab file of the first group.
pub fn slab(directory: &Path) -> File {
    let path = directory.join("model").join("slab.0.000");
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// Damages one byte, `at` bytes into the block of a key of the first group.
pub fn damage_byte(directory: &Path, number: usize, slot_bytes: u64, at: u64) {
    let (_, block) = tools::why(directory, "model", 0, &key(number)).unwrap();
    let at = u64::from(block.unwrap().slot) * slot_bytes + at;
    let (file, mut byte) = (slab(directory), [0]);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.sync_all().unwrap();
}

/// A size of this process, by its name in `/proc/self/status`.
pub fn process_bytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// The bytes of the block of a key.
pub fn content(key: &[u8], bytes: usize) -> Vec<u8> {
    let mut state = key.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut filled: Vec<u8> =
        std::iter::repeat_with(next).take(bytes.div_ceil(8)).flatten().collect();
    filled.truncate(bytes);
    filled
}

/// Blocks of memory of a job, and the spans of all of them.
pub fn spans(blocks: &mut [Vec<u8>]) -> Spans {
    let mut spans = Spans::new();
    for block in blocks {
        spans.add(NonNull::from(&mut block[..]).cast(), block.len());
    }
    spans
}

pub fn submit_put(store: &Store, keys: &[Vec<u8>], bytes: usize, options: JobOptions) -> Job {
    let mut blocks: Vec<Vec<u8>> = keys.iter().map(|key| content(key, bytes)).collect();
    // SAFETY: the job gets the blocks as its guard.
    let source = unsafe { Blocks::spans(spans(&mut blocks)) };
    store.put(keys, source, options, blocks).unwrap()
}

pub fn put(store: &Store, keys: &[Vec<u8>], bytes: usize) -> JobOutcome {
    submit_put(store, keys, bytes, JobOptions::new()).wait()
}

pub fn put_ok(store: &Store, keys: &[Vec<u8>], bytes: usize) {
    let outcome = put(store, keys, bytes);
    assert!(outcome.is_ok(), "{outcome:?}");
}

/// Gets blocks into memory that outlives the job.
pub fn get(
    store: &Store,
    keys: &[Vec<u8>],
    bytes: usize,
    options: JobOptions,
) -> (JobOutcome, Vec<Vec<u8>>) {
    let mut blocks = vec![vec![0xee_u8; bytes]; keys.len()];
    // SAFETY: `blocks` outlives the wait below, and nothing else uses it until then.
    let destination = unsafe { Blocks::spans(spans(&mut blocks)) };
    let outcome = store.get(keys, destination, options, ()).unwrap().wait();
    (outcome, blocks)
}

/// Gets blocks, and checks that those which are done are right. Returns whether each is.
pub fn found(store: &Store, keys: &[Vec<u8>], bytes: usize) -> Vec<bool> {
    let (outcome, blocks) = get(store, keys, bytes, JobOptions::new());
    let check = |((key, block), result): ((&Vec<u8>, Vec<u8>), &BlockResult)| match result {
        BlockResult::Done { bytes: done } => {
            assert_eq!(usize::try_from(*done).unwrap(), bytes);
            assert!(block == content(key, bytes), "wrong bytes for {key:?}");
            true
        }
        BlockResult::Absent | BlockResult::Corrupt => false,
        other => panic!("{key:?}: {other}"),
    };
    keys.iter().zip(blocks).zip(&outcome.results).map(check).collect()
}

pub fn key(number: usize) -> Vec<u8> {
    format!("prefix {number}").into_bytes()
}

pub fn keys(numbers: std::ops::Range<usize>) -> Vec<Vec<u8>> {
    numbers.map(key).collect()
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Checks that no job, claim, pin or slot is left, and that all slots are accounted for.
pub fn assert_at_rest(store: &Store) {
    assert_eq!(store.drain(soon()).left, 0);
    assert_eq!(store.snapshot().running_jobs, 0);
    let until = soon();
    // The store's own jobs go on, and tasks drop what they own just after the outcome.
    loop {
        let snapshot = store.snapshot();
        let in_use: usize =
            snapshot.tiers.iter().flat_map(|tier| &tier.groups).map(|group| group.in_use).sum();
        let left = in_use + snapshot.keys_in_flight + snapshot.jobs_waiting_for_room;
        if left == 0 {
            return;
        }
        assert!(Instant::now() < until, "{snapshot:#?}");
        std::thread::yield_now();
    }
}
