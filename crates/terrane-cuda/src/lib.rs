//! CUDA devices as Terrane backends: whether there are any, contexts, streams, events, device
//! memory, pinned host memory, and the engine that moves blocks between them.
//!
//! # Should I be using this crate?
//!
//! Use it directly to find out at run time whether CUDA can be used, to put device or pinned
//! memory under a layout or a pool, or to let a pool follow the order of CUDA streams. It stands
//! beside `cudarc`, candle or PyTorch in one process: it works on each device's primary context,
//! which all of them share, leaves every thread's current context as it found it, and takes their
//! streams and pointers.
//!
//! # What it does not do
//!
//! It does not use managed (unified) memory. It needs no CUDA to build, and links none: without a
//! driver every entry point answers with a typed [`CudaError`].
//!
//! # What there is
//!
//! - [`probe`] says what is missing, or which [`Device`]s there are; [`Driver`] is the library.
//! - [`Context`] is a device's primary context, bound for each call on whatever thread it comes
//!   from.
//! - [`Stream`]s are owned or borrowed; [`Event`]s are pooled, with timing where asked for. Either is
//!   what a transfer [runs after](Stream::order), and a stream [waits](Stream::wait_for_layer) for a
//!   layer of one.
//!   [`CudaStreams`] is both as a pool's [`FenceSource`](terrane_pool::FenceSource) and
//!   [`StreamSource`](terrane_pool::StreamSource).
//! - [`Kernels`] copy many scattered cells ([`GridCopy`]) or runs ([`RunCopy`]) in one launch.
//! - [`DeviceEngine`] copies blocks between layouts in the device's memory and in pinned memory, for
//!   a [`TransferManager`](terrane_transfer::TransferManager), by the [`CopyPath`] that a
//!   [`Calibration`] predicts to be the fastest.
//! - [`DeviceAllocator`] and [`DevicePool`] hand out device memory, [`PinnedAllocator`] pinned
//!   host memory, also [while it comes up](PinnedAllocator::bring_up_in_background). What is held of
//!   all that, [`Context::holdings`] counts. Somebody else's device memory is checked by
//!   [`Context::device_span`] and adopted as [`ForeignMemory`](terrane_core::ForeignMemory).
//! - [`DeviceEngine`] copies blocks between the device and pinned memory; [`engines`] puts it
//!   together with those of host memory and files, and with relays between what is left.
//! - [`kernel_argument`] makes managed memory an argument of `cudarc`'s kernels and copies, and
//!   [`CudaFill`] lets poison and guards reach device memory.
//!
//! # Example
//!
//! Memory of both sorts, and a copy there and back. [`DeviceEngine`] has one of blocks that are
//! offloaded and brought back, layer by layer.
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
//!         // SAFETY: both live until the stream has been waited for, and nobody else uses them.
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

mod context;
mod device;
mod driver;
mod engine;
mod engines;
mod error;
mod event;
mod fill;
mod holdings;
pub mod kernel_argument;
mod kernels;
mod memory;
mod order;
mod stream;
mod streams;

pub use context::Context;
pub use device::Device;
pub use driver::{Availability, Driver, DriverCode, DriverVersion, probe};
pub use engine::{
    Calibration, CalibrationOptions, CopyPath, DeviceEngine, DeviceEngineOptions, Direction,
    PathCost,
};
pub use engines::{EnginesOptions, engines};
pub use error::CudaError;
pub use event::{Event, Timing};
pub use fill::CudaFill;
pub use holdings::{Held, Holdings};
pub use kernels::{
    BlockIds, CopyEnd, CopyRun, CopyWidth, GridCopy, INLINE_BLOCKS, KernelFigures, Kernels, RunCopy,
};
pub use memory::{
    DeviceAllocator, DeviceMemory, DevicePool, DevicePoolMemory, OrderedMemory, PinnedAllocator,
    PinnedBringUp, PinnedMemory, PinnedNuma, PinnedOptions,
};
pub use stream::{Stream, StreamPriority};
pub use streams::CudaStreams;
