//! Encodes KV-cache layouts for peers and files. The bytes are framed, versioned and bounded, and
//! checked before they are used.
//!
//! A [`LayoutDescriptor`] contains the sections of a layout with all strides, and their fingerprint.
//! It also contains the location of the regions in the owner's memory, and the metadata with which
//! other agents reach them. [`encode`](LayoutDescriptor::encode) converts it to bytes, and
//! [`decode`](LayoutDescriptor::decode) converts and checks them. [`first_difference`] compares two
//! geometries.
//!
//! # Should I be using this crate?
//!
//! Use it directly to inspect descriptions, or to exchange layouts through another transport. To
//! reach a peer's blocks with NIXL, use `terrane-nixl`. It exports and imports these descriptions,
//! and returns layouts that are ends of transfers.
//!
//! # Limits of this crate
//!
//! It sends no data, opens no file, dereferences no address, does not parse agents' metadata, and
//! has no unsafe code. It serialises no type of another crate, so no other crate can change the
//! format.
//!
//! # What is checked
//!
//! | part | checks |
//! |---|---|
//! | frame | magic, length, CRC-64/NVME, version; no bytes before or after it |
//! | lists and texts | length against [`WireLimits`] and the remaining input, before memory is allocated |
//! | geometry | strides are nested, disjoint and within the regions, by the proof of `terrane-layout`; fingerprint |
//! | regions | number, lengths, alignment to blocks, ends within the address space, one kind of storage, no overlap |
//! | names | UTF-8, not empty, no control characters |
//! | whole | canonical: one layout has one encoding |
//!
//! A checksum detects damage, not forgery. A sender can also claim any address. `terrane-nixl`
//! checks such claims as far as NIXL permits.
//!
//! # Example
//!
//! ```
//! use terrane_core::{BackendName, ByteCount, RemoteSpace, StorageKind};
//! use terrane_layout::{ElementFormat, Geometry, LayoutConfig, LayoutKind};
//! use terrane_wire::{LayoutDescriptor, RegionDescriptor, WireLimits};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = LayoutConfig::builder()
//!     .num_blocks(1024)
//!     .num_layers(32)
//!     .outer_dim(2)
//!     .page_size(16)
//!     .inner_dim(1024)
//!     .element(ElementFormat::Width(2))
//!     .build()?;
//! let geometry = |config: &LayoutConfig| Geometry::new(config, LayoutKind::FullyContiguous);
//! let ucx = [BackendName::from("UCX")];
//! let region = RegionDescriptor::new(RemoteSpace::Host, 0x7f00_0000_0000, ByteCount::gib(2), ucx);
//! let (agent, metadata) = ("prefill-0".into(), b"connection and keys".to_vec());
//! let storage = StorageKind::Pinned;
//! let sent = LayoutDescriptor::new(geometry(&config)?, storage, agent, metadata, vec![region])?;
//! let bytes = sent.encode()?;
//!
//! // In the other process.
//! let received = LayoutDescriptor::decode(&bytes, &WireLimits::default())?;
//! assert_eq!(received, sent);
//! // A transfer works with fewer blocks on this side, but not with fewer layers.
//! assert!(received.expect_shape(&geometry(&config.with_num_blocks(16)?)?).is_ok());
//! let mismatch = received.expect_shape(&geometry(&config.with_num_layers(16)?)?).unwrap_err();
//! assert_eq!(mismatch.difference.to_string(), "section k: num_layers is 16 here and 32 there");
//!
//! // Damage is detected.
//! let mut damaged = bytes;
//! damaged[20] ^= 1;
//! let error = LayoutDescriptor::decode(&damaged, &WireLimits::default()).unwrap_err();
//! assert!(error.to_string().contains("is damaged"));
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod difference;
mod error;
mod frame;
mod layout;
mod limits;
mod region;

pub use difference::field_value::FieldValue;
pub use difference::{
    Difference, GeometryField, GeometryMismatch, first_difference, first_shape_difference,
};
pub use error::{Part, WireError};
pub use frame::Content;
pub use layout::descriptor::LayoutDescriptor;
pub use limits::{Limited, WireLimits};
pub use region::descriptor::RegionDescriptor;

/// Compiles and runs the README's example as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
