//! Every named format, in the sizes of the oracle.

use terrane_layout::formats::vllm::PackedOrder;
use terrane_layout::formats::{
    dynamo, flashinfer, flexkv, lmcache, model, paged, sglang, tensorrt_llm, vllm,
};
use terrane_layout::{
    BlockDimension, ElementFormat, Geometry, LayoutConfig, LayoutError, SectionName,
};

/// The sizes of a cache.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Blocks of the cache.
    pub blocks: u32,
    /// Layers.
    pub layers: u32,
    /// Heads of a token.
    pub heads: u32,
    /// Tokens of a block.
    pub tokens: u32,
    /// Elements of a head.
    pub elements: u32,
    /// Bytes of an element.
    pub width: u8,
}

/// The sizes in `expected.txt`.
pub const SMALL: Sizes = Sizes { blocks: 4, layers: 3, heads: 2, tokens: 2, elements: 4, width: 2 };

/// The elements of a group in paged attention, and the elements per scale.
const GROUP: u32 = 2;

/// Blocks of a chunk.
const CHUNK: u32 = 2;

/// K and V.
///
/// # Panics
///
/// If no cache can have these sizes.
#[must_use]
pub fn keys_and_values(sizes: Sizes) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(sizes.blocks)
        .num_layers(sizes.layers)
        .outer_dim(2)
        .page_size(sizes.tokens)
        .inner_dim(sizes.heads * sizes.elements)
        .num_heads(sizes.heads)
        .element(ElementFormat::Width(sizes.width))
        .build()
        .unwrap()
}

/// A latent with 3 elements more than a head.
///
/// # Panics
///
/// If no cache can have these sizes.
#[must_use]
pub fn latent(sizes: Sizes) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(sizes.blocks)
        .num_layers(sizes.layers)
        .outer_dim(1)
        .page_size(sizes.tokens)
        .inner_dim(sizes.elements + 3)
        .element(ElementFormat::Width(sizes.width))
        .build()
        .unwrap()
}

/// A format, with its name in the oracle.
pub type Case = (&'static str, Result<Geometry, LayoutError>);

/// Every format.
#[must_use]
pub fn all(sizes: Sizes) -> Vec<Case> {
    let (kv, one) = (&keys_and_values(sizes), &latent(sizes));
    let unequal = sizes.elements / 2;
    let page = kv.piece_bytes().get() * 2 + 12;
    let row = kv.block_bytes().get() * u64::from(CHUNK) + 32;
    let dimensions = [sizes.blocks, sizes.layers, sizes.tokens];
    let [blocks, layers, tokens] = dimensions;
    let states = [
        model::PageState { name: SectionName::CONVOLUTION, elements: 5, element_bytes: 2 },
        model::PageState { name: SectionName::STATE, elements: 7, element_bytes: 4 },
    ];
    use PackedOrder::{Bhlnc, Blhnc, Blnhc, Lbhnc, Lbnhc, Lhbnc};
    vec![
        ("vllm.nhd", vllm::nhd(kv)),
        ("vllm.hnd", vllm::hnd(kv)),
        ("vllm.cross_layer", vllm::cross_layer(kv)),
        ("vllm.cross_layer_hnd", vllm::cross_layer_hnd(kv)),
        ("vllm.mla", vllm::mla(one)),
        ("vllm.mla_cross_layer", vllm::mla_cross_layer(one)),
        ("vllm.fp8_ds_mla", vllm::fp8_ds_mla(blocks, layers, tokens)),
        ("vllm.lbnhc", vllm::packed(kv, Lbnhc)),
        ("vllm.lbhnc", vllm::packed(kv, Lbhnc)),
        ("vllm.lhbnc", vllm::packed(kv, Lhbnc)),
        ("vllm.blnhc", vllm::packed(kv, Blnhc)),
        ("vllm.blhnc", vllm::packed(kv, Blhnc)),
        ("vllm.bhlnc", vllm::packed(kv, Bhlnc)),
        ("vllm.packed_unequal_nhd", vllm::packed_unequal(kv, Lbnhc, unequal)),
        ("vllm.packed_unequal_hnd", vllm::packed_unequal(kv, Blhnc, unequal)),
        ("vllm.packed_with_scales", vllm::packed_with_scales(kv, Lbnhc, 4)),
        ("vllm.page_padded_lb", vllm::page_padded(kv, Lbnhc, page)),
        ("vllm.page_padded_bl", vllm::page_padded(kv, Blhnc, page)),
        ("vllm.offload_rows", vllm::offload_rows(kv, Lbnhc, CHUNK, None)),
        ("vllm.offload_rows_padded", vllm::offload_rows(kv, Lbhnc, CHUNK, Some(row))),
        ("flashinfer.nhd", flashinfer::nhd(kv)),
        ("flashinfer.hnd", flashinfer::hnd(kv)),
        ("sglang.device", sglang::device(kv)),
        ("sglang.layer_first", sglang::layer_first(kv)),
        ("sglang.page_first", sglang::page_first(kv)),
        ("sglang.page_first_direct", sglang::page_first_direct(kv)),
        ("sglang.page_head", sglang::page_head(kv)),
        ("sglang.page_unified", sglang::page_unified(kv, 1)),
        ("sglang.page_first_direct_unequal", sglang::page_first_direct_unequal(kv, unequal)),
        ("sglang.mla_layer_first", sglang::layer_first(one)),
        ("sglang.mla_page_first", sglang::page_first(one)),
        ("sglang.mla_page_first_direct", sglang::page_first_direct(one)),
        ("sglang.mla_page_unified", sglang::page_unified(one, 1)),
        ("tensorrt_llm.pool", tensorrt_llm::pool(kv)),
        ("tensorrt_llm.latent_pool", tensorrt_llm::pool(one)),
        ("lmcache.kv_2ltd", lmcache::kv_2ltd(kv, CHUNK)),
        ("lmcache.kv_2td", lmcache::kv_2td(kv, CHUNK)),
        ("lmcache.kv_t2d", lmcache::kv_t2d(kv, CHUNK)),
        ("lmcache.mla", lmcache::mla(one, CHUNK)),
        ("flexkv.layer_first", flexkv::layer_first(kv)),
        ("flexkv.block_first", flexkv::block_first(kv)),
        ("flexkv.layer_block", flexkv::layer_block(kv)),
        ("dynamo.fully_contiguous", dynamo::fully_contiguous(kv)),
        ("dynamo.layer_separate_block_first", dynamo::layer_separate(kv, BlockDimension::First)),
        ("dynamo.layer_separate_outer_first", dynamo::layer_separate(kv, BlockDimension::Second)),
        ("paged.vllm_v0", paged::vllm_v0(kv, GROUP)),
        ("paged.pairs_of_tensors", paged::pairs_of_tensors(kv, GROUP)),
        ("paged.aiter_shuffled", paged::aiter_shuffled(kv, GROUP)),
        ("model.indexer", model::indexer(dimensions, 8, 4)),
        ("model.scales_beside", model::scales_beside(kv, GROUP, 1)),
        ("model.state_pages", model::state_pages(blocks, layers, page, &states)),
    ]
}
