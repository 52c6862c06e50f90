//! The vocabulary and the contracts of Terrane, the memory layer under an LLM serving engine.
//!
//! Everything else in Terrane speaks in the terms of this crate: how many bytes ([`ByteCount`],
//! [`Alignment`]), of which kind ([`StorageKind`]), where ([`Location`]), held by whom
//! ([`Memory`], [`Region`]), obtained from whom ([`Allocate`]) and registered with whom
//! ([`Register`]).
//!
//! # Should I be using this crate?
//!
//! Use it directly to write a backend: a new kind of memory, an allocator, a registrar. To lay
//! out, pool or move KV-cache blocks, use the crates above it, or all of them through the facade
//! `terrane`.
//!
//! # What it does not do
//!
//! It allocates nothing but its own small bookkeeping, opens nothing, starts no thread, names no
//! driver, and never reads or writes the bytes of a [`Memory`].
//!
//! # Who owes what
//!
//! | contract | the implementor owes | the caller owes |
//! |---|---|---|
//! | [`Memory`] | the span is valid and does not move until the value drops | synchronisation of every access to the bytes |
//! | [`Allocate`] | bytes that are the caller's alone, as many and as aligned as asked for, or a typed error and no leak | requests within the [`Limits`] |
//! | [`Register`] | deregistration when the handle drops | keeping the memory alive longer than the handle ([`Registered`] does) |
//!
//! # Example
//!
//! ```
//! use terrane_core::{Alignment, ByteCount, SizeOverflow};
//!
//! # fn main() -> Result<(), SizeOverflow> {
//! let page = ByteCount::product(&[("page_size", 16), ("inner_dim", 1024), ("width", 2)])?;
//! assert_eq!(page, ByteCount::kib(32));
//! assert_eq!(ByteCount::new(33).align_up(Alignment::SECTOR)?, ByteCount::new(512));
//!
//! let overflow = ByteCount::product(&[("num_blocks", u64::MAX), ("page_size", 16)]).unwrap_err();
//! assert!(overflow.to_string().contains("num_blocks"));
//! # Ok(())
//! # }
//! ```

#[cfg(not(target_pointer_width = "64"))]
compile_error!("Terrane addresses more memory than a 32-bit target can; build for a 64-bit one");

mod alignment;
mod allocate;
mod byte_count;
mod capability;
mod durability;
mod foreign;
mod host_bytes;
mod limits;
mod location;
mod memory;
mod os_error;
mod place;
mod process;
mod region;
mod register;
mod registered;
mod remote;
mod request;
mod span;
mod storage_kind;

pub use alignment::{Alignment, InvalidAlignment};
pub use allocate::{Allocate, AllocateError};
pub use byte_count::{ByteCount, SizeOverflow};
pub use capability::{
    Capability, CapabilityMissing, CapabilityOutcome, CapabilityReport, Grant, Reason, Wish,
};
pub use durability::Durability;
pub use foreign::ForeignMemory;
pub use host_bytes::HostBytes;
pub use limits::Limits;
pub use location::{
    DeviceAddress, DirectFile, FileHandle, FileIdentity, FilePosition, HostAddress, Location,
};
pub use memory::Memory;
pub use os_error::OsError;
pub use place::{Place, Space};
pub use process::{ForkedProcess, OwnerProcess};
pub use region::{Region, ViewOutOfBounds};
pub use register::{
    AgentName, BackendName, BackendOutcome, Register, RegisterError, Registration,
    RegistrationRecord,
};
pub use registered::{Registered, RegistrationFailed};
pub use remote::{PeerId, RemoteAddress, RemoteSpace};
pub use request::{Label, RegionRequest};
pub use span::Span;
pub use storage_kind::{DeviceId, StorageKind};

/// A cause from another library, kept whole behind the error that it led to.
pub type BoxedCause = Box<dyn std::error::Error + Send + Sync + 'static>;
