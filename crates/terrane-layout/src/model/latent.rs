//! Latents and the keys of indexers.

use serde_json::Value;

use super::error::ModelError;
use super::fields::Fields;
use super::limits::LARGEST_DIMENSION;

/// Elements of a latent: its compressed part and its rotary part.
pub(super) fn latent_dim(fields: &Fields<'_>) -> Result<u32, ModelError> {
    let latent = fields.integer("kv_lora_rank", 1, LARGEST_DIMENSION)?;
    let rotary = fields.integer("qk_rope_head_dim", 1, LARGEST_DIMENSION)?;
    Ok(latent + rotary)
}

/// Bytes of an indexer's row: one fp8 value per element, and a scale of four bytes for each 128. An
/// engine stores the values of a block before its scales; the size of the block is the same.
pub(super) fn indexer_row_bytes(fields: &Fields<'_>) -> Result<u32, ModelError> {
    let dim = fields.integer("index_head_dim", 1, LARGEST_DIMENSION)?;
    Ok(dim + 4 * dim.div_ceil(128))
}

/// The layers that select tokens, and so have an indexer. Each other layer uses the selection of an
/// earlier layer.
pub(super) fn indexer_layers(
    fields: &Fields<'_>,
    num_layers: u32,
    every: u32,
) -> Result<Vec<u32>, ModelError> {
    let of_types = |types: Vec<&str>, own: &str| {
        (0_u32..).zip(types).filter(|(_, each)| *each == own).map(|(layer, _)| layer).collect()
    };
    if let Some(types) = fields.layers("indexer_types", num_layers, &["full", "shared"])? {
        return Ok(of_types(types, "full"));
    }
    let name = "index_topk_pattern";
    let types = match fields.own(name) {
        Some(Value::String(text)) => Some(fields.letters(name, text, num_layers, &["F", "S"])?),
        _ => fields.layers(name, num_layers, &["F", "S"])?,
    };
    if let Some(types) = types {
        return Ok(of_types(types, "F"));
    }
    let every = fields.optional_integer("index_topk_freq", 1, u32::MAX)?.unwrap_or(every);
    let offset = fields.optional_integer("index_skip_topk_offset", 0, u32::MAX)?.unwrap_or(2);
    let selects = |layer: &u32| (layer + 1).saturating_sub(offset).is_multiple_of(every);
    Ok((0..num_layers).filter(selects).collect())
}
