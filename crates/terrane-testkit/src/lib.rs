//! What Terrane's crates, and backends of others, are tested with.
//!
//! - [`pattern`]: bytes that say where they belong, and their verification at memory speed.
//! - [`memory`]: heap memory that plays every kind of storage, with odd alignments, poison and
//!   counters; [`device`]: the address spaces and streams of simulated devices.
//! - [`recorder`]: a journal that proves in which order things were acquired and let go.
//! - [`fault`]: an allocator that fails as a plan says; [`delayed`]: one that frees memory late.
//! - [`simulated`]: device memory that is only addresses, and streams whose work runs on request.
//! - [`engine`]: a copy engine whose order, delays, failures and very steps a test decides.
//! - [`model`]: what a transfer should do, computed byte by byte; [`regions`]: the same for layouts of
//!   any strides; [`formats`]: every named format in small sizes.
//! - [`conformance`]: the rules that every `Memory`, `Allocate` and `CopyEngine` has to keep.
//! - [`references`]: the transfer tests of vLLM, SGLang and LMCache, written again.
//! - [`damage`]: what may happen to bytes on their way.
//! - [`strided`]: copies of cells with strides, and what they should do.
//! - [`leaks`]: open descriptors and mappings, counted before and after.
//! - [`mounted`]: small file systems, to fill them.
//! - [`process`]: tests that need a process to themselves; [`peer`]: tests of two that talk; [`port`]:
//!   ports to listen on.
//! - [`priced`]: an upstream without memory whose calls take a stated time.
//! - [`simulated_cuda`]: faults of the simulated CUDA driver, streams that are held, leaks.
//!
//! # What it does not do
//!
//! It is not published, and nothing that is published depends on it but for tests and examples.
//! As asserting is its purpose, it panics where a library must not: a panic here is a failed
//! test, and says what was expected and what was found.
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
pub mod memory;
pub mod model;
pub mod mounted;
pub mod needs;
pub mod pattern;
pub mod peer;
pub mod port;
pub mod priced;
pub mod process;
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
