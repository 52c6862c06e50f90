//! The engines that need no driver: between host memory, and between host memory and files.

mod copy;
mod disk;
mod host;
mod rate;
pub mod threads;

pub use disk::{DiskEngine, DiskEngineOptions};
pub use host::{HostEngine, HostEngineOptions};
