//! A simulated CUDA driver: a `libcuda.so.1` for machines without a device, and for tests of every
//! behaviour that CUDA's documentation permits.
//!
//! A program that loads the driver at run time loads this one if its folder is in
//! `LD_LIBRARY_PATH`. The program is unchanged:
//!
//! ```text
//! cargo build -p terrane-simulated-cuda
//! mkdir -p simulated && cp target/debug/libterrane_simulated_cuda.so simulated/libcuda.so.1
//! LD_LIBRARY_PATH=$PWD/simulated TERRANE_SIMULATED_CUDA=seed=7 cargo test --test gpu
//! ```
//!
//! (`cargo xtask test` does that for Terrane's own tests, under two policies.) The variable
//! `TERRANE_SIMULATED_CUDA` holds the settings: see [`Config::from_env`]. A test that links this
//! crate can start several drivers: see [`Session`].
//!
//! # What is simulated
//!
//! - **Order.** Streams (default, per-thread, non-blocking), events, waits across streams and
//!   devices, functions of the host. Work runs in small steps. A policy selects the next stream:
//!   random from a seed, as late as possible, or immediately ([`Policy`]). If the documentation
//!   defines no order, the order is random: copies of a batch, warps of a grid, streams without a
//!   common event. Before a copy is waited for, its destination may be partly written.
//! - **Addresses.** Device memory is at addresses that the host cannot dereference. The alias of
//!   registered host memory differs from the host's address. A freed address is not reused soon.
//!   Every copy, fill, load and store is checked against the allocations twice. A wrong address is
//!   an invalid value at submission. When the work runs, it is an illegal address, which loses the
//!   context.
//! - **Memory.** Each device has a limit. Pools have a release threshold, and allocate and free in
//!   stream order. Registrations do not overlap, and no copy crosses one. Copies with pageable memory
//!   end before the call returns.
//! - **Kernels.** PTX is interpreted, warp by warp: integers, branches, vectors, shared memory,
//!   barriers. Unsupported instructions are refused by name when the module is loaded.
//! - **Errors.** Sticky errors last until the context is destroyed. Handles are not reused, so a
//!   stale handle is refused. Tests make calls fail, lose contexts and hold streams back with the
//!   functions `terraneSimulated…` in [`exports`].
//!
//! # What is not simulated
//!
//! - Time: elapsed times are the host's and have no meaning.
//! - Graphs: work submitted to a captured stream is discarded, and the graph is empty. Captures are
//!   still ended by calls of other threads, and spread to other streams by events.
//! - Arrays, textures, managed and virtual memory, memory shared between processes, floating-point
//!   arithmetic, atomics, and warp operations.
//!
//! After a context is lost and its last owner has released it, the process can retain another one.
//! Real drivers often cannot. If drivers differ, the simulation follows the strictest reading of
//! the documentation.
//!
//! # Repeating a run
//!
//! All random choices use the seed. A program with several threads still calls in any order. A
//! program that only polls memory also makes progress. After half a millisecond without a call
//! (10 ms under [`Policy::Lazy`]), a background thread runs the next steps. `background=off` disables this
//! thread. A single-threaded program then repeats exactly.

mod arena;
mod capture;
mod code;
mod config;
pub mod exports;
mod faults;
mod pools;
mod ptx;
mod random;
mod run;
mod schedule;
mod session;
mod simulator;
mod space;
mod state;
mod work;

pub use config::{Config, Policy};
pub use session::{Attached, Session};
