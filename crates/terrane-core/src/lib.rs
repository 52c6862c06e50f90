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
//! # Limits of this crate
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
//! # Features
//!
//! - `checksum` (off by default): CRC-64 of bytes
#![cfg_attr(feature = "checksum", doc = "  ([`checksum`]).")]
#![cfg_attr(not(feature = "checksum"), doc = "  (module `checksum`).")]
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

mod allocate;
mod bytes;
mod capability;
#[cfg(feature = "checksum")]
pub mod checksum;
pub mod convert;
mod delegate_error;
mod display;
mod getters;
mod location;
mod memory;
pub mod metrics;
mod os_error;
mod process;
mod register;
pub mod sync;

pub use allocate::limits::Limits;
pub use allocate::request::{Label, RegionRequest};
pub use allocate::{Allocate, AllocateError};
pub use bytes::alignment::{Alignment, InvalidAlignment};
pub use bytes::byte_count::{ByteCount, SizeOverflow};
pub use capability::{
    Capability, CapabilityMissing, CapabilityOutcome, CapabilityReport, CapabilityStatus, Reason,
    Requirement,
};
pub use location::durability::Durability;
pub use location::position::{AddressSpace, Position};
pub use location::remote::{PeerId, RemoteAddress, RemoteSpace};
pub use location::storage_kind::{DeviceId, StorageKind};
pub use location::{
    DeviceAddress, DirectFile, FileHandle, FileIdentity, FilePosition, HostAddress, Location,
};
pub use memory::Memory;
pub use memory::foreign::ForeignMemory;
pub use memory::host_bytes::HostBytes;
pub use memory::region::{Region, ViewOutOfBounds};
pub use memory::span::Span;
pub use os_error::OsError;
pub use process::{ForkedProcess, OwnerProcess};
pub use register::names::{AgentName, BackendName};
pub use register::registered::{Registered, RegistrationFailed};
pub use register::registration::{BackendOutcome, Registration, RegistrationRecord};
pub use register::{Register, RegisterError};

/// The cause of an error, from another library.
pub type BoxedCause = Box<dyn std::error::Error + Send + Sync + 'static>;
