//! Fields that imply a cache which the reader of a model type may not count.

use serde_json::Value;

use super::error::ModelError;
use super::fields::Fields;

/// Field names that change a model's caches, or prefixes of such names that end in `_`. A reader
/// refuses the fields that its [`Family::counts`](super::families::Family) does not list.
const GUARDED: &[&str] = &[
    // Sparse attention caches the keys for its selection, or compressed tokens.
    "index_",
    "indexer_",
    "sparse_",
    "compress_",
    // Attention within chunks, or with other heads in some layers.
    "attention_chunk_size",
    "global_head_dim",
    "num_global_",
    "swa_",
    "per_layer_config",
    "block_configs",
    "hybrid_",
    // Rows of another size: a latent, or V with its own heads.
    "kv_lora_rank",
    "use_mla",
    "v_head_dim",
    // Layers with a state.
    "full_attention_interval",
    "linear_",
    "layer_group_size",
    "layers_block_type",
    "attn_layer_",
    "attn_type_list",
    "full_attn_",
    "mamba_",
    "ssm_",
    "state_size",
    "conv_",
    // Layers that share a cache, or attend to an encoder.
    "num_kv_shared_layers",
    "use_cla",
    "cross_attention_layers",
    "add_cross_attention",
    "is_encoder_decoder",
];

/// Refuses a field that implies more or fewer caches than the reader of this model type counts.
pub(super) fn check(fields: &Fields<'_>) -> Result<(), ModelError> {
    for (name, value) in fields.entries() {
        let covers = |pattern: &&&str| {
            if pattern.ends_with('_') { name.starts_with(**pattern) } else { name == **pattern }
        };
        if GUARDED.iter().any(|pattern| covers(&pattern))
            && !fields.family.counts.iter().any(|pattern| covers(&pattern))
            && !is_nothing(value)
            && (name != "attn_type_list" || !is_attention_alone(value))
        {
            return Err(fields.uncounted(fields.path(name), value));
        }
    }
    Ok(())
}

/// Whether each layer of `attn_type_list` has full attention. Other layers have a state.
fn is_attention_alone(value: &Value) -> bool {
    value.as_array().is_some_and(|entries| entries.iter().all(|entry| entry.as_u64() == Some(1)))
}

/// Whether the value states that the cache does not exist.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(entries) => entries.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}
