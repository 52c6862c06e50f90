//! The KV tensors of serving engines: views of a layout, and a layout over them.
//!
//! An engine stores its KV cache as tensors, one or two for each layer, with its own order of axes.
//! A [`KvAxisOrder`] names that order:
//!
//! | engine | tensors | axis order |
//! |---|---|---|
//! | vLLM, FlashAttention ([source][vllm]) | one a layer, `[2, blocks, page, heads, dim]`; HND by strides | [`VLLM`](KvAxisOrder::VLLM) |
//! | FlashInfer, and vLLM with it or with Triton ([page layout][flashinfer], [source][triton]) | one a layer, `[blocks, 2, page, heads, dim]` | [`FLASHINFER_NHD`](KvAxisOrder::FLASHINFER_NHD), [`VLLM_BLOCKS_FIRST`](KvAxisOrder::VLLM_BLOCKS_FIRST) |
//! | FlashInfer, HND | one a layer, `[blocks, 2, heads, page, dim]` | [`FLASHINFER_HND`](KvAxisOrder::FLASHINFER_HND) |
//! | SGLang ([source][sglang]) | K and V apart, each `[tokens, heads, dim]` a layer | [`SGLANG`](KvAxisOrder::SGLANG) |
//! | vLLM, latent attention ([source][mla]) | one a layer, `[blocks, page, dim]` | [`VLLM_LATENT`](KvAxisOrder::VLLM_LATENT) |
//! | SGLang, latent attention | one a layer, `[tokens, 1, dim]` | [`SGLANG_LATENT`](KvAxisOrder::SGLANG_LATENT) |
//!
//! Shape and memory order are independent: vLLM's tensors keep their shape when the memory is
//! head-major, and FlashInfer's do not. So an axis order states the order of the axes, and the
//! layout's [`TokenOrder`](terrane_layout::TokenOrder) states the order in memory. Strides connect
//! the two.
//!
//! # Views
//!
//! [`kv_views`] returns the tensors of a layout without a copy, if strides can express them.
//! Otherwise the [`KvError`] names the two axes that cannot be joined. [`kv_tensors`] exports the
//! tensors, with the blocks held against transfers.
//!
//! # Adoption
//!
//! [`adopt_strided`] accepts tensors of any library with any nested strides: DLPack's, or an
//! address with sizes, strides and an owner ([`StridedTensor`]). A [`StridedForm`] names their
//! dimensions. [`adopt_kv`] accepts the DLPack tensors of an engine and compares every size with a
//! configuration. Both return a [`LayoutBuilder`](terrane_layout::LayoutBuilder) over the tensors'
//! memory. An error names the tensor, the axis, the expected value and the actual value.
//!
//! SGLang's buffers have `size + page_size` tokens, and padding is written to the first page. In
//! Terrane all pages are blocks, so the engine must never move block 0.
//!
//! [vllm]: https://github.com/vllm-project/vllm/blob/0084b783bcda6d7ee15c337b1062cbee9985c954/vllm/v1/attention/backends/flash_attn.py
//! [triton]: https://github.com/vllm-project/vllm/blob/001ceb3e98e7a19ebe33f542a368fa73bf6c76ad/vllm/v1/attention/backends/triton_attn.py
//! [mla]: https://github.com/vllm-project/vllm/blob/main/vllm/v1/attention/backends/mla/common.py
//! [flashinfer]: https://docs.flashinfer.ai/tutorials/kv_layout.html
//! [sglang]: https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/mem_cache/memory_pool.py

mod adopt;
mod axis_order;
mod error;
mod list_strides;
mod row;
mod strided;
mod strided_adopt;
mod strided_error;
mod strides;
mod views;

pub use adopt::{KvTensors, adopt_kv};
pub use axis_order::{InvalidAxisOrder, KvAxis, KvAxisOrder};
pub use error::{KvError, TensorName};
pub use strided::{StridedForm, StridedTensor};
pub use strided_adopt::{adopt_strided, adopt_strided_parts};
pub use strided_error::StridedError;
pub use views::{KvView, kv_tensors, kv_views};
