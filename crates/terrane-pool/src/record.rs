//! What a pool knows of a block, in one allocation that moves with the block as a pointer.

use std::fmt;
use std::sync::Arc;

use terrane_core::{ByteCount, Location, Memory, StorageKind};

use crate::block::StreamOrder;
use crate::stock::Stock;
use crate::sync::{AtomicU64, Ordering};

/// The class of a block that goes straight back to the upstream.
pub(crate) const UNPOOLED: usize = usize::MAX;

/// A block with its memory. Whoever has the box has the block.
///
/// A hit does not read it: of many blocks, few records are in a cache.
pub(crate) struct Record<M: Memory> {
    pub(crate) stock: Arc<Stock<M>>,
    pub(crate) class: usize,
    pub(crate) granted: u64,
    pub(crate) asked: u64,
    /// What the block waits for; nothing, unless it is in use apart, parked or in a lane.
    pub(crate) order: StreamOrder,
    pub(crate) location: Location,
    /// What the memory says of itself, so that it need not be asked under a lock.
    pub(crate) kind: StorageKind,
    backing: Backing<M>,
}

enum Backing<M> {
    Whole(Held<M>),
    Part { slab: Arc<Held<M>>, offset: ByteCount },
}

impl<M: Memory> Record<M> {
    /// A block that is the whole of `memory`.
    pub(crate) fn whole(
        stock: &Arc<Stock<M>>,
        memory: Held<M>,
        class: usize,
        granted: u64,
    ) -> Box<Self> {
        let (location, kind) = (memory.memory.location(), memory.memory.kind());
        Self::new(stock, Backing::Whole(memory), (location, kind), class, granted)
    }

    /// The block at `offset` of a slab; `None` if that leaves the address space, which a memory
    /// that keeps its promises does not.
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

    /// The memory that the block is in.
    pub(crate) fn memory(&self) -> &M {
        match &self.backing {
            Backing::Whole(held) => &held.memory,
            Backing::Part { slab, .. } => &slab.memory,
        }
    }

    /// Where in that memory the block begins.
    pub(crate) fn offset(&self) -> ByteCount {
        match &self.backing {
            Backing::Whole(_) => ByteCount::ZERO,
            Backing::Part { offset, .. } => *offset,
        }
    }

    /// What tells the slab of the block from others.
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

/// Memory obtained from the upstream, on the pool's account until it has been given back.
#[derive(Debug)]
pub(crate) struct Held<M> {
    // Fields drop in this order: what has been given back is off the account afterwards.
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

/// How many bytes a pool holds of its upstream. Written when blocks come and go there, never on
/// a hit.
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
