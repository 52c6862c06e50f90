//! Pools, budgets and adaptors over any source of memory: device, pinned, system or disk.
//!
//! A [`Pool`] keeps freed memory in size classes for the next request. Acquiring and releasing a
//! block costs some 9 ns on each of any number of threads; what is kept is bounded exactly;
//! blocks that streams use are reused in the streams' order; and when memory runs out, the pool
//! climbs a ladder before it refuses. A pool is an [`Allocate`](terrane_core::Allocate) over
//! another, and so is every adaptor in [`adaptors`], in any order.
//!
//! # Should I be using this crate?
//!
//! Use it alone to pool or to account for memory of any [`Allocate`](terrane_core::Allocate).
//! Whoever serves models takes it with the rest of Terrane through the facade `terrane`.
//!
//! # What it does not do
//!
//! It names no driver, starts no thread and copies no bytes. It carves no region into blocks of
//! mixed sizes: a class is a size, and slabs are cut into equal blocks, by
//! [`SizeClasses::ExactSlab`] for one size and by [`adaptors::Slabs`] for every small class.
//! A process that was forked from one with threads leaves the pools of its parent alone: another
//! thread may have been at its magazines, and a sweep would wait for it for ever.
//!
//! # How a pool works
//!
//! ```text
//!  acquire ──► magazine of the thread ──► queue of the class ──► parking ──► upstream ──► ladder
//!               no lock, no shared line     14 blocks at a time    streams     cached
//!  release ──► magazine of the thread ──► queue of the class       done        shed first
//!         └──► lane of the thread, for a block used on one stream
//!         └──► parking, for a block that other streams use
//! ```
//!
//! The records of the decisions, with their numbers: `docs/decisions/0020` to `0033`.
//!
//! # Small blocks
//!
//! Each block of a class is a region of the upstream. Over system memory that is a mapping, and a
//! process has at most 65,530 of them (`vm.max_map_count`). Put [`adaptors::Slabs`] below a pool of
//! many small blocks: it asks the upstream once for up to 2 MiB of them.
//!
//! # What is guaranteed
//!
//! - A block has one owner; a block in use, or that a stream may use, is never cached.
//! - [`Pool::clear`] has an instant at which nothing is cached, in no class and no thread.
//! - After [`Pool::close`], nothing is cached: late releases go to the upstream.
//! - Cached bytes never exceed [`PoolOptions::cached_bytes`]; the queue of a class never exceeds
//!   [`PoolOptions::blocks_per_class`].
//! - A thread that ends gives its blocks back to the pools.
//!
//! # Metrics
//!
//! [`Pool::snapshot`] has everything as plain numbers. With the feature `metrics` a snapshot can be
//! published through the facade of that name (`PoolSnapshot::publish`); nothing is published from
//! within. Block by block, a pool is listed by [`adaptors::Snapshot`], which the feature `serde`
//! turns into JSON.
//!
//! Sweeps, the ladder, closing and whatever goes wrong with fences are traced; a hit, a miss and a
//! release are not.
//!
//! # Errors
//!
//! Every part has an error of its own, and all of them convert into [`PoolError`].

pub mod adaptors;
mod barrier;
mod block;
mod depot;
mod error;
mod fence;
mod grant;
mod inspect;
mod ladder;
pub mod managed;
mod options;
mod parking;
mod pool;
#[cfg(feature = "metrics")]
mod publish;
mod record;
pub mod replay;
mod retired;
mod seat;
mod size_class;
mod slot;
mod snapshot;
mod stack;
pub mod staging;
mod stock;
mod stream_pool;
mod sweep;
mod sync;
mod tags;

pub use block::{PoolBlock, TypedSpan};
pub use error::{Exhausted, PoolError};
pub use fence::{Access, Fence, FenceError, FenceSource, SimulatedStreams, StreamId};
pub use ladder::{Retry, TrimUpstream};
pub use options::PoolOptions;
pub use pool::Pool;
pub use size_class::SizeClasses;
pub use snapshot::{ClassSnapshot, LadderSnapshot, PoolSnapshot};
pub use stream_pool::{StreamError, StreamLease, StreamPool, StreamSource};
pub use tags::Tag;
