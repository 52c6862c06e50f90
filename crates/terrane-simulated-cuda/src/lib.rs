//! A simulated CUDA driver: a `libcuda.so.1` for machines without a device.

mod arena;
mod code;
mod config;
pub mod exports;
mod faults;
mod pools;
mod ptx;
mod random;
mod schedule;
mod session;
mod simulator;
mod space;
mod state;
mod work;

pub use config::{Config, Policy};
pub use session::{Attached, Session};
