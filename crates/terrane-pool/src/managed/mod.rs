//! Managed memory: typed and raw allocations under a budget, each with an identity.
//!
//! A [`MemoryManager`] allocates from any upstream: system memory, a pool, a device. It returns
//! [`TrackedSlice`]s of plain data and raw [`TrackedBlock`]s, which are freed on drop. Streams
//! other than the upstream's own may still use a dropped block. It is then freed once the work
//! submitted to them before the drop has completed.
//!
//! ```
//! use terrane_core::ByteCount;
//! use terrane_pool::HeapAllocator;
//! use terrane_pool::adaptors::Budget;
//! use terrane_pool::managed::{ManagerOptions, MemoryManager};
//!
//! let budget = Budget::new("device", ByteCount::kib(4));
//! let manager = MemoryManager::new(HeapAllocator, budget, ManagerOptions::default());
//! let scores = manager.allocate_slice::<f32>(256)?;
//! assert_eq!(manager.allocated(), ByteCount::kib(1));
//! assert_eq!(scores.as_bytes().len(), 1024);
//! assert!(manager.allocate_slice::<f64>(1024).unwrap_err().is_exhaustion());
//!
//! // A number with a generation crosses an FFI boundary. It cannot be used twice.
//! let handle = scores.into_block().export();
//! drop(manager.import(handle)?);
//! assert!(manager.import(handle).is_err());
//! # Ok::<(), terrane_pool::managed::ManagedError>(())
//! ```

mod block;
mod error;
mod identity;
mod manager;
mod registry;
mod slice;

pub use block::{ManagedBlock, TrackedBlock};
pub use error::{CastFailed, ManagedError};
pub use identity::{BlockHandle, BlockIdentity, Lifecycle};
pub use manager::{ManagedMemory, ManagerOptions, MemoryManager};
pub use slice::{TrackedSlice, TypedView};
