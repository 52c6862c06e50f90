//! The engines that need no driver. They copy between host memory, between host memory and files,
//! and through memory that two other engines can access.

mod copy;
mod disk;
mod host;
mod relay;

pub use crate::engine::rate::Rate;
pub use crate::engine::threads;
pub use disk::{DiskEngine, DiskEngineOptions};
pub use host::{HostEngine, HostEngineOptions};
pub use relay::{RelayEngine, RelayOptions, RelaySlots, RelayStep, StepFailed};
