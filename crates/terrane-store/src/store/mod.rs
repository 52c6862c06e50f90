//! The store: keyed blocks over tiers of memory and disk.
//!
//! # Folders
//!
//! `open` builds a store. `job` has jobs and the thread of their tasks. `get`, `put` and `removal`
//! are the work of jobs, and `copy` their copies. `query` answers without a job. `tier` and
//! `slot_table` have the memory and the slots. `upkeep` is the sync thread, and `metrics` has the
//! numbers.
//!
//! # Threads
//!
//! `terrane-store` runs the tasks of jobs, `terrane-store-io` reads and writes the slab files, and
//! `terrane-store-sync` makes blocks durable. A job's task runs on the caller's thread until it
//! waits for the first time. A get that is one transfer has no task (`get/direct.rs`), and ends on
//! `terrane-store`.
//!
//! # Order of locks
//!
//! A thread takes locks in this order only, and may leave some out:
//!
//! 1. an entry of the gate (`gate.rs`), which a clear closes;
//! 2. the order of a key (`sharded.rs`): held from the change of the index to its record;
//! 3. the state of a slot table (`slot_table/mod.rs`);
//! 4. a shard of claims (`claims.rs`), an eviction policy, a shard of an index, the catalog's state, the claims of
//!    transfers on an endpoint (`terrane_transfer::OrphanedClaims::has`).
//!
//! The lock of a resize (`StoreCore::resizing`) comes before all of them.
//!
//! Wakers, guards and sinks of foreign code are called without a lock.

pub(crate) mod claims;
pub(crate) mod copy;
pub(crate) mod gate;
pub(crate) mod get;
pub(crate) mod group;
pub(crate) mod job;
pub(crate) mod key_names;
pub(crate) mod metrics;
pub(crate) mod open;
pub(crate) mod put;
pub(crate) mod query;
pub(crate) mod removal;
pub(crate) mod sharded;
pub(crate) mod shared;
pub(crate) mod slot_table;
pub(crate) mod tier;
pub(crate) mod upkeep;

use std::sync::Arc;
use std::time::Instant;

use terrane_core::ByteCount;

use crate::store::job::Drained;
use crate::store::metrics::snapshot::StoreSnapshot;
use crate::store::open::builder::StoreBuilder;
use crate::store::shared::StoreCore;
use crate::store::upkeep::maintenance::instant_after;

/// Keyed blocks over tiers of memory and disk.
///
/// Queries (`presence`, `prefix`, `acquire`, `touch`, `why`) do no I/O. Submits (`put`, `get`,
/// `promote`, `remove`, `clear`, `sync`) return a [`Job`](crate::Job) and never wait for I/O. Clones
/// share the store. When the last clone drops, the store closes.
///
/// Keys name content: two blocks with one key have equal bytes. A put of a key that is stored copies
/// nothing.
///
/// The guard of a job should not own the last clone of its store: its drop would close the store on the
/// store's own thread, and cancel the other jobs.
///
/// # Prefixes
///
/// A block of a prefix is useless without the blocks before it. So the tail of a prefix should be evicted
/// before its head. List the keys of a job in the order of the prefix, its head first. A `put`, `get` or
/// `touch` then uses the keys in reverse order: its first key is the most recently used one. The blocks
/// that a job adds to a tier enter the eviction policy in reverse order, too. These are the blocks of a
/// put or a promotion, and those that a durable put writes to a slower tier.
///
/// Later uses can change this order, by the rules of the policy. [`S3Fifo`](crate::S3Fifo) keeps a block
/// longer if it evicted the block lately and the block was added again. Blocks have no such order in a
/// slower tier if the store writes them back by itself, in a `sync` or in a close.
///
/// The order counts within a job only. The blocks of a later put are newer than the prefix that they
/// continue, until a job names both. A removal, a damage or a lease changes nothing for the other blocks
/// of the prefix. The order is not on disk: the blocks of an earlier session have none.
///
/// # After `fork`
///
/// A forked child has none of the store's threads. There, queries find nothing, submits return
/// [`StoreError::Forked`](crate::StoreError::Forked), and a drop does nothing. A child may open a store
/// of its own, in another directory.
///
/// If a thread of the parent opens or closes a store just during the fork, the child cannot open any
/// store: each attempt fails after two seconds, with
/// [`CatalogError::ForkedDuringOpen`](crate::disk::CatalogError::ForkedDuringOpen). The parent is not
/// affected. A child that calls `exec` has neither restriction.
///
/// ```
/// use std::ptr::NonNull;
/// use terrane_core::ByteCount;
/// use terrane_store::{BlockGroup, Blocks, DiskTier, JobOptions, Spans, Store};
/// use terrane_store::disk::Namespace;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let directory = tempfile::tempdir()?;
/// # let directory = directory.path();
/// let (store, recovery) = Store::builder()
///     .group(BlockGroup::new("kv", 65_536))
///     .disk(DiskTier::new(directory, ByteCount::mib(4)))
///     .namespace(Namespace::new("llama-3.1-8b", [("model", "llama-3.1-8b")])?)
///     .open()?;
/// assert_eq!(recovery.found, 0);
///
/// let mut block = vec![7_u8; 65_536];
/// let mut spans = Spans::new();
/// spans.add(NonNull::from(&mut block[..]).cast(), block.len());
/// // SAFETY: the job gets `block` as its guard, which owns the bytes; no other code uses them.
/// let source = unsafe { Blocks::spans(spans) };
/// let outcome = store.put(&[b"prefix 42"], source, JobOptions::new(), block)?.wait();
/// assert!(outcome.is_ok());
/// assert_eq!(store.prefix(0, &[b"prefix 42"]), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Store {
    handle: Arc<StoreHandle>,
}

/// Closes the store when the last clone drops.
struct StoreHandle {
    core: Arc<StoreCore>,
}

impl Drop for StoreHandle {
    fn drop(&mut self) {
        self.core.close(instant_after(self.core.close_within));
    }
}

impl Store {
    pub(crate) fn new(core: Arc<StoreCore>) -> Self {
        Self { handle: Arc::new(StoreHandle { core }) }
    }

    /// A builder without groups and tiers.
    pub const fn builder() -> StoreBuilder {
        StoreBuilder::new()
    }

    pub(crate) fn core(&self) -> &Arc<StoreCore> {
        &self.handle.core
    }

    /// Numbers about the store.
    #[must_use]
    pub fn snapshot(&self) -> StoreSnapshot {
        self.core().snapshot()
    }

    /// The names of the tiers, the fastest first.
    #[must_use]
    pub fn tiers(&self) -> Vec<String> {
        self.core().tiers.iter().map(|tier| tier.name.clone()).collect()
    }

    /// The bytes of a slot of a group on disk, or of a block if there is no disk tier. `None` if there is
    /// no such group.
    #[must_use]
    pub fn slot_bytes(&self, group: u16) -> Option<ByteCount> {
        self.core().group(group).ok().map(|group| ByteCount::new(group.slot_bytes))
    }

    /// Blocks until no job of a caller runs, or until the deadline.
    #[must_use]
    pub fn drain(&self, deadline: Instant) -> Drained {
        let core = self.core();
        let is_own = core.owner.is_current();
        let left = if is_own { core.jobs.wait(Some(deadline), false) } else { 0 };
        Drained { left, unwritten: 0 }
    }

    /// Refuses further jobs, waits for the running ones and cancels those that are left. Then it
    /// makes the blocks durable until the deadline, and joins the threads. If there are blocks to
    /// write, half of the time is for them. A request in the device is waited for, so the call may
    /// end after the deadline. Returns the number of jobs that were cancelled, and of blocks that
    /// were not written.
    ///
    /// Clones of the store refuse jobs afterwards. A second call does nothing.
    pub fn close(&self, deadline: Instant) -> Drained {
        self.core().close(deadline)
    }
}

terrane_core::debug_fields!(Store, |it| { tiers: it.core().tiers.len() });
