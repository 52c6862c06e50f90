//! The bytes of a layer's state on one rank, and the layers of hybrids.

use serde_json::Value;

use super::dtype;
use super::error::{Expected, ModelError};
use super::families::{Mamba2, Recurrent, State, StateLayers, StateShape};
use super::fields::{Fields, first};
use super::limits::{LARGEST_DIMENSION, LARGEST_LAYER_COUNT};

/// The largest number of rows of a recurrence that is accepted.
const LARGEST_INNER: u32 = 1 << 24;

const LINEAR: &[&str] = &["full_attention", "linear_attention"];

/// The caches of one layer of a hybrid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerCaches {
    pub tokens: bool,
    pub state: bool,
}

/// Elements of a state on one rank: of the convolution, and of the recurrence.
struct Elements {
    convolution: u64,
    recurrence: u64,
}

/// The bytes of one layer's state for one sequence, on one rank.
pub(super) fn bytes(
    fields: &Fields<'_>,
    state: &State,
    ranks: u32,
    recurrent_width: Option<u8>,
) -> Result<u32, ModelError> {
    let elements = match state.shape {
        StateShape::Mamba1 { inner, expand, size, conv } => {
            let inner_name = if inner.is_empty() { expand } else { inner };
            let inner = inner_rows(fields, inner, expand)?;
            let rows = share(fields, inner_name, inner.into(), ranks)?;
            let size = fields.integer(size, 1, LARGEST_DIMENSION)?;
            let taps = fields.integer(conv, 1, LARGEST_DIMENSION)? - 1;
            Elements { convolution: rows * u64::from(taps), recurrence: rows * u64::from(size) }
        }
        StateShape::Mamba2(names) => mamba2(fields, names, ranks)?,
        StateShape::DeltaNet => delta_net(fields, ranks)?,
        StateShape::Kda => kda(fields, ranks)?,
        StateShape::ShortConv { channels } => {
            let all = fields.integer(channels, 1, LARGEST_INNER)?;
            let rows = share(fields, channels, all.into(), ranks)?;
            let taps = fields.integer("conv_L_cache", 1, LARGEST_DIMENSION)? - 1;
            Elements { convolution: rows * u64::from(taps), recurrence: 0 }
        }
    };
    let model_width = dtype::model_width(fields)?;
    let recurrent_width = match (recurrent_width, state.recurrent) {
        (Some(width), _) => dtype::checked_width(width)?,
        (None, Recurrent::Model) => model_width,
        (None, Recurrent::FieldOrModel(field)) => {
            dtype::stated_width(fields, field)?.unwrap_or(model_width)
        }
        (None, Recurrent::FieldOrFloat32(field)) => {
            dtype::stated_width(fields, field)?.unwrap_or(4)
        }
    };
    // Factors are bounded: each product is below 2^53.
    let bytes = elements.convolution * u64::from(model_width)
        + elements.recurrence * u64::from(recurrent_width);
    match u32::try_from(bytes) {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(ModelError::StateBytes { bytes, model_type: fields.family.model_type }),
    }
}

/// Rows of a recurrence: from a field, or a multiple of the hidden size.
fn inner_rows(
    fields: &Fields<'_>,
    inner: &'static str,
    expand: &'static str,
) -> Result<u32, ModelError> {
    if !inner.is_empty()
        && let Some(stated) = fields.optional_integer(inner, 1, LARGEST_INNER)?
    {
        return Ok(stated);
    }
    let hidden = fields.one_integer(fields.family.names.hidden, 1, LARGEST_DIMENSION)?;
    let expand = fields.integer(expand, 1, 128)?;
    Ok(hidden * expand)
}

fn mamba2(fields: &Fields<'_>, names: &Mamba2, ranks: u32) -> Result<Elements, ModelError> {
    let heads = fields.integer(names.heads, 1, LARGEST_DIMENSION)?;
    let size = fields.integer(names.size, 1, LARGEST_DIMENSION)?;
    let groups = fields.one_integer(names.groups, 1, LARGEST_DIMENSION)?;
    let taps = fields.one_integer(names.conv, 1, LARGEST_DIMENSION)? - 1;
    // Some configurations state "auto" for the quotient.
    let is_auto = fields.own(names.head_dim).and_then(Value::as_str) == Some("auto");
    let stated = if is_auto {
        None
    } else {
        fields.optional_integer(names.head_dim, 1, LARGEST_DIMENSION)?
    };
    let has_inner = !names.expand.is_empty()
        && (fields.own(names.expand).is_some() || fields.own(names.inner).is_some());
    let head_dim = match stated {
        Some(head_dim) if !has_inner => head_dim,
        _ if names.expand.is_empty() => return Err(fields.missing(names.head_dim)),
        _ => {
            let inner = inner_rows(fields, names.inner, names.expand)?;
            let head_dim = inner / heads;
            if !inner.is_multiple_of(heads) || stated.is_some_and(|stated| stated != head_dim) {
                return Err(fields.contradiction(
                    (names.heads, heads.to_string()),
                    (names.expand, format!("{inner} rows")),
                    "the rows must be heads times head dimension",
                ));
            }
            head_dim
        }
    };
    let rows = u64::from(heads) * u64::from(head_dim);
    // Each rank has at least one group.
    let group_name = first(names.groups);
    let heads_here = share(fields, names.heads, heads.into(), ranks)?;
    let groups = groups.max(ranks);
    share(fields, group_name, groups.into(), ranks)?;
    let channels = rows + 2 * u64::from(groups) * u64::from(size);
    let channels_here = share(fields, names.heads, channels, ranks)?;
    Ok(Elements {
        convolution: channels_here * u64::from(taps),
        recurrence: recurrence(heads_here, head_dim, size),
    })
}

fn delta_net(fields: &Fields<'_>, ranks: u32) -> Result<Elements, ModelError> {
    let integer = |name| fields.integer(name, 1, LARGEST_DIMENSION);
    let (key_heads, value_heads) =
        (integer("linear_num_key_heads")?, integer("linear_num_value_heads")?);
    let (key_dim, value_dim) = (integer("linear_key_head_dim")?, integer("linear_value_head_dim")?);
    let taps = integer("linear_conv_kernel_dim")? - 1;
    let keys_here = share(fields, "linear_num_key_heads", key_heads.into(), ranks)?;
    let values_here = share(fields, "linear_num_value_heads", value_heads.into(), ranks)?;
    let channels = 2 * keys_here * u64::from(key_dim) + values_here * u64::from(value_dim);
    Ok(Elements {
        convolution: channels * u64::from(taps),
        recurrence: recurrence(values_here, value_dim, key_dim),
    })
}

fn kda(fields: &Fields<'_>, ranks: u32) -> Result<Elements, ModelError> {
    // Published configurations have an inner object; those of `transformers` 5 have none.
    let integer = |names: [&'static str; 2]| fields.one_integer(&names, 1, LARGEST_DIMENSION);
    let heads = integer(["linear_attn_config.num_heads", "linear_num_heads"])?;
    let head_dim = integer(["linear_attn_config.head_dim", "linear_head_dim"])?;
    let taps =
        integer(["linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim"])? - 1;
    let heads_here = share(fields, "linear_attn_config.num_heads", heads.into(), ranks)?;
    let channels = 3 * heads_here * u64::from(head_dim);
    Ok(Elements {
        convolution: channels * u64::from(taps),
        recurrence: recurrence(heads_here, head_dim, head_dim),
    })
}

/// All three factors are below 2^16, except the heads, which are below 2^17.
fn recurrence(heads: u64, rows: u32, columns: u32) -> u64 {
    heads * u64::from(rows) * u64::from(columns)
}

/// The share of one rank.
fn share(fields: &Fields<'_>, name: &str, all: u64, ranks: u32) -> Result<u64, ModelError> {
    let is_whole = all.is_multiple_of(u64::from(ranks));
    is_whole.then_some(all / u64::from(ranks)).ok_or_else(|| fields.indivisible(name, all, ranks))
}

/// The number of layers, if only their list states it.
pub(super) fn listed_layers(fields: &Fields<'_>, layers: StateLayers) -> Result<u32, ModelError> {
    let names = fields.family.names.layers;
    let name = "layers_block_type";
    let list = if let StateLayers::Letters = layers { fields.list(name)? } else { None };
    let count = list.and_then(|list| u32::try_from(list.len()).ok());
    match (count, list) {
        (Some(count), _) if (1..=LARGEST_LAYER_COUNT).contains(&count) => Ok(count),
        (_, Some(_)) => {
            let expected = Expected::Integer { least: 1, largest: LARGEST_LAYER_COUNT };
            let count = Value::from(count.unwrap_or(u32::MAX));
            Err(fields.unexpected("the length of layers_block_type", &count, expected))
        }
        _ => Err(fields.missing(first(names))),
    }
}

/// The caches of each layer.
pub(super) fn layers(
    fields: &Fields<'_>,
    layers: StateLayers,
    has_tokens: bool,
    num_layers: u32,
) -> Result<Vec<LayerCaches>, ModelError> {
    let only = |tokens: bool| LayerCaches { tokens, state: !tokens };
    match layers {
        StateLayers::All => {
            Ok((0..num_layers).map(|_| LayerCaches { tokens: has_tokens, state: true }).collect())
        }
        StateLayers::Typed { field, of } => {
            let types = fields.layers(field, num_layers, of)?;
            types.ok_or_else(|| fields.missing(field)).map(of_types)
        }
        StateLayers::Interval(unstated) => {
            if let Some(types) = fields.layers("layer_types", num_layers, LINEAR)? {
                return Ok(of_types(types));
            }
            let stated = fields.optional_integer("full_attention_interval", 1, u32::MAX)?;
            let of = stated.unwrap_or(unstated);
            Ok((0..num_layers).map(|layer| only((layer + 1).is_multiple_of(of))).collect())
        }
        StateLayers::Indices => {
            if let Some(types) =
                fields.layers("layer_types", num_layers, &["full_attention", "conv"])?
            {
                return Ok(of_types(types));
            }
            let name = "full_attn_idxs";
            let full = fields.integers(name, num_layers, num_layers.saturating_sub(1))?;
            let full = full.ok_or_else(|| fields.missing(name))?;
            Ok((0..num_layers).map(|layer| only(full.contains(&layer))).collect())
        }
        StateLayers::Period => {
            let period = fields.integer("attn_layer_period", 1, u32::MAX)?;
            let offset = fields.integer("attn_layer_offset", 0, period - 1)?;
            Ok((0..num_layers).map(|layer| only(layer % period == offset)).collect())
        }
        StateLayers::Letters => letters(fields, num_layers),
        StateLayers::Lists => lists(fields, num_layers),
    }
}

fn of_types(types: Vec<&'static str>) -> Vec<LayerCaches> {
    types
        .into_iter()
        .map(|each| LayerCaches {
            tokens: matches!(each, "attention" | "full_attention" | "hybrid" | "*"),
            state: matches!(each, "mamba" | "linear_attention" | "conv" | "hybrid" | "M"),
        })
        .collect()
}

/// Nemotron H: a list, or one letter per layer.
fn letters(fields: &Fields<'_>, num_layers: u32) -> Result<Vec<LayerCaches>, ModelError> {
    const BLOCKS: &[&str] =
        &["attention", "full_attention", "mamba", "linear_attention", "mlp", "moe"];
    const LETTERS: &[&str] = &["M", "*", "-", "E"];
    if let Some(types) = fields.layers("layers_block_type", num_layers, BLOCKS)? {
        return Ok(of_types(types));
    }
    let name = "hybrid_override_pattern";
    let text = fields.text(name)?.ok_or_else(|| fields.missing(name))?;
    fields.letters(name, text, num_layers, LETTERS).map(of_types)
}

/// Kimi Linear: lists of the layers of both kinds, counted from 1. Each layer is in exactly one
/// list.
fn lists(fields: &Fields<'_>, num_layers: u32) -> Result<Vec<LayerCaches>, ModelError> {
    if let Some(types) = fields.layers("layer_types", num_layers, LINEAR)? {
        return Ok(of_types(types));
    }
    let (full_name, state_name) =
        ("linear_attn_config.full_attn_layers", "linear_attn_config.kda_layers");
    let list = |name| {
        let stated = fields.integers(name, num_layers, num_layers)?;
        stated.ok_or_else(|| fields.missing(name))
    };
    let (full, state) = (list(full_name)?, list(state_name)?);
    (1..=num_layers)
        .map(|layer| {
            let caches =
                LayerCaches { tokens: full.contains(&layer), state: state.contains(&layer) };
            if caches.tokens == caches.state {
                return Err(fields.contradiction(
                    (full_name, format!("{} layers", full.len())),
                    (state_name, format!("{} layers", state.len())),
                    "each layer must be in exactly one of them",
                ));
            }
            Ok(caches)
        })
        .collect()
}
