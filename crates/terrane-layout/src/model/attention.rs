//! Heads, their size and their windows.

use serde_json::Value;

use super::error::{Expected, ModelError};
use super::families::{Attention, HeadDim, KvHeads, Variant, Windows};
use super::fields::{Fields, first};
use super::group::GroupKind;
use super::limits::LARGEST_DIMENSION;

const LAYER_TYPES: &[&str] = &["full_attention", "sliding_attention"];
const CHUNKED_TYPES: &[&str] = &["full_attention", "chunked_attention"];

/// KV heads on one rank, and elements of each in K and in V.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub count: u32,
    pub dim: u32,
    pub value_dim: u32,
}

/// The heads of layers with full attention, and the heads of other layers.
pub(super) fn heads(
    fields: &Fields<'_>,
    attention: &Attention,
    ranks: u32,
) -> Result<(Heads, Heads), ModelError> {
    let names = fields.family.names;
    let field = first(names.kv_heads);
    let all = kv_head_count(fields, attention.kv_heads)?;
    let dim = head_dimension(fields, attention.head_dim)?;
    let count = heads_of_rank(fields, field, all, ranks)?;
    let plain = Heads { count, dim, value_dim: dim };
    match attention.variant {
        Variant::None | Variant::Shared => Ok((plain, plain)),
        Variant::SharedAndGlobal => {
            let dim = fields.integer("global_head_dim", 1, LARGEST_DIMENSION)?;
            let name = "num_global_key_value_heads";
            let stated = fields.optional_integer(name, 1, LARGEST_DIMENSION)?;
            let count = match stated {
                Some(all) if fields.flag("attention_k_eq_v")? => {
                    heads_of_rank(fields, name, all, ranks)?
                }
                _ => count,
            };
            Ok((Heads { count, dim, value_dim: dim }, plain))
        }
        Variant::Unequal => {
            let integer = |name| fields.integer(name, 1, LARGEST_DIMENSION);
            let name = "swa_num_key_value_heads";
            let sliding = Heads {
                count: heads_of_rank(fields, name, integer(name)?, ranks)?,
                dim: integer("swa_head_dim")?,
                value_dim: integer("swa_v_head_dim")?,
            };
            Ok((Heads { value_dim: integer("v_head_dim")?, ..plain }, sliding))
        }
    }
}

/// The number of layers, from the first on, with their own caches.
pub(super) fn cached_layers(
    fields: &Fields<'_>,
    attention: &Attention,
    num_layers: u32,
) -> Result<u32, ModelError> {
    if matches!(attention.variant, Variant::None | Variant::Unequal) {
        return Ok(num_layers);
    }
    // At least one layer must own a cache that others share.
    let shared = fields.integer("num_kv_shared_layers", 0, num_layers.saturating_sub(1))?;
    Ok(num_layers.saturating_sub(shared))
}

fn kv_head_count(fields: &Fields<'_>, unstated: KvHeads) -> Result<u32, ModelError> {
    let names = fields.family.names;
    let all = fields.any_integer(names.heads, 1, LARGEST_DIMENSION)?;
    let all_heads = || all.map_or_else(|| fields.one_integer(names.heads, 1, 1), Ok);
    let stated = || fields.any_integer(names.kv_heads, 1, LARGEST_DIMENSION);
    let heads = match unstated {
        KvHeads::All => return all_heads(),
        KvHeads::Stated => fields.one_integer(names.kv_heads, 1, LARGEST_DIMENSION)?,
        KvHeads::Or(heads) => stated()?.unwrap_or(heads),
        KvHeads::OrAllHeads => match stated()? {
            Some(heads) => heads,
            None => return all_heads(),
        },
        KvHeads::Flags { grouped, single } => {
            let (is_grouped, is_single) =
                (fields.optional_flag(grouped)?, fields.optional_flag(single)?);
            match (is_grouped, is_single) {
                (None, None) => {
                    let name = if single.is_empty() { grouped } else { single };
                    return Err(fields.missing(name));
                }
                (Some(true), _) => fields.one_integer(names.kv_heads, 1, LARGEST_DIMENSION)?,
                (_, Some(true)) => 1,
                _ => return all_heads(),
            }
        }
    };
    match all {
        Some(all) if !all.is_multiple_of(heads) => Err(fields.contradiction(
            (first(names.kv_heads), heads.to_string()),
            (first(names.heads), all.to_string()),
            "it must divide the attention heads",
        )),
        _ => Ok(heads),
    }
}

/// The KV heads of each rank: a share of all heads, or one head that several ranks replicate.
fn heads_of_rank(
    fields: &Fields<'_>,
    field: &str,
    heads: u32,
    ranks: u32,
) -> Result<u32, ModelError> {
    if heads.is_multiple_of(ranks) {
        Ok(heads / ranks)
    } else if ranks.is_multiple_of(heads) {
        Ok(1)
    } else {
        Err(fields.indivisible(field, heads.into(), ranks))
    }
}

fn head_dimension(fields: &Fields<'_>, unstated: HeadDim) -> Result<u32, ModelError> {
    let names = fields.family.names;
    if let HeadDim::NopeAndRope = unstated {
        let nope = fields.integer("qk_nope_head_dim", 0, LARGEST_DIMENSION / 2)?;
        return Ok(nope + fields.integer("qk_rope_head_dim", 1, LARGEST_DIMENSION / 2)?);
    }
    if let Some(stated) = fields.any_integer(names.head_dim, 1, LARGEST_DIMENSION)? {
        return Ok(stated);
    }
    match unstated {
        HeadDim::Or(dimension) => Ok(dimension),
        HeadDim::OrHiddenPerHead => {
            let hidden = fields.one_integer(names.hidden, 1, u32::MAX)?;
            let heads = fields.one_integer(names.heads, 1, LARGEST_DIMENSION)?;
            let divides = hidden.is_multiple_of(heads) && hidden / heads <= LARGEST_DIMENSION;
            divides.then_some(hidden / heads).ok_or_else(|| {
                fields.contradiction(
                    (first(names.hidden), hidden.to_string()),
                    (first(names.heads), heads.to_string()),
                    "the heads must divide it into at most 65535; otherwise state head_dim",
                )
            })
        }
        HeadDim::Stated | HeadDim::NopeAndRope => Err(fields.missing(first(names.head_dim))),
    }
}

/// The kind of each layer.
pub(super) fn kinds(
    fields: &Fields<'_>,
    windows: Windows,
    num_layers: u32,
) -> Result<Vec<GroupKind>, ModelError> {
    match windows {
        Windows::Chunks => return chunks(fields, num_layers),
        Windows::Numbered { field, window } => return numbered(fields, field, window, num_layers),
        _ => {}
    }
    let types = fields.layers("layer_types", num_layers, LAYER_TYPES)?;
    if types.is_none() && matches!(windows, Windows::Never) {
        return Ok((0..num_layers).map(|_| GroupKind::Attention).collect());
    }
    let window = || fields.optional_integer("sliding_window", 1, u32::MAX);
    // If no layer has a window, the window may have any value.
    let sliding = |is_sliding: bool| match is_sliding {
        false => Ok(GroupKind::Attention),
        true => match window()? {
            Some(window) => Ok(GroupKind::SlidingAttention { window }),
            None => Err(fields.missing("sliding_window")),
        },
    };
    let switched = matches!(windows, Windows::FromLayer | Windows::LayerTypesOnly);
    let switched_on = !switched || fields.flag("use_sliding_window")?;

    if let Some(types) = types {
        let any = types.contains(&"sliding_attention");
        if any && !switched_on {
            return Err(fields.contradiction(
                ("layer_types", "sliding_attention in some layers".to_owned()),
                ("use_sliding_window", "false".to_owned()),
                "correct one of them",
            ));
        }
        return types.into_iter().map(|kind| sliding(kind == "sliding_attention")).collect();
    }
    let each = |is_sliding: &dyn Fn(u32) -> bool| {
        (0..num_layers).map(|layer| sliding(is_sliding(layer))).collect()
    };
    match windows {
        Windows::FromLayer | Windows::LayerTypesOnly if !switched_on => each(&|_| false),
        Windows::FromLayer => {
            let first = fields.integer("max_window_layers", 0, u32::MAX)?;
            each(&|layer| layer >= first)
        }
        Windows::LayerTypesOnly | Windows::Listed => Err(fields.missing("layer_types")),
        Windows::All => {
            let has_window = window()?.is_some();
            each(&|_| has_window)
        }
        Windows::AllButLast { field, of } => {
            let stated = fields.optional_integer(field, 1, u32::MAX)?;
            let hidden = fields.optional_integer("_sliding_window_pattern", 1, u32::MAX)?;
            let of = stated.or(hidden).unwrap_or(of);
            each(&|layer| !(layer + 1).is_multiple_of(of))
        }
        Windows::AllButFirst { of } => each(&|layer| !layer.is_multiple_of(of)),
        Windows::Never | Windows::Chunks | Windows::Numbered { .. } => each(&|_| false),
    }
}

/// Llama 4: layers with rotary embedding attend within a chunk.
fn chunks(fields: &Fields<'_>, num_layers: u32) -> Result<Vec<GroupKind>, ModelError> {
    let chunk = fields.optional_integer("attention_chunk_size", 1, u32::MAX)?;
    let kind = |is_chunked: bool| match (is_chunked, chunk) {
        (true, Some(chunk)) => GroupKind::ChunkedAttention { chunk },
        _ => GroupKind::Attention,
    };
    if let Some(types) = fields.layers("layer_types", num_layers, CHUNKED_TYPES)? {
        return Ok(types.into_iter().map(|each| kind(each == "chunked_attention")).collect());
    }
    // The field's name is the opposite of its values: 1 is a layer with rotary embedding.
    let rotary = flags(fields, "no_rope_layers", num_layers)?;
    if !rotary.is_empty() {
        return Ok(rotary.into_iter().map(kind).collect());
    }
    let of = fields.optional_integer("no_rope_layer_interval", 1, u32::MAX)?.unwrap_or(4);
    Ok((0..num_layers).map(|layer| kind(!(layer + 1).is_multiple_of(of))).collect())
}

/// `MiMo` V2: a list of 0 and 1, one number per layer.
fn numbered(
    fields: &Fields<'_>,
    field: &'static str,
    window: &'static str,
    num_layers: u32,
) -> Result<Vec<GroupKind>, ModelError> {
    let window = fields.integer(window, 1, u32::MAX)?;
    let sliding = flags(fields, field, num_layers)?;
    if sliding.is_empty() {
        return Err(fields.missing(field));
    }
    let kind = |is_sliding| match is_sliding {
        true => GroupKind::SlidingAttention { window },
        false => GroupKind::Attention,
    };
    Ok(sliding.into_iter().map(kind).collect())
}

/// A list of 0 and 1, one number per layer; empty if it is absent or empty.
fn flags(
    fields: &Fields<'_>,
    name: &'static str,
    num_layers: u32,
) -> Result<Vec<bool>, ModelError> {
    let stated = fields.integers(name, num_layers, 1)?.unwrap_or_default();
    if !stated.is_empty() && u32::try_from(stated.len()) != Ok(num_layers) {
        let expected = Expected::Layers { layers: num_layers, of: &["0", "1"] };
        let value = fields.own(name).unwrap_or(&Value::Null);
        return Err(fields.unexpected(name, value, expected));
    }
    Ok(stated.into_iter().map(|flag| flag == 1).collect())
}
