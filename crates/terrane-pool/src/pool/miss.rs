//! Finds a block for a miss: a block that streams have finished with, or a block of the upstream.

use std::sync::Arc;

use terrane_core::{Allocate, AllocateError, ByteCount, Label, Memory, RegionRequest};

use super::Pool;
use super::account::Held;
use super::block::PoolBlock;
use super::reclaim::{Found, Wanted};
use super::record::{Block, Record, UNPOOLED};
use crate::cache::shared_cache::SharedCache;
use crate::error::PoolError;
use crate::tags::{LiveBytes, Tag};

/// One in so many misses of a class asks the upstream, although a larger block is cached.
const SUBSTITUTES: u64 = 64;

impl<A: Allocate> Pool<A> {
    /// Finds a freed block that is available without waiting. Frees what streams have finished
    /// with, also without a class.
    pub(super) fn take_pending(&self, wanted: Wanted<'_>) -> Option<Block<A::Memory>> {
        let Wanted { tag, class, stream, .. } = wanted;
        let pending = self.cache.pending.as_ref()?;
        if pending.bytes() == 0 {
            return None;
        }
        self.reap();
        let class = class?;
        if let Some(record) = self.cache.take_shared(class, tag) {
            return Some(record);
        }
        let free = pending.take_ready(class, stream).or_else(|| {
            let stream = stream.filter(|_| self.options.order_streams)?;
            pending.take_after(class, stream).unwrap_or_else(|error| {
                tracing::warn!(%error, %stream, "one stream could not be ordered after another");
                None
            })
        })?;
        self.cache.count(tag, free.granted, LiveBytes::Added);
        Some(free)
    }

    /// Takes a cached block of a slightly larger class, if a block from the upstream would raise
    /// the peak while the cache has more than its share. One in [`SUBSTITUTES`] requests takes
    /// none, so that a class that is used often gets blocks of its own.
    pub(super) fn take_larger(
        &self,
        class: usize,
        bytes: ByteCount,
        tag: Tag,
    ) -> Option<PoolBlock<A::Memory>> {
        let excess = self.cache.excess(self.cache.table.size(class), self.options.cached_percent);
        if excess == 0 || self.cache.misses(class).is_multiple_of(SUBSTITUTES) {
            return None;
        }
        let last = self.cache.table.last_within(class, bytes, self.options.larger_class_waste);
        (class + 1..=last).find_map(|class| {
            let cache = &self.cache;
            let record = cache.take(class, tag).or_else(|| cache.take_one_shared(class, tag));
            Some(self.block(record?, class, tag))
        })
    }

    /// Allocates a block of `class` from the upstream. It does not yet count as live.
    pub(crate) fn fetch(&self, class: usize, label: &Label) -> Found<A> {
        let size = self.cache.table.size(class);
        let blocks = self.cache.table.blocks_per_slab();
        self.cache.tick();
        self.cache.limit_peak(size, self.options.cached_percent);
        let Some(count) = blocks else {
            let held = self.obtain(ByteCount::new(size), size, label)?;
            return Ok(Record::whole(&self.cache, held, class, size));
        };
        // Checked when the table was made.
        let slab = Arc::new(self.obtain(ByteCount::new(size * u64::from(count)), size, label)?);
        let mut parts = (0..u64::from(count)).filter_map(|number| {
            Record::part(&self.cache, &slab, ByteCount::new(number * size), class, size)
        });
        let first = parts.next();
        self.cache.add_new(parts);
        first.ok_or_else(|| AllocateError::OutOfMemory {
            kind: self.kind(),
            requested: ByteCount::new(size),
            available: None,
            label: label.clone(),
            source: None,
        })
    }

    /// Allocates memory of the upstream for blocks of `size` bytes.
    fn obtain(
        &self,
        bytes: ByteCount,
        size: u64,
        label: &Label,
    ) -> Result<Held<A::Memory>, AllocateError> {
        let alignment = self.options.alignment;
        let request = RegionRequest {
            alignment,
            label: label.clone(),
            unit: ByteCount::new(size),
            ..RegionRequest::new(bytes)
        };
        Ok(self.cache.account.hold(self.allocate_fitting(&request)?))
    }

    /// Allocates a block that is not pooled.
    pub(super) fn fetch_one(&self, request: &RegionRequest) -> Found<A> {
        // Aligned like a pooled block, as the limits of the pool state.
        let alignment = request.alignment.max(self.options.alignment);
        let memory = self.allocate_fitting(&RegionRequest { alignment, ..request.clone() })?;
        let length = memory.length().get();
        let held = self.cache.account.hold(memory);
        Ok(Record::whole(&self.cache, held, UNPOOLED, length))
    }

    /// Allocates upstream memory, and checks that it fits the request. An `Allocate` may be wrong,
    /// and a block's views rely on its length.
    fn allocate_fitting(&self, request: &RegionRequest) -> Result<A::Memory, AllocateError> {
        let memory = self.source.upstream.allocate(request)?;
        let (requested, granted) = (request.bytes, memory.length());
        let (alignment, available) = (request.alignment, memory.location().alignment());
        if requested.is_zero() || (granted >= requested && available >= alignment) {
            return Ok(memory);
        }
        let unfit = PoolError::UnfitUpstream { requested, granted, alignment, available };
        Err(AllocateError::backend(self.kind(), request, unfit))
    }
}

impl<M: Memory> SharedCache<M> {
    /// Caches a block that its streams have finished with, if it has a class and there is capacity.
    pub(crate) fn keep_freed(self: &Arc<Self>, record: Block<M>) {
        if record.class != UNPOOLED {
            // The block was counted as released when it became pending.
            self.release_shared(record.class, Tag::NONE, record);
        }
    }
}
