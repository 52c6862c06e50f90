//! Block transfers between KV-cache layouts.
//!
//! A transfer moves blocks between any two layouts of equal shape, whatever order they are laid
//! out in and whatever memory they are in: some layers of them or all, some heads or all, re-laid
//! where one end is token-major and the other head-major. On its way it is
//!
//! 1. **validated**, in every build: equal shapes, ids and layers in range, no destination named
//!    twice, no byte both read and written ([`Planner`]);
//! 2. **planned**: broken into as few contiguous runs as there can be, without an allocation in
//!    the steady state ([`TransferPlan`]), or described by counts and strides ([`CopyGrid`]);
//! 3. **explained**: what runs, by which engine and path, why, and how long that should take
//!    ([`TransferManager::explain`]);
//! 4. **checked against what is in flight**: a transfer that would write what another one reads
//!    or writes, or read what another one writes, declares that it runs after that one
//!    ([`Transfer::after`], [`Transfer::after_end`]) or is refused with the blocks in conflict. So is
//!    one that would read what a failed transfer has left in part;
//! 5. **executed** by an engine ([`CopyEngine`]), of which this crate has those that need no
//!    driver ([`engines`]); others plug in from other crates;
//! 6. **completed**: waited for, polled or awaited on any runtime ([`Completion`]), and layer by
//!    layer before that, where it was asked for ([`Layers`]). What the copy
//!    needs belongs to it until it has ended, so that nothing the caller does, forgetting it
//!    included, frees memory under a running copy.
//!
//! # Should I be using this crate?
//!
//! Yes, to move blocks between layouts of [`terrane_layout`], or to write an engine. For the
//! usual set-up in fewer lines there is the facade `terrane`.
//!
//! # What it does not do
//!
//! It never decides *which* blocks to move: no eviction, no prefix matching, no cache of what is
//! where. It knows nothing of accesses that do not go through it, unless they are declared
//! ([`Endpoint::hold_for_write`]). It forces no runtime on its users, and starts no threads but
//! those of engines, which are named and joined.
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

mod attend;
mod builder;
mod completion;
mod endpoint;
mod engine;
pub mod engines;
mod error;
mod exclusive;
mod explain;
mod group;
mod hazard;
mod job;
mod layers;
mod manager;
mod order;
mod plan;
mod request;
mod set;
mod sync;
mod ticket;
mod ticket_end;
mod waiting;

pub use attend::{Attend, DEFAULT_ATTENTION};
pub use builder::TransferManagerBuilder;
pub use completion::{Completion, CompletionFuture, Outcome};
pub use endpoint::{BytesInUse, Endpoint, EndpointId, Hold, WeakEndpoint};
pub use engine::{CopyEngine, Declined, Quote};
pub use error::{Rejected, Side, TransferError};
pub use explain::{EngineTimes, Explanation, Report};
pub use group::{GroupRefusal, GroupsRefused};
pub use hazard::{Access, BlockConflict};
pub use job::{CopyFailure, CopyJob, Progress, Remains, Terms};
pub use layers::{LayerError, LayerFuture, LayerSignals, LayerState, Layers};
pub use manager::TransferManager;
pub use order::{DeviceOrder, EventHandle, PinnedOrder, StreamHandle};
pub use plan::{CopyGrid, CopyRun, GridEnd, Planner, TransferPlan};
pub use request::Transfer;
pub use set::{CompletionSet, CompletionSetFuture, RejectedSet, SetOutcome};
pub use terrane_core::Durability;
pub use ticket::{Ticket, TransferId};
pub use ticket_end::{TicketEnd, TicketFuture};
