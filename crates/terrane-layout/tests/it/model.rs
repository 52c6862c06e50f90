//! Configurations of published models, and hostile ones.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use terrane_core::ByteCount;
use terrane_layout::model::{
    CacheGroup, Expected, GroupKind, LARGEST_LAYER_COUNT, ModelError, ModelGeometry, ModelOptions,
    supported_model_types,
};
use terrane_layout::{ElementFormat, LayoutError};

pub fn data() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

/// The folder of the published models. They are in the planner's crate, which is above this one.
pub fn models() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../terrane-plan/src/data/models")
}

pub fn fixture(name: &str) -> Value {
    let path = models().join(name);
    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap()
}

pub fn read(config: &Value) -> Result<ModelGeometry, LayoutError> {
    ModelGeometry::from_json(config.to_string(), &ModelOptions::new())
}

pub fn refused(config: &Value) -> ModelError {
    match read(config) {
        Err(LayoutError::Model(error)) => *error,
        other => panic!("{other:?}"),
    }
}

pub fn full() -> Value {
    json!({
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    })
}

/// The configuration with these fields replaced; `null` removes a field.
pub fn with(mut config: Value, fields: &Value) -> Value {
    for (name, value) in fields.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

/// The kind of a group in `expected.json`, with its window or chunk.
fn expected_kind(group: &Value) -> GroupKind {
    let tokens = || u32::try_from(group["tokens"].as_u64().unwrap()).unwrap();
    match group["kind"].as_str().unwrap() {
        "attention" => GroupKind::Attention,
        "sliding" => GroupKind::SlidingAttention { window: tokens() },
        "chunked" => GroupKind::ChunkedAttention { chunk: tokens() },
        "latent" => GroupKind::Latent,
        "indexer" => GroupKind::Indexer,
        "state" => GroupKind::State,
        other => panic!("{other}"),
    }
}

#[test]
fn published_models_have_their_published_sizes() {
    let text = fs::read(data().join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&text).unwrap();
    let expected = expected.as_object().unwrap();
    let files = fs::read_dir(models()).unwrap().count();
    assert_eq!(files, expected.len());
    assert!(files >= 30);
    for (name, cases) in expected {
        let config = fixture(&format!("{name}.json"));
        assert!(config["source"].is_string() && config["date"].is_string(), "{name}");
        for (ranks, groups) in cases.as_object().unwrap() {
            let case = format!("{name} on {ranks} ranks");
            let options = ModelOptions::new().tensor_parallel(ranks.parse().unwrap());
            let model = ModelGeometry::from_json(config.to_string(), &options);
            if groups.is_null() {
                let text = model.unwrap_err().to_string();
                assert!(text.contains("cannot be divided"), "{case}: {text}");
                continue;
            }
            let (model, groups) = (model.unwrap(), groups.as_array().unwrap());
            assert_eq!(model.groups().len(), groups.len(), "{case}");
            for (group, figures) in model.groups().iter().zip(groups) {
                assert_eq!(group.kind(), expected_kind(figures), "{case}");
                assert_eq!(Some(group.layers().len() as u64), figures["layers"].as_u64());
                assert_eq!(Some(u64::from(group.layers()[0])), figures["first"].as_u64());
                let token = group.bytes_per_token().unwrap().get();
                assert_eq!(token, figures["bytes_per_token"].as_u64().unwrap_or(0), "{case}");
                let sequence = group.bytes_per_sequence().unwrap().get();
                let expected = figures["bytes_per_sequence"].as_u64().unwrap_or(0);
                assert_eq!(sequence, expected, "{case}");
                // A block of 64 tokens, or of one state.
                let layout = group.layout_config(10, 64).unwrap();
                assert_eq!(layout.block_bytes().get(), 64 * token + sequence, "{case}");
            }
        }
    }
}

#[test]
fn the_expected_sizes_are_what_their_script_prints() {
    let test = "the_expected_sizes_are_what_their_script_prints";
    let script = data().join("expected_bytes.py");
    let output = match Command::new("python3").arg("-B").arg(script).output() {
        Ok(output) => output,
        Err(error) => return eprintln!("skipped: {test}: no python3: {error}"),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout == fs::read(data().join("expected.json")).unwrap(), "run the script");
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
        let config = model.groups()[0].layout_config(10, 16).unwrap();
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
    let new = json!({"torch_dtype": null, "dtype": "float8_e5m2"});
    assert_eq!(width(new).unwrap(), ElementFormat::Width(1));
    let both = json!({"dtype": "float16"}); // beside bfloat16
    assert!(width(both).unwrap_err().to_string().contains("both name one field"));
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

fn kinds(config: &Value) -> Vec<(GroupKind, Vec<u32>)> {
    let groups = |group: &CacheGroup| (group.kind(), group.layers().to_vec());
    read(config).unwrap().groups().iter().map(groups).collect()
}

#[test]
fn windows_as_each_family_states_them() {
    const WINDOW: GroupKind = GroupKind::SlidingAttention { window: 32 };
    const FULL: GroupKind = GroupKind::Attention;
    let case = |model_type: &str, fields: Value| {
        let base = json!({"model_type": model_type, "head_dim": 8, "sliding_window": 32});
        kinds(&with(with(full(), &base), &fields))
    };
    let all = || vec![0, 1, 2, 3];

    // A window without effect, a window of all layers, and a window that is switched off.
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
    // The published configuration of Gemma 3 4B, which omits fields that equal the defaults.
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
    assert_eq!(model.groups()[1].kind(), GroupKind::SlidingAttention { window: 1024 });

    // A field of the outer object is not a field of the language model.
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
    let error = refused(&json!({"model_type": "rwkv"}));
    let text = error.to_string();
    assert!(text.contains(r#"model_type is "rwkv""#) && text.contains("deepseek_v3"), "{text}");
    assert!(supported_model_types().is_sorted());
    assert!(supported_model_types().iter().all(|name| text.contains(name)));
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
fn missing_fields_of_a_family_are_refused() {
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
