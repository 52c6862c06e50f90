//! Errors in a model's configuration.

use std::fmt;

/// Why a model's configuration could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The text is not a JSON object.
    #[error("the model's configuration is not a JSON object; pass the hub's config.json")]
    Json {
        /// The parser's error, with line and column.
        #[source]
        source: serde_json::Error,
    },
    /// This version does not support the model type.
    #[error(
        "{field} is {model_type:?}, which is not supported; supported are {}. For another model, \
         describe its groups with ModelGeometry::from_groups",
        .supported.join(", ")
    )]
    UnsupportedModel {
        /// The field, with its path.
        field: String,
        /// Its value.
        model_type: String,
        /// The supported model types.
        supported: &'static [&'static str],
    },
    /// A required field of this model type is missing or null.
    #[error("{field} is missing; a configuration of model type {model_type} must state it")]
    Missing {
        /// The field, with its path.
        field: String,
        /// The model type.
        model_type: &'static str,
    },
    /// A field has an invalid value.
    #[error("{field} is {value}; expected {expected}")]
    Value {
        /// The field, with its path.
        field: String,
        /// Its value as JSON, shortened for display.
        value: String,
        /// The valid values.
        expected: Expected,
    },
    /// Two fields contradict each other.
    #[error("{first} is {first_value}, which contradicts {second}, {second_value}; {rule}")]
    Contradiction {
        /// A field, with its path.
        first: String,
        /// Its value.
        first_value: String,
        /// Another field, with its path.
        second: String,
        /// Its value.
        second_value: String,
        /// The rule that the two values break.
        rule: &'static str,
    },
    /// A field implies a cache that the reader of this model type does not count.
    #[error(
        "{field} is {value}, which implies caches that are not counted for model type \
         {model_type}; correct model_type, or describe the groups with ModelGeometry::from_groups"
    )]
    Uncounted {
        /// The field, with its path.
        field: String,
        /// Its value as JSON, shortened for display.
        value: String,
        /// The model type.
        model_type: &'static str,
    },
    /// The number of ranks neither divides a number nor, for KV heads, is a multiple of it.
    #[error(
        "{field} is {value}, and cannot be divided among {tensor_parallel} tensor-parallel ranks; \
         use a number of ranks that divides it, or for KV heads a multiple of it"
    )]
    Indivisible {
        /// The field, with its path.
        field: String,
        /// Its value.
        value: u64,
        /// The number of ranks.
        tensor_parallel: u32,
    },
    /// A layer's state is empty or too large.
    #[error(
        "a layer's state of model type {model_type} takes {bytes} bytes; expected 1 to 4294967295, \
         so correct the dimensions of its state"
    )]
    StateBytes {
        /// Its bytes.
        bytes: u64,
        /// The model type.
        model_type: &'static str,
    },
    /// The width of a recurrent state is out of range.
    #[error("recurrent_width is {width}; expected 1 to 8 bytes per element")]
    RecurrentWidth {
        /// The width.
        width: u8,
    },
    /// A number of a described group is out of range.
    #[error("{field} of group {group} is {value}; expected an integer from {least} to {largest}")]
    GroupField {
        /// The group, counted from 0.
        group: usize,
        /// The name of the number.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The smallest valid value.
        least: u32,
        /// The largest valid value.
        largest: u32,
    },
    /// The layers of a described group are not in ascending order.
    #[error(
        "group {group} has layer {after} after layer {before}; state each layer once, in ascending \
         order"
    )]
    LayersUnordered {
        /// The group, counted from 0.
        group: usize,
        /// A layer.
        before: u32,
        /// The next layer in the list.
        after: u32,
    },
    /// Two groups of one kind have the same layer.
    #[error(
        "layer {layer} is in group {first} and in group {second} of the same kind; keep it in one \
         of them"
    )]
    LayerTwice {
        /// The layer.
        layer: u32,
        /// A group, counted from 0.
        first: usize,
        /// Another group.
        second: usize,
    },
    /// There are no groups, or too many.
    #[error("the model has {groups} groups; expected 1 to {largest}")]
    GroupCount {
        /// The number of groups.
        groups: usize,
        /// The largest number of groups.
        largest: usize,
    },
    /// The number of ranks is zero.
    #[error("tensor_parallel is 0; use at least 1")]
    NoRanks,
}

/// The valid values of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expected {
    /// An integer in this range.
    Integer {
        /// The smallest.
        least: u32,
        /// The largest.
        largest: u32,
    },
    /// `true` or `false`.
    Boolean,
    /// A text.
    Text,
    /// An object.
    Object,
    /// A list.
    List,
    /// A list of integers.
    Integers {
        /// The largest number of entries.
        most: u32,
        /// The largest entry.
        largest: u32,
    },
    /// A list with an entry for each layer.
    Layers {
        /// The number of layers.
        layers: u32,
        /// The valid entries.
        of: &'static [&'static str],
    },
    /// One of these texts.
    OneOf(&'static [&'static str]),
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer { least, largest } => {
                write!(f, "an integer from {least} to {largest}")
            }
            Self::Boolean => f.write_str("true or false"),
            Self::Text => f.write_str("a text"),
            Self::Object => f.write_str("an object"),
            Self::List => f.write_str("a list"),
            Self::Integers { most, largest } => {
                write!(f, "a list of at most {most} integers from 0 to {largest}")
            }
            Self::Layers { layers, of } => {
                write!(f, "a list of {layers} entries, one per layer, of {}", of.join(", "))
            }
            Self::OneOf(texts) => write!(f, "one of {}", texts.join(", ")),
        }
    }
}
