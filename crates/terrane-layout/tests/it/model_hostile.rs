//! Invalid configurations: typed errors, and no panic.

use proptest::prelude::*;
use serde_json::{Value, json};
use terrane_layout::model::{
    Expected, GroupKind, ModelError, ModelGeometry, ModelOptions, supported_model_types,
};

use super::model::{fixture, full, refused, with};

/// Files whose numbers all affect the cache.
const FILES: [&str; 12] = [
    "deepseek_v32-defaults.json",
    "falcon_h1-defaults.json",
    "falcon-40b.json",
    "gemma4_text-defaults.json",
    "jamba-defaults.json",
    "kimi_linear-defaults.json",
    "llama-3.1-8b.json",
    "mamba-defaults.json",
    "mamba2-defaults.json",
    "nemotron_h-defaults.json",
    "qwen3_next-defaults.json",
    "zamba2-defaults.json",
];

/// Fields that the readers of these files ignore.
const UNREAD: [&str; 5] =
    ["index_n_heads", "index_topk", "num_attention_heads", "expand", "hidden_size"];

#[test]
fn numbers_that_no_cache_has_are_named() {
    let mut tried = 0;
    for name in FILES {
        let file = fixture(name);
        for (field, value) in file.as_object().unwrap() {
            // Zamba 2 has a KV head for each head.
            let is_unread = UNREAD.contains(&field.as_str())
                || (name.starts_with("zamba2") && field == "num_key_value_heads");
            if !value.is_u64() || is_unread {
                continue;
            }
            let least_is_zero =
                matches!(field.as_str(), "attn_layer_offset" | "num_kv_shared_layers");
            let zero = if least_is_zero { json!(-2) } else { json!(0) };
            for wrong in [zero, json!(-1), json!(1.5), json!("8"), json!(1e99), json!(u64::MAX)] {
                let error = refused(&with(file.clone(), &json!({ field: wrong.clone() })));
                let ModelError::Value { field: named, expected, .. } = &error else {
                    panic!("{name}: {field} {wrong}: {error}");
                };
                assert_eq!(named, field, "{name}");
                assert!(matches!(expected, Expected::Integer { .. }), "{name}: {error}");
                tried += 1;
            }
        }
    }
    assert!(tried > 300, "{tried}");
}

#[test]
fn numbers_that_are_missing_are_named() {
    // If these fields are missing, other fields or a default of the type apply.
    const OPTIONAL: [&str; 6] = [
        "num_key_value_heads",
        "head_dim",
        "full_attention_interval",
        "num_hidden_layers",
        "mamba_d_head",
        "mamba_headdim",
    ];
    let mut tried = 0;
    for name in FILES {
        let file = fixture(name);
        for (field, value) in file.as_object().unwrap() {
            let skip = UNREAD.contains(&field.as_str()) || OPTIONAL.contains(&field.as_str());
            if !value.is_u64() || skip || field == "mamba_d_ssm" || field == "mamba_expand" {
                continue;
            }
            let error = refused(&with(file.clone(), &json!({ field: null })));
            let ModelError::Missing { field: named, .. } = &error else {
                panic!("{name}: {field}: {error}");
            };
            assert!(named.ends_with(field) || named.starts_with("linear_attn_config"), "{error}");
            tried += 1;
        }
    }
    assert!(tried > 30, "{tried}");
}

#[test]
fn states_that_overflow_are_refused() {
    let mamba2 = fixture("mamba2-defaults.json");
    let largest = json!({
        "num_heads": 65_535, "head_dim": 65_535, "state_size": 65_535, "conv_kernel": 65_535,
        "n_groups": 65_535, "expand": null
    });
    let error = refused(&with(mamba2.clone(), &largest));
    assert!(matches!(error, ModelError::StateBytes { .. }), "{error}");
    // Heads times head dimension must match `expand`.
    let error = refused(&with(mamba2, &json!({"head_dim": 65_535})));
    assert!(matches!(error, ModelError::Contradiction { .. }), "{error}");
    let delta = json!({
        "linear_num_value_heads": 65_535, "linear_value_head_dim": 65_535,
        "linear_key_head_dim": 65_535, "linear_num_key_heads": 65_535
    });
    let error = refused(&with(fixture("qwen3_next-defaults.json"), &delta));
    assert!(matches!(error, ModelError::StateBytes { .. }), "{error}");
    // One tap is not a state of a convolution.
    let lfm2 = json!({
        "model_type": "lfm2", "conv_L_cache": 1, "conv_dim": 64, "full_attn_idxs": [1]
    });
    let error = refused(&with(full(), &lfm2));
    assert!(matches!(error, ModelError::StateBytes { bytes: 0, .. }), "{error}");
}

#[test]
fn layers_that_contradict_each_other_are_refused() {
    let lists = |full: Value, state: Value| {
        let inner = json!({
            "full_attn_layers": full, "kda_layers": state,
            "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4
        });
        let fields = json!({
            "num_hidden_layers": 2, "layer_types": null, "linear_attn_config": inner,
            "linear_num_heads": null, "linear_head_dim": null, "linear_conv_kernel_dim": null
        });
        refused(&with(fixture("kimi_linear-defaults.json"), &fields))
    };
    for (full, state) in
        [(json!([1]), json!([1, 2])), (json!([1]), json!([])), (json!([]), json!([]))]
    {
        let error = lists(full, state);
        assert!(matches!(error, ModelError::Contradiction { .. }), "{error}");
    }
    for wrong in [json!([3]), json!([-1]), json!([1, 2, 1]), json!(1), json!("1")] {
        let error = lists(wrong, json!([2]));
        assert!(matches!(error, ModelError::Value { .. }), "{error}");
    }
    let chunks = with(
        fixture("llama4_text-defaults.json"),
        &json!({"num_hidden_layers": 4, "no_rope_layers": [1, 0]}),
    );
    assert!(matches!(refused(&chunks), ModelError::Value { .. }));
    let letters = json!({"layers_block_type": null, "num_hidden_layers": 3});
    for pattern in ["M*", "M*X", "", "M*-E"] {
        let fields = with(letters.clone(), &json!({"hybrid_override_pattern": pattern}));
        let error = refused(&with(fixture("nemotron_h-defaults.json"), &fields));
        assert!(matches!(error, ModelError::Value { .. }), "{pattern}: {error}");
    }
    let names = json!({"n_layer": 2, "num_hidden_layers": 3});
    let error = refused(&with(fixture("gpt2-defaults.json"), &names));
    assert!(error.to_string().contains("both name one field"), "{error}");
}

#[test]
fn states_are_divided_among_ranks_or_refused() {
    let bytes = |name: &str, ranks: u32| {
        let options = ModelOptions::new().tensor_parallel(ranks);
        ModelGeometry::from_json(fixture(name).to_string(), &options).map(|model| {
            let state = model.groups().iter().find(|group| group.kind() == GroupKind::State);
            state.unwrap().state_bytes().unwrap().get()
        })
    };
    // 128 heads of 64 by 128, and 8 groups, so each group is replicated on two of 16 ranks.
    assert_eq!(bytes("nemotron_h-defaults.json", 1).unwrap(), 10_240 * 3 * 2 + 128 * 64 * 128 * 4);
    let rank = (128 * 64 + 2 * 16 * 128) / 16 * 3 * 2 + 128 / 16 * 64 * 128 * 4;
    assert_eq!(bytes("nemotron_h-defaults.json", 16).unwrap(), rank);
    for (name, ranks) in [
        ("nemotron_h-defaults.json", 3),
        ("nemotron_h-defaults.json", 256),
        ("qwen3_next-defaults.json", 32),
        ("mamba-defaults.json", 7),
        ("kimi_linear-defaults.json", u32::MAX),
    ] {
        let text = bytes(name, ranks).unwrap_err().to_string();
        assert!(text.contains("cannot be divided among"), "{name}: {text}");
    }
}

#[test]
fn floats_that_only_python_writes_are_no_obstacle() {
    let text = fixture("mamba2-defaults.json").to_string();
    let text = text.replacen('{', r#"{"time_step_limit": [0.0, Infinity], "x": NaN, "#, 1);
    ModelGeometry::from_json(text, &ModelOptions::new()).unwrap();
    let broken = r#"{"model_type": Infinity}"#;
    ModelGeometry::from_json(broken, &ModelOptions::new()).unwrap_err();
}

/// Any JSON value, and numbers at the ends of their ranges.
fn values() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0..20_u32).prop_map(Value::from),
        prop::sample::select(vec![65_535_u32, 65_536, u32::MAX, 4096]).prop_map(Value::from),
        ".{0,5}".prop_map(Value::from),
        prop::collection::vec(
            prop::sample::select(vec!["full_attention", "sliding_attention", "x"]),
            0..5
        )
        .prop_map(Value::from),
        Just(json!({"model_type": "gemma3_text"})),
    ]
}

/// The fields that most readers need, without those that they refuse.
fn base(model_type: &str) -> Value {
    const LATENT: [&str; 9] = [
        "axk1",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "hy_v4",
        "kimi_k2",
        "sarvam_mla",
    ];
    let base = json!({"model_type": model_type, "head_dim": 64, "layer_types": null});
    let more = match model_type {
        name if LATENT.contains(&name) => json!({"kv_lora_rank": 9, "qk_rope_head_dim": 3}),
        "mamba" | "falcon_mamba" => json!({"state_size": 16, "conv_kernel": 4, "expand": 2}),
        "qwen3_next" | "qwen3_5_text" | "olmo_hybrid" => json!({
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4
        }),
        _ => json!({}),
    };
    with(base, &more)
}

proptest! {
    #[test]
    fn no_configuration_panics(
        model_type in prop::sample::select(supported_model_types().to_vec()),
        fields in prop::collection::vec((prop::sample::select(vec![
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "sliding_window", "layer_types", "sliding_window_pattern",
            "max_window_layers", "use_sliding_window", "kv_lora_rank", "qk_rope_head_dim",
            "torch_dtype", "dtype", "text_config", "n_layer", "num_layers", "conv_L_cache",
            "index_head_dim", "index_topk_freq", "mamba_d_state", "mamba_expand", "expand",
            "state_size", "conv_kernel", "num_heads", "n_groups", "linear_num_key_heads",
            "linear_attn_config", "layers_block_type", "attn_layer_period", "no_rope_layers",
        ]), values()), 0..6),
        ranks in 0..70_u32,
        num_blocks in any::<u32>(),
        page_size in any::<u32>(),
    ) {
        let base = base(model_type);
        let mut config = with(full(), &base);
        for (name, value) in fields {
            config[name] = value;
        }
        let options = ModelOptions::new().tensor_parallel(ranks);
        if let Ok(model) = ModelGeometry::from_json(config.to_string(), &options) {
            prop_assert!(!model.groups().is_empty());
            prop_assert!(model.bytes_per_token().is_ok() && model.bytes_per_sequence().is_ok());
            prop_assert!(model.groups().iter().all(|group| group.layers().is_sorted()));
            if let Ok(configs) = model.layout_configs(num_blocks, page_size) {
                prop_assert_eq!(configs.len(), model.groups().len());
            }
        }
    }

    #[test]
    fn no_change_of_a_file_panics(
        file in prop::sample::select(FILES.to_vec()),
        changes in prop::collection::vec((any::<prop::sample::Index>(), values()), 1..4),
        ranks in 1..130_u32,
    ) {
        let mut config = fixture(file);
        let names: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        for (index, value) in changes {
            config[index.get(&names)] = value;
        }
        let options = ModelOptions::new().tensor_parallel(ranks);
        if let Ok(model) = ModelGeometry::from_json(config.to_string(), &options) {
            prop_assert!(model.bytes_per_token().is_ok() && model.bytes_per_sequence().is_ok());
        }
    }
}
