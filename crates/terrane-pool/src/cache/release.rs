//! Returns blocks to the shared cache. A block is stored in the thread's magazine if possible.
//! Otherwise it is stored in the shared queue of its class or in the pending frees. If these are
//! full, it is freed to the upstream.

use std::sync::Arc;

use terrane_core::Memory;
use terrane_core::convert::to_u64;

use crate::cache::descriptor::{BlockDescriptor, BlockUse, DescriptorRef};
use crate::cache::membarrier;
use crate::cache::shared_cache::SharedCache;
use crate::cache::thread_cache::{Refusal, ThreadMagazines};
use crate::cache::thread_index::ThreadExit as _;
use crate::pool::record::{Block, Record, UNPOOLED};
use crate::tags::{LiveBytes, Tag};

impl<M: Memory> SharedCache<M> {
    /// Returns a block from its user. The descriptor must belong to the record's shared cache.
    #[inline]
    pub(crate) fn release(record: Block<M>, descriptor: DescriptorRef<M>) {
        // SAFETY: the record keeps its shared cache alive, and this function owns the record.
        // The fields are read one by one, because a copy of all would go through the stack.
        let &BlockDescriptor { cache, class, weight, tag, usage } = unsafe { descriptor.get() };
        if usage == BlockUse::Listed {
            return Self::release_listed(record, descriptor);
        }
        let mut record = Some(record);
        // SAFETY: as above, while `record` owns the block. If the block is now in a magazine of
        // this thread, the thread has registered there, and keeps the shared cache alive.
        let cache = unsafe { cache.as_ref() };
        let work = |magazines: &mut ThreadMagazines<Block<M>>| {
            magazines.put(class, weight, tag, &mut record)
        };
        let done = cache.enter(work);
        if let Some(record) = record {
            Self::release_slowly(record, descriptor, done.and_then(Result::err));
        }
    }

    /// Returns a block that is not pooled, or that streams may use.
    fn release_listed(record: Block<M>, descriptor: DescriptorRef<M>) {
        // SAFETY: as in `release`.
        let &BlockDescriptor { cache, class, weight, tag, .. } = unsafe { descriptor.get() };
        if class != UNPOOLED && record.uses.is_free() {
            let plain = record.cache.descriptor(class, tag, BlockUse::Plain);
            return Self::release(record, plain);
        }
        let mut record = Some(record);
        if class != UNPOOLED
            && let Some(block) = record.as_ref()
            && let Some(stream) = block.uses.only_own()
        {
            // SAFETY: as in `release`.
            let cache = unsafe { cache.as_ref() };
            cache.enter(|magazines| magazines.put_on(stream, (class, weight), tag, &mut record));
        }
        if let Some(record) = record {
            Self::release_to_pending(record, tag);
        }
    }

    #[cold]
    fn release_to_pending(record: Block<M>, tag: Tag) {
        let cache = Arc::clone(&record.cache);
        cache.register_thread();
        cache.count(tag, record.granted, LiveBytes::Removed);
        if record.uses.is_free() {
            return drop(record);
        }
        cache.prepare_stream_magazines(&record);
        cache.defer([record]);
    }

    /// Prepares the thread's stream magazines for the next block of this class and stream. They
    /// have no credit yet, or serve another stream.
    fn prepare_stream_magazines(&self, record: &Record<M>) {
        let Some(stream) = record.uses.only_own() else { return };
        if record.class == UNPOOLED || !self.has_magazine(record.class) || self.is_closed() {
            return;
        }
        let weight = self.weight(record.class);
        let credit = self.reserve_credit(record.class, weight);
        let room = || self.make_room(record.class, weight).then_some(weight);
        let credit = credit.or_else(room).unwrap_or(0);
        let mut flushed = Vec::new();
        let weights = |class| self.weight(class);
        let entered = self.enter(|magazines| {
            magazines.credit += credit;
            magazines.credit += magazines.assign_stream(stream, &mut flushed, weights);
            magazines.surplus(record.class, weight)
        });
        self.limit.release(entered.unwrap_or(credit));
        self.defer(flushed);
    }

    /// Keeps blocks that streams use until the streams have finished.
    pub(crate) fn defer(&self, records: impl IntoIterator<Item = Block<M>>) {
        let Some(pending) = &self.pending else { return };
        records.into_iter().for_each(|block| pending.insert(block));
        self.free_pending_if_closed();
    }

    /// Frees the pending blocks if the pool is closed, because `close` may have missed a block that
    /// was added later.
    pub(super) fn free_pending_if_closed(&self) {
        // `close` sets `closed`, runs a heavy barrier, and then frees the pending blocks.
        membarrier::light();
        if let Some(pending) = &self.pending
            && self.is_closed()
        {
            pending.free_all();
        }
    }

    #[cold]
    fn release_slowly(record: Block<M>, descriptor: DescriptorRef<M>, refusal: Option<Refusal>) {
        // SAFETY: as in `release`.
        let &BlockDescriptor { cache, class, weight, tag, .. } = unsafe { descriptor.get() };
        // SAFETY: until the block is stored, it keeps its shared cache alive. Afterwards `kept`
        // does, or this thread does, because it has registered there. Foreign code may end that
        // registration, but the thread runs none before the last use of the cache.
        let cache = unsafe { cache.as_ref() };
        let mut kept = None;
        if !cache.is_registered() {
            record.cache.register_thread();
            kept = Some(Arc::clone(&record.cache));
        }
        cache.release_registered(record, (class, weight), tag, refusal);
        drop(kept);
    }

    /// [`release_slowly`](Self::release_slowly), on a thread that keeps the cache alive. Blocks
    /// that no place can store drop last.
    fn release_registered(
        &self,
        record: Block<M>,
        (class, weight): (usize, u64),
        tag: Tag,
        refusal: Option<Refusal>,
    ) {
        if self.is_closed() {
            self.count(tag, weight, LiveBytes::Removed);
            return drop(record);
        }
        if !self.has_magazine(class) || self.must_bypass_magazines() {
            return self.release_shared(class, tag, record);
        }
        // `make_room` runs foreign code. After it, the thread may no longer keep the cache alive.
        let mut kept = None;
        // The blocks that a full magazine spills keep their reservation.
        let reserved = if refusal == Some(Refusal::Full) {
            let spilled = self.depth(class).div_ceil(2);
            let weight = weight * to_u64(spilled);
            self.limit.reserve(weight).then_some(weight).or(Some(0))
        } else {
            self.reserve_credit(class, weight).or_else(|| {
                kept = Some(Arc::clone(&record.cache));
                self.make_room(class, weight).then_some(weight)
            })
        };
        let Some(credit) = reserved else {
            self.count(tag, weight, LiveBytes::Removed);
            self.count_eviction(class, 1);
            return drop(record);
        };
        let mut record = Some(record);
        let done = self.without_sweep(|magazines| {
            let Some(magazines) = magazines else { return credit };
            let queue = self.queues.get(class);
            let spilled = queue.map_or(0, |queue| magazines.spill(queue, self.now()));
            // A full queue takes fewer blocks than the credit is for.
            let used = if refusal == Some(Refusal::Full) {
                credit.min(weight * to_u64(spilled))
            } else {
                credit
            };
            magazines.credit += used;
            // Without credit, or if the magazine is still full, the block goes into the shared
            // queue below.
            let _ = magazines.put(class, weight, tag, &mut record);
            credit - used
        });
        self.limit.release(done.unwrap_or(0));
        if let Some(record) = record {
            self.release_shared(class, tag, record);
        }
        drop(kept);
    }

    /// Reserves credit for a full magazine if possible, to save later calls, but at most a
    /// 64th of the limit. Otherwise reserves credit for one block.
    fn reserve_credit(&self, class: usize, weight: u64) -> Option<u64> {
        let most = self.limit.share(weight * to_u64(self.depth(class))).max(weight);
        if self.limit.reserve(most) {
            Some(most)
        } else {
            self.limit.reserve(weight).then_some(weight)
        }
    }

    /// Returns a block without a magazine. A block that no place can store drops last.
    pub(crate) fn release_shared(&self, class: usize, tag: Tag, record: Block<M>) {
        let weight = self.weight(class);
        self.count(tag, weight, LiveBytes::Removed);
        let mut kept = None;
        let has_room = self.limit.reserve(weight) || {
            // As in `release_registered`.
            kept = Some(Arc::clone(&record.cache));
            self.make_room(class, weight)
        };
        if has_room {
            drop(self.enqueue(class, record));
        } else {
            self.count_eviction(class, 1);
            drop(record);
        }
        drop(kept);
    }

    /// Adds a free block of `class`, which already counts to the limit, to the shared queue. If the
    /// queue is full or the pool is closed, returns the block, which then no longer counts.
    pub(crate) fn enqueue(&self, class: usize, record: Block<M>) -> Option<Block<M>> {
        let mut record = Some(record);
        self.queues.get(class)?.put(|| record.take(), self.now());
        if record.is_some() {
            self.unreserve(class, 1);
            self.count_eviction(class, 1);
        }
        record
    }

    /// Adds new blocks, which do not yet count to the limit, to the shared queue.
    pub(crate) fn add_new(&self, records: impl IntoIterator<Item = Block<M>>) {
        for record in records {
            if self.limit.reserve(self.weight(record.class)) {
                drop(self.enqueue(record.class, record));
            }
        }
    }
}
