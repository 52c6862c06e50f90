//! What can be wrong with a model's configuration.

use std::fmt;

/// Why a model's configuration could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The text is no JSON object.
    #[error("the model's configuration is no JSON object; give the hub's config.json")]
    Json {
        /// What the parser said, with line and column.
        #[source]
        source: serde_json::Error,
    },
    /// The model type is not one that this version knows.
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
        /// The model types that are supported.
        supported: &'static [&'static str],
    },
    /// A field that this model type needs is missing, or null.
    #[error("{field} is missing; a configuration of model type {model_type} has to state it")]
    Missing {
        /// The field, with its path.
        field: String,
        /// The model type.
        model_type: &'static str,
    },
    /// A field has a value that it cannot have.
    #[error("{field} is {value}; expected {expected}")]
    Value {
        /// The field, with its path.
        field: String,
        /// Its value as JSON, cut to a length that can be shown.
        value: String,
        /// What it could have been.
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
        /// What should hold between them.
        rule: &'static str,
    },
    /// A field means a cache that the reader of this model type does not count.
    #[error(
        "{field} is {value}, and means caches that are not counted for model type {model_type}; \
         correct model_type, or describe the groups with ModelGeometry::from_groups"
    )]
    Uncounted {
        /// The field, with its path.
        field: String,
        /// Its value as JSON, cut to a length that can be shown.
        value: String,
        /// The model type.
        model_type: &'static str,
    },
    /// The ranks do not divide a number. Nor do they hold it alike, as they do with KV heads of
    /// which they are a multiple.
    #[error(
        "{field} is {value}, and cannot be divided among {tensor_parallel} tensor-parallel ranks; \
         use a number of ranks that divides it, or for KV heads a multiple of it"
    )]
    Indivisible {
        /// The field, with its path.
        field: String,
        /// Its value.
        value: u64,
        /// Ranks.
        tensor_parallel: u32,
    },
    /// A layer's state is empty, or too large to be one.
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
    /// No element of a recurrent state is that wide.
    #[error("recurrent_width is {width}; expected 1 to 8 bytes an element")]
    RecurrentWidth {
        /// The width.
        width: u8,
    },
    /// A number of a described group is out of range.
    #[error("{field} of group {group} is {value}; expected an integer from {least} to {largest}")]
    GroupField {
        /// The group, counted from 0.
        group: usize,
        /// What is out of range.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The least.
        least: u32,
        /// The most.
        largest: u32,
    },
    /// The layers of a described group do not ascend.
    #[error(
        "group {group} has layer {after} after layer {before}; state each layer once, ascending"
    )]
    LayersUnordered {
        /// The group, counted from 0.
        group: usize,
        /// A layer.
        before: u32,
        /// The one after it.
        after: u32,
    },
    /// Two groups of one kind hold the same layer.
    #[error(
        "layer {layer} is in group {first} and in group {second} of the same kind; leave it in one"
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
        /// How many were counted.
        groups: usize,
        /// The most.
        largest: usize,
    },
    /// No ranks at all.
    #[error("tensor_parallel is 0; at least one rank holds the model")]
    NoRanks,
    /// There is no group of this number.
    #[error("group {group} does not exist: the model has {groups}, counted from 0")]
    NoSuchGroup {
        /// The number.
        group: usize,
        /// How many there are.
        groups: usize,
    },
}

/// What a field could have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expected {
    /// An integer between these two.
    Integer {
        /// The least.
        least: u32,
        /// The most.
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
        /// The most entries.
        most: u32,
        /// The largest entry.
        largest: u32,
    },
    /// A list with an entry a layer, each of which is one of these.
    Layers {
        /// How many layers there are.
        layers: u32,
        /// What an entry can be.
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
                write!(f, "a list of {layers} entries, one a layer, of {}", of.join(", "))
            }
            Self::OneOf(texts) => write!(f, "one of {}", texts.join(", ")),
        }
    }
}
