//! A block store: keyed KV-cache blocks over tiers of memory and disk.
//!
//! [`Store`] answers which keys are present, and copies their blocks to and from memory. Each copy is a
//! job that reports its end. The store has any number of tiers of memory, and one on disk that survives
//! a crash.
//!
//! Four parts are public as well. [`TierIndex`] finds the slot of a key. [`CompletionQueue`] delivers ended
//! jobs. [`disk`] records which block is in which slot of a file. An [`EvictionPolicy`], [`S3Fifo`] or
//! [`Lru`], chooses the block that makes room. A policy of your own can be tested and used in other caches,
//! but [`StoreBuilder::eviction`] accepts only an [`EvictionKind`].
//!
//! # Should I be using this crate?
//!
//! Use it to keep KV blocks between requests, in host memory and on disk across restarts, in a serving
//! engine or an adapter for one. Use `terrane-transfer` alone if the engine has its own index.
//!
//! # Limits of this crate
//!
//! It knows no tokens, requests or prefix trees: the caller chooses the keys, and which blocks to put.
//! It has no network. One process owns a store, and each rank has its own. Other processes reach its blocks
//! only through the owner, as the ranks of some models in SGLang do.
//!
//! # Example
//!
//! [`Store`] has one. [`tools`] reads, verifies and repairs a store's directory.

#![deny(unsafe_code)]

pub mod disk;
mod error;
mod eviction;
mod index;
mod key;
mod parallel;
mod queue;
mod slab;
mod store;
mod sync;
mod table_memory;
pub mod tools;

pub use error::{KeyError, QueueError, StoreError};
pub use eviction::{EvictionPolicy, Lru, S3Fifo};
pub use index::{Freed, StoredBlock, TierIndex};
pub use key::{KeyHash, KeyHasher, MAX_KEY_BYTES};
pub use queue::{CompletionQueue, QueuePlace};
pub use slab::{JobId, Priority};
pub use store::Store;
pub use store::job::blocks::{Blocks, Spans};
pub use store::job::layers::{JobLayerError, JobLayers};
pub use store::job::options::JobOptions;
pub use store::job::outcome::JobOutcome;
pub use store::job::result::{BlockResult, NoRoom};
pub use store::job::{Drained, Job, JobFuture, Refused};
pub use store::metrics::snapshot::{GroupSnapshot, Misses, StoreSnapshot, TierSnapshot};
pub use store::open::builder::{
    BlockGroup, DiskTier, EvictionKind, MemoryTier, Recovery, StoreBuilder, WritePolicy,
};
pub use store::query::event::{Events, KeyName, StoreEvent, StoreEventKind};
pub use store::query::lease::Lease;
pub use store::query::presence::{Presence, TierId};
pub use store::query::why::Why;

/// The README's example is compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
