//! From the fields of a configuration to the groups of its layers.

use serde_json::{Map, Value};

use super::error::{Expected, ModelError};
use super::families::{Cache, HeadDim, KvHeads, Windows};
use super::fields::{Fields, cut};
use super::{AttentionKind, CacheGroup, ModelGeometry, ModelOptions};
use crate::{ElementFormat, LayoutError};

/// The most layers that a configuration may state: some thirty times as many as the deepest
/// published models have (126), so that a hostile number allocates nothing large.
pub const LARGEST_LAYER_COUNT: u32 = 4096;

/// The most heads and elements of a head that a configuration may state, so that their product
/// fits in 32 bits: 512 times the largest published ones (128 heads; heads of 512).
const LARGEST_DIMENSION: u32 = (1 << 16) - 1;

const LAYER_TYPES: &[&str] = &["full_attention", "sliding_attention"];

/// The dtypes of models that have one width an element, as `torch` names them.
const DTYPES: &[&str] =
    &["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "half", "float"];

pub(crate) fn read(json: &[u8], options: &ModelOptions) -> Result<ModelGeometry, LayoutError> {
    if options.tensor_parallel == 0 {
        return Err(ModelError::NoRanks.into());
    }
    let root: Map<String, Value> =
        serde_json::from_slice(json).map_err(|source| ModelError::Json { source })?;
    let fields = Fields::new(&root)?;
    let element = match options.kv_element {
        Some(element) => element,
        None => stated_element(&fields)?,
    };
    let num_layers = fields.integer("num_hidden_layers", 1, LARGEST_LAYER_COUNT)?;
    let (heads, head_dim, outer_dim, kinds) = match fields.family.cache {
        Cache::Latent => {
            let latent = fields.integer("kv_lora_rank", 1, LARGEST_DIMENSION)?;
            let rotary = fields.integer("qk_rope_head_dim", 1, LARGEST_DIMENSION)?;
            let full = (0..num_layers).map(|_| AttentionKind::Full).collect();
            (1, latent + rotary, 1, full)
        }
        Cache::Heads { kv_heads, head_dim, windows } => {
            let all = kv_head_count(&fields, kv_heads)?;
            let heads = heads_of_rank(all, options.tensor_parallel)?;
            let kinds = attention_kinds(&fields, windows, num_layers)?;
            (heads, head_dimension(&fields, head_dim)?, 2, kinds)
        }
    };
    // Both factors are below 2^16, or one of them is 1.
    let inner_dim = heads * head_dim;
    let row_bytes = element.row_bytes(inner_dim)?;

    let mut distinct = kinds.clone();
    distinct.sort_unstable();
    distinct.dedup();
    let group = |kind: AttentionKind| CacheGroup {
        kind,
        layers: (0_u32..).zip(&kinds).filter(|(_, k)| **k == kind).map(|(n, _)| n).collect(),
        heads,
        head_dim,
        inner_dim,
        outer_dim,
        element,
        row_bytes,
    };
    let groups = distinct.into_iter().map(group).collect();
    Ok(ModelGeometry { model_type: fields.family.model_type, groups })
}

/// The dtype of the model, which is that of its cache unless the caller says otherwise. Newer
/// configurations call it `dtype`, older ones `torch_dtype`.
fn stated_element(fields: &Fields<'_>) -> Result<ElementFormat, ModelError> {
    let (old, new) = (fields.inherited_text("torch_dtype")?, fields.inherited_text("dtype")?);
    if let (Some((old_name, old)), Some((new_name, new))) = (&old, &new)
        && old != new
    {
        return Err(ModelError::Contradiction {
            first: old_name.clone(),
            first_value: cut(old),
            second: new_name.clone(),
            second_value: cut(new),
            rule: "they are two names of one field",
        });
    }
    let (field, dtype) = old.or(new).ok_or_else(|| fields.missing("torch_dtype"))?;
    Ok(ElementFormat::Width(match dtype {
        "bfloat16" | "float16" | "half" => 2,
        "float32" | "float" => 4,
        "float8_e4m3fn" | "float8_e5m2" => 1,
        other => {
            let (value, expected) = (cut(other), Expected::OneOf(DTYPES));
            return Err(ModelError::Value { field, value, expected });
        }
    }))
}

fn kv_head_count(fields: &Fields<'_>, unstated: KvHeads) -> Result<u32, ModelError> {
    let all = fields.optional_integer("num_attention_heads", 1, LARGEST_DIMENSION)?;
    let stated = fields.optional_integer("num_key_value_heads", 1, LARGEST_DIMENSION)?;
    let heads = match (stated, unstated) {
        (Some(heads), _) | (None, KvHeads::Or(heads)) => heads,
        (None, KvHeads::OrAllHeads) => {
            return all.ok_or_else(|| fields.missing("num_attention_heads"));
        }
        (None, KvHeads::Stated) => return Err(fields.missing("num_key_value_heads")),
    };
    match all {
        Some(all) if !all.is_multiple_of(heads) => Err(fields.contradiction(
            ("num_key_value_heads", heads.to_string()),
            ("num_attention_heads", all.to_string()),
            "it has to divide the attention heads",
        )),
        _ => Ok(heads),
    }
}

/// KV heads on each rank: a share of them, or one that several ranks hold alike.
fn heads_of_rank(heads: u32, tensor_parallel: u32) -> Result<u32, ModelError> {
    if heads.is_multiple_of(tensor_parallel) {
        Ok(heads / tensor_parallel)
    } else if tensor_parallel.is_multiple_of(heads) {
        Ok(1)
    } else {
        Err(ModelError::IndivisibleHeads { heads, tensor_parallel })
    }
}

fn head_dimension(fields: &Fields<'_>, unstated: HeadDim) -> Result<u32, ModelError> {
    if let Some(stated) = fields.optional_integer("head_dim", 1, LARGEST_DIMENSION)? {
        return Ok(stated);
    }
    match unstated {
        HeadDim::Stated => Err(fields.missing("head_dim")),
        HeadDim::Or(dimension) => Ok(dimension),
        HeadDim::OrHiddenPerHead => {
            let hidden = fields.integer("hidden_size", 1, u32::MAX)?;
            let heads = fields.integer("num_attention_heads", 1, LARGEST_DIMENSION)?;
            let divides = hidden.is_multiple_of(heads) && hidden / heads <= LARGEST_DIMENSION;
            divides.then_some(hidden / heads).ok_or_else(|| {
                fields.contradiction(
                    ("hidden_size", hidden.to_string()),
                    ("num_attention_heads", heads.to_string()),
                    "the heads have to divide it into at most 65535, or head_dim be stated",
                )
            })
        }
    }
}

/// The kind of each layer.
fn attention_kinds(
    fields: &Fields<'_>,
    windows: Windows,
    num_layers: u32,
) -> Result<Vec<AttentionKind>, ModelError> {
    let types = fields.layers("layer_types", num_layers, LAYER_TYPES)?;
    if types.is_none() && matches!(windows, Windows::Never) {
        return Ok((0..num_layers).map(|_| AttentionKind::Full).collect());
    }
    let window = fields.optional_integer("sliding_window", 1, u32::MAX)?;
    let sliding = |is_sliding: bool| match (is_sliding, window) {
        (false, _) => Ok(AttentionKind::Full),
        (true, Some(window)) => Ok(AttentionKind::Sliding { window }),
        (true, None) => Err(fields.missing("sliding_window")),
    };
    let switched = matches!(windows, Windows::FromLayer | Windows::LayerTypesOnly);
    let switched_on = !switched || fields.flag("use_sliding_window")?;

    if let Some(types) = types {
        let any = types.iter().any(|&position| position > 0);
        if any && !switched_on {
            return Err(fields.contradiction(
                ("layer_types", "sliding_attention in some layers".to_owned()),
                ("use_sliding_window", "false".to_owned()),
                "one of them is wrong",
            ));
        }
        return types.into_iter().map(|position| sliding(position > 0)).collect();
    }
    let first_sliding = match windows {
        Windows::Never => num_layers,
        Windows::All => window.map_or(num_layers, |_| 0),
        Windows::FromLayer | Windows::LayerTypesOnly if !switched_on => num_layers,
        Windows::FromLayer => fields.integer("max_window_layers", 0, u32::MAX)?,
        Windows::LayerTypesOnly => return Err(fields.missing("layer_types")),
        Windows::Pattern(default) => {
            let stated = fields.optional_integer("sliding_window_pattern", 1, u32::MAX)?;
            let hidden = fields.optional_integer("_sliding_window_pattern", 1, u32::MAX)?;
            let pattern = stated.or(hidden).unwrap_or(default);
            return (0..num_layers)
                .map(|layer| sliding(!(layer + 1).is_multiple_of(pattern)))
                .collect();
        }
    };
    (0..num_layers).map(|layer| sliding(layer >= first_sliding)).collect()
}
