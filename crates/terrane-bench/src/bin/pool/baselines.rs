//! The designs that pools are measured beside, behind one trait.

use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use dashmap::DashMap;
use terrane_core::{Allocate, ByteCount, RegionRequest};
use terrane_pool::adaptors::{Simulated, SimulatedOptions};
use terrane_pool::{Pool, PoolBlock, PoolOptions};

/// Something that blocks come from and go back to.
pub trait Source: Sync {
    /// A block in use.
    type Block: Send;

    fn acquire(&self, bytes: u64) -> Self::Block;
    fn release(&self, block: Self::Block);
}

/// The memory of a simulated device.
pub type Simulation = <Simulated as Allocate>::Memory;

impl Source for Pool<Simulated> {
    type Block = PoolBlock<Simulation>;

    fn acquire(&self, bytes: u64) -> Self::Block {
        match Pool::acquire(self, ByteCount::new(bytes)) {
            Ok(block) => block,
            Err(error) => unreachable!("the device is larger than the benchmark: {error}"),
        }
    }

    fn release(&self, block: Self::Block) {
        drop(block);
    }
}

impl Source for Simulated {
    type Block = Simulation;

    fn acquire(&self, bytes: u64) -> Self::Block {
        match self.allocate(&RegionRequest::new(ByteCount::new(bytes))) {
            Ok(memory) => memory,
            Err(error) => unreachable!("the device is larger than the benchmark: {error}"),
        }
    }

    fn release(&self, memory: Self::Block) {
        drop(memory);
    }
}

pub fn simulated() -> Simulated {
    Simulated::new(SimulatedOptions::default())
}

pub fn pool(options: PoolOptions) -> anyhow::Result<Pool<Simulated>> {
    Ok(Pool::new(simulated(), options)?)
}

/// A block of a baseline: where it is and how long, as a handle with a class would carry it.
pub struct Block {
    address: u64,
    class: u32,
}

fn class_of(bytes: u64) -> u32 {
    bytes.next_power_of_two().trailing_zeros()
}

/// Addresses that were never handed out.
#[derive(Default)]
struct Fresh(AtomicU64);

impl Fresh {
    fn block(&self, class: u32) -> Block {
        let address = self.0.fetch_add(1 << class, Ordering::Relaxed);
        Block { address, class }
    }
}

/// Powers of two in a DashMap of ArrayQueues, the cached bytes in one counter that is moved by
/// compare and swap: the pool of the system that is replaced.
pub struct DashMapOfQueues {
    buckets: DashMap<u64, ArrayQueue<u64>>,
    cached: AtomicU64,
    fresh: Fresh,
}

const SLOTS: usize = 1024;
const CACHED: u64 = 4 << 30;

impl DashMapOfQueues {
    pub fn new() -> Self {
        Self { buckets: DashMap::new(), cached: AtomicU64::new(0), fresh: Fresh::default() }
    }
}

impl Source for DashMapOfQueues {
    type Block = Block;

    fn acquire(&self, bytes: u64) -> Block {
        let class = class_of(bytes);
        let size = 1_u64 << class;
        if let Some(queue) = self.buckets.get(&size)
            && let Some(address) = queue.pop()
        {
            let subtract = |cached: u64| cached.checked_sub(size);
            let _ = self.cached.fetch_update(Ordering::AcqRel, Ordering::Acquire, subtract);
            return Block { address, class };
        }
        self.fresh.block(class)
    }

    fn release(&self, block: Block) {
        let size = 1_u64 << block.class;
        let add = |cached: u64| cached.checked_add(size).filter(|&sum| sum <= CACHED);
        if self.cached.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).is_err() {
            return;
        }
        let pushed = match self.buckets.get(&size) {
            Some(queue) => queue.push(block.address),
            None => {
                let bucket = self.buckets.entry(size).or_insert_with(|| ArrayQueue::new(SLOTS));
                bucket.push(block.address)
            }
        };
        if pushed.is_err() {
            self.cached.fetch_sub(size, Ordering::AcqRel);
        }
    }
}

/// A vector behind a mutex for every class.
pub struct MutexedTable {
    buckets: [Mutex<Vec<u64>>; 64],
    fresh: Fresh,
}

impl MutexedTable {
    pub fn new() -> Self {
        Self { buckets: std::array::from_fn(|_| Mutex::default()), fresh: Fresh::default() }
    }

    fn bucket(&self, class: u32) -> std::sync::MutexGuard<'_, Vec<u64>> {
        let index = usize::try_from(class).unwrap_or(0) % self.buckets.len();
        match self.buckets.get(index).map(Mutex::lock) {
            Some(Ok(guard)) => guard,
            _ => unreachable!("the index is in range, and no holder panics"),
        }
    }
}

impl Source for MutexedTable {
    type Block = Block;

    fn acquire(&self, bytes: u64) -> Block {
        let class = class_of(bytes);
        match self.bucket(class).pop() {
            Some(address) => Block { address, class },
            None => self.fresh.block(class),
        }
    }

    fn release(&self, block: Block) {
        self.bucket(block.class).push(block.address);
    }
}

/// The allocator of the C library, through the standard library.
pub struct Malloc;

impl Source for Malloc {
    type Block = Vec<u8>;

    fn acquire(&self, bytes: u64) -> Vec<u8> {
        // As malloc, it leaves the bytes alone.
        black_box(Vec::with_capacity(ByteCount::new(bytes).to_usize()))
    }

    fn release(&self, block: Vec<u8>) {
        drop(black_box(block));
    }
}

/// The crate `offset-allocator`, in units of 256 bytes, behind a mutex: it is for one thread.
pub struct Offsets(Mutex<offset_allocator::Allocator<u32>>);

const UNIT: u64 = 256;

impl Offsets {
    pub fn new() -> Self {
        Self(Mutex::new(offset_allocator::Allocator::with_max_allocs(1 << 30, 1 << 18)))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, offset_allocator::Allocator<u32>> {
        match self.0.lock() {
            Ok(guard) => guard,
            Err(_) => unreachable!("no holder panics"),
        }
    }
}

impl Source for Offsets {
    type Block = offset_allocator::Allocation;

    fn acquire(&self, bytes: u64) -> Self::Block {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        match self.lock().allocate(units) {
            Some(allocation) => allocation,
            None => unreachable!("the space is larger than the benchmark"),
        }
    }

    fn release(&self, block: Self::Block) {
        self.lock().free(block);
    }
}
