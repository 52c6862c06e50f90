//! Formats of a config with one outer, such as a latent.

use terrane_layout::formats::{dynamo, flashinfer, flexkv, lmcache, sglang, tensorrt_llm, vllm};
use terrane_layout::{
    BlockDimension, BlockFingerprint, ElementFormat, Geometry, LayoutConfig, LayoutError,
    LayoutKind,
};

fn config(heads: Option<u32>) -> LayoutConfig {
    let config = LayoutConfig::builder().num_blocks(4).num_layers(3).outer_dim(1).page_size(2);
    let config = config.inner_dim(8).element(ElementFormat::Width(2));
    heads.into_iter().fold(config, |config, heads| config.num_heads(heads)).build().unwrap()
}

/// Every format that has one outer. A format with heads outside tokens needs stated heads.
fn formats(config: &LayoutConfig) -> Vec<(&'static str, Result<Geometry, LayoutError>)> {
    let mut formats = vec![
        ("vllm.nhd", vllm::nhd(config)),
        ("vllm.cross_layer", vllm::cross_layer(config)),
        ("vllm.mla", vllm::mla(config)),
        ("vllm.mla_cross_layer", vllm::mla_cross_layer(config)),
        ("flashinfer.nhd", flashinfer::nhd(config)),
        ("sglang.device", sglang::device(config)),
        ("sglang.layer_first", sglang::layer_first(config)),
        ("sglang.page_first", sglang::page_first(config)),
        ("sglang.page_first_direct", sglang::page_first_direct(config)),
        ("sglang.page_unified", sglang::page_unified(config, 1)),
        ("tensorrt_llm.pool", tensorrt_llm::pool(config)),
        ("lmcache.kv_2ltd", lmcache::kv_2ltd(config, 2)),
        ("lmcache.kv_2td", lmcache::kv_2td(config, 2)),
        ("lmcache.kv_t2d", lmcache::kv_t2d(config, 2)),
        ("lmcache.mla", lmcache::mla(config, 2)),
        ("flexkv.layer_first", flexkv::layer_first(config)),
        ("flexkv.block_first", flexkv::block_first(config)),
        ("flexkv.layer_block", flexkv::layer_block(config)),
        ("dynamo.fully_contiguous", dynamo::fully_contiguous(config)),
        ("dynamo.block_first", dynamo::layer_separate(config, BlockDimension::First)),
        ("dynamo.outer_first", dynamo::layer_separate(config, BlockDimension::Second)),
    ];
    if config.num_heads().is_some() {
        formats.extend([
            ("vllm.hnd", vllm::hnd(config)),
            ("vllm.cross_layer_hnd", vllm::cross_layer_hnd(config)),
            ("flashinfer.hnd", flashinfer::hnd(config)),
            ("sglang.page_head", sglang::page_head(config)),
        ]);
    }
    formats
}

#[test]
fn formats_of_one_outer_have_the_bytes_and_the_shape_of_their_config() {
    for heads in [None, Some(1), Some(4)] {
        let config = config(heads);
        let own = Geometry::new(&config, LayoutKind::FullyContiguous).unwrap();
        let expected = BlockFingerprint::new(&own, 0, b"");
        for (name, geometry) in formats(&config) {
            let geometry = geometry.unwrap_or_else(|error| panic!("{name}, {heads:?}: {error}"));
            assert_eq!(geometry.block_bytes(), config.block_bytes(), "{name}, {heads:?}");
            let found = BlockFingerprint::new(&geometry, 0, b"");
            assert_eq!(found, expected, "{name}, {heads:?}");
        }
    }
}
