//! Layouts of engines and cache tiers, by name.
//!
//! Each function names its source and the shape of its tensors. Dimensions are written as letters,
//! outermost first:
//!
//! | letter | dimension |
//! |---|---|
//! | B | blocks |
//! | L | layers |
//! | 2 | K and V; dropped by a config of one outer |
//! | N | tokens of a block |
//! | H | heads; part of D where a config states none |
//! | D | elements of a head |
//!
//! `L × [2, B, N, H, D]` is one tensor for each layer, and each tensor is a region. Tensors are
//! contiguous unless the text gives a stride. Shapes were read in the sources of vLLM 0.33, SGLang
//! 0.5.23, LMCache 0.5, FlashInfer, TensorRT-LLM, FlexKV, Dynamo, mistral.rs and candle-vllm.
//!
//! All formats of one config have the same sections with the same shapes, except where they add
//! scales. So each converts into each other.
//!
//! A format fixes the order of tokens and heads and all strides. The
//! [token order](LayoutConfig::token_order) and the
//! [block alignment](LayoutConfig::block_alignment) of the config are not used here.
//!
//! ```
//! use terrane_layout::{ElementFormat, LayoutConfig, formats};
//!
//! # fn main() -> Result<(), terrane_layout::LayoutError> {
//! let config = LayoutConfig::builder()
//!     .num_blocks(1024)
//!     .num_layers(32)
//!     .outer_dim(2)
//!     .page_size(16)
//!     .inner_dim(8 * 128)
//!     .num_heads(8)
//!     .element(ElementFormat::Width(2))
//!     .build()?;
//! let engine = formats::vllm::hnd(&config)?;
//! let host = formats::sglang::page_head(&config)?;
//! assert_eq!((engine.region_count(), host.region_count()), (32, 1));
//! assert_eq!(engine.sections()[0].shape(), host.sections()[0].shape());
//! # Ok(())
//! # }
//! ```

pub mod dynamo;
pub mod flashinfer;
pub mod flexkv;
pub mod lmcache;
pub mod model;
pub mod paged;
pub mod sglang;
mod shape;
pub mod tensorrt_llm;
pub mod vllm;

#[cfg(doc)]
use crate::config::LayoutConfig;
