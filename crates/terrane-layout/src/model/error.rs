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
         state its dimensions with LayoutConfig::builder",
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
    /// The ranks do not divide the KV heads, nor the KV heads the ranks.
    #[error(
        "num_key_value_heads is {heads}, and cannot be divided among {tensor_parallel} \
         tensor-parallel ranks; use a number of ranks that divides it, or a multiple of it"
    )]
    IndivisibleHeads {
        /// KV heads of the model.
        heads: u32,
        /// Ranks.
        tensor_parallel: u32,
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
            Self::Layers { layers, of } => {
                write!(f, "a list of {layers} entries, one a layer, of {}", of.join(", "))
            }
            Self::OneOf(texts) => write!(f, "one of {}", texts.join(", ")),
        }
    }
}
