//! What peers and files are told of KV-cache layouts: bytes that are framed, versioned and bounded,
//! and that nobody believes before they are checked.
//!
//! A [`LayoutDescriptor`] has the sections of a layout with all strides, its fingerprint, where its
//! regions are in the memory of the agent that owns it, and what that agent tells others so that they
//! can reach them. [`encode`](LayoutDescriptor::encode) makes bytes of it,
//! [`decode`](LayoutDescriptor::decode) takes them back, and [`first_difference`] names what differs between
//! two geometries.
//!
//! # Should I be using this crate?
//!
//! Use it directly to look into descriptions, or to carry layouts between agents of a library of
//! your own. To reach a peer's blocks with NIXL, `terrane-nixl` exports and imports these, and hands
//! out layouts that are ends of transfers.
//!
//! # What it does not do
//!
//! It sends nothing, opens nothing, follows no address, looks into no agent's metadata, and has no
//! unsafe code. Its wire forms are its own: no type of another crate is serialised, so that none can
//! change the format.
//!
//! # What is checked
//!
//! | of | what |
//! |---|---|
//! | the frame | magic, length, CRC-64/NVME, version; nothing before it and nothing behind |
//! | every list and text | its length, against [`WireLimits`] and against what is left of the input, before memory is spent on it |
//! | the geometry | nested strides, apart and within the regions, by the proof of `terrane-layout`; the fingerprint |
//! | regions | their number, their lengths, alignment to blocks, ends within the address space, one kind of storage, no overlap |
//! | names | text, of a character at least, and none that controls a terminal |
//! | the whole | that it is written as this crate writes it: one layout, one encoding |
//!
//! A checksum finds damage, not malice, and anybody can say that memory is at an address. What of
//! that a library can check, its boundary crate does.
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
//! let (agent, metadata) = ("prefill-0".into(), b"what the agent says".to_vec());
//! let storage = StorageKind::Pinned;
//! let sent = LayoutDescriptor::new(geometry(&config)?, storage, agent, metadata, vec![region])?;
//! let bytes = sent.encode()?;
//!
//! // On the other side.
//! let received = LayoutDescriptor::decode(&bytes, &WireLimits::default())?;
//! assert_eq!(received, sent);
//! // Fewer blocks on this side do not matter to a transfer, and fewer layers do.
//! assert!(received.expect_shape(&geometry(&config.with_num_blocks(16)?)?).is_ok());
//! let mismatch = received.expect_shape(&geometry(&config.with_num_layers(16)?)?).unwrap_err();
//! assert_eq!(mismatch.difference.to_string(), "section k: num_layers is 16 here and 32 there");
//!
//! // Damage does not get through.
//! let mut damaged = bytes;
//! damaged[20] ^= 1;
//! let error = LayoutDescriptor::decode(&damaged, &WireLimits::default()).unwrap_err();
//! assert!(error.to_string().contains("is damaged"));
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod descriptor;
mod difference;
mod error;
mod frame;
mod input;
mod layout_form;
mod limits;
mod region;
mod region_form;

pub use descriptor::LayoutDescriptor;
pub use difference::{
    Difference, FieldValue, GeometryField, GeometryMismatch, first_difference,
    first_shape_difference,
};
pub use error::{Part, WireError};
pub use frame::Content;
pub use limits::{Limited, WireLimits};
pub use region::RegionDescriptor;

/// The README's example is compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
