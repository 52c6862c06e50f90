//! Tests of the slab files: real files, direct I/O, real faults.

#![allow(unsafe_code, reason = "tests submit memory of their own")]

mod bytes;
mod damage;
mod faults;
mod files;
mod order;

use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use terrane_core::sync::{lock, unpoisoned};
use terrane_core::{ByteCount, HostAddress};
use terrane_storage::{IoBuffer, IoMemory};

use super::*;

type SlabResult = Result<SlabDone, SlabFailure>;

/// The results of requests, in the order of their ends.
#[derive(Default)]
struct Results {
    ended: Mutex<Vec<(usize, SlabResult)>>,
    arrived: Condvar,
}

impl SlabSink for Results {
    fn block_ended(&self, index: usize, result: SlabResult) {
        lock(&self.ended).push((index, result));
        self.arrived.notify_all();
    }
}

impl Results {
    /// Waits for `count` results and takes them.
    #[track_caller]
    fn take(&self, count: usize) -> Vec<(usize, SlabResult)> {
        let mut ended = lock(&self.ended);
        let end = Instant::now() + Duration::from_secs(120);
        while ended.len() < count {
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{} of {count} requests have ended", ended.len());
            ended = unpoisoned(self.arrived.wait_timeout(ended, left)).0;
        }
        assert_eq!(ended.len(), count, "each request ends once");
        std::mem::take(&mut ended)
    }
}

/// Memory with guard bytes around each span, which nothing may change.
struct Guarded {
    bytes: Vec<u8>,
    /// Beginnings and lengths.
    spans: Vec<(usize, usize)>,
}

const GUARD: u8 = 0xA5;
const GUARD_BYTES: usize = 64;

impl Guarded {
    /// Spans of these lengths. Each begins `skew` bytes after a multiple of 4 KiB.
    fn new(spans: &[(usize, usize)]) -> Self {
        let total: usize = spans.iter().map(|(skew, length)| skew + length + 3 * 4096).sum();
        let bytes = vec![GUARD; total + 4096];
        let base = bytes.as_ptr().addr();
        let mut at = bytes.as_ptr().align_offset(4096);
        let mut placed = Vec::new();
        for &(skew, length) in spans {
            at += (base + at).next_multiple_of(4096) - (base + at) + 4096 + skew;
            placed.push((at, length));
            at += length + GUARD_BYTES;
        }
        Self { bytes, spans: placed }
    }

    /// The bytes of all spans.
    fn content(&self) -> Vec<u8> {
        let mut content = Vec::new();
        for &(begin, length) in &self.spans {
            content.extend_from_slice(&self.bytes[begin..begin + length]);
        }
        content
    }

    fn fill(&mut self, content: &[u8]) {
        let mut at = 0;
        for &(begin, length) in &self.spans {
            self.bytes[begin..begin + length].copy_from_slice(&content[at..at + length]);
            at += length;
        }
    }

    fn buffers(&mut self) -> SlabBuffers {
        let base = NonNull::new(self.bytes.as_mut_ptr()).unwrap();
        let spans = self.spans.iter().map(|&(begin, length)| IoBuffer {
            // SAFETY: the span lies within the allocation.
            address: HostAddress::new(unsafe { base.add(begin) }),
            length: ByteCount::from_usize(length),
        });
        spans.collect()
    }

    #[track_caller]
    fn check_guards(&self) {
        let mut at = 0;
        for &(begin, length) in &self.spans {
            assert!(self.bytes[at..begin].iter().all(|&byte| byte == GUARD), "before a span");
            at = begin + length;
        }
        assert!(self.bytes[at..].iter().all(|&byte| byte == GUARD), "after the last span");
    }
}

/// Bytes that depend on `seed` and on their position.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut random = terrane_testkit::random::Seeded::new(seed);
    let mut bytes = vec![0; length.next_multiple_of(8)];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&random.next_u64().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

const fn group(slot_bytes: u64, slots: u32) -> GroupSlots {
    GroupSlots { slot_bytes, slots, fingerprint: [0; 16] }
}

/// One group in one directory.
fn open_one(folder: &Path, group: GroupSlots, options: &SlabOptions) -> Slabs {
    Slabs::open(&[folder.to_owned()], &[group], options).unwrap()
}

/// A request of job 1 in group 0.
fn request(slot: u32, buffers: SlabBuffers, direction: SlabDirection) -> NewRequest {
    NewRequest {
        slot,
        buffers,
        memory: None,
        direction,
        index: 0,
        job: 1,
        deadline: None,
        priority: Priority::Normal,
    }
}

/// A request without its sink.
struct NewRequest {
    slot: u32,
    buffers: SlabBuffers,
    memory: Option<IoMemory>,
    direction: SlabDirection,
    index: usize,
    job: u64,
    deadline: Option<Instant>,
    priority: Priority,
}

impl NewRequest {
    fn to(self, sink: &Arc<impl SlabSink + 'static>) -> SlabRequest {
        let sink = Arc::clone(sink);
        SlabRequest {
            job: JobId::new(self.job),
            index: self.index,
            group: 0,
            slot: self.slot,
            buffers: self.buffers,
            memory: self.memory,
            direction: self.direction,
            deadline: self.deadline,
            priority: self.priority,
            sink,
        }
    }
}

/// Runs one request to its end.
#[track_caller]
fn run(slabs: &Slabs, request: NewRequest) -> SlabResult {
    let results = Arc::new(Results::default());
    // SAFETY: the caller keeps the memory until this returns, after the request's end.
    unsafe { slabs.submit(vec![request.to(&results)]) };
    results.take(1).remove(0).1
}

/// Writes `content` from one aligned span, and returns its checksum.
#[track_caller]
fn write(slabs: &Slabs, slot: u32, content: &[u8]) -> u64 {
    let mut memory = Guarded::new(&[(0, content.len())]);
    memory.fill(content);
    run(slabs, request(slot, memory.buffers(), SlabDirection::Write)).unwrap().checksum
}

/// Reads `length` bytes into one aligned span.
#[track_caller]
fn read(slabs: &Slabs, slot: u32, length: usize, checksum: u64) -> Result<Vec<u8>, SlabFailure> {
    let mut memory = Guarded::new(&[(0, length)]);
    run(slabs, request(slot, memory.buffers(), SlabDirection::Read { checksum }))?;
    memory.check_guards();
    Ok(memory.content())
}

/// The slot at an index.
fn slot(index: usize) -> u32 {
    index.try_into().unwrap()
}

/// In memory where possible: faster, with the same alignment rules as requested by the options.
fn memory_folder() -> tempfile::TempDir {
    let folder = PathBuf::from("/dev/shm");
    tempfile::tempdir_in(folder).or_else(|_| tempfile::tempdir()).unwrap()
}

fn in_a_second() -> Instant {
    Instant::now() + Duration::from_secs(1)
}
