//! The designs that pools are compared with, behind one trait.
//!
//! All except malloc allocate from an [`Upstream`] and free there. They have the same counters as a
//! pool, and cache at most the same [`Limit`].

use std::hint::black_box;
use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use crossbeam_utils::CachePadded;
use dashmap::DashMap;
use terrane_core::{Allocate, ByteCount};
use terrane_pool::{Pool, PoolBlock, PoolOptions};

use terrane_testkit::priced::{PricedDevice as Upstream, PricedRegion as Region};

/// An allocator of blocks.
pub trait Source: Sync {
    /// A block in use.
    type Block: Send;

    fn acquire(&self, bytes: u64) -> Self::Block;
    fn release(&self, block: Self::Block);
}

impl<A: Allocate + Send + Sync> Source for Pool<A> {
    type Block = PoolBlock<A::Memory>;

    fn acquire(&self, bytes: u64) -> Self::Block {
        match Pool::allocate_bytes(self, ByteCount::new(bytes)) {
            Ok(block) => block,
            Err(error) => unreachable!("the device is larger than the benchmark: {error}"),
        }
    }

    fn release(&self, block: Self::Block) {
        drop(block);
    }
}

/// The upstream without a cache.
impl Source for Upstream {
    type Block = Region;

    fn acquire(&self, bytes: u64) -> Region {
        match self.region(bytes) {
            Some(region) => region,
            None => unreachable!("the device is larger than the benchmark"),
        }
    }

    fn release(&self, block: Region) {
        drop(block);
    }
}

/// The limits on cached memory, as in [`PoolOptions`].
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    pub cached_bytes: u64,
    pub blocks_per_class: usize,
}

impl Limit {
    pub fn of(options: &PoolOptions) -> Self {
        let cached_bytes = options.cached_bytes.get();
        Self { cached_bytes, blocks_per_class: options.blocks_per_class }
    }
}

/// A pool over the upstream.
pub fn pool(upstream: &Upstream, options: PoolOptions) -> anyhow::Result<Pool<&Upstream>> {
    Ok(Pool::new(upstream, options)?)
}

/// The counters of a pool: held and cached bytes, the peak of held bytes, hits and misses.
#[derive(Debug)]
struct Account {
    held: AtomicU64,
    peak: AtomicU64,
    cached: AtomicU64,
    most: u64,
    hits: [CachePadded<AtomicU64>; CLASSES],
    misses: AtomicU64,
}

const CLASSES: usize = 64;

impl Account {
    fn new(limit: Limit) -> Self {
        Self {
            held: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            cached: AtomicU64::new(0),
            most: limit.cached_bytes,
            hits: [const { CachePadded::new(AtomicU64::new(0)) }; CLASSES],
            misses: AtomicU64::new(0),
        }
    }

    fn hit(&self, class: u32) {
        self.hits[index(class)].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a block from the upstream.
    fn obtain(&self, bytes: u64) {
        self.misses.fetch_add(1, Ordering::Relaxed);
        let held = self.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(held, Ordering::Relaxed);
    }

    /// Counts a block that is about to be freed in the upstream.
    fn give_back(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Counts bytes as cached if the limit allows it.
    fn cache(&self, bytes: u64) -> bool {
        let add = |cached: u64| cached.checked_add(bytes).filter(|&sum| sum <= self.most);
        self.cached.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    fn uncache(&self, bytes: u64) {
        self.cached.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// A block of a baseline: its memory and its class.
pub struct Block {
    region: Region,
    class: u32,
}

impl Block {
    fn size(&self) -> u64 {
        1 << self.class
    }
}

/// The class of a size. As in a pool by default, no class is below 512 bytes.
fn class_of(bytes: u64) -> u32 {
    bytes.max(512).next_power_of_two().trailing_zeros()
}

fn index(class: u32) -> usize {
    usize::try_from(class).unwrap_or(0) % CLASSES
}

/// Powers of two in a DashMap of ArrayQueues. One counter has the cached bytes and is changed by
/// compare and swap. This is the design that the pool replaces.
pub struct DashMapOfQueues<'u> {
    upstream: &'u Upstream,
    account: Account,
    slots: usize,
    buckets: DashMap<u64, ArrayQueue<Region>>,
}

impl<'u> DashMapOfQueues<'u> {
    pub fn new(upstream: &'u Upstream, limit: Limit) -> Self {
        let (account, slots) = (Account::new(limit), limit.blocks_per_class);
        Self { upstream, account, slots, buckets: DashMap::new() }
    }
}

impl Source for DashMapOfQueues<'_> {
    type Block = Block;

    fn acquire(&self, bytes: u64) -> Block {
        let class = class_of(bytes);
        let size = 1_u64 << class;
        if let Some(queue) = self.buckets.get(&size)
            && let Some(region) = queue.pop()
        {
            self.account.uncache(size);
            self.account.hit(class);
            return Block { region, class };
        }
        let region = Source::acquire(self.upstream, size);
        self.account.obtain(size);
        Block { region, class }
    }

    fn release(&self, block: Block) {
        let size = block.size();
        if !self.account.cache(size) {
            self.account.give_back(size);
            return;
        }
        let pushed = match self.buckets.get(&size) {
            Some(queue) => queue.push(block.region),
            None => {
                let slots = self.slots;
                let queue = self.buckets.entry(size).or_insert_with(|| ArrayQueue::new(slots));
                queue.push(block.region)
            }
        };
        if pushed.is_err() {
            self.account.uncache(size);
            self.account.give_back(size);
        }
    }
}

/// A vector behind a mutex for every class.
pub struct MutexedTable<'u> {
    upstream: &'u Upstream,
    account: Account,
    slots: usize,
    buckets: [Mutex<Vec<Region>>; CLASSES],
}

impl<'u> MutexedTable<'u> {
    pub fn new(upstream: &'u Upstream, limit: Limit) -> Self {
        let (account, slots) = (Account::new(limit), limit.blocks_per_class);
        Self { upstream, account, slots, buckets: std::array::from_fn(|_| Mutex::default()) }
    }

    fn bucket(&self, class: u32) -> std::sync::MutexGuard<'_, Vec<Region>> {
        match self.buckets[index(class)].lock() {
            Ok(guard) => guard,
            Err(_) => unreachable!("no holder panics"),
        }
    }
}

impl Source for MutexedTable<'_> {
    type Block = Block;

    fn acquire(&self, bytes: u64) -> Block {
        let class = class_of(bytes);
        let cached = self.bucket(class).pop();
        if let Some(region) = cached {
            self.account.uncache(1 << class);
            self.account.hit(class);
            return Block { region, class };
        }
        let region = Source::acquire(self.upstream, 1 << class);
        self.account.obtain(1 << class);
        Block { region, class }
    }

    fn release(&self, block: Block) {
        let size = block.size();
        if self.account.cache(size) {
            let mut bucket = self.bucket(block.class);
            if bucket.len() < self.slots {
                bucket.push(block.region);
                return;
            }
            drop(bucket);
            self.account.uncache(size);
        }
        self.account.give_back(size);
    }
}

/// The allocator of the C library, through the standard library.
pub struct Malloc;

impl Source for Malloc {
    type Block = Box<[MaybeUninit<u8>]>;

    fn acquire(&self, bytes: u64) -> Self::Block {
        // Leaves the bytes uninitialised, as malloc does.
        black_box(Box::new_uninit_slice(ByteCount::new(bytes).to_usize()))
    }

    fn release(&self, block: Self::Block) {
        drop(black_box(block));
    }
}

/// The crate `offset-allocator`, in units of 256 bytes, behind a mutex because it is for one
/// thread. It allocates blocks from [arenas](ARENA). It frees an empty arena if the free bytes of
/// all arenas are above the cache limit.
pub struct Offsets<'u> {
    upstream: &'u Upstream,
    account: Account,
    arenas: Mutex<Vec<Option<Arena>>>,
}

struct Arena {
    allocator: offset_allocator::Allocator<u32>,
    free: u64,
    #[expect(dead_code, reason = "its drop frees the memory")]
    region: Region,
}

/// A block of `offset-allocator`: an offset in an arena, or a separate allocation if it is larger
/// than an arena.
pub enum Cut {
    Piece { arena: usize, allocation: offset_allocator::Allocation<u32>, bytes: u64 },
    Whole(Region, u64),
}

/// The bytes of an arena.
const ARENA: u64 = 1 << 30;
const UNIT: u64 = 256;

impl<'u> Offsets<'u> {
    pub fn new(upstream: &'u Upstream, limit: Limit) -> Self {
        Self { upstream, account: Account::new(limit), arenas: Mutex::default() }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Option<Arena>>> {
        match self.arenas.lock() {
            Ok(guard) => guard,
            Err(_) => unreachable!("no holder panics"),
        }
    }

    fn arena(&self) -> Arena {
        let region = Source::acquire(self.upstream, ARENA);
        self.account.obtain(ARENA);
        let units = u32::try_from(ARENA / UNIT).unwrap_or(u32::MAX);
        let allocator = offset_allocator::Allocator::with_max_allocs(units, 1 << 18);
        Arena { allocator, free: ARENA, region }
    }
}

impl Source for Offsets<'_> {
    type Block = Cut;

    fn acquire(&self, bytes: u64) -> Cut {
        let units = bytes.div_ceil(UNIT);
        let bytes = units * UNIT;
        let Some(units) = u32::try_from(units).ok().filter(|_| bytes <= ARENA) else {
            self.account.obtain(bytes);
            return Cut::Whole(Source::acquire(self.upstream, bytes), bytes);
        };
        let mut arenas = self.lock();
        for (number, arena) in arenas.iter_mut().enumerate() {
            if let Some(arena) = arena
                && arena.free >= bytes
                && let Some(allocation) = arena.allocator.allocate(units)
            {
                arena.free -= bytes;
                self.account.uncache(bytes);
                self.account.hit(class_of(bytes));
                return Cut::Piece { arena: number, allocation, bytes };
            }
        }
        let mut arena = self.arena();
        let Some(allocation) = arena.allocator.allocate(units) else {
            unreachable!("an empty arena has room for a block that is no larger");
        };
        arena.free -= bytes;
        self.account.cached.fetch_add(ARENA - bytes, Ordering::Relaxed);
        let vacant = arenas.iter().position(Option::is_none);
        let number = vacant.unwrap_or(arenas.len());
        match vacant.and_then(|vacant| arenas.get_mut(vacant)) {
            Some(place) => *place = Some(arena),
            None => arenas.push(Some(arena)),
        }
        Cut::Piece { arena: number, allocation, bytes }
    }

    fn release(&self, block: Cut) {
        let (number, allocation, bytes) = match block {
            Cut::Piece { arena, allocation, bytes } => (arena, allocation, bytes),
            Cut::Whole(region, bytes) => {
                drop(region);
                return self.account.give_back(bytes);
            }
        };
        let mut arenas = self.lock();
        let Some(place) = arenas.get_mut(number) else { return };
        let Some(arena) = place.as_mut() else { return };
        arena.allocator.free(allocation);
        arena.free += bytes;
        let cached = self.account.cached.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if arena.free == ARENA && cached > self.account.most {
            self.account.uncache(ARENA);
            let empty = place.take();
            drop(arenas);
            drop(empty);
            self.account.give_back(ARENA);
        }
    }
}
