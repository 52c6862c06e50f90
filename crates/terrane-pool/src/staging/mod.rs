//! Staging: sets of buffers that are used together, and freed together when the device is done.
//!
//! A [`StagingArea`] allocates from any upstream, usually a pool. It creates
//!
//! - [`TransferTable`]s over host memory: the data to upload, space for the data to read back, and
//!   afterwards the outputs;
//! - [`DispatchSet`]s over device memory: the allocations and the parameter buffer of one dispatch.
//!
//! Both have the same states. While a table is being *filled*, no other code knows its buffers.
//! [`begin`](TransferTable::begin) names the streams that will use the buffers, and returns their
//! locations. [`submitted`](Copying::submitted) declares that all work has been submitted. Only
//! when the streams have passed that point are outputs readable and buffers freed. Dropping a table
//! at any time keeps this order: no buffer is freed under a running copy.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use terrane_core::ByteCount;
//! use terrane_pool::staging::{Direction, StagingArea};
//! use terrane_pool::{HeapAllocator, StreamId};
//! # use terrane_testkit::simulated::SimulatedStreams;
//! # fn driver() -> SimulatedStreams {
//! #     let streams = SimulatedStreams::new(0);
//! #     streams.set_runs_on_wait(true);
//! #     streams
//! # }
//!
//! let fences = Arc::new(driver());
//! let area = StagingArea::new(HeapAllocator, fences, Duration::from_secs(1));
//!
//! let mut table = area.transfer_table()?;
//! table.upload_padded(&[1, 2, 3], ByteCount::new(16))?;
//! let scores = table.output(ByteCount::new(64))?;
//! let copying = table.begin(&[StreamId::new(1)]).map_err(|(_, error)| error)?;
//! for copy in copying.copies() {
//!     match copy.direction {
//!         Direction::ToDevice => { /* enqueue a copy of `copy.length` bytes from `copy.host` */ }
//!         Direction::FromDevice => { /* enqueue one to `copy.host` */ }
//!     }
//! }
//! let finished = copying.submitted().wait(Duration::from_secs(1)).map_err(|e| e.cause)?;
//! assert_eq!(finished.output(scores)?, [0; 64]);
//! # Ok::<(), terrane_pool::staging::StagingError>(())
//! ```

mod area;
mod dispatch;
mod error;
mod finished;
mod lease;
mod transfer;

pub use area::StagingArea;
pub use dispatch::{AllocationId, DispatchSet, LaunchedDispatch, PendingDispatch};
pub use error::{NotFinished, StagingError};
pub use finished::FinishedTransfer;
pub use transfer::{Copying, Direction, EntryId, HostCopy, PendingTransfer, TransferTable};
