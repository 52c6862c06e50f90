//! The facade of Terrane, the memory layer under an LLM serving engine.
//!
#![doc = include_str!("../README.md")]
//!
//! # Features
//!
//! - `model-config` (off by default): a model hub's `config.json` to layout configurations
#![cfg_attr(feature = "model-config", doc = "  ([`layout::model`]).")]
#![cfg_attr(not(feature = "model-config"), doc = "  (module `layout::model`).")]
#![forbid(unsafe_code)]

#[doc(inline)]
pub use terrane_core as core;
#[doc(inline)]
pub use terrane_cuda as cuda;
#[doc(inline)]
pub use terrane_layout as layout;
#[doc(inline)]
pub use terrane_pool as pool;
#[doc(inline)]
pub use terrane_storage as storage;
#[doc(inline)]
pub use terrane_transfer as transfer;

pub mod prelude;

/// The example of the repository's README is compiled and run as well.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct RepositoryReadme;
