//! Layout configurations from a model hub's `config.json`, or from a description.
//!
//! A model is a list of [groups](CacheGroup) of equal caches. A group has a [kind](GroupKind) and
//! the layers with such a cache. It also has the bytes of one row for each token, or of one state
//! for each sequence. Each group becomes its own [`LayoutConfig`], because its blocks are stored
//! and dropped separately.
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
//! [`ModelGeometry::from_json`] reads the `config.json` of a model on a hub.
//! [`supported_model_types`] lists the supported types. The sizes follow the published
//! configurations, the defaults of the `transformers` library, and the caches of vLLM without
//! speculative decoding. If a field implies a cache that the reader of the type does not count, the
//! configuration is refused. A guess would move the wrong bytes. [`ModelGeometry::from_groups`]
//! describes any other model.
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
//! let config = model.groups()[0].layout_config(1024, 16)?;
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

/// The caches of a model on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelGeometry {
    model_type: Cow<'static, str>,
    groups: Vec<CacheGroup>,
}

impl ModelGeometry {
    /// Reads a `config.json`. Fields that do not affect the cache are optional. For a multimodal
    /// model, it reads the language model's configuration (`text_config` or a similar object).
    ///
    /// # Errors
    ///
    /// [`LayoutError::Model`] with a [`ModelError`] that names the field and the value. It refuses
    /// unsupported model types, and fields that are missing, out of range, of the wrong type, or
    /// contradictory. It also refuses fields that imply an unsupported cache, and ranks that do not
    /// divide the KV heads or states. [`LayoutError`] as from
    /// [`ElementFormat::row_bytes`](crate::ElementFormat::row_bytes) if the format of the cache
    /// does not fit the model. No input panics.
    pub fn from_json(json: impl AsRef<[u8]>, options: &ModelOptions) -> Result<Self, LayoutError> {
        let (model_type, groups) = read::read(json.as_ref(), options)?;
        Ok(Self { model_type: Cow::Borrowed(model_type), groups })
    }

    /// A model that the caller describes, on one rank. The groups keep their order.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Model`] with a [`ModelError`] that names the group. It refuses fewer than 1
    /// or more than 64 groups, groups without layers or whose layers do not ascend, and numbers out
    /// of range. It also refuses a layer in two groups of one kind, except states. [`LayoutError`]
    /// as from [`ElementFormat::row_bytes`](crate::ElementFormat::row_bytes).
    pub fn from_groups(
        model_type: impl Into<String>,
        groups: impl IntoIterator<Item = GroupSpec>,
    ) -> Result<Self, LayoutError> {
        let groups = spec::check_groups(groups)?;
        Ok(Self { model_type: Cow::Owned(model_type.into()), groups })
    }

    /// The model type from the configuration or the caller.
    #[must_use]
    pub fn model_type(&self) -> &str {
        &self.model_type
    }

    /// The groups, at least one. Groups from a configuration are in the order of [`GroupKind`].
    #[must_use]
    pub fn groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// The bytes of one token over all layers of all groups, on one rank.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] if they do not fit in 64 bits.
    pub fn bytes_per_token(&self) -> Result<ByteCount, LayoutError> {
        self.sum(CacheGroup::bytes_per_token)
    }

    /// The bytes of one sequence of any length over all layers of all groups, on one rank: those of
    /// its states.
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

    /// The layout configurations of all groups, each with the same number of blocks.
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
