//! A pool's data on a block, in one allocation that moves with the block as a pointer.

use std::fmt;
use std::sync::Arc;

use terrane_core::{ByteCount, Location, Memory, StorageKind};

use crate::block::StreamOrder;
use crate::stock::Stock;
use crate::sync::{AtomicU64, Ordering};

/// The class of a block that is not pooled, and is freed straight to the upstream.
pub(crate) const UNPOOLED: usize = usize::MAX;

/// A block with its memory. The owner of the box owns the block.
///
/// A hit does not read it: with many blocks, few records are in a CPU cache.
pub(crate) struct Record<M: Memory> {
    pub(crate) stock: Arc<Stock<M>>,
    pub(crate) class: usize,
    pub(crate) granted: u64,
    pub(crate) asked: u64,
    /// The streams that the block waits for; empty, unless streams use it, or it is parked or in a
    /// lane.
    pub(crate) order: StreamOrder,
    pub(crate) location: Location,
    /// A copy of the memory's answer, so that the memory is not asked under a lock.
    pub(crate) kind: StorageKind,
    backing: Backing<M>,
}

enum Backing<M> {
    Whole(Held<M>),
    Part { slab: Arc<Held<M>>, offset: ByteCount },
}

impl<M: Memory> Record<M> {
    /// Makes a block of the whole of `memory`.
    pub(crate) fn whole(
        stock: &Arc<Stock<M>>,
        memory: Held<M>,
        class: usize,
        granted: u64,
    ) -> Box<Self> {
        let (location, kind) = (memory.memory.location(), memory.memory.kind());
        Self::new(stock, Backing::Whole(memory), (location, kind), class, granted)
    }

    /// Makes the block at `offset` of a slab. Returns `None` if the offset leaves the address
    /// space, which does not happen for a correct `Memory`.
    pub(crate) fn part(
        stock: &Arc<Stock<M>>,
        slab: &Arc<Held<M>>,
        offset: ByteCount,
        class: usize,
        granted: u64,
    ) -> Option<Box<Self>> {
        let location = slab.memory.location().checked_add(offset)?;
        let kind = slab.memory.kind();
        let backing = Backing::Part { slab: Arc::clone(slab), offset };
        Some(Self::new(stock, backing, (location, kind), class, granted))
    }

    fn new(
        stock: &Arc<Stock<M>>,
        backing: Backing<M>,
        (location, kind): (Location, StorageKind),
        class: usize,
        granted: u64,
    ) -> Box<Self> {
        Box::new(Self {
            class,
            granted,
            asked: granted,
            order: StreamOrder::default(),
            stock: Arc::clone(stock),
            location,
            kind,
            backing,
        })
    }

    /// Returns the memory that the block is in.
    pub(crate) fn memory(&self) -> &M {
        match &self.backing {
            Backing::Whole(held) => &held.memory,
            Backing::Part { slab, .. } => &slab.memory,
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

impl<M: Memory> fmt::Debug for Record<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record")
            .field("class", &self.class)
            .field("granted", &self.granted)
            .field("location", &self.location)
            .finish_non_exhaustive()
    }
}

/// Memory obtained from the upstream, on the pool's account until it is freed.
#[derive(Debug)]
pub(crate) struct Held<M> {
    // Fields drop in this order: memory leaves the account only after it is freed.
    memory: M,
    _charge: Charge,
}

impl<M: Memory> Held<M> {
    pub(crate) fn new(memory: M, account: &Arc<Account>) -> Self {
        let bytes = memory.length().get();
        account.charge(bytes);
        Self { memory, _charge: Charge { account: Arc::clone(account), bytes } }
    }

    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }
}

#[derive(Debug)]
struct Charge {
    account: Arc<Account>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The bytes that a pool holds of its upstream. Written when blocks are allocated or freed there,
/// never on a hit.
#[derive(Debug)]
pub(crate) struct Account {
    held: AtomicU64,
    peak: AtomicU64,
}

impl Account {
    pub(crate) fn new() -> Self {
        Self { held: AtomicU64::new(0), peak: AtomicU64::new(0) }
    }

    fn charge(&self, bytes: u64) {
        let before = self.held.fetch_add(bytes, Ordering::Relaxed);
        self.peak.fetch_max(before + bytes, Ordering::Relaxed);
    }

    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }
}
