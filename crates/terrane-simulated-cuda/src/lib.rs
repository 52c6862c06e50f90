//! A simulated CUDA driver: a `libcuda.so.1` for machines without a device.
#![allow(missing_docs)]

mod arena;
mod code;
mod config;
mod exports;
mod faults;
mod pools;
mod ptx;
mod random;
mod schedule;
mod simulator;
mod space;
mod state;
mod work;
