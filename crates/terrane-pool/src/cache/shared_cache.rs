//! The shared part of a pool: every place that stores free blocks, without the upstream.
//!
//! A free block is in one of three places: a thread's magazine ([`ThreadCache`]), the shared queue
//! of its class ([`ClassQueue`]) or, while streams may still use it, [`PendingFrees`]. Blocks in
//! use keep the shared cache alive, so it may outlive its pool. Free blocks would keep it alive
//! too, so a pool closes its shared cache when the pool is dropped.

use std::sync::{Arc, OnceLock};

use crossbeam_utils::CachePadded;
use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, Label, Memory};

use crate::cache::class_queue::{CacheLimit, ClassQueue, Occupied};
use crate::cache::descriptor::{BlockUse, DescriptorRef, Descriptors};
use crate::cache::thread_cache::{MAGAZINE, ThreadCache, ThreadMagazines};
use crate::cache::thread_index::{self, ThreadExit};
use crate::options::PoolOptions;
use crate::pool::account::Account;
use crate::pool::record::Block;
use crate::size_class::ClassTable;
use crate::streams::fence::StreamId;
use crate::streams::pending::PendingFrees;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::tags::{LiveBytes, TAGS, Tag, TagTable, Tally};

/// The maximum number of threads with magazines. A system rarely has more, and each has memory.
const MOST_THREADS: usize = 65_536;

pub(crate) struct SharedCache<M: Memory> {
    pub(crate) table: ClassTable,
    pub(crate) tags: TagTable,
    descriptors: Descriptors<M>,
    pub(crate) account: Arc<Account>,
    pub(crate) pending: Option<PendingFrees<Block<M>>>,
    pub(crate) queues: Box<[CachePadded<ClassQueue<Block<M>>>]>,
    pub(crate) occupied: Arc<Occupied>,
    pub(crate) limit: CacheLimit,
    pub(crate) threads: Box<[ThreadSlot<M>]>,
    /// Held while gates are closed and while a thread's cache is created.
    pub(crate) sweeping: Mutex<()>,
    pub(crate) closed: AtomicBool,
    /// Live bytes by tag, from threads without a cache.
    unregistered_tally: Mutex<Tally>,
    /// The depth of each class's magazines.
    depths: Box<[usize]>,
    /// The clock for idle classes; see [`now`](Self::now).
    clock: CachePadded<AtomicU64>,
    /// The time when unused credit was last collected.
    pub(crate) credit_collected: CachePadded<AtomicU64>,
    /// The number of further releases that bypass the magazines after an exhaustion. Blocks in a
    /// shared queue can be found without a sweep.
    pressure: CachePadded<AtomicU64>,
}

/// The number of releases after an exhaustion that bypass the magazines.
const PRESSURE: u64 = 256;

/// The cache of one thread. It is created when the thread registers.
type ThreadSlot<M> = OnceLock<Box<CachePadded<ThreadCache<Block<M>>>>>;

impl<M: Memory> SharedCache<M> {
    pub(crate) fn new(
        table: ClassTable,
        options: &PoolOptions,
        pending: Option<PendingFrees<Block<M>>>,
    ) -> Arc<Self> {
        let slabs = table.blocks_per_slab().is_some();
        let most = if slabs { usize::MAX } else { options.blocks_per_class };
        let depth = |class| {
            let fitting = options.magazine_bytes.get() / table.size(class);
            let fitting = usize::try_from(fitting).unwrap_or(MAGAZINE);
            fitting.min(options.magazine_depth).min(MAGAZINE)
        };
        let occupied = Occupied::new(table.len());
        let queue = |class| {
            let occupied = Arc::clone(&occupied);
            CachePadded::new(ClassQueue::new(class, table.size(class), most, occupied))
        };
        Arc::new(Self {
            descriptors: Descriptors::new(),
            queues: (0..table.len()).map(queue).collect(),
            depths: (0..table.len()).map(depth).collect(),
            limit: CacheLimit::new(if slabs { u64::MAX } else { options.cached_bytes.get() }),
            occupied,
            table,
            tags: TagTable::new(),
            account: Arc::default(),
            pending,
            threads: (0..options.threads.min(MOST_THREADS)).map(|_| OnceLock::new()).collect(),
            sweeping: Mutex::new(()),
            closed: AtomicBool::new(false),
            unregistered_tally: Mutex::new(Tally::default()),
            clock: CachePadded::new(AtomicU64::new(0)),
            credit_collected: CachePadded::new(AtomicU64::new(0)),
            pressure: CachePadded::new(AtomicU64::new(0)),
        })
    }

    /// Returns the descriptor of a block of `class` under `tag`.
    #[inline]
    pub(crate) fn descriptor(&self, class: usize, tag: Tag, usage: BlockUse) -> DescriptorRef<M> {
        self.descriptors.get(self, class, tag, usage)
    }

    /// Returns the weight of a block of the class: the bytes that the block counts to the limit.
    #[inline]
    pub(crate) fn weight(&self, class: usize) -> u64 {
        self.table.size(class)
    }

    pub(crate) fn knows_streams(&self) -> bool {
        self.pending.is_some()
    }

    pub(super) fn depth(&self, class: usize) -> usize {
        self.depths.get(class).copied().unwrap_or(0)
    }

    pub(super) fn has_magazine(&self, class: usize) -> bool {
        self.depth(class) > 0
    }

    /// Returns the time: the number of requests to the upstream and of times that the limit on
    /// cached bytes was reached.
    pub(crate) fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// Records that the upstream was exhausted.
    pub(crate) fn note_exhaustion(&self) {
        self.pressure.store(PRESSURE, Ordering::Relaxed);
    }

    fn has_pressure(&self) -> bool {
        self.pressure.load(Ordering::Relaxed) > 0
    }

    /// Counts a release that may bypass the magazines, and returns whether it must.
    pub(super) fn must_bypass_magazines(&self) -> bool {
        let has_pressure = self.has_pressure();
        if has_pressure {
            // Fails if other threads have made it zero. Then one more release bypasses them.
            let less = |pressure: u64| pressure.checked_sub(1);
            let _ = self.pressure.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
        has_pressure
    }

    /// Returns whether threads have blocks or credit, which only a sweep finds.
    pub(crate) fn is_in_threads(&self) -> bool {
        let reserved = self.limit.reserved();
        if reserved == 0 {
            return false;
        }
        let queues = self.occupied.iter().filter_map(|class| self.queues.get(class));
        // If a block moves meanwhile, the reservation changes.
        reserved > queues.map(|queue| queue.bytes()).sum() || reserved != self.limit.reserved()
    }

    /// Advances the time, and returns it.
    pub(crate) fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed) + 1
    }

    // ---- allocation

    /// Removes a free block from the thread's magazine.
    #[inline]
    pub(crate) fn take(&self, class: usize, tag: Tag) -> Option<Block<M>> {
        let weight = self.weight(class);
        self.enter(|magazines| magazines.take(class, weight, tag))?
    }

    /// Removes a block that this thread released on `stream`.
    #[inline]
    pub(crate) fn take_on(&self, class: usize, tag: Tag, stream: StreamId) -> Option<Block<M>> {
        let weight = self.weight(class);
        self.enter(|magazines| magazines.take_on(stream, class, weight, tag))?
    }

    /// Removes a free block from the shared queue, and more blocks for the magazine.
    pub(crate) fn take_shared(self: &Arc<Self>, class: usize, tag: Tag) -> Option<Block<M>> {
        let queue = self.queues.get(class)?;
        if queue.blocks() == 0 {
            return None;
        }
        let weight = self.weight(class);
        if !self.has_magazine(class) || self.has_pressure() {
            return self.take_one_shared(class, tag);
        }
        self.register_thread();
        let further = self.depth(class).div_ceil(2) - 1;
        let (record, surplus, counted) = self.without_sweep(|magazines| {
            let Some(magazines) = magazines else {
                return Some((queue.take_one(self.now())?, weight, false));
            };
            let record = magazines.refill(queue, further, self.now())?;
            magazines.count(tag, weight, LiveBytes::Added);
            magazines.credit += weight;
            Some((record, magazines.surplus(class, weight), true))
        })??;
        self.limit.release(surplus);
        if !counted {
            queue.shared_hits.fetch_add(1, Ordering::Relaxed);
            self.count(tag, weight, LiveBytes::Added);
        }
        Some(record)
    }

    /// Removes a free block from the shared queue, and none for the magazine.
    pub(crate) fn take_one_shared(&self, class: usize, tag: Tag) -> Option<Block<M>> {
        let queue = self.queues.get(class)?;
        let record = queue.take_one(self.now())?;
        let weight = self.weight(class);
        self.limit.release(weight);
        queue.shared_hits.fetch_add(1, Ordering::Relaxed);
        self.count(tag, weight, LiveBytes::Added);
        Some(record)
    }

    /// Returns the tag of `label`.
    #[inline]
    pub(crate) fn tag(&self, label: &Label) -> Tag {
        if label.as_str().is_empty() {
            return Tag::NONE;
        }
        let known = self.enter(|magazines| {
            magazines.label.as_ref().filter(|(last, _)| last == label).map(|&(_, tag)| tag)
        });
        known.flatten().unwrap_or_else(|| {
            let tag = self.tags.tag(label);
            let mut last = Some((label.clone(), tag));
            // The previous label drops here, outside the gate.
            self.enter(|magazines| std::mem::swap(&mut magazines.label, &mut last));
            tag
        })
    }

    // ---- allocation and release

    /// Runs `work` while no sweep runs: inside the thread's gate, with its magazines, or under the
    /// sweepers' lock. Blocks move between a magazine and a shared queue only here, so a sweep
    /// always finds them in one of the two. `work` must run no code of the pool's user.
    pub(super) fn without_sweep<R>(
        &self,
        work: impl FnOnce(Option<&mut ThreadMagazines<Block<M>>>) -> R,
    ) -> Option<R> {
        let mut work = Some(work);
        let inside = self.enter(|magazines| Some(work.take()?(Some(magazines))));
        inside.flatten().or_else(|| {
            let work = work?;
            let _sweeping = self.sweeping.lock();
            Some(work(None))
        })
    }

    /// Releases the weight of `count` blocks of the class from the limit.
    pub(crate) fn unreserve(&self, class: usize, count: usize) {
        let count = to_u64(count);
        self.limit.release(self.weight(class) * count);
    }

    pub(crate) fn count_miss(&self, class: usize) {
        if let Some(queue) = self.queues.get(class) {
            queue.misses.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of misses of the class.
    pub(crate) fn misses(&self, class: usize) -> u64 {
        self.queues.get(class).map_or(0, |queue| queue.misses.load(Ordering::Relaxed))
    }

    pub(crate) fn count_eviction(&self, class: usize, count: usize) {
        if let Some(queue) = self.queues.get(class) {
            queue.evictions.fetch_add(to_u64(count), Ordering::Relaxed);
        }
    }

    // ---- the thread's cache

    /// Runs `work` on the calling thread's magazines. Returns `None`, without running it, if the
    /// thread has no magazines or a sweep is running.
    #[inline]
    pub(crate) fn enter<R>(
        &self,
        work: impl FnOnce(&mut ThreadMagazines<Block<M>>) -> R,
    ) -> Option<R> {
        let thread_cache = self.threads.get(thread_index::current())?.get()?;
        // SAFETY: the index belongs to this thread. No `work` enters again, because the closures of
        // this module and of its siblings only move blocks and count.
        unsafe { thread_cache.enter(work) }
    }

    /// Returns whether the calling thread has registered, and so keeps this alive.
    pub(super) fn is_registered(&self) -> bool {
        let thread_cache = self.threads.get(thread_index::current()).and_then(OnceLock::get);
        thread_cache.is_some_and(|thread_cache| thread_cache.is_registered())
    }

    /// Creates a cache for the calling thread, if it has none and there is a slot for its index.
    /// During a sweep, the thread continues without a cache.
    pub(super) fn register_thread(self: &Arc<Self>) {
        // There may be more threads than slots.
        let index = thread_index::current();
        if self.is_registered() || (index != thread_index::NO_INDEX && index >= self.threads.len())
        {
            return;
        }
        // At its end, a sweep must find the same threads whose gates it closed at the beginning.
        let Some(sweeping) = self.sweeping.try_lock() else { return };
        if self.is_closed() {
            return;
        }
        let Some((index, closed)) = thread_index::register(Arc::clone(self) as _) else { return };
        if let Some(place) = self.threads.get(index) {
            let has_streams = self.knows_streams();
            let thread_cache =
                || Box::new(CachePadded::new(ThreadCache::new(&self.depths, has_streams)));
            place.get_or_init(thread_cache).register();
        }
        drop(sweeping);
        // The last owner of a closed pool's shared cache drops the upstream's memory and the fences
        // here. Their code may call this pool.
        drop(closed);
    }

    /// Counts bytes of `tag` that became live, or stopped being live.
    pub(crate) fn count(&self, tag: Tag, bytes: u64, change: LiveBytes) {
        if tag == Tag::NONE || self.enter(|magazines| magazines.count(tag, bytes, change)).is_some()
        {
            return;
        }
        self.unregistered_tally.lock().count(tag, bytes, change);
    }

    /// Returns the labels with the most live bytes, at most `count`, the largest first.
    pub(crate) fn labels(&self, count: usize) -> Vec<(Label, ByteCount)> {
        let mut sums = [0; TAGS];
        // Every refusal runs this, so it sums only the tags that exist.
        let known = self.tags.known();
        let Some(sums) = sums.get_mut(..known).filter(|sums| !sums.is_empty()) else {
            return Vec::new();
        };
        let threads = self.threads.iter().filter_map(OnceLock::get);
        threads.for_each(|thread_cache| thread_cache.tally.add_to(sums));
        self.unregistered_tally.lock().add_to(sums);
        let bytes = |sum: i64| u64::try_from(sum).ok().filter(|&sum| sum > 0).map(ByteCount::new);
        let sums = sums.iter().enumerate();
        let mut live: Vec<_> = sums.filter_map(|(tag, &sum)| Some((tag, bytes(sum)?))).collect();
        live.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        live.truncate(count);
        self.tags.named(live)
    }
}

impl<M: Memory> ThreadExit for SharedCache<M> {
    fn unregister(&self, index: usize) {
        let Some(thread_cache) = self.threads.get(index).and_then(OnceLock::get) else { return };
        let (mut blocks, mut of_stream, mut over) = (Vec::new(), Vec::new(), Vec::new());
        let credit = {
            let _sweeping = self.sweeping.lock();
            let work = |magazines: &mut ThreadMagazines<Block<M>>| {
                magazines.drain_into(&mut blocks)
                    + magazines.drain_stream_into(&mut of_stream, |class| self.weight(class))
            };
            // SAFETY: the index belongs to the calling thread, which is ending, and `work` does not
            // enter again; see `enter`.
            let credit = unsafe { thread_cache.enter(work) };
            thread_cache.unregister();
            if let Some(pending) = &self.pending {
                of_stream.into_iter().for_each(|block| pending.insert(block));
            }
            over.extend(blocks.into_iter().filter_map(|block| self.enqueue(block.class, block)));
            credit
        };
        self.limit.release(credit.unwrap_or(0));
        self.free_pending_if_closed();
        drop(over);
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::{Pool, SizeClasses};
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    #[test]
    fn a_thread_without_an_index_leaves_nothing_behind() {
        let options = PoolOptions { threads: 0, ..PoolOptions::default() };
        let pool = Pool::new(Simulated::new(SimulatedOptions::default()), options).unwrap();
        let holders = || {
            drop(pool.allocate_bytes(ByteCount::kib(4)).unwrap());
            Arc::strong_count(&pool.cache)
        };
        // This thread may own one reference to the shared cache, and its cached block owns another.
        let first = holders();
        for _ in 0..100 {
            assert_eq!(holders(), first);
        }
    }

    #[test]
    fn releases_to_a_full_queue_reserve_no_more_bytes_than_a_magazine_can_use() {
        const SIZE: ByteCount = ByteCount::kib(4);
        let options =
            PoolOptions { blocks_per_class: 5, magazine_depth: 4, ..PoolOptions::default() };
        let pool = Pool::new(Simulated::new(SimulatedOptions::default()), options).unwrap();
        let blocks: Vec<_> = (0..100).map(|_| pool.allocate_bytes(SIZE).unwrap()).collect();
        drop(blocks);
        let seen = pool.snapshot();
        assert_eq!((seen.cached, seen.held), (ByteCount::kib(36), ByteCount::kib(36)));
        let class = pool.cache.table.class_of(SIZE.get()).unwrap();
        // Each time, the queue has room for one block, and the magazine would move two.
        for _ in 0..100 {
            let taken = pool.cache.take_one_shared(class, Tag::NONE).unwrap();
            let further = pool.fetch(class, &Label::default()).unwrap();
            drop(pool.block(further, class, Tag::NONE));
            drop(taken);
        }
        assert!(pool.cache.limit.reserved() <= 13 * SIZE.get(), "9 blocks, and credit for 4");
        pool.clear();
        assert_eq!(pool.cache.limit.reserved(), 0);
    }

    #[test]
    fn a_refill_takes_no_more_blocks_than_the_magazine_has_room_for() {
        const SIZE: ByteCount = ByteCount::kib(4);
        let slab = SizeClasses::ExactSlab { stride: SIZE, count: 64 };
        for classes in [SizeClasses::Steps8, slab] {
            let options = PoolOptions { classes, ..PoolOptions::default() };
            let pool = Pool::new(Simulated::new(SimulatedOptions::default()), options).unwrap();
            let blocks: Vec<_> = (0..64).map(|_| pool.allocate_bytes(SIZE).unwrap()).collect();
            drop(blocks);
            let before = pool.snapshot();
            let class = before.classes.iter().position(|class| class.size == SIZE).unwrap();
            assert!(before.classes[class].in_magazines > MAGAZINE / 2, "it is nearly full");
            // If a sweep has excluded a thread from its magazine, its request gets here although
            // the magazine has blocks.
            let record = pool.cache.take_shared(class, Tag::NONE).unwrap();
            let after = pool.snapshot();
            assert_eq!((after.live, after.held), (SIZE, before.held), "{after:?}");
            pool.cache.release_shared(class, Tag::NONE, record);
            assert_eq!(pool.clear(), before.held);
            assert_eq!(pool.cache.limit.reserved(), 0, "a reservation is lost");
        }
    }
}
