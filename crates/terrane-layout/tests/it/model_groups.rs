//! Groups of every kind: of hybrids, of indexers, and from the caller's description.

use std::fs;

use serde_json::{Value, json};
use terrane_core::ByteCount;
use terrane_layout::model::{
    GroupKind, GroupSpec, LARGEST_LAYER_COUNT, ModelError, ModelGeometry, ModelOptions,
    supported_model_types,
};
use terrane_layout::{ElementFormat, LayoutError};

use super::model::{data, fixture, full, read, refused, with};

const WIDTH: ElementFormat = ElementFormat::Width(2);

#[test]
fn the_indexer_is_a_group_of_its_own_and_counts() {
    let model = read(&fixture("deepseek_v32-defaults.json")).unwrap();
    let [latent, indexer] = model.groups() else { panic!("{model:?}") };
    assert_eq!((latent.kind(), latent.head_dim()), (GroupKind::Latent, 576));
    assert_eq!(indexer.kind(), GroupKind::Indexer);
    assert_eq!(indexer.element(), ElementFormat::RowBytes(132));
    assert_eq!(indexer.row_bytes(), Some(ByteCount::new(132)));
    // 64 tokens: 64 rows of 128 fp8 values, and then 64 scales of 4 bytes.
    let block = indexer.layout_config(10, 64).unwrap();
    assert_eq!(block.piece_bytes(), ByteCount::new(64 * 128 + 64 * 4));
    assert_eq!(model.bytes_per_token().unwrap(), ByteCount::new(61 * (576 * 2 + 132)));

    // Latents in an engine's packed format do not change the indexer.
    let packed = ModelOptions::new().kv_element(ElementFormat::RowBytes(656));
    let config = fixture("deepseek_v32-defaults.json").to_string();
    let packed = ModelGeometry::from_json(config, &packed).unwrap();
    assert_eq!(packed.bytes_per_token().unwrap(), ByteCount::new(61 * (656 + 132)));
}

#[test]
fn indexers_that_layers_share_are_counted_once() {
    let base = with(
        fixture("glm_moe_dsa-defaults.json"),
        &json!({"num_hidden_layers": 6, "indexer_types": null}),
    );
    let layers = |fields: Value| {
        let model = read(&with(base.clone(), &fields)).unwrap();
        model.groups()[1].layers().to_vec()
    };
    assert_eq!(layers(json!({})), [0, 1, 2, 3, 4, 5]);
    assert_eq!(layers(json!({"index_topk_freq": 4})), [0, 1, 5]);
    assert_eq!(layers(json!({"index_topk_freq": 2, "index_skip_topk_offset": 0})), [1, 3, 5]);
    assert_eq!(layers(json!({"index_topk_pattern": "FSSFSS"})), [0, 3]);
    assert_eq!(layers(json!({"index_topk_pattern": ["F", "S", "S", "S", "S", "F"]})), [0, 5]);
    let types = ["full", "shared", "shared", "full", "shared", "shared"];
    assert_eq!(layers(json!({"indexer_types": types})), [0, 3]);
    for pattern in [json!("FSSFS"), json!("FSSFSX"), json!(["F"]), json!(3)] {
        let error = refused(&with(base.clone(), &json!({"index_topk_pattern": pattern})));
        assert!(error.to_string().starts_with("index_topk_pattern is"), "{error}");
    }
}

#[test]
fn unsupported_fields_are_refused_by_name() {
    let latent = fixture("deepseek-v3.json");
    let cases = [
        (latent.clone(), "index_head_dim", json!(128)),
        (latent, "compress_ratios", json!([1, 4])),
        (full(), "attention_chunk_size", json!(8192)),
        (full(), "full_attention_interval", json!(4)),
        (full(), "linear_num_value_heads", json!(32)),
        (full(), "linear_attn_config", json!({"num_heads": 4})),
        (full(), "kv_lora_rank", json!(512)),
        (full(), "v_head_dim", json!(128)),
        (full(), "mamba_d_state", json!(16)),
        (full(), "layers_block_type", json!(["mamba"])),
        (full(), "num_kv_shared_layers", json!(2)),
        (full(), "global_head_dim", json!(512)),
        (full(), "sparse_attention_config", json!({"a": 1})),
        (full(), "is_encoder_decoder", json!(true)),
    ];
    for (config, name, value) in cases {
        match refused(&with(config.clone(), &json!({ name: value }))) {
            ModelError::Uncounted { field, model_type, .. } => {
                assert_eq!(field, name);
                assert_eq!(config["model_type"], model_type);
            }
            other => panic!("{name}: {other}"),
        }
        // Fields that state no such cache are accepted.
        for nothing in [json!(null), json!(false), json!(0), json!([]), json!({}), json!("")] {
            read(&with(config.clone(), &json!({ name: nothing }))).unwrap();
        }
    }
    let text = refused(&json!({
        "model_type": "llava", "torch_dtype": "bfloat16",
        "text_config": with(full(), &json!({"index_topk": 2048}))
    }))
    .to_string();
    assert!(text.contains("text_config.index_topk is 2048") && text.contains("llama"), "{text}");
}

#[test]
fn a_dtype_is_assumed_only_where_the_type_is_known_to_have_it() {
    let gpt_oss = fixture("gpt-oss-20b.json");
    assert!(gpt_oss["torch_dtype"].is_null() && gpt_oss["dtype"].is_null());
    let model = read(&gpt_oss).unwrap();
    assert_eq!(model.bytes_per_token().unwrap(), ByteCount::new(24 * 2 * 8 * 64 * 2));
    let stated = read(&with(gpt_oss, &json!({"dtype": "float8_e4m3fn"}))).unwrap();
    assert_eq!(stated.bytes_per_token().unwrap(), ByteCount::new(24 * 2 * 8 * 64));
    for name in ["llama-3.1-8b.json", "deepseek-v3.json", "mamba-defaults.json"] {
        let error = refused(&with(fixture(name), &json!({"torch_dtype": null})));
        assert!(matches!(&error, ModelError::Missing { field, .. } if field == "torch_dtype"));
    }
}

#[test]
fn a_hybrid_has_states_and_attention() {
    let model = read(&fixture("qwen3_next-defaults.json")).unwrap();
    let [attention, state] = model.groups() else { panic!("{model:?}") };
    assert_eq!((attention.kind(), attention.layers().len()), (GroupKind::Attention, 12));
    assert_eq!(attention.layers()[..3], [3, 7, 11]);
    assert_eq!((state.kind(), state.layers().len()), (GroupKind::State, 36));
    assert_eq!((state.outer_dim(), state.heads(), state.row_bytes()), (1, 1, None));
    // A convolution of 3 taps over 8,192 channels; 32 heads of 128 by 128.
    let bytes = ByteCount::new((3 * 8192 + 32 * 128 * 128) * 2);
    assert_eq!(state.state_bytes(), Some(bytes));
    assert_eq!((attention.state_bytes(), attention.bytes_per_sequence().unwrap().get()), (None, 0));
    assert_eq!(state.bytes_per_token().unwrap().get(), 0);
    // A block has one state for each layer, whatever the page size of the tokens.
    let configs = model.layout_configs(10, 16).unwrap();
    assert_eq!((configs[0].page_size(), configs[1].page_size()), (16, 1));
    assert_eq!(configs[1].block_bytes().get(), 36 * bytes.get());

    let wide = ModelOptions::new().recurrent_width(4);
    let wide = ModelGeometry::from_json(fixture("qwen3_next-defaults.json").to_string(), &wide);
    let bytes = ByteCount::new(3 * 8192 * 2 + 32 * 128 * 128 * 4);
    assert_eq!(wide.unwrap().groups()[1].state_bytes(), Some(bytes));
    for width in [0, 9] {
        let options = ModelOptions::new().recurrent_width(width);
        let config = fixture("qwen3_next-defaults.json").to_string();
        let error = ModelGeometry::from_json(config, &options).unwrap_err().to_string();
        assert!(error.contains(&format!("recurrent_width is {width}")), "{error}");
    }
}

#[test]
fn a_layer_can_be_in_several_groups() {
    let model = read(&fixture("falcon_h1-defaults.json")).unwrap();
    assert!(model.groups().iter().all(|group| group.layers().len() == 32));
    let model = read(&fixture("zamba2-defaults.json")).unwrap();
    let layers: Vec<usize> = model.groups().iter().map(|group| group.layers().len()).collect();
    assert_eq!(layers, [9, 54]);
}

#[test]
fn layers_of_hybrids_as_each_family_states_them() {
    let states = |name: &str, fields: Value| {
        let model = read(&with(fixture(name), &fields)).unwrap();
        let group = model.groups().iter().find(|group| group.kind() == GroupKind::State);
        group.map_or(Vec::new(), |group| group.layers().to_vec())
    };
    let four = |fields: Value| with(json!({"num_hidden_layers": 4, "layer_types": null}), &fields);
    let next = "qwen3_next-defaults.json";
    assert_eq!(states(next, four(json!({"full_attention_interval": 2}))), [0, 2]);
    let types = ["linear_attention", "full_attention", "full_attention", "full_attention"];
    assert_eq!(states(next, four(json!({"layer_types": types}))), [0]);
    let jamba = json!({"attn_layer_period": 2, "attn_layer_offset": 0});
    assert_eq!(states("jamba-defaults.json", four(jamba)), [1, 3]);
    let letters = four(json!({"layers_block_type": null, "hybrid_override_pattern": "M*-M"}));
    assert_eq!(states("nemotron_h-defaults.json", letters), [0, 3]);
    let lists = json!({"linear_attn_config": {
        "full_attn_layers": [4], "kda_layers": [1, 2, 3],
        "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4
    }, "linear_num_heads": null, "linear_head_dim": null, "linear_conv_kernel_dim": null});
    assert_eq!(states("kimi_linear-defaults.json", four(lists)), [0, 1, 2]);
    let lfm2 = json!({
        "model_type": "lfm2", "conv_L_cache": 3, "conv_dim": 64, "full_attn_idxs": [1, 2]
    });
    let model = read(&with(full(), &lfm2)).unwrap();
    assert_eq!(model.groups()[1].layers(), [0, 3]);
    assert_eq!(model.groups()[1].state_bytes(), Some(ByteCount::new(2 * 64 * 2)));
    // A model with attention only, and a model with states only.
    let lfm2 = with(full(), &with(lfm2, &json!({"full_attn_idxs": [0, 1, 2, 3]})));
    assert_eq!(read(&lfm2).unwrap().groups().len(), 1);
}

#[test]
fn keys_and_values_of_unequal_size_share_a_row() {
    let mimo = with(
        full(),
        &json!({
            "model_type": "mimo_v2_flash", "head_dim": 192, "v_head_dim": 128,
            "swa_num_key_value_heads": 8, "swa_head_dim": 96, "swa_v_head_dim": 64,
            "hybrid_layer_pattern": [0, 1, 1, 0], "sliding_window_size": 128
        }),
    );
    let model = read(&mimo).unwrap();
    let [attention, sliding] = model.groups() else { panic!("{model:?}") };
    assert_eq!((attention.outer_dim(), attention.heads(), attention.head_dim()), (1, 4, 320));
    assert_eq!((sliding.outer_dim(), sliding.heads(), sliding.head_dim()), (1, 8, 160));
    assert_eq!(sliding.kind(), GroupKind::SlidingAttention { window: 128 });
    assert_eq!((attention.layers(), sliding.layers()), ([0, 3].as_slice(), [1, 2].as_slice()));
    let error = refused(&with(mimo.clone(), &json!({"hybrid_layer_pattern": null})));
    assert!(matches!(error, ModelError::Missing { .. }), "{error}");
    let error = refused(&with(mimo, &json!({"hybrid_layer_pattern": [0, 1, 2, 0]})));
    assert!(matches!(error, ModelError::Value { .. }), "{error}");
}

#[test]
fn layers_of_drafts_are_not_counted() {
    let types = ["full_attention", "sliding_attention", "full_attention"];
    let step = json!({
        "model_type": "step3p5", "num_attention_groups": 4, "num_key_value_heads": null,
        "head_dim": 8, "num_hidden_layers": 2, "sliding_window": 32, "layer_types": types
    });
    let error = refused(&with(full(), &step));
    assert!(matches!(error, ModelError::Value { .. }), "{error}");
    let step = with(step, &json!({"num_nextn_predict_layers": 1}));
    let model = read(&with(full(), &step)).unwrap();
    let layers: Vec<&[u32]> = model.groups().iter().map(|group| group.layers()).collect();
    assert_eq!(layers, [&[0], &[1]]);
}

#[test]
fn described_groups_are_as_read_ones() {
    let read = read(&fixture("falcon_h1-defaults.json")).unwrap();
    let groups = [
        GroupSpec::attention(0..32, 8, 128, WIDTH),
        GroupSpec::state(
            0..32,
            u32::try_from(read.groups()[1].state_bytes().unwrap().get()).unwrap(),
        ),
    ];
    let described = ModelGeometry::from_groups("falcon_h1", groups).unwrap();
    assert_eq!(described, read);
    assert_eq!(described.model_type(), "falcon_h1");

    let kind = GroupKind::SlidingAttention { window: 128 };
    let groups = [
        GroupSpec::latent([0, 1, 5], 576, WIDTH),
        GroupSpec::indexer([1], 132),
        // K of 192 elements and V of 128 in one row.
        GroupSpec::new(kind, [2, 3], 4, 192 + 128, WIDTH),
    ];
    let model = ModelGeometry::from_groups(String::from("mine"), groups).unwrap();
    let bytes = 3 * 576 * 2 + 132 + 2 * 4 * 320 * 2;
    assert_eq!(model.bytes_per_token().unwrap(), ByteCount::new(bytes));
    assert_eq!(model.groups()[2].kind(), kind);
    assert_eq!(model.groups()[2].layout_config(10, 16).unwrap().outer_dim(), 1);
}

#[test]
fn described_groups_that_cannot_be_are_refused() {
    let error = |groups: Vec<GroupSpec>| match ModelGeometry::from_groups("mine", groups) {
        Err(LayoutError::Model(error)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let good = || GroupSpec::attention(0..4, 2, 8, WIDTH);
    let many: Vec<GroupSpec> = (0..65).map(|layer| GroupSpec::state([layer], 1)).collect();
    let too_many = 0..=LARGEST_LAYER_COUNT;
    for (groups, said) in [
        (vec![], "0 groups; expected 1 to 64"),
        (many, "65 groups"),
        (vec![GroupSpec::latent([], 8, WIDTH)], "layers of group 0 is 0"),
        (vec![GroupSpec::latent(too_many, 8, WIDTH)], "layers of group 0 is 4097"),
        (vec![GroupSpec::latent(0.., 8, WIDTH)], "layers of group 0 is 4097"),
        (vec![good(), GroupSpec::latent([1, 1], 8, WIDTH)], "group 1 has layer 1 after layer 1"),
        (vec![GroupSpec::latent([2, 1], 8, WIDTH)], "layer 1 after layer 2"),
        (vec![GroupSpec::attention([0], 0, 8, WIDTH)], "heads of group 0 is 0"),
        (vec![GroupSpec::attention([0], 65_536, 8, WIDTH)], "heads of group 0 is 65536"),
        (vec![GroupSpec::attention([0], 2, 0, WIDTH)], "head_dim of group 0 is 0"),
        (vec![GroupSpec::attention([0], 2, 65_536, WIDTH)], "head_dim of group 0 is 65536"),
        (vec![GroupSpec::state([0], 0)], "head_dim of group 0 is 0"),
        (vec![GroupSpec::state([0], 1).outer_dim(2)], "outer_dim of a state of group 0 is 2"),
        (vec![good().outer_dim(3)], "outer_dim of group 0 is 3"),
        (vec![good().kind(GroupKind::SlidingAttention { window: 0 })], "window of group 0 is 0"),
        (vec![good().kind(GroupKind::ChunkedAttention { chunk: 0 })], "chunk of group 0 is 0"),
        (vec![good(), good()], "layer 0 is in group 0 and in group 1"),
    ] {
        let text = error(groups);
        assert!(text.contains(said), "{text}, not {said}");
    }
    for element in [ElementFormat::Width(0), ElementFormat::RowBytes(0), ElementFormat::MXFP4] {
        let group = GroupSpec::attention([0], 1, 8, element);
        ModelGeometry::from_groups("mine", [group]).unwrap_err();
    }
    // Layer numbers far above the largest count are accepted, and take no memory.
    let group = GroupSpec::state([0, u32::MAX], u32::MAX);
    assert!(ModelGeometry::from_groups("mine", [group]).unwrap().bytes_per_sequence().is_ok());
}

#[test]
fn every_type_that_vllm_serves_is_read_or_refused_for_a_reason() {
    let file = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(data().join(name)).unwrap()).unwrap()
    };
    let (served, other) = (file("served.json"), file("not_read.json"));
    let served = served["model_types"].as_object().unwrap();
    let other = other.as_object().unwrap();
    let is_read = |name: &str| supported_model_types().contains(&name);
    assert!(served.len() > 150);
    for model_type in served.keys() {
        let entry = other.get(model_type);
        assert!(is_read(model_type) != entry.is_some(), "{model_type}: {entry:?}");
        let Some(entry) = entry else { continue };
        let error = refused(&json!({"model_type": model_type}));
        assert!(matches!(error, ModelError::UnsupportedModel { .. }), "{model_type}: {error}");
        match entry["language_model"].as_str() {
            Some(inner) => assert!(is_read(inner), "{model_type}: {inner}"),
            None => assert!(entry["refused"].as_str().is_some_and(|reason| reason.len() > 10)),
        }
    }
    assert!(other.keys().all(|name| served.contains_key(name)));
}
