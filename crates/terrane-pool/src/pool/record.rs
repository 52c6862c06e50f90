//! A pool's data on a block, in one allocation. The block moves as a pointer to it.

use std::sync::Arc;

use terrane_core::{ByteCount, Location, Memory, StorageKind};

use crate::cache::shared_cache::SharedCache;
use crate::pool::account::Held;
use crate::streams::pending::PendingBlock;
use crate::streams::uses::StreamUses;

/// The class of a block that is not pooled, and is freed directly to the upstream.
pub(crate) const UNPOOLED: usize = usize::MAX;

/// A free block, or the record behind a block in use. The owner of the box owns the block.
pub(crate) type Block<M> = Box<Record<M>>;

/// A block with its memory.
///
/// A hit does not read it: with many blocks, few records are in a CPU cache.
pub(crate) struct Record<M: Memory> {
    pub(crate) cache: Arc<SharedCache<M>>,
    pub(crate) class: usize,
    pub(crate) granted: u64,
    /// The streams that the block waits for. Empty, unless streams use the block, or it is pending
    /// or kept for a stream.
    pub(crate) uses: StreamUses,
    pub(crate) location: Location,
    /// A copy of the memory's kind, so that the memory is not called under a lock.
    pub(crate) kind: StorageKind,
    backing: Backing<M>,
}

enum Backing<M> {
    Whole(Held<M>),
    Part { slab: Arc<Held<M>>, offset: ByteCount },
}

impl<M: Memory> Record<M> {
    /// Creates the block of the whole of `memory`.
    pub(crate) fn whole(
        cache: &Arc<SharedCache<M>>,
        memory: Held<M>,
        class: usize,
        granted: u64,
    ) -> Box<Self> {
        let (location, kind) = (memory.memory().location(), memory.memory().kind());
        Self::new(cache, Backing::Whole(memory), (location, kind), class, granted)
    }

    /// Creates the block at `offset` of a slab. Returns `None` if the offset exceeds the address
    /// space, which cannot happen with a correct `Memory`.
    pub(crate) fn part(
        cache: &Arc<SharedCache<M>>,
        slab: &Arc<Held<M>>,
        offset: ByteCount,
        class: usize,
        granted: u64,
    ) -> Option<Box<Self>> {
        let location = slab.memory().location().checked_add(offset)?;
        let kind = slab.memory().kind();
        let backing = Backing::Part { slab: Arc::clone(slab), offset };
        Some(Self::new(cache, backing, (location, kind), class, granted))
    }

    fn new(
        cache: &Arc<SharedCache<M>>,
        backing: Backing<M>,
        (location, kind): (Location, StorageKind),
        class: usize,
        granted: u64,
    ) -> Box<Self> {
        Box::new(Self {
            class,
            granted,
            uses: StreamUses::default(),
            cache: Arc::clone(cache),
            location,
            kind,
            backing,
        })
    }

    /// Returns the memory that the block is in.
    pub(crate) fn memory(&self) -> &M {
        match &self.backing {
            Backing::Whole(held) => held.memory(),
            Backing::Part { slab, .. } => slab.memory(),
        }
    }

    /// Returns the offset of the block in that memory.
    pub(crate) fn offset(&self) -> ByteCount {
        match &self.backing {
            Backing::Whole(_) => ByteCount::ZERO,
            Backing::Part { offset, .. } => *offset,
        }
    }

    /// Returns the identity of the block's slab.
    pub(crate) fn slab(&self) -> Option<*const Held<M>> {
        match &self.backing {
            Backing::Whole(_) => None,
            Backing::Part { slab, .. } => Some(Arc::as_ptr(slab)),
        }
    }
}

impl<M: Memory> PendingBlock for Block<M> {
    fn class(&self) -> usize {
        self.class
    }

    fn bytes(&self) -> u64 {
        self.granted
    }

    fn location(&self) -> Location {
        self.location
    }

    fn uses(&self) -> &StreamUses {
        &self.uses
    }

    fn clear_uses(&mut self) {
        self.uses = StreamUses::default();
    }
}

terrane_core::debug_fields!(Record<M: Memory>, |it| { class: it.class,
    granted: it.granted,
    location: it.location });
