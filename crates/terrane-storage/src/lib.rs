//! System memory and disk files as Terrane memory, and the queue that reads and writes the files.
//!
//! # Should I be using this crate?
//!
//! Use it directly to hold KV-cache blocks, or anything else that is large and long-lived, in the
//! memory of the host or in files; to bring memory up in parallel, on huge pages, on a given NUMA
//! node; or to keep several direct reads and writes in flight on io_uring. To move blocks between
//! layouts use `terrane-transfer`, or the facade `terrane`.
//!
//! # What it does not do
//!
//! It knows nothing of blocks, devices or registration, pools nothing, and starts no thread that
//! it does not join. It never touches a file that existed but to read and write where it is told
//! to, apart from empty files named `.terrane-scratch-N`, which killed processes leave behind where
//! there is no `O_TMPFILE`. It never reads the environment.
//!
//! # What there is
//!
//! - [`SystemAllocator`] maps memory: its pages, its NUMA nodes and who touches it first are
//!   [policies](SystemOptions); [`Progress`] shows how far it has come.
//! - [`NumaTopology`] says which nodes there are, and which one a PCI device is attached to.
//! - [`DiskFile`] is a file, scratch or named. [`DiskAllocator`] hands out scratch files,
//!   [`NamedFileAllocator`] one named file. Direct I/O is tried on each file.
//! - [`IoQueue`] keeps requests on files in flight, on io_uring or on threads.
//!
//! What a machine refuses is an entry in a
//! [`CapabilityReport`](terrane_core::CapabilityReport), and an error if it was
//! [required](terrane_core::Wish::Required). Every error is a [`StorageError`].
//!
//! # Example
//!
//! Bytes of system memory go to a scratch file and come back:
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

/// The code of the README, compiled and run.
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
pub use error::{FileType, StorageError};
pub use numa::{InvalidPciAddress, NodeId, NumaNode, NumaTopology, PciAddress, TopologyGap};
pub use queue::{
    ActiveBackend, IoBackend, IoBuffer, IoCompletion, IoFailure, IoFailureReason, IoFile,
    IoOperation, IoQueue, IoQueueOptions, IoRequest, IoWaker,
};
pub use system::{
    BringUp, BringUpEnded, FirstTouch, HugePageSize, HugePages, NumaPolicy, Progress,
    ProgressEntry, Raising, SystemAllocator, SystemMemory, SystemOptions, UsablePrefix,
};
