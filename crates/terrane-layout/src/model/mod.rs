//! From a model hub's `config.json`, or from a description, to layout configurations.
//!
//! A model is a list of [groups](CacheGroup) of caches that are alike. A group has a
//! [kind](GroupKind), the layers that have such a cache, and the bytes of one: a row for each token,
//! or a state for each sequence. Each group becomes a [`LayoutConfig`] of its own, as its blocks
//! are kept and dropped on their own.
//!
//! | model | groups |
//! |---|---|
//! | most | K and V of all layers |
//! | Gemma, gpt-oss | full attention; sliding attention |
//! | DeepSeek V2, V3, Kimi K2 | latents |
//! | DeepSeek V3.2, GLM 5 | latents; the keys of the indexer |
//! | Qwen3-Next, Jamba, Nemotron H | K and V in some layers; states in others |
//! | Falcon H1 | K and V, and a state, in each layer |
//! | Kimi Linear | latents in some layers; states in others |
//! | Mamba | states |
//!
//! [`ModelGeometry::from_json`] reads the file that every model on a hub comes with.
//! [`supported_model_types`] lists the types that it knows. What is read follows the published
//! configurations, the defaults of the `transformers` library, and the caches that vLLM makes of
//! them, without speculative decoding. A configuration is refused by name if it has a field that
//! means a cache which the reader of its type does not count: a guess would move the wrong bytes.
//! [`ModelGeometry::from_groups`] describes any other model.
//!
//! ```
//! use terrane_core::ByteCount;
//! use terrane_layout::model::{ModelGeometry, ModelOptions};
//!
//! # fn main() -> Result<(), terrane_layout::LayoutError> {
//! let json = r#"{
//!     "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 8192,
//!     "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8
//! }"#;
//! let model = ModelGeometry::from_json(json, &ModelOptions::new().tensor_parallel(4))?;
//! assert_eq!(model.bytes_per_token()?, ByteCount::new(81_920));
//! let config = model.layout_config(0, 1024, 16)?;
//! assert_eq!(config.block_bytes(), ByteCount::new(1_310_720));
//! # Ok(())
//! # }
//! ```

mod attention;
mod dtype;
mod error;
mod families;
mod fields;
mod group;
mod guard;
mod json;
mod latent;
mod limits;
mod names;
mod options;
mod read;
mod spec;
mod state;
mod table;

use std::borrow::Cow;

use terrane_core::{ByteCount, SizeOverflow};

use crate::{LayoutConfig, LayoutError};

pub use error::{Expected, ModelError};
pub use group::{CacheGroup, GroupKind};
pub use limits::LARGEST_LAYER_COUNT;
pub use options::ModelOptions;
pub use spec::GroupSpec;
pub use table::supported_model_types;

/// What one rank has to cache of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelGeometry {
    model_type: Cow<'static, str>,
    groups: Vec<CacheGroup>,
}

impl ModelGeometry {
    /// Reads a `config.json`. Fields that do not matter to the cache may be there or not. For a
    /// multimodal model, the language model's configuration (`text_config` or the like) is read.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Model`], with a [`ModelError`] that names the field and the value: for an
    /// unsupported model type, with those that are supported; for a field that is missing, out of
    /// range, of the wrong type, or in contradiction to another; for a field that means a cache
    /// which is not counted; for KV heads or states that the ranks do not divide. Also
    /// [`LayoutError`] as from [`ElementFormat::row_bytes`](crate::ElementFormat::row_bytes), if
    /// the format of the cache does not fit the model. No input panics.
    pub fn from_json(json: impl AsRef<[u8]>, options: &ModelOptions) -> Result<Self, LayoutError> {
        let (model_type, groups) = read::read(json.as_ref(), options)?;
        Ok(Self { model_type: Cow::Borrowed(model_type), groups })
    }

    /// A model that the caller describes, on one rank. The groups keep their order.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Model`], with a [`ModelError`] that names the group: for no groups, or more
    /// than 64; for a group of no layers, or of layers that do not ascend; for a number that is out
    /// of range; for a layer in two groups of one kind, other than states. Also [`LayoutError`] as
    /// from [`ElementFormat::row_bytes`](crate::ElementFormat::row_bytes).
    pub fn from_groups(
        model_type: impl Into<String>,
        groups: impl IntoIterator<Item = GroupSpec>,
    ) -> Result<Self, LayoutError> {
        let groups = spec::check_groups(groups)?;
        Ok(Self { model_type: Cow::Owned(model_type.into()), groups })
    }

    /// The model type, as the configuration or the caller names it.
    #[must_use]
    pub fn model_type(&self) -> &str {
        &self.model_type
    }

    /// The groups, one or more. Those of a configuration are in the order of [`GroupKind`].
    #[must_use]
    pub fn groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// The bytes that one token takes over all layers of all groups, on one rank.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] if they do not fit in 64 bits.
    pub fn bytes_per_token(&self) -> Result<ByteCount, LayoutError> {
        self.sum(CacheGroup::bytes_per_token)
    }

    /// The bytes that one sequence takes whatever its length, over all layers of all groups, on one
    /// rank: those of its states.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] if they do not fit in 64 bits.
    pub fn bytes_per_sequence(&self) -> Result<ByteCount, LayoutError> {
        self.sum(CacheGroup::bytes_per_sequence)
    }

    fn sum(
        &self,
        of: fn(&CacheGroup) -> Result<ByteCount, LayoutError>,
    ) -> Result<ByteCount, LayoutError> {
        let groups: Vec<ByteCount> = self.groups.iter().map(of).collect::<Result<_, _>>()?;
        let sum: Result<ByteCount, SizeOverflow> = groups.into_iter().collect();
        Ok(sum?)
    }

    /// The layout configuration of one group, counted from 0.
    ///
    /// # Errors
    ///
    /// [`ModelError::NoSuchGroup`], and [`LayoutError`] as from
    /// [`LayoutConfigBuilder::build`](crate::LayoutConfigBuilder::build).
    pub fn layout_config(
        &self,
        group: usize,
        num_blocks: u32,
        page_size: u32,
    ) -> Result<LayoutConfig, LayoutError> {
        let groups = self.groups.len();
        let missing = ModelError::NoSuchGroup { group, groups };
        self.groups.get(group).ok_or(missing)?.layout_config(num_blocks, page_size)
    }

    /// The layout configurations of all groups, each with as many blocks.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] as from [`LayoutConfigBuilder::build`](crate::LayoutConfigBuilder::build).
    pub fn layout_configs(
        &self,
        num_blocks: u32,
        page_size: u32,
    ) -> Result<Vec<LayoutConfig>, LayoutError> {
        self.groups.iter().map(|group| group.layout_config(num_blocks, page_size)).collect()
    }
}
