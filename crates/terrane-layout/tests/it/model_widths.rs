//! The width of elements as engines serve a model, and fields that name no other cache.

use serde_json::{Value, json};
use terrane_core::ByteCount;
use terrane_layout::ElementFormat;
use terrane_layout::model::{GroupKind, ModelError, ModelGeometry, ModelOptions};

use super::model::{fixture, full, read, refused, with};

fn element(config: &Value) -> ElementFormat {
    read(config).unwrap().groups()[0].element()
}

fn state_bytes(config: &Value) -> u64 {
    let model = read(config).unwrap();
    let state = model.groups().iter().find(|group| group.kind() == GroupKind::State);
    state.unwrap().state_bytes().unwrap().get()
}

fn wrapped(inner: &Value, quantised: &Value) -> Value {
    json!({"model_type": "llava", "text_config": inner, "quantization_config": quantised})
}

#[test]
fn a_cache_that_the_configuration_quantises_has_one_byte_an_element() {
    let scheme = json!({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": false}});
    let algorithm = json!({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"});
    let nested = json!({"quant_method": "modelopt", "quantization": algorithm});
    for quantised in [&scheme, &algorithm, &nested] {
        let config = with(full(), &json!({ "quantization_config": quantised }));
        assert_eq!(element(&config), ElementFormat::Width(1), "{quantised}");
        assert_eq!(element(&wrapped(&full(), quantised)), ElementFormat::Width(1), "{quantised}");
        assert_eq!(element(&wrapped(&config, &json!(null))), ElementFormat::Width(1));
        // The caller's format is used, whatever the configuration states.
        let options = ModelOptions::new().kv_element(ElementFormat::Width(2));
        let model = ModelGeometry::from_json(config.to_string(), &options).unwrap();
        assert_eq!(model.groups()[0].element(), ElementFormat::Width(2));
    }
    let latent = with(fixture("deepseek-v3.json"), &json!({ "quantization_config": scheme }));
    assert_eq!(read(&latent).unwrap().bytes_per_token().unwrap(), ByteCount::new(61 * 576));
    // Quantised weights alone, or null, change no cache.
    for plain in [json!({"quant_method": "fp8"}), json!({"kv_cache_scheme": null}), json!(null)] {
        let config = with(full(), &json!({ "quantization_config": plain }));
        assert_eq!(element(&config), ElementFormat::Width(2));
    }
    // A state keeps the dtype of the model.
    let hybrid = fixture("qwen3_next-defaults.json");
    let quantised = with(hybrid.clone(), &json!({ "quantization_config": algorithm }));
    assert_eq!(state_bytes(&quantised), state_bytes(&hybrid));
}

#[test]
fn a_quantised_cache_of_another_format_is_refused_by_name() {
    let cases = [
        ("kv_cache_scheme", json!({"num_bits": 4, "type": "float"})),
        ("kv_cache_scheme", json!({"num_bits": 8, "type": "int"})),
        ("kv_cache_scheme", json!({})),
        ("kv_cache_quant_algo", json!("NVFP4")),
        ("kv_cache_quant_algo", json!(8)),
    ];
    for (name, value) in cases {
        let quantised = json!({ name: value });
        let own = with(full(), &json!({ "quantization_config": quantised }));
        let outer = wrapped(&full(), &quantised);
        let inner = wrapped(&own, &json!(null));
        for (config, prefix) in [(own, ""), (outer, ""), (inner, "text_config.")] {
            match refused(&config) {
                ModelError::Uncounted { field, .. } => {
                    assert_eq!(field, format!("{prefix}quantization_config.{name}"));
                }
                other => panic!("{value}: {other}"),
            }
            let options = ModelOptions::new().kv_element(ElementFormat::Width(1));
            ModelGeometry::from_json(config.to_string(), &options).unwrap();
        }
    }
}

/// vLLM serves a float32 checkpoint in 16 bits.
#[test]
fn models_of_float32_are_counted_in_16_bits() {
    for dtype in ["float32", "float"] {
        let config = with(full(), &json!({"torch_dtype": dtype}));
        assert_eq!(element(&config), ElementFormat::Width(2));
        let options = ModelOptions::new().kv_element(ElementFormat::Width(4));
        let stated = ModelGeometry::from_json(config.to_string(), &options).unwrap();
        assert_eq!(stated.groups()[0].element(), ElementFormat::Width(4));
    }
    // A recurrence has the width that its field states.
    for name in ["nemotron_h-defaults.json", "qwen3_next-defaults.json", "mamba-defaults.json"] {
        let config = fixture(name);
        let wide = with(config.clone(), &json!({"torch_dtype": "float32"}));
        assert_eq!(state_bytes(&wide), state_bytes(&config), "{name}");
    }
    let hybrid = fixture("nemotron_h-defaults.json");
    let cache = |dtype: &str| with(hybrid.clone(), &json!({"mamba_ssm_cache_dtype": dtype}));
    let (wide, narrow) = (state_bytes(&cache("float32")), state_bytes(&cache("bfloat16")));
    assert_eq!(wide - narrow, 128 * 64 * 128 * 2);
}

#[test]
fn fields_that_name_only_counted_caches_are_read() {
    let minimax = fixture("minimax_m2-defaults.json");
    let all = vec![1; 62];
    let listed = with(minimax.clone(), &json!({ "attn_type_list": all }));
    assert_eq!(read(&listed).unwrap(), read(&minimax).unwrap());
    let mut linear = all;
    linear[7] = 0;
    for other in [json!(linear), json!([1, 2]), json!(["1"]), json!([1.0, true]), json!(1)] {
        let error = refused(&with(minimax.clone(), &json!({ "attn_type_list": other })));
        let named =
            matches!(&error, ModelError::Uncounted { field, .. } if field == "attn_type_list");
        assert!(named, "{error}");
    }
    // Its layers state their windows; the chunk is not read.
    let mimo = with(
        full(),
        &json!({
            "model_type": "mimo_v2_flash", "head_dim": 192, "v_head_dim": 128,
            "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
            "hybrid_layer_pattern": [0, 1, 1, 0], "sliding_window_size": 128
        }),
    );
    let chunks = with(mimo.clone(), &json!({"attention_chunk_size": 128}));
    assert_eq!(read(&chunks).unwrap(), read(&mimo).unwrap());
}

#[test]
fn global_heads_count_only_if_keys_are_stated_to_serve_as_values() {
    for model_type in ["gemma4_text", "gemma4_unified_text"] {
        let base = json!({"model_type": model_type, "num_global_key_value_heads": 2});
        let heads = |fields: Value| {
            let config = with(fixture("gemma4_text-defaults.json"), &with(base.clone(), &fields));
            let model = read(&config).unwrap();
            let mut groups = model.groups().iter();
            groups.find(|group| group.kind() == GroupKind::Attention).unwrap().heads()
        };
        assert_eq!(heads(json!({})), 4, "{model_type}");
        assert_eq!(heads(json!({"attention_k_eq_v": false})), 4, "{model_type}");
        assert_eq!(heads(json!({"attention_k_eq_v": true})), 2, "{model_type}");
    }
}
