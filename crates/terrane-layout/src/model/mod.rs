//! From a model hub's `config.json` to layout configurations.
//!
//! [`ModelGeometry::from_json`] reads the file that every model on a hub comes with, and answers
//! with the groups of layers whose caches are alike: one for most models, one more for models in
//! which some layers attend to a sliding window. Each group becomes a [`LayoutConfig`] of its
//! own, as its blocks are kept and dropped on their own.
//!
//! What is read follows the published configurations and the `transformers` library's reading of
//! them. What cannot be vouched for is refused by name: a guess here would move the wrong bytes.
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

mod error;
mod families;
mod fields;
mod read;

use std::fmt;

use terrane_core::{ByteCount, SizeOverflow};

use crate::{ElementFormat, LayoutConfig, LayoutError};

pub use error::{Expected, ModelError};
pub use families::SUPPORTED_MODEL_TYPES;
pub use read::LARGEST_LAYER_COUNT;

/// How a model is served, which its configuration does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelOptions {
    tensor_parallel: u32,
    kv_element: Option<ElementFormat>,
}

impl ModelOptions {
    /// One rank, and the cache in the model's own dtype.
    #[must_use]
    pub const fn new() -> Self {
        Self { tensor_parallel: 1, kv_element: None }
    }

    /// The number of tensor-parallel ranks among which KV heads are divided.
    ///
    /// With more ranks than heads, each head is held by several ranks, if they divide evenly. A
    /// latent is not divided: each rank holds all of it.
    #[must_use]
    pub const fn tensor_parallel(self, ranks: u32) -> Self {
        Self { tensor_parallel: ranks, ..self }
    }

    /// The format of the cache, where it is not the model's dtype: [`ElementFormat::Width`] of 1
    /// for fp8, or [`ElementFormat::RowBytes`] where an engine packs rows its own way.
    #[must_use]
    pub const fn kv_element(self, element: ElementFormat) -> Self {
        Self { kv_element: Some(element), ..self }
    }
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// What one rank has to cache of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelGeometry {
    model_type: &'static str,
    groups: Vec<CacheGroup>,
}

impl ModelGeometry {
    /// Reads a `config.json`. Fields that do not matter to the cache may be there or not. Of a
    /// multimodal model, the language model's configuration (`text_config`) is read.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Model`], with a [`ModelError`] that names the field and the value: for an
    /// unsupported model type, with those that are supported; for a field that is missing, out of
    /// range, of the wrong type, or in contradiction to another; for KV heads that the ranks do
    /// not divide. Also [`LayoutError`] as from [`ElementFormat::row_bytes`], if the format of
    /// the cache does not fit the model. No input panics.
    pub fn from_json(json: impl AsRef<[u8]>, options: &ModelOptions) -> Result<Self, LayoutError> {
        read::read(json.as_ref(), options)
    }

    /// The model type, as the configuration names it.
    #[must_use]
    pub const fn model_type(&self) -> &'static str {
        self.model_type
    }

    /// The groups, one or more; full attention comes first.
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
        let groups: Result<Vec<ByteCount>, SizeOverflow> =
            self.groups.iter().map(CacheGroup::token_bytes).collect();
        let sum: Result<ByteCount, SizeOverflow> = groups?.into_iter().collect();
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

/// Layers whose caches are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    kind: AttentionKind,
    layers: Vec<u32>,
    heads: u32,
    head_dim: u32,
    inner_dim: u32,
    outer_dim: u32,
    element: ElementFormat,
    row_bytes: ByteCount,
}

impl CacheGroup {
    /// How far back these layers look.
    #[must_use]
    pub const fn kind(&self) -> AttentionKind {
        self.kind
    }

    /// The numbers of these layers in the model, ascending.
    #[must_use]
    pub fn layers(&self) -> &[u32] {
        &self.layers
    }

    /// KV heads on this rank; 1 for a latent.
    #[must_use]
    pub const fn heads(&self) -> u32 {
        self.heads
    }

    /// Elements a head, or of the latent with its rotary part.
    #[must_use]
    pub const fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// Elements for each token, layer and outer: heads · head dimension.
    #[must_use]
    pub const fn inner_dim(&self) -> u32 {
        self.inner_dim
    }

    /// 2 for K and V, 1 for a latent.
    #[must_use]
    pub const fn outer_dim(&self) -> u32 {
        self.outer_dim
    }

    /// How elements are stored.
    #[must_use]
    pub const fn element(&self) -> ElementFormat {
        self.element
    }

    /// The bytes that one token takes over all layers of this group, on one rank.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] if they do not fit in 64 bits.
    pub fn bytes_per_token(&self) -> Result<ByteCount, LayoutError> {
        Ok(self.token_bytes()?)
    }

    /// The layout configuration of this group, token-major. It states the heads, unless the format of
    /// the cache does not keep them apart.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] as from [`LayoutConfigBuilder::build`](crate::LayoutConfigBuilder::build).
    pub fn layout_config(
        &self,
        num_blocks: u32,
        page_size: u32,
    ) -> Result<LayoutConfig, LayoutError> {
        let config = LayoutConfig::builder()
            .num_blocks(num_blocks)
            .num_layers(self.num_layers())
            .outer_dim(self.outer_dim)
            .page_size(page_size)
            .inner_dim(self.inner_dim)
            .element(self.element);
        let config = if self.has_whole_heads() { config.num_heads(self.heads) } else { config };
        config.build()
    }

    /// Whether each head has bytes of its own. How an engine packs a row is not known here.
    fn has_whole_heads(&self) -> bool {
        match self.element {
            ElementFormat::Width(_) => true,
            ElementFormat::BlockScaled { elements, .. } => self.head_dim.is_multiple_of(elements),
            ElementFormat::RowBytes(_) => false,
        }
    }

    fn num_layers(&self) -> u32 {
        // The reader lets at most `LARGEST_LAYER_COUNT` pass.
        u32::try_from(self.layers.len()).unwrap_or(LARGEST_LAYER_COUNT)
    }

    fn token_bytes(&self) -> Result<ByteCount, SizeOverflow> {
        ByteCount::product(&[
            ("layers", u64::from(self.num_layers())),
            ("outer_dim", u64::from(self.outer_dim)),
            ("bytes a token row", self.row_bytes.get()),
        ])
    }
}

/// How far back a layer looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttentionKind {
    /// At all tokens before.
    Full,
    /// At the last tokens only, so that older ones need not be kept.
    Sliding {
        /// How many.
        window: u32,
    },
}

impl fmt::Display for AttentionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.pad("full"),
            Self::Sliding { window } => write!(f, "sliding window of {window}"),
        }
    }
}
