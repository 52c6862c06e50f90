//! Pools, budgets and adaptors over any source of memory: device, pinned, system or disk.
//!
//! A [`Pool`] keeps freed memory in size classes for the next request. A hit and its release take
//! about 10 ns together on each thread, for any number of threads. The cached bytes have an exact
//! limit. Blocks that streams use are reused in the order of the streams. When memory runs out, the
//! pool tries several steps to reclaim memory before it refuses. A pool is an
//! [`Allocate`](terrane_core::Allocate) over another, and so is every adaptor in [`adaptors`]. They
//! compose in any order.
//!
//! # Should I be using this crate?
//!
//! Use it alone to pool or to account for memory of any [`Allocate`](terrane_core::Allocate).
//! To serve models, use it with the rest of Terrane through the facade `terrane`.
//!
//! # Limits of this crate
//!
//! It uses no driver, starts no thread and copies no bytes. It does not split a region into blocks
//! of mixed sizes. Slabs are cut into equal blocks, by [`SizeClasses::ExactSlab`] for one size and
//! by [`adaptors::Slabs`] for every small class. A process that was forked from one with threads
//! must not use or drop the pools of its parent. Another thread may have been inside its magazines
//! at the fork, and a sweep would wait for it without end.
//!
//! # How a pool works
//!
//! ```text
//!  allocate ──► magazine of the thread ──► queue of the class ──► pending frees ──► upstream
//!                no lock                   blocks in batches      whose streams     if exhausted,
//!                                                                  have finished     reclaim
//!  release ───► magazine of the thread ──► queue of the class
//!         ├───► stream magazine of the thread, for a block used on one stream
//!         └───► pending frees, for a block that other streams use
//! ```
//!
//! Read the folders in this order: `pool` (a pool and its blocks), `cache` (free blocks), `streams`
//! (fences and pending frees), `adaptors`, `managed`, `staging`.
//!
//! Decision records with the measurements: `docs/decisions/0020` to `0030`.
//!
//! # Small blocks
//!
//! Each block of a class is a region of the upstream. Over system memory, a region is a mapping,
//! and a process has at most 65,530 mappings (`vm.max_map_count`). Put [`adaptors::Slabs`] below a
//! pool of many small blocks: it requests up to 2 MiB of blocks at once from the upstream.
//!
//! # What is guaranteed
//!
//! - A block has one owner; a block in use, or that a stream may use, is never cached.
//! - [`Pool::clear`] has an instant at which no class and no thread caches a block.
//! - After [`Pool::close`], nothing is cached: late releases free their blocks to the upstream.
//! - Cached bytes never exceed [`PoolOptions::cached_bytes`]; the queue of a class never exceeds
//!   [`PoolOptions::blocks_per_class`].
//! - A thread that ends returns its blocks to the pools.
//! - Clones of a [`Pool`] are handles to one pool. The last handle closes it.
//!
//! # Metrics
//!
//! [`Pool::snapshot`] returns all counters as plain numbers. With the feature `metrics`,
//! `PoolSnapshot::record_metrics` publishes a snapshot through the `metrics` crate. The pool itself
//! publishes nothing. [`adaptors::Snapshot`] lists a pool block by block, and the feature `serde`
//! turns the list into JSON.
//!
//! Sweeps, reclaims, closing and failures of fences are traced. Hits, misses and releases are not
//! traced.
//!
//! # Errors
//!
//! Every part has its own error type, and all of them convert into [`PoolError`].

pub mod adaptors;
mod cache;
mod error;
mod heap;
pub mod managed;
#[cfg(feature = "metrics")]
mod metrics;
mod options;
mod pool;
mod size_class;
mod snapshot;
pub mod staging;
mod streams;
mod sync;
mod tags;

pub use error::{Exhausted, PoolError};
pub use heap::{HeapAllocator, HeapMemory};
pub use options::PoolOptions;
pub use pool::Pool;
pub use pool::block::PoolBlock;
pub use pool::reclaim::{Retry, TrimUpstream};
pub use size_class::SizeClasses;
pub use snapshot::{ClassSnapshot, PoolSnapshot, ReclaimSnapshot};
pub use streams::fence::{Access, Fence, FenceError, FenceSource, StreamId};
pub use streams::stream_pool::{StreamError, StreamLease, StreamPool, StreamSource};
pub use tags::Tag;

// Re-exported, because public signatures use its types.
#[doc(no_inline)]
pub use terrane_core;
