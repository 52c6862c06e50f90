//! Adaptors: each wraps an upstream, adds one property, and is an [`Allocate`] itself.
//!
//! They compose in any order. When memory drops, each adaptor undoes what it did at the allocation.
//! [`Adapt`] builds a stack from the upstream outwards:
//!
//! ```
//! use terrane_core::{Allocate, ByteCount, RegionRequest};
//! use terrane_pool::HeapAllocator;
//! use terrane_pool::adaptors::{Adapt, Budget, Counters, LiveBlocks};
//!
//! let budget = Budget::new("host", ByteCount::mib(64));
//! let source = HeapAllocator
//!     .limited(budget.clone())
//!     .counted(Counters::new())
//!     .tagged(LiveBlocks::new());
//! let block = source.allocate(&RegionRequest::new(ByteCount::mib(48)).labelled("kv"))?;
//! assert_eq!(budget.live(), ByteCount::mib(48));
//! assert!(source.allocate(&RegionRequest::new(ByteCount::mib(32))).is_err());
//! drop(block);
//! assert_eq!(budget.live(), ByteCount::ZERO);
//! # Ok::<(), terrane_core::AllocateError>(())
//! ```
//!
//! | adaptor | added property |
//! |---|---|
//! | [`Limit`] | a budget, alone or in a tree that tiers share |
//! | [`Statistics`] | counts, peaks and measurement windows |
//! | [`Trace`] | a log in RMM's columns, for replay |
//! | [`Guard`] | detection of overlaps and writes out of bounds |
//! | [`Poison`] | a pattern in memory that is new or freed |
//! | [`DebugOptions`] | guard and poison as code or the environment chooses |
//! | [`Tags`] | a table of live blocks, for a [`Snapshot`] |
//! | [`OnFailure`] | a callback that may make room, a bounded number of times |
//! | [`Fallback`] | a second upstream behind the first |
//! | [`Binning`] | an upstream for each range of sizes |
//! | [`Slabs`] | small blocks, cut from large regions |
//! | [`Erased`] | one type of memory for all upstreams |
//!
//! Adaptors are for the slow path of a pool, or for debugging: most take a short lock.
//!
//! [`Allocate`]: terrane_core::Allocate

pub(crate) mod accounting;
pub(crate) mod adapt;
pub(crate) mod attached;
pub(crate) mod compose;
pub(crate) mod debug;

pub use accounting::budget::{Budget, OverBudget, Reservation};
pub use accounting::limit::Limit;
pub use accounting::snapshot::{BlockRecord, BlockState, Inspect, Snapshot};
pub use accounting::statistics::{Amount, Counters, Statistics, Totals, Window};
pub use accounting::tags::{LiveBlocks, Tags};
pub use accounting::trace::{
    Trace, TraceAction, TraceError, TraceEvent, TraceReader, TraceSink, TraceTime,
};
pub use adapt::Adapt;
pub use attached::Attached;
pub use compose::binning::Binning;
pub use compose::either::{Either, MixedKinds};
pub use compose::erased::{AnyUpstream, Erased};
pub use compose::fallback::{BothRefused, Fallback};
pub use compose::on_failure::{OnFailure, RefusedRequest};
pub use compose::slabs::{SlabBlock, SlabMemory, SlabOptions, SlabUsage, Slabs};
pub use debug::guard::{Guard, GuardLog, GuardViolation, Guarded, OverwrittenSide};
pub use debug::options::DebugOptions;
pub use debug::poison::{
    CannotFill, CannotReach, Fill, FillHost, Poison, PoisonBytes, PoisonReport, Poisoned,
};
