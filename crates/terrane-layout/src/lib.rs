//! The position of every byte of every KV-cache block.
//!
//! A serving engine's KV cache consists of blocks of tokens. A block is a list of sections: K and
//! V, one latent, or values and their scales ([`Section`]). Each section has its own strides over
//! blocks, layers, heads, tokens and elements. The crate proves that sections are within their
//! regions and do not overlap ([`Geometry`]). It plans the memory ([`LayoutPlan`]), computes
//! addresses ([`PhysicalLayout`]) and checks them ([`verify()`]). Fingerprints let two processes
//! compare layouts ([`BlockFingerprint`], [`LayoutFingerprint`]).
//!
//! # Should I be using this crate?
//!
//! Use it directly to describe or address KV blocks in existing memory, or to plan memory that you
//! will allocate. Other crates allocate this memory and move blocks between layouts; the facade
//! `terrane` has all of them.
//!
//! # Limits of this crate
//!
//! It does no I/O, uses no driver, starts no thread, accesses no byte of a block, and has no unsafe
//! code. Memory comes from an [`Allocate`] or from the caller, registration from a [`Register`].
//! The caller synchronises all accesses to the blocks.
//!
//! # From config to address
//!
//! | step | type | checked by then |
//! |---|---|---|
//! | dimensions | [`LayoutConfig`] | every field and every product |
//! | order | [`LayoutKind`], or the form of an engine's tensors ([`TensorForm`]) | – |
//! | strides | [`Geometry`] | nested strides, bounds of regions, no overlap of sections |
//! | plan, under [`Limits`] | [`LayoutPlan`] | padding, alignment, the largest region |
//! | memory and registration | [`LayoutBuilder`] | count, sizes, alignment, kind and overlap of regions |
//! | address | [`PhysicalLayout`] | – ([`verify`](PhysicalLayout::verify) checks everything again, with the addresses) |
//!
//! All checks that need no memory pass before anything is allocated or registered.
//!
//! ```
//! use std::ptr::NonNull;
//!
//! use terrane_core::{ForeignMemory, HostAddress, Limits, Location, Span, StorageKind};
//! use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, LayoutPlan};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = LayoutConfig::builder()
//!     .num_blocks(8)
//!     .num_layers(4)
//!     .outer_dim(2)
//!     .page_size(16)
//!     .inner_dim(64)
//!     .element(ElementFormat::Width(2))
//!     .build()?;
//! let plan = LayoutPlan::new(&config, LayoutKind::FullyContiguous, Limits::NONE)?;
//!
//! // Memory that exists already, here a boxed slice, is adopted with its owner.
//! let mut bytes = vec![0_u8; plan.base_bytes().to_usize()].into_boxed_slice();
//! let address = NonNull::from(&mut bytes[..]).cast::<u8>();
//! let span = Span {
//!     kind: StorageKind::System,
//!     location: Location::Host(HostAddress::new(address)),
//!     length: plan.base_bytes(),
//! };
//! // SAFETY: the box owns the bytes, does not move them, and no other code uses it.
//! let memory = unsafe { ForeignMemory::new(span, bytes) };
//!
//! let layout = LayoutBuilder::new(config)
//!     .fully_contiguous()
//!     .adopt_memory([memory])
//!     .unregistered()
//!     .build()?;
//! let v_of_layer_3 = layout.host_address(7, 3, 1).ok_or("no such block")?;
//! assert_eq!(v_of_layer_3.get(), HostAddress::new(address).get() + ((7 * 4 + 3) * 2 + 1) * 2048);
//! assert_eq!(layout.verify()?.pieces, 8 * 4 * 2);
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! - `model-config` (off by default): reads a model hub's `config.json`
#![cfg_attr(feature = "model-config", doc = "  ([`model`]).")]
#![cfg_attr(not(feature = "model-config"), doc = "  (module `model`).")]
//!
//! [`Allocate`]: terrane_core::Allocate
//! [`Register`]: terrane_core::Register
//! [`Limits`]: terrane_core::Limits

#![forbid(unsafe_code)]

mod adopt;
mod builder;
mod config;
mod element;
mod error;
mod fingerprint;
pub mod formats;
mod geometry;
mod kind;
#[cfg(feature = "model-config")]
pub mod model;
mod physical;
mod picture;
mod plan;
pub mod state;
mod verify;

pub use builder::{BuildFailed, LayoutBuilder};
pub use config::{Field, LARGEST_LAYOUT, LayoutConfig, LayoutConfigBuilder};
pub use element::ElementFormat;
pub use error::{LayoutError, Part, RegionRole};
pub use fingerprint::{BlockFingerprint, InvalidFingerprint, LayoutFingerprint};
pub use geometry::{
    Axis, AxisSteps, DecodeError, EncodedCount, Geometry, GeometryError, GeometryLimits, Index,
    IndexOutOfRange, InvalidSectionName, Page, PieceStrides, RegionOffset, Section, SectionName,
    SectionShape, Step, Stretches, TensorAxis, TensorForm,
};
pub use kind::{BlockDimension, LayoutKind, TokenOrder};
pub use physical::{PhysicalLayout, RegionRegistration, RegistrationState};
pub use picture::Picture;
pub use plan::{LEAST_REGION_ALIGNMENT, LayoutPlan, PaddingReport};
pub use verify::{Extent, PieceIndex, VerifyReport, Violation, verify, verify_map};

/// Compiles and runs the README's example as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

// Re-exported, because public signatures use its types.
#[doc(no_inline)]
pub use terrane_core;
