//! Layouts of engines and cache tiers, by name.
//!
//! Each function names its source and the shape of its tensors. Dimensions are written as letters,
//! outermost first:
//!
//! | letter | dimension |
//! |---|---|
//! | B | blocks |
//! | L | layers |
//! | 2 | K and V; absent for a config of one outer |
//! | N | tokens of a block |
//! | H | heads; part of D if a config states none |
//! | D | elements of a head |
//!
//! `L × [2, B, N, H, D]` is one tensor for each layer, and each tensor is a region. Tensors are
//! contiguous unless the text gives a stride.
//!
//! The shapes were compared with these sources:
//!
//! | module | source |
//! |---|---|
//! | [`vllm`] | vLLM 0.33 |
//! | [`sglang`] | SGLang 0.5.23 |
//! | [`flashinfer`] | FlashInfer 0.6.18, `prefill.py`: one tensor of K and V |
//! | [`tensorrt_llm`] | TensorRT-LLM, `kvCacheUtils.h` and `WindowBlockManager::allocatePools` |
//! | [`lmcache`] | LMCache, `MemoryFormat` in `memory_management.py` |
//! | [`flexkv`] | FlexKV of 2026-08, `KVCacheLayout` in `storage.py` |
//! | [`dynamo`] | Dynamo, `block_manager/layout.rs` |
//! | [`paged::vllm_v0`] | vLLM 0.33, `cache_kernels.cu` and `paged_attn.py` |
//! | [`paged::pairs_of_tensors`] | mistral.rs and candle-vllm, `cache_engine.rs` |
//! | [`paged::aiter_shuffled`] | vLLM 0.33, `rocm_aiter_fa.py` |
//! | [`model::indexer`] | vLLM 0.33, `cache_kernels.cu`; SGLang's tests of its index buffer |
//! | [`model::state_pages`] | vLLM 0.33, `MambaSpec` |
//!
//! Rows without a version or a date were compared with revisions of unknown date.
//! [`model::scales_beside`] was not compared with any project.
//!
//! Some projects have further layouts, which have no function here:
//!
//! - FlashInfer accepts K and V as two tensors, and mistral.rs stores them so for it
//!   (`KvCacheLayout::FlashInferHnd`): `[B, H, N, D]` each.
//! - TensorRT-LLM stores recurrent states with layers outermost.
//! - LMCache allocates each chunk separately. [`TensorForm`](crate::TensorForm) describes the
//!   chunks as a list of tensors.
//! - In vLLM 0.33, AITER's K and V are planes of one tensor. A view of each plane is a region.
//! - SGLang can store the indexer's rows in 16 bits without scales. Rows of 4 bits are
//!   [`model::indexer`] with 64 bytes of values.
//!
//! All formats of one config have the same sections with the same shapes, except for formats with
//! scales. So any two of them convert into each other.
//!
//! A format defines the order of tokens and heads and all strides. The
//! [token order](LayoutConfig::token_order) and the
//! [block alignment](LayoutConfig::block_alignment) of the config are ignored.
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
