//! Adaptors: each takes an upstream, adds one thing, and is an [`Allocate`] itself.
//!
//! They compose in any order. When memory drops, each adaptor undoes what it did at the allocation.
//! [`Adapt`] builds a stack from the upstream outwards:
//!
//! ```
//! use terrane_core::{Allocate, ByteCount, RegionRequest};
//! use terrane_pool::adaptors::{Adapt, Budget, Counters, LiveBlocks, Simulated, SimulatedOptions};
//!
//! let budget = Budget::new("device", ByteCount::mib(64));
//! let source = Simulated::new(SimulatedOptions::default())
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
//! | adaptor | what it adds |
//! |---|---|
//! | [`Limit`] | a budget, alone or in a tree that tiers share |
//! | [`Statistics`] | counts, peaks and measurement windows |
//! | [`Trace`] | a log in RMM's columns, for replay |
//! | [`Guard`] | detection of overlaps, writes out of bounds and stale references |
//! | [`Poison`] | a pattern in memory that is new or freed |
//! | [`DebugOptions`] | guard and poison as code or the environment chooses |
//! | [`Tags`] | a table of live blocks, for a [`Snapshot`] |
//! | [`OnFailure`] | a callback that may make room, a bounded number of times |
//! | [`Fallback`] | a second upstream behind the first |
//! | [`Binning`] | an upstream for each range of sizes |
//! | [`Slabs`] | small blocks, cut from large regions |
//! | [`Erased`] | one type of memory for all upstreams |
//! | [`Faulty`], [`Delayed`] | failures, and memory that is freed late, for tests |
//!
//! [`Simulated`] is an upstream of addresses without memory. Adaptors are for the slow path of a
//! pool, or for debugging: most take a short lock.
//!
//! [`Allocate`]: terrane_core::Allocate

mod adapt;
mod address_space;
mod attached;
mod binning;
mod budget;
mod debug;
mod delayed;
mod either;
mod erased;
mod fallback;
mod fault;
mod guard;
mod limit;
mod live_ranges;
mod on_failure;
mod poison;
mod random;
mod simulated;
mod slabs;
mod snapshot;
mod statistics;
mod tags;
mod trace;

pub use adapt::Adapt;
pub use address_space::Reuse;
pub use attached::Attached;
pub use binning::Binning;
pub use budget::{Budget, OverBudget, Reservation};
pub use debug::{DebugOptions, Debugged};
pub use delayed::{Delayed, DelayedMemory};
pub use either::{Either, MixedKinds};
pub use erased::{AnyUpstream, Erased};
pub use fallback::{BothRefused, Fallback};
pub use fault::{FaultPlan, Faulty, InjectedFault};
pub use guard::{Guard, GuardLog, GuardViolation, Guarded, Side, StaleReference};
pub use limit::{Limit, Limited};
pub use on_failure::{OnFailure, RefusedRequest, Verdict};
pub use poison::{
    CannotFill, CannotReach, Fill, FillHost, Poison, PoisonBytes, PoisonReport, Poisoned,
};
pub(crate) use random::SplitMix64;
pub use simulated::{Simulated, SimulatedMemory, SimulatedOptions, SimulatedUsage};
pub use slabs::{SlabBlock, SlabMemory, SlabOptions, SlabUsage, Slabs};
pub use snapshot::{BlockRecord, BlockState, Inspect, Snapshot, TagTotal};
pub use statistics::{Amount, Count, Counted, Counters, Statistics, Totals, Window};
pub use tags::{LiveBlocks, TagEntry, Tagged, Tags};
pub use trace::{
    Trace, TraceAction, TraceError, TraceEvent, TraceReader, TraceSink, TraceTime, Traced,
    TracedBlock,
};
