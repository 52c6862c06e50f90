//! The width of a model's elements.

use serde_json::Value;

use super::error::{Expected, ModelError};
use super::fields::{Fields, cut};

/// The dtypes with one width per element, by their names in `torch`.
const DTYPES: &[&str] =
    &["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "half", "float"];

/// Where a configuration states the format of a quantised cache: compressed-tensors, and ModelOpt.
const QUANTISED: &[&[&str]] = &[
    &["quantization_config", "kv_cache_scheme"],
    &["quantization_config", "kv_cache_quant_algo"],
    &["quantization_config", "quantization", "kv_cache_scheme"],
    &["quantization_config", "quantization", "kv_cache_quant_algo"],
];

/// Bytes per element of K, V and latents, unless the caller states another format.
pub(super) fn cache_width(fields: &Fields<'_>) -> Result<u8, ModelError> {
    let mut stated = QUANTISED.iter().flat_map(|names| fields.inherited(names)).peekable();
    if stated.peek().is_none() {
        return model_width(fields);
    }
    match stated.find(|(_, format)| !is_fp8(format)) {
        Some((field, format)) => Err(fields.uncounted(field, format)),
        None => Ok(1),
    }
}

/// Whether a cache has 8-bit floats: `{"num_bits": 8, "type": "float"}`, or `"FP8"`.
fn is_fp8(format: &Value) -> bool {
    match format {
        Value::String(algorithm) => algorithm.eq_ignore_ascii_case("fp8"),
        scheme => scheme["num_bits"] == 8 && scheme["type"] == "float",
    }
}

/// Bytes per element of the model. Newer configurations call the field `dtype`, older ones
/// `torch_dtype`.
pub(super) fn model_width(fields: &Fields<'_>) -> Result<u8, ModelError> {
    let (old, new) = (fields.inherited_text("torch_dtype")?, fields.inherited_text("dtype")?);
    if let (Some((old_name, old)), Some((new_name, new))) = (&old, &new)
        && old != new
    {
        return Err(ModelError::Contradiction {
            first: old_name.clone(),
            first_value: cut(old),
            second: new_name.clone(),
            second_value: cut(new),
            rule: "both name one field, so state one of them",
        });
    }
    let unstated = fields.family.default_dtype.map(|dtype| ("torch_dtype".to_owned(), dtype));
    let (field, dtype) = old.or(new).or(unstated).ok_or_else(|| fields.missing("torch_dtype"))?;
    // Engines serve a float32 checkpoint in 16 bits (vLLM's `_resolve_auto_dtype`).
    width(field, dtype).map(|width| width.min(2))
}

/// Bytes per element of the dtype that a field states; `None` if it states none.
pub(super) fn stated_width(
    fields: &Fields<'_>,
    name: &'static str,
) -> Result<Option<u8>, ModelError> {
    let stated = if name.is_empty() { None } else { fields.inherited_text(name)? };
    stated.map(|(field, dtype)| width(field, dtype)).transpose()
}

/// The caller's width.
pub(super) fn checked_width(width: u8) -> Result<u8, ModelError> {
    if (1..=8).contains(&width) { Ok(width) } else { Err(ModelError::RecurrentWidth { width }) }
}

fn width(field: String, dtype: &str) -> Result<u8, ModelError> {
    match dtype {
        "bfloat16" | "float16" | "half" => Ok(2),
        "float32" | "float" => Ok(4),
        "float8_e4m3fn" | "float8_e5m2" => Ok(1),
        other => {
            let (value, expected) = (cut(other), Expected::OneOf(DTYPES));
            Err(ModelError::Value { field, value, expected })
        }
    }
}
