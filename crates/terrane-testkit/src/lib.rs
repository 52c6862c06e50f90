//! Tools for the tests of Terrane's crates and of other backends.
//!
//! - [`pattern`]: bytes that identify their block, layer and offset, and their verification at
//!   memory speed.
//! - [`memory`]: heap memory that acts as every kind of storage, with odd alignments, poison and
//!   counters; [`device`]: the address spaces and streams of simulated devices.
//! - [`recorder`]: a journal that proves the order of acquisitions and releases.
//! - [`fault`]: an allocator with injected failures; [`delayed`]: one that frees memory late.
//! - [`simulated`]: device memory that is only addresses, and streams whose work runs on request.
//! - [`engine`]: a copy engine whose order, delays and failures are controlled by a test.
//! - [`model`]: the expected bytes of a transfer; [`regions`]: the same for layouts of any strides;
//!   [`formats`]: every named format in small sizes.
//! - [`conformance`]: the rules of every `Memory`, `Allocate`, `Register` and `CopyEngine`.
//! - [`references`]: the transfer tests of vLLM, SGLang and LMCache, reimplemented.
//! - [`damage`]: random changes of bytes; [`permutations`]: every order of some values.
//! - [`strided`]: copies of cells with strides, and their expected bytes.
//! - [`leaks`]: counts of open descriptors and mappings, before and after.
//! - [`mounted`]: small file systems that a test can fill.
//! - [`process`]: tests that need their own process; [`peer`]: tests of two processes.
//! - [`priced`]: an upstream without memory whose calls take a stated time.
//! - [`ptx`]: a kernel to launch through another library.
//! - [`needs`]: the machine that a test needs; [`events`]: functions that run at events of
//!   `tracing`; [`random`]: repeatable pseudo-random numbers.
//! - [`simulated_cuda`]: faults, held streams and counts of the simulated CUDA driver.
//!
//! # Limits of this crate
//!
//! It is not published, and published crates depend on it only for tests and examples. It panics
//! where a library must not: a panic here is a failed test, and states the expected and the actual
//! value.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a panic of this crate is a failed test"
)]

pub mod conformance;
pub mod damage;
pub mod delayed;
pub mod device;
pub mod engine;
pub mod events;
pub mod fault;
pub mod formats;
pub mod leaks;
pub mod mapping;
pub mod memory;
pub mod model;
pub mod mounted;
pub mod needs;
pub mod pattern;
pub mod peer;
pub mod permutations;
pub mod priced;
pub mod process;
pub mod ptx;
pub mod random;
pub mod recorder;
pub mod references;
pub mod regions;
pub mod simulated;
pub mod simulated_cuda;
pub mod strided;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
