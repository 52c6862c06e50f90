//! Configurations of published models, and hostile ones.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Value, json};
use terrane_core::ByteCount;
use terrane_layout::model::{
    AttentionKind, CacheGroup, Expected, LARGEST_LAYER_COUNT, ModelError, ModelGeometry,
    ModelOptions, SUPPORTED_MODEL_TYPES,
};
use terrane_layout::{ElementFormat, LayoutError};

fn fixture(name: &str) -> Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(name);
    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap()
}

fn read(config: &Value) -> Result<ModelGeometry, LayoutError> {
    ModelGeometry::from_json(config.to_string(), &ModelOptions::new())
}

fn refused(config: &Value) -> ModelError {
    match read(config) {
        Err(LayoutError::Model(error)) => *error,
        other => panic!("{other:?}"),
    }
}

fn full() -> Value {
    json!({
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    })
}

/// The configuration with other fields; `null` takes one out.
fn with(mut config: Value, fields: &Value) -> Value {
    for (name, value) in fields.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

#[test]
fn published_models_have_their_published_sizes() {
    let expected = fixture("expected.json");
    let mut models = 0;
    for (case, figures) in expected.as_object().unwrap() {
        let (name, ranks) = case.split_once("@tp").unwrap_or((case, "1"));
        let options = ModelOptions::new().tensor_parallel(ranks.parse().unwrap());
        let config = fixture(&format!("{name}.json"));
        let model = ModelGeometry::from_json(config.to_string(), &options).unwrap();
        assert_eq!(model.model_type(), config["model_type"]);

        if let Some(bytes) = figures["bytes_per_token"].as_u64() {
            assert_eq!(model.bytes_per_token().unwrap().get(), bytes, "{case}");
            assert_eq!(model.groups().len(), 1, "{case}");
            let layout = model.layout_config(0, 10, 16).unwrap();
            assert_eq!(Some(layout.block_bytes().get()), figures["bytes_per_block_16"].as_u64());
        }
        for (group, figures) in
            model.groups().iter().zip(figures["groups"].as_array().into_iter().flatten())
        {
            let window = figures["window"].as_u64().map(|window| u32::try_from(window).unwrap());
            let kind =
                window.map_or(AttentionKind::Full, |window| AttentionKind::Sliding { window });
            assert_eq!(group.kind(), kind, "{case}");
            assert_eq!(Some(group.layers().len() as u64), figures["layers"].as_u64());
            let bytes = group.bytes_per_token().unwrap().get();
            assert_eq!(Some(bytes), figures["bytes_per_token"].as_u64());
        }
        let groups = figures["groups"].as_array().map_or(1, Vec::len);
        assert_eq!(model.groups().len(), groups, "{case}");
        models += 1;
    }
    assert_eq!(models, 7);
}

#[test]
fn a_latent_is_one_outer_and_not_divided() {
    let config = fixture("deepseek-v3.json").to_string();
    let alone = ModelGeometry::from_json(&config, &ModelOptions::new()).unwrap();
    let ranks = ModelGeometry::from_json(&config, &ModelOptions::new().tensor_parallel(8)).unwrap();
    assert_eq!(alone, ranks);
    let group = &alone.groups()[0];
    assert_eq!((group.outer_dim(), group.heads(), group.head_dim()), (1, 1, 576));

    // A packed fp8 row: 512 elements, 4 scales of fp32, 64 rotary elements in bfloat16.
    let packed = ModelOptions::new().kv_element(ElementFormat::RowBytes(512 + 16 + 128));
    let packed = ModelGeometry::from_json(&config, &packed).unwrap();
    assert_eq!(packed.bytes_per_token().unwrap(), ByteCount::new(61 * 656));
}

#[test]
fn groups_become_configs_of_their_own() {
    let model = read(&fixture("gpt-oss-20b.json")).unwrap();
    let configs = model.layout_configs(100, 16).unwrap();
    assert_eq!(configs.len(), 2);
    assert!(configs.iter().all(|config| config.num_layers() == 12));
    assert_eq!(model.groups()[0].layers()[..3], [1, 3, 5]);
    assert_eq!(model.groups()[1].layers()[..3], [0, 2, 4]);
    let error = model.layout_config(2, 100, 16).unwrap_err();
    assert!(error.to_string().contains("group 2 does not exist: the model has 2"), "{error}");
}

#[test]
fn heads_are_divided_or_held_by_several_ranks() {
    let heads = |ranks| {
        let options = ModelOptions::new().tensor_parallel(ranks);
        ModelGeometry::from_json(full().to_string(), &options).map(|m| m.groups()[0].heads())
    };
    for (ranks, expected) in [(1, 4), (2, 2), (4, 1), (8, 1), (12, 1)] {
        assert_eq!(heads(ranks).unwrap(), expected, "{ranks}");
    }
    for ranks in [3, 5, 6, u32::MAX] {
        let text = heads(ranks).unwrap_err().to_string();
        assert!(text.contains("num_key_value_heads is 4") && text.contains(&ranks.to_string()));
    }
    assert!(heads(0).unwrap_err().to_string().contains("tensor_parallel is 0"));
}

#[test]
fn configs_state_heads_where_these_have_bytes_of_their_own() {
    let heads = |element: Option<ElementFormat>| {
        let options = ModelOptions::new().tensor_parallel(2);
        let options = element.map_or(options, |element| options.kv_element(element));
        let model = ModelGeometry::from_json(full().to_string(), &options).unwrap();
        let config = model.layout_config(0, 10, 16).unwrap();
        assert!(
            config.num_heads().is_none() || config.head_dim() == Some(model.groups()[0].head_dim())
        );
        config.num_heads()
    };
    assert_eq!(heads(None), Some(2));
    assert_eq!(heads(Some(ElementFormat::Width(1))), Some(2));
    assert_eq!(heads(Some(ElementFormat::RowBytes(200))), None);
}

#[test]
fn the_dtype_has_two_names_and_an_override() {
    let width = |fields: Value| read(&with(full(), &fields)).map(|m| m.groups()[0].element());
    assert_eq!(width(json!({})).unwrap(), ElementFormat::Width(2));
    let new = json!({"torch_dtype": null, "dtype": "float32"});
    assert_eq!(width(new).unwrap(), ElementFormat::Width(4));
    let both = json!({"dtype": "float16"}); // beside bfloat16
    assert!(width(both).unwrap_err().to_string().contains("two names of one field"));
    let text = width(json!({"torch_dtype": "int4"})).unwrap_err().to_string();
    assert!(text.contains("torch_dtype is int4") && text.contains("bfloat16"), "{text}");

    let none = with(full(), &json!({"torch_dtype": null}));
    assert!(matches!(refused(&none), ModelError::Missing { field, .. } if field == "torch_dtype"));
    let fp8 = ModelOptions::new().kv_element(ElementFormat::Width(1));
    let model = ModelGeometry::from_json(none.to_string(), &fp8).unwrap();
    assert_eq!(model.bytes_per_token().unwrap(), ByteCount::new(4 * 2 * 4 * 8));
    let scaled = ModelOptions::new().kv_element(ElementFormat::MXFP4);
    let model = ModelGeometry::from_json(none.to_string(), &scaled).unwrap();
    assert_eq!(model.bytes_per_token().unwrap(), ByteCount::new(4 * 2 * 17));
}

fn kinds(config: &Value) -> Vec<(AttentionKind, Vec<u32>)> {
    let groups = |group: &CacheGroup| (group.kind(), group.layers().to_vec());
    read(config).unwrap().groups().iter().map(groups).collect()
}

#[test]
fn windows_as_each_family_states_them() {
    const WINDOW: AttentionKind = AttentionKind::Sliding { window: 32 };
    const FULL: AttentionKind = AttentionKind::Full;
    let case = |model_type: &str, fields: Value| {
        let base = json!({"model_type": model_type, "head_dim": 8, "sliding_window": 32});
        kinds(&with(with(full(), &base), &fields))
    };
    let all = || vec![0, 1, 2, 3];

    // A window that means nothing, one for all layers, one that is switched off.
    assert_eq!(case("llama", json!({})), [(FULL, all())]);
    assert_eq!(case("mistral", json!({})), [(WINDOW, all())]);
    assert_eq!(case("mistral", json!({"sliding_window": null})), [(FULL, all())]);
    assert_eq!(case("phi3", json!({})), [(WINDOW, all())]);
    assert_eq!(case("qwen2", json!({"use_sliding_window": false})), [(FULL, all())]);
    assert_eq!(case("qwen3_moe", json!({})), [(FULL, all())]);

    let from_three = json!({"use_sliding_window": true, "max_window_layers": 3});
    assert_eq!(case("qwen2", from_three.clone()), [(FULL, vec![0, 1, 2]), (WINDOW, vec![3])]);
    assert_eq!(case("qwen3", from_three), [(FULL, vec![0, 1, 2]), (WINDOW, vec![3])]);
    assert_eq!(case("gemma2", json!({})), [(FULL, vec![1, 3]), (WINDOW, vec![0, 2])]);
    assert_eq!(case("gpt_oss", json!({})), [(FULL, vec![1, 3]), (WINDOW, vec![0, 2])]);
    let pattern = json!({"sliding_window_pattern": 3});
    assert_eq!(case("gemma3_text", pattern), [(FULL, vec![2]), (WINDOW, vec![0, 1, 3])]);
    assert_eq!(case("gemma3_text", json!({})), [(WINDOW, all())]);

    let types = ["full_attention", "full_attention", "sliding_attention", "full_attention"];
    let types = json!({"layer_types": types});
    assert_eq!(case("gemma3_text", types), [(FULL, vec![0, 1, 3]), (WINDOW, vec![2])]);
}

#[test]
fn the_language_model_of_a_multimodal_one() {
    // As the published configuration of Gemma 3 4B: what equals the defaults is left out.
    let gemma = json!({
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
            "sliding_window": 1024
        },
        "vision_config": {"num_hidden_layers": 27}
    });
    let model = read(&gemma).unwrap();
    assert_eq!(model.model_type(), "gemma3_text");
    let group = &model.groups()[0];
    assert_eq!((group.heads(), group.head_dim(), group.layers().len()), (4, 256, 5));
    assert_eq!(group.layers(), [5, 11, 17, 23, 29]);
    assert_eq!(model.groups()[1].kind(), AttentionKind::Sliding { window: 1024 });

    // A field of the outer object is not the language model's.
    let missing = json!({
        "model_type": "llava", "torch_dtype": "float16", "num_hidden_layers": 3,
        "text_config": {"model_type": "llama"}
    });
    assert!(matches!(
        refused(&missing),
        ModelError::Missing { field, .. } if field == "text_config.num_hidden_layers"
    ));
    let nested = json!({"model_type": "llava", "text_config": {"model_type": "vicuna"}});
    assert!(refused(&nested).to_string().contains(r#"text_config.model_type is "vicuna""#));
}

#[test]
fn an_unsupported_model_names_the_field_and_what_is_supported() {
    let error = refused(&json!({"model_type": "mamba"}));
    let text = error.to_string();
    assert!(text.contains(r#"model_type is "mamba""#) && text.contains("deepseek_v3"), "{text}");
    assert!(SUPPORTED_MODEL_TYPES.is_sorted());
    assert!(SUPPORTED_MODEL_TYPES.iter().all(|name| text.contains(name)));
}

#[test]
fn fields_that_are_wrong_are_named_with_their_value() {
    let value = |fields: Value| match refused(&with(full(), &fields)) {
        ModelError::Value { field, value, expected } => (field, value, expected),
        other => panic!("{other}"),
    };
    for (wrong, shown) in [
        (json!(-1), "-1"),
        (json!(0), "0"),
        (json!(32.0), "32.0"),
        (json!(1e300), "1e+300"),
        (json!(u64::MAX), "18446744073709551615"),
        (json!("32"), "\"32\""),
        (json!([]), "[]"),
        (json!(LARGEST_LAYER_COUNT + 1), "4097"),
    ] {
        let (field, value, expected) = value(json!({"num_hidden_layers": wrong}));
        assert_eq!((field.as_str(), value.as_str()), ("num_hidden_layers", shown));
        assert_eq!(expected, Expected::Integer { least: 1, largest: LARGEST_LAYER_COUNT });
    }
    let (field, shown, _) = value(json!({"num_key_value_heads": "9".repeat(10_000)}));
    assert_eq!(field, "num_key_value_heads");
    assert!(shown.chars().count() <= 61, "{shown}");
    assert_eq!(value(json!({"text_config": 3})).2, Expected::Object);
    assert_eq!(value(json!({"torch_dtype": 3})).2, Expected::Text);
    assert!(matches!(value(json!({"model_type": 3})).2, Expected::OneOf(_)));
    assert!(matches!(value(json!({"model_type": null})).2, Expected::OneOf(_)));
    for types in [json!(["full_attention"]), json!(3), json!(["a", "b", "c", "d"])] {
        let (field, _, expected) = value(json!({"layer_types": types}));
        assert_eq!(field, "layer_types");
        assert!(matches!(expected, Expected::Layers { layers: 4, .. }));
    }
    let qwen = json!({"model_type": "qwen2", "use_sliding_window": "yes"});
    assert_eq!(value(qwen).2, Expected::Boolean);
}

#[test]
fn contradictions_name_both_fields() {
    let contradiction = |fields: Value| match refused(&with(full(), &fields)) {
        ModelError::Contradiction { first, second, .. } => (first, second),
        other => panic!("{other}"),
    };
    let names = |first: &str, second: &str| (first.to_owned(), second.to_owned());
    assert_eq!(
        contradiction(json!({"num_key_value_heads": 3})),
        names("num_key_value_heads", "num_attention_heads")
    );
    assert_eq!(
        contradiction(json!({"hidden_size": 65})),
        names("hidden_size", "num_attention_heads")
    );
    let types = json!({
        "model_type": "qwen2", "use_sliding_window": false, "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    });
    assert_eq!(contradiction(types), names("layer_types", "use_sliding_window"));
}

#[test]
fn what_a_family_needs_is_missed() {
    let missing = |fields: Value| match refused(&with(full(), &fields)) {
        ModelError::Missing { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_eq!(missing(json!({"num_hidden_layers": null})), "num_hidden_layers");
    assert_eq!(missing(json!({"hidden_size": null})), "hidden_size");
    assert_eq!(missing(json!({"model_type": "qwen3"})), "head_dim");
    assert_eq!(
        missing(json!({"model_type": "mistral", "num_key_value_heads": null})),
        "num_key_value_heads"
    );
    assert_eq!(missing(json!({"model_type": "gemma2", "head_dim": 8})), "sliding_window");
    assert_eq!(missing(json!({"model_type": "deepseek_v3"})), "kv_lora_rank");
    let window = json!({"model_type": "qwen2_moe", "use_sliding_window": true});
    assert_eq!(missing(window), "layer_types");
    let window = json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 8});
    assert_eq!(missing(window), "max_window_layers");
}

#[test]
fn no_json_at_all() {
    for text in
        ["", "null", "[]", "3", "{", "{\"model_type\": \"llama\"", "\u{0}", &"[".repeat(100_000)]
    {
        let error = ModelGeometry::from_json(text, &ModelOptions::new()).unwrap_err();
        let LayoutError::Model(error) = error else { panic!("{error}") };
        assert!(matches!(*error, ModelError::Json { .. }), "{error}");
    }
    assert!(ModelGeometry::from_json([0xff, 0xfe], &ModelOptions::new()).is_err());
}

/// Any value of JSON, and numbers at the ends of their ranges.
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

proptest! {
    #[test]
    fn no_configuration_panics(
        model_type in prop::sample::select(SUPPORTED_MODEL_TYPES.to_vec()),
        fields in prop::collection::vec((prop::sample::select(vec![
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "sliding_window", "layer_types", "sliding_window_pattern",
            "max_window_layers", "use_sliding_window", "kv_lora_rank", "qk_rope_head_dim",
            "torch_dtype", "dtype", "text_config",
        ]), values()), 0..6),
        ranks in 0..70_u32,
        num_blocks in any::<u32>(),
        page_size in any::<u32>(),
    ) {
        let base = json!({"model_type": model_type, "head_dim": 64, "kv_lora_rank": 9, "qk_rope_head_dim": 3});
        let mut config = with(full(), &base);
        for (name, value) in fields {
            config[name] = value;
        }
        let options = ModelOptions::new().tensor_parallel(ranks);
        if let Ok(model) = ModelGeometry::from_json(config.to_string(), &options) {
            prop_assert!(!model.groups().is_empty());
            let layers: usize = model.groups().iter().map(|group| group.layers().len()).sum();
            prop_assert_eq!(Some(layers as u64), config["num_hidden_layers"].as_u64()
                .or(config["text_config"]["num_hidden_layers"].as_u64()));
            if let Ok(configs) = model.layout_configs(num_blocks, page_size) {
                prop_assert_eq!(configs.len(), model.groups().len());
            }
        }
    }
}
