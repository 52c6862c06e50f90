//! The facade of Terrane, the memory layer under an LLM serving engine.
//!
#![doc = include_str!("../README.md")]
//!
//! # Features
//!
//! - `checksum` (on by default): checksums of transfers.
//! - `cuda` (on by default): CUDA devices, pinned memory (module `cuda`). Building needs no CUDA.
//! - `interop` (on by default): DLPack tensors and the KV tensors of engines (module `interop`).
//! - `pool` (on by default): pools, budgets, allocator adaptors (module `pool`). `cuda` needs it.
//! - `store` (on by default): keyed blocks over tiers of memory and disk (module `store`).
//! - `wire` (on by default): layouts as bytes for peers (module `wire`). `nixl` needs it.
//! - `arrow` (off by default): Arrow arrays and columns (module `arrow`). It enables `cuda` and
//!   `interop`.
//! - `metrics` (off by default): publishes snapshots of transfers and of the store through the
//!   `metrics` crate.
//! - `model-config` (off by default): converts a model hub's `config.json` to layout configurations
#![cfg_attr(feature = "model-config", doc = "  ([`layout::model`]).")]
#![cfg_attr(not(feature = "model-config"), doc = "  (module `layout::model`).")]
//! - `nixl` (off by default): memory registered with NIXL, and transfers of blocks between
//!   processes
#![cfg_attr(feature = "nixl", doc = "  ([`nixl`]).")]
#![cfg_attr(not(feature = "nixl"), doc = "  (module `nixl`).")]
//!   Its bindings need libclang and g++ to build. The library itself is loaded at run time.
#![forbid(unsafe_code)]

#[cfg(feature = "arrow")]
#[doc(inline)]
pub use terrane_arrow as arrow;
#[doc(inline)]
pub use terrane_core as core;
#[cfg(feature = "cuda")]
#[doc(inline)]
pub use terrane_cuda as cuda;
#[cfg(feature = "interop")]
#[doc(inline)]
pub use terrane_interop as interop;
#[doc(inline)]
pub use terrane_layout as layout;
#[cfg(feature = "nixl")]
#[doc(inline)]
pub use terrane_nixl as nixl;
#[cfg(feature = "pool")]
#[doc(inline)]
pub use terrane_pool as pool;
#[doc(inline)]
pub use terrane_storage as storage;
#[cfg(feature = "store")]
#[doc(inline)]
pub use terrane_store as store;
#[doc(inline)]
pub use terrane_transfer as transfer;
#[cfg(feature = "wire")]
#[doc(inline)]
pub use terrane_wire as wire;

pub mod prelude;

/// Compiles and runs the example of the repository's README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct RepositoryReadme;
