//! System memory and disk files as Terrane memory, and an I/O queue for the files.
//!
//! # Should I be using this crate?
//!
//! Use it directly to place KV-cache blocks, or other large and long-lived data, in host memory or
//! files. It prepares memory in parallel, on huge pages and on a chosen NUMA node. It keeps several
//! direct reads and writes in flight on io_uring. To move blocks between layouts, use
//! `terrane-transfer` or the facade `terrane`.
//!
//! # Limits of this crate
//!
//! It does not handle blocks, devices or registration, and it has no pool. It joins every thread
//! that it starts. It changes an existing file only by the writes that the caller requests. One
//! exception: it removes empty files named `.terrane-scratch-N`, which killed processes leave
//! behind on file systems without `O_TMPFILE`. It never reads environment variables.
//!
//! # Overview
//!
//! - [`SystemAllocator`] maps memory. [Policies](SystemOptions) select its pages, its NUMA nodes
//!   and the threads for the first touch. [`Progress`] reports how many bytes are ready.
//! - [`NumaTopology`] lists the nodes, and the node of a PCI device.
//! - [`DiskFile`] is a file, scratch or named. [`DiskAllocator`] allocates scratch files,
//!   [`NamedFileAllocator`] one named file. Each file is tested for direct I/O.
//! - [`IoQueue`] keeps requests on files in flight, on io_uring or on threads.
//!
//! A capability that the machine refuses is an entry in a
//! [`CapabilityReport`](terrane_core::CapabilityReport). It is an error if it was
//! [required](terrane_core::Requirement::Required). Every error is a [`StorageError`].
//!
//! # Example
//!
//! This example writes system memory to a scratch file and reads it back:
//!
//! ```
//! use terrane_core::{Allocate, ByteCount, Memory, RegionRequest};
//! use terrane_storage::{
//!     DiskAllocator, DiskOptions, IoBuffer, IoFile, IoQueue, IoQueueOptions, IoRequest,
//!     SystemAllocator, SystemOptions,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let directory = directory.path();
//! let request = RegionRequest::new(ByteCount::mib(4)).labelled("blocks");
//! let memory = SystemAllocator::new(SystemOptions::default()).allocate(&request)?;
//! let disk = DiskAllocator::new(directory, DiskOptions::default())?.allocate(&request)?;
//! println!("memory: {}", memory.capabilities());
//! println!("disk: {}", disk.capabilities());
//!
//! let handle = disk.handle();
//! let file = IoFile::direct(&handle).unwrap_or(IoFile::buffered(&handle));
//! let address = memory.location().as_host().ok_or("system memory has host addresses")?;
//! let buffers = [IoBuffer { address, length: memory.length() }];
//!
//! let mut queue = IoQueue::new(&IoQueueOptions::default())?;
//! let mut completions = Vec::new();
//! for request in [
//!     IoRequest::write(1, file, ByteCount::ZERO, &buffers),
//!     IoRequest::read(2, file, ByteCount::ZERO, &buffers),
//! ] {
//!     // SAFETY: memory and file outlive the wait, and nothing else uses them meanwhile.
//!     unsafe { queue.submit(&request) }?;
//!     queue.wait(None, &mut completions)?;
//! }
//! assert!(completions.iter().all(|completion| completion.outcome.is_ok()));
//! # Ok(())
//! # }
//! ```

#[cfg(not(target_os = "linux"))]
compile_error!("terrane-storage is built on Linux: its huge pages, NUMA, direct I/O and io_uring");

/// The code of the README, compiled and run as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod disk;
mod error;
mod numa;
mod queue;
mod sys;
mod system;

pub use disk::{DiskAllocator, DiskFile, DiskOptions, NamedFileAllocator};
pub use error::StorageError;
pub use numa::{InvalidPciAddress, NodeId, NumaNode, NumaTopology, PciAddress, TopologyGap};
pub use queue::{
    IoBackend, IoBuffer, IoCompletion, IoFailure, IoFailureReason, IoFile, IoMemory, IoOperation,
    IoQueue, IoQueueOptions, IoRegistration, IoRequest, IoWaker,
};
pub use system::{
    BringUp, BringUpEnded, BringUpProducer, ControlGroupLimits, FirstTouch, HugePageSize,
    HugePages, NumaPolicy, Progress, ProgressEntry, SystemAllocator, SystemMemory, SystemOptions,
    UsablePrefix, available_memory,
};

// Crates whose types the public signatures name.
#[doc(no_inline)]
pub use terrane_core;
