//! The basic types and contracts of Terrane, the memory layer under an LLM serving engine.
//!
//! All other crates of Terrane use these types. They describe bytes ([`ByteCount`], [`Alignment`]),
//! their kind ([`StorageKind`]) and their location ([`Location`]). They describe owners
//! ([`Memory`], [`Region`]), sources ([`Allocate`]) and registrars ([`Register`]) of memory.
//!
//! # Should I be using this crate?
//!
//! Use it directly to write a backend: a new kind of memory, an allocator, a registrar. To lay out,
//! pool or move KV-cache blocks, use the crates above it, or the facade `terrane` for all of them.
//!
//! # What it does not do
//!
//! It allocates only its own small bookkeeping, opens no file, starts no thread and uses no driver.
//! It never reads or writes the bytes of a [`Memory`].
//!
//! # Obligations
//!
//! | contract | obligation of the implementation | obligation of the caller |
//! |---|---|---|
//! | [`Memory`] | the span is valid and does not move until the value drops | synchronisation of every access to the bytes |
//! | [`Allocate`] | bytes for the caller alone, with the requested size and alignment; or a typed error and no leak | requests within the [`Limits`] |
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
    Capability, CapabilityMissing, CapabilityOutcome, CapabilityReport, CapabilityStatus, Reason,
    Requirement,
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

/// The cause of an error, from another library.
pub type BoxedCause = Box<dyn std::error::Error + Send + Sync + 'static>;
