//! The items that a serving engine names most often, for `use terrane::prelude::*`.
//!
//! These are the types from a config to a completion, and the two traits whose methods users call.
//! Other errors, reports, and items for backends stay in their modules.

pub use terrane_core::{
    Alignment, Allocate, ByteCount, DeviceId, ForeignMemory, HostBytes, Memory, Region,
    Requirement, StorageKind,
};
#[cfg(feature = "cuda")]
pub use terrane_cuda::{
    Context, CudaError, DeviceAllocator, DeviceEngine, DeviceEngineOptions, Event, PinnedAllocator,
    PinnedOptions, Stream, Timing, WithDevices,
};
pub use terrane_layout::{
    BlockDimension, ElementFormat, Geometry, LayoutBuilder, LayoutConfig, LayoutKind,
    PhysicalLayout,
};
#[cfg(feature = "nixl")]
pub use terrane_nixl::{
    AddNixl, Agent, AgentBuilder, BackendConfig, ForeignLayout, NixlEngine, NixlEngineOptions,
    RemoteLayout,
};
#[cfg(feature = "pool")]
pub use terrane_pool::{Pool, PoolOptions};
pub use terrane_storage::{
    DiskAllocator, DiskFile, DiskOptions, HugePages, NamedFileAllocator, SystemAllocator,
    SystemOptions,
};
pub use terrane_transfer::{
    Completion, DeviceOrder, Durability, Endpoint, Explanation, Layers, Outcome, Rejected, Report,
    SlotSet, Slots, Ticket, Transfer, TransferError, TransferManager,
};
