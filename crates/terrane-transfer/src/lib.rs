//! Block transfers between KV-cache layouts.
//!
//! A transfer moves blocks between any two layouts of equal shape. Their axis orders and their
//! memory may differ. It copies all layers or some, and all heads or some. It converts between
//! token-major and head-major. Every transfer is
//!
//! 1. **validated**, in every build: equal shapes, ids and layers in range, no destination named
//!    twice, no byte both read and written ([`Planner`]);
//! 2. **planned**: broken into as few contiguous runs as possible ([`TransferPlan`]), or described
//!    by counts and strides ([`CopyGrid`]). The steady state allocates nothing;
//! 3. **explained**: which engine and path run it, why, and how long that should take
//!    ([`TransferManager::explain`]);
//! 4. **checked for hazards**: two transfers conflict if one writes a block that the other reads or
//!    writes. The later one declares that it runs after the earlier one ([`Transfer::after`],
//!    [`Transfer::after_end`]), or is refused with the conflicting blocks. A read of blocks that a
//!    failed transfer may have written in part is refused as well;
//! 5. **executed** by an engine ([`CopyEngine`]). This crate has the engines that need no driver
//!    ([`engines`]); other crates add more;
//! 6. **completed**: waited for, polled or awaited on any runtime ([`Completion`]), or
//!    [cancelled](Completion::cancel). On request, each layer completes on its own before that
//!    ([`Layers`]). The transfer owns all that the copy needs until the copy has ended. So the
//!    caller cannot free memory under a running copy, even if it forgets the completion.
//!
//! # Should I be using this crate?
//!
//! Yes, to move blocks between layouts of [`terrane_layout`], or to write an engine. The facade
//! `terrane` does the usual set-up in fewer lines.
//!
//! # Limits of this crate
//!
//! It never decides *which* blocks to move: no eviction, no prefix matching, no index of cached
//! blocks. [`Slots`] only tracks which block ids are free. The crate does not see accesses that
//! bypass it, unless they are declared ([`Endpoint::hold_for_write`]). It requires no runtime. Only
//! engines start threads. These are named, and joined when the engine drops.
//!
//! # Features
//!
//! - `calibration` (off by default): the measured costs of a device's copy paths, in a file (the
//!   module `calibration`).
//! - `checksum` (off by default): engines compute checksums of blocks ([`Transfer::checksums`]).
//! - `metrics` (off by default): snapshots of a manager for the facade of that name
//!   ([`TransferSnapshot`]).
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//!
//! use terrane_layout::{BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig};
//! use terrane_storage::{SystemAllocator, SystemOptions};
//! use terrane_transfer::engines::{HostEngine, HostEngineOptions};
//! use terrane_transfer::{Endpoint, Transfer, TransferManager};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = LayoutConfig::builder()
//!     .num_blocks(16)
//!     .num_layers(4)
//!     .outer_dim(2)
//!     .page_size(16)
//!     .inner_dim(128)
//!     .element(ElementFormat::Width(2))
//!     .build()?;
//! let system = SystemAllocator::new(SystemOptions::default());
//! let compute = LayoutBuilder::new(config)
//!     .layer_separate(BlockDimension::Second)
//!     .allocate(&system)
//!     .unregistered()
//!     .build()?;
//! let host =
//!     LayoutBuilder::new(config).fully_contiguous().allocate(&system).unregistered().build()?;
//! let (compute, host) = (Endpoint::new(compute)?, Endpoint::new(host)?);
//!
//! let engine = HostEngine::new(HostEngineOptions::default())?;
//! let manager = TransferManager::new([Arc::new(engine) as _]);
//! let offload = Transfer::new(&compute, &host).blocks(&[3, 7], &[0, 1]);
//! println!("{}", manager.explain(&offload)?);
//!
//! let lock_on_my_tables = vec![3, 7];
//! let completion = manager.submit(offload, lock_on_my_tables)?;
//! let outcome = completion.wait();
//! println!("{}", outcome.result?);
//! assert_eq!(outcome.guard, [3, 7]);
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "calibration")]
pub mod calibration;
mod checksums;
mod completion;
mod engine;
pub mod engines;
mod error;
mod explain;
mod hazard;
mod manager;
mod metrics;
mod plan;
mod side;
mod slots;
mod sync;
mod transfer;

pub use checksums::{ChecksumDifference, Checksums};
pub use completion::end_sink::EndSink;
pub use completion::layers::range::LayerRange;
pub use completion::layers::{LayerError, LayerFuture, LayerSignals, LayerState, Layers};
pub use completion::progress::CopyProgress;
pub use completion::set::{CompletionSet, CompletionSetFuture, SetOutcome};
pub use completion::waiter_progress::{DEFAULT_SPIN, WaiterProgress};
pub use completion::{Completion, CompletionFuture, Outcome};
pub use engine::CopyEngine;
pub use engine::declined::Declined;
pub use engine::endpoint_cache::EndpointCache;
pub use engine::job::{CopyFailure, CopyJob, Orphaned};
pub use engine::order::{DeviceOrder, EventHandle, StreamHandle};
pub use engine::quote::{Decision, ForeignDecision, OnlyPath, Quote};
pub use error::{Rejected, TransferError};
pub use explain::{EngineTimes, Explanation, Report};
pub use hazard::conflict::{Access, BlockConflict};
pub use hazard::endpoint::{BytesInUse, Endpoint, EndpointId, Hold, WeakEndpoint};
pub use hazard::group_overlap::{GroupRefusal, GroupsRefused};
pub use hazard::orphaned_claims::OrphanedClaims;
pub use hazard::ticket::{Ticket, TransferId};
pub use hazard::ticket_end::{TicketEnd, TicketFuture};
pub use manager::TransferManager;
pub use manager::builder::TransferManagerBuilder;
pub use manager::submit_all::RejectedSet;
pub use metrics::snapshot::{PathSnapshot, TransferSnapshot};
pub use plan::TransferPlan;
pub use plan::grid::{CopyGrid, GridEnd};
pub use plan::planner::Planner;
pub use plan::run::CopyRun;
pub use side::{Ends, Side};
pub use slots::{SlotSet, Slots, SlotsError};
pub use terrane_core::Durability;
pub use transfer::{Transfer, TransferOptions};

// Crates whose types the public signatures name.
#[doc(no_inline)]
pub use terrane_core;
#[doc(no_inline)]
pub use terrane_layout;
#[doc(no_inline)]
pub use terrane_storage;
