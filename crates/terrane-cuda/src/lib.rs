//! CUDA devices as Terrane backends: a probe for devices, contexts, streams, events, device memory,
//! pinned host memory, and the engine that moves blocks between them.
//!
//! # Should I be using this crate?
//!
//! Use it directly to find out at run time whether CUDA can be used. Use it also to put device or
//! pinned memory under a layout or a pool, or to let a pool follow the order of CUDA streams.
//!
//! It works beside `cudarc`, candle or PyTorch in one process. It uses each device's primary
//! context, which all of these libraries share, and it accepts their streams and pointers. It
//! leaves every thread's current context unchanged.
//!
//! # Limits of this crate
//!
//! It does not use managed (unified) memory. Building needs no CUDA toolkit, and nothing links
//! CUDA. Without a driver, every entry point returns a typed [`CudaError`].
//!
//! # Contents
//!
//! - [`probe`] reports a missing requirement, or lists the [`Device`]s. [`Driver`] is the driver's
//!   library.
//! - [`Context`] is a device's primary context. Each call binds it on the calling thread.
//! - [`Stream`]s are owned or borrowed. [`Event`]s are pooled; timing is optional. A transfer can
//!   [run after](Stream::order) either, and a stream can [wait](Stream::wait_for_layers) for one
//!   layer of a transfer. [`CudaStreams`] provides both to a pool, as its
//!   [`FenceSource`](terrane_pool::FenceSource) and [`StreamSource`](terrane_pool::StreamSource).
//! - [`Kernels`] copy many scattered cells ([`GridLaunch`]) in one launch.
//! - [`DeviceEngine`] copies blocks between layouts in the device's memory and in pinned memory,
//!   for a [`TransferManager`](terrane_transfer::TransferManager). It copies by the [`CopyPath`]
//!   that a [`Calibration`] predicts to be the fastest.
//! - [`DeviceAllocator`] and [`DevicePool`] allocate device memory. [`PinnedAllocator`] allocates
//!   pinned host memory, optionally [in the background](PinnedAllocator::allocate_in_background).
//!   [`Context::usage`] counts all live memory, streams and events. [`Context::device_span`]
//!   checks device memory of another library, which [`ForeignMemory`](terrane_core::ForeignMemory)
//!   adopts.
//! - [`engines`] combines the [`DeviceEngine`] with the engines of host memory and files, and with
//!   relays for the remaining routes.
//! - [`mod@cudarc`] makes managed memory an argument of `cudarc`'s kernels and copies.
//!   [`CudaFill`] lets poison and guards reach device memory.
//!
//! # Example
//!
//! The example allocates device and pinned memory, and copies there and back. The docs of
//! [`DeviceEngine`] show how blocks are offloaded and brought back, layer by layer.
//!
//! ```
//! use terrane_core::{Allocate, ByteCount, DeviceId, Memory, RegionRequest};
//! use terrane_cuda::{Context, CudaError, DeviceAllocator, PinnedAllocator, PinnedOptions, Stream};
//!
//! fn there_and_back() -> Result<(), Box<dyn std::error::Error>> {
//!     let context = Context::primary(DeviceId::new(0))?;
//!     let request = RegionRequest::new(ByteCount::mib(4)).labelled("blocks");
//!     let pinned = PinnedAllocator::new(&context, PinnedOptions::default())?.allocate(&request)?;
//!     let device = DeviceAllocator::new(&context).allocate(&request)?;
//!     println!("{}", pinned.capabilities());
//!
//!     let stream = Stream::new(&context)?;
//!     for (from, to) in [(pinned.location(), device.location()), (device.location(), pinned.location())] {
//!         // SAFETY: both live until the stream has been waited for, and no other code uses them.
//!         unsafe { stream.copy(from, to, request.bytes) }?;
//!     }
//!     stream.synchronize()?;
//!     Ok(())
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! match terrane_cuda::probe() {
//!     Ok(_) => there_and_back()?,
//!     Err(reason) => println!("without a device: {reason}"),
//! }
//! # Ok(())
//! # }
//! ```

/// The code of the README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod bridges;
mod driver;
mod engine;
mod engines;
mod error;
mod kernels;
mod memory;
mod runtime;

pub use bridges::cudarc;
pub use bridges::debug_fill::CudaFill;
pub use bridges::pool_streams::CudaStreams;
pub use driver::Driver;
pub use driver::code::DriverCode;
pub use driver::version::DriverVersion;
pub use engine::DeviceEngine;
pub use engine::options::DeviceEngineOptions;
pub use engine::path::measure::CalibrationOptions;
pub use engines::{EnginesOptions, WithDevices, engines};
pub use error::CudaError;
pub use kernels::{
    BlockIds, CopyWidth, GridLaunch, INLINE_BLOCKS, KernelFigures, Kernels, LaunchEnd,
};
pub use memory::{
    DeviceAllocator, DeviceMemory, DevicePool, DevicePoolMemory, OrderedMemory, PinnedAllocator,
    PinnedBringUp, PinnedMemory, PinnedNuma, PinnedOptions,
};
pub use runtime::context::Context;
pub use runtime::device::{Availability, Device, probe};
pub use runtime::event::{Event, Timing};
pub use runtime::stream::{Stream, StreamPriority};
pub use runtime::usage::{ResourceCount, ResourceUsage};
pub use terrane_transfer::calibration::{
    Calibration, CalibrationError, CopyPath, Direction, PathCost,
};

// Crates whose types the public signatures name.
#[doc(no_inline)]
pub use terrane_core;
#[doc(no_inline)]
pub use terrane_pool;
#[doc(no_inline)]
pub use terrane_storage;
#[doc(no_inline)]
pub use terrane_transfer;
