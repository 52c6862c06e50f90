//! Parts of a block store: keyed KV-cache blocks over tiers.
//!
//! [`TierIndex`] finds the slot of a key. An [`EvictionPolicy`] chooses the block that makes room.
//! [`CompletionQueue`] delivers ended jobs. [`disk`] records which block is in which slot of a
//! file, and finds the blocks again after a crash. The store that composes them is not built yet.
//!
//! # Should I be using this crate?
//!
//! Use it to keep track of blocks by key, in memory and on disk across restarts. A lookup
//! returns the slot and the checksum of a block. The caller reads and writes the payloads, for example with `terrane-transfer`.
//!
//! # What it does not do
//!
//! It does not read or write payloads, and starts no thread that outlives a call. It has no unsafe
//! code.
//!
//! # Example
//!
//! ```
//! use terrane_store::KeyHasher;
//! use terrane_store::disk::{Catalog, CatalogOptions, GroupSlots, Namespace, PutRecord};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let directory = directory.path();
//! let namespace = Namespace::new("llama-3.1-8b", [("model", "llama-3.1-8b"), ("rank", "0")])?;
//! let groups = [GroupSlots { slot_bytes: 1 << 20, slots: 1000, fingerprint: [7; 16] }];
//! let options = CatalogOptions { keep_keys: true, ..CatalogOptions::default() };
//!
//! let (catalog, recovered) = Catalog::open(directory, &namespace, &groups, options)?;
//! assert!(recovered.live.is_empty());
//! let hasher = KeyHasher::new(&catalog.secret());
//! let block = PutRecord {
//!     key_hash: hasher.hash(b"prefix 42")?,
//!     group: 0,
//!     slot: 5,
//!     length: 1 << 20,
//!     checksum: 0x1234,
//!     key: b"prefix 42",
//! };
//! let other = hasher.hash(b"prefix 43")?;
//! catalog.append_puts(&[block, PutRecord { key_hash: other, slot: 6, key: b"prefix 43", ..block }])?;
//! catalog.append_removes(&[other])?;
//! catalog.sync()?;
//! drop(catalog);
//!
//! let (_catalog, recovered) = Catalog::open(directory, &namespace, &groups, options)?;
//! let found: Vec<_> = recovered.live.into_iter().collect();
//! assert_eq!(found.len(), 1);
//! assert_eq!((found[0].slot, found[0].key.as_deref()), (5, Some(&b"prefix 42"[..])));
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

pub mod disk;
mod error;
mod eviction;
mod index;
mod key;
mod queue;
mod slab;
mod store;
mod sync;
pub mod tools;

pub use error::{KeyError, QueueError, StoreError};
pub use eviction::{EvictionPolicy, Lru, S3Fifo};
pub use index::{Freed, StoredBlock, TierIndex};
pub use key::{KeyHash, KeyHasher, MAX_KEY_BYTES};
pub use queue::{CompletionQueue, QueuePlace};
pub use slab::{JobId, Priority};
pub use store::Store;
pub use store::blocks::{Blocks, Spans};
pub use store::builder::{
    BlockGroup, DiskTier, EvictionKind, MemoryTier, Recovery, StoreBuilder, WritePolicy,
};
pub use store::event::{Events, KeyName, StoreEvent, StoreEventKind};
pub use store::job::{Drained, Job, JobFuture, JobOutcome, Refused};
pub use store::lease::Lease;
pub use store::options::JobOptions;
pub use store::presence::{Presence, TierId};
pub use store::result::{BlockResult, NoRoom};
pub use store::snapshot::{GroupSnapshot, Misses, StoreSnapshot, TierSnapshot};
pub use store::why::Why;

/// The README's example is compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
