//! A simulated CUDA driver: a `libcuda.so.1` for machines without a device, and for tests that
//! want a device as awkward as the documentation allows.
//!
//! A program that loads the driver at run time finds this one instead when `LD_LIBRARY_PATH` names
//! the folder that it lies in; nothing in the program changes:
//!
//! ```text
//! cargo build -p terrane-simulated-cuda
//! mkdir -p simulated && cp target/debug/libterrane_simulated_cuda.so simulated/libcuda.so.1
//! LD_LIBRARY_PATH=$PWD/simulated TERRANE_SIMULATED_CUDA=seed=7 cargo test --test gpu
//! ```
//!
//! (`cargo xtask test` does that for Terrane's own tests, under two policies.) The variable
//! `TERRANE_SIMULATED_CUDA` says what is simulated: see [`Config::from_env`]. A test that links this
//! crate starts drivers of its own, as many as it likes: see [`Session`].
//!
//! # What is simulated
//!
//! - **Order.** Streams (default, per-thread, non-blocking), events, waits across streams and
//!   devices, functions of the host. Work runs in small steps; which stream goes on is drawn from a
//!   seed, or work runs as late as can be, or at once ([`Policy`]). Everything that the documentation
//!   leaves open comes in any order: copies of a batch, warps of a grid, streams without a common event. A
//!   copy that has not been waited for is seen half done.
//! - **Addresses.** Device memory is at addresses that the host cannot dereference; the alias of
//!   registered host memory is another number than the host's address. An address that was freed
//!   is not given again soon. Every copy, fill, load and store is checked against what is
//!   allocated, when it is submitted (an invalid value) and when it runs (an illegal address, and
//!   the context is lost).
//! - **Memory.** A limit for each device; pools with a release threshold, whose memory comes and
//!   goes in the order of streams; registrations, which do not overlap, and which no copy crosses;
//!   pageable memory, whose copies read before they return and write before they return.
//! - **Kernels.** PTX is interpreted, thread by thread: integers, branches, vectors, shared memory,
//!   barriers. Unsupported instructions are refused by name when the module is loaded.
//! - **Errors.** Sticky ones stay until the context is gone; handles are never given twice, so that
//!   a stale one is refused. Calls that fail, contexts that are lost and streams that are held, at
//!   a test's request: the functions called `terraneSimulated…` in [`exports`].
//!
//! # What is not
//!
//! Time: an elapsed time is the host's, and says nothing. Graphs: what a stream is given while it
//! is captured is forgotten, and the graph is empty; that calls of other threads end a capture, and
//! that events drag other streams into one, is simulated. Arrays, textures, managed and virtual memory, exports to other processes, floating-point arithmetic, atomics and
//! operations of a warp. A lost context leaves the process usable, as another one can be retained
//! on the same device once the last owner has released it; real drivers often do not. Where real drivers
//! differ from each other, what the documentation says is done, and the stricter reading of it.
//!
//! # Repeating a run
//!
//! Every choice comes from the seed, but a program with several threads calls in an order of its
//! own, and after half a millisecond without a call a thread in the background goes on by itself
//! (10 ms under [`Policy::Lazy`]), so that a program which only looks at memory is not stuck.
//! `background=off` switches that off: a single thread sees the same run again.

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
