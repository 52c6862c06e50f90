//! Device memory and streams without a device: addresses without bytes, and work that runs when a
//! test requests it.

mod address_space;
mod memory;
mod streams;

// The unit tests of the pool compile the streams against their own build.
use terrane_pool::{Fence, FenceError, FenceSource, StreamId};

pub use address_space::Reuse;
pub use memory::{Simulated, SimulatedMemory, SimulatedOptions, SimulatedUsage};
pub use streams::SimulatedStreams;
