//! A group of equal caches: its kind, its layers and its bytes.

use std::fmt;

use terrane_core::{ByteCount, SizeOverflow};

use super::limits::LARGEST_LAYER_COUNT;
use crate::{ElementFormat, LayoutConfig, LayoutError};

/// Caches of one kind and one size, in one or more layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    pub(super) kind: GroupKind,
    pub(super) layers: Vec<u32>,
    pub(super) heads: u32,
    pub(super) head_dim: u32,
    pub(super) inner_dim: u32,
    pub(super) outer_dim: u32,
    pub(super) element: ElementFormat,
    /// Bytes of a row, or of a whole state.
    pub(super) row_bytes: ByteCount,
}

impl CacheGroup {
    terrane_core::getters! {
        /// The kind of cache.
        kind: GroupKind,
        /// KV heads on this rank; 1 for a latent, an indexer and a state.
        heads: u32,
        /// Elements of a head: of K and V each, of both if they share a row, or of the latent with
        /// its rotary part. For an indexer, and a state from a configuration, the unit is bytes.
        head_dim: u32,
        /// Elements per token, layer and outer: heads · head dimension.
        inner_dim: u32,
        /// 2 for K and V, 1 if one row contains the whole cache.
        outer_dim: u32,
        /// The element format.
        element: ElementFormat,
    }

    /// The numbers of the group's layers in the model, ascending. A layer can be in several groups.
    #[must_use]
    pub fn layers(&self) -> &[u32] {
        &self.layers
    }

    /// The bytes of a row: of one token, layer and outer on one rank. `None` for states.
    #[must_use]
    pub fn row_bytes(&self) -> Option<ByteCount> {
        (!self.is_state()).then_some(self.row_bytes)
    }

    /// The bytes of a state: of one sequence and layer on one rank. `None` for other kinds.
    #[must_use]
    pub fn state_bytes(&self) -> Option<ByteCount> {
        self.is_state().then_some(self.row_bytes)
    }

    /// The bytes of one token over all layers of this group, on one rank. They are 0 for a state,
    /// whose size does not depend on the length.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] if they do not fit in 64 bits.
    pub fn bytes_per_token(&self) -> Result<ByteCount, LayoutError> {
        Ok(if self.is_state() { ByteCount::new(0) } else { self.unit_bytes()? })
    }

    /// The bytes of one sequence of any length over all layers of this group, on one rank: those of
    /// its states. They are 0 for other kinds.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] if they do not fit in 64 bits.
    pub fn bytes_per_sequence(&self) -> Result<ByteCount, LayoutError> {
        Ok(if self.is_state() { self.unit_bytes()? } else { ByteCount::new(0) })
    }

    /// The layout configuration of this group, token-major. It states the heads if the format of
    /// the cache stores them separately.
    ///
    /// A block of states has one state for each layer: its page is one row, and `page_size` is
    /// ignored.
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
            .page_size(if self.is_state() { 1 } else { page_size })
            .inner_dim(self.inner_dim)
            .element(self.element);
        let config = if self.has_whole_heads() { config.num_heads(self.heads) } else { config };
        config.build()
    }

    fn is_state(&self) -> bool {
        self.kind == GroupKind::State
    }

    /// Whether each head has its own bytes. The order of heads in an engine's packed rows is
    /// unknown.
    fn has_whole_heads(&self) -> bool {
        match self.element {
            ElementFormat::Width(_) => true,
            ElementFormat::BlockScaled { elements, .. } => self.head_dim.is_multiple_of(elements),
            ElementFormat::RowBytes(_) => false,
        }
    }

    fn num_layers(&self) -> u32 {
        // A group has at most `LARGEST_LAYER_COUNT` layers.
        u32::try_from(self.layers.len()).unwrap_or(LARGEST_LAYER_COUNT)
    }

    /// The bytes of one token, or of one state, over all layers.
    fn unit_bytes(&self) -> Result<ByteCount, SizeOverflow> {
        ByteCount::product(&[
            ("layers", u64::from(self.num_layers())),
            ("outer_dim", u64::from(self.outer_dim)),
            ("bytes a row", self.row_bytes.get()),
        ])
    }
}

/// The kind of a group's caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum GroupKind {
    /// K and V of all previous tokens.
    Attention,
    /// K and V of the last tokens only, so older ones can be dropped.
    SlidingAttention {
        /// The number of tokens.
        window: u32,
    },
    /// K and V of the tokens of the current chunk only.
    ChunkedAttention {
        /// Tokens per chunk.
        chunk: u32,
    },
    /// One latent per token for all heads, with its rotary key.
    Latent,
    /// The keys with which sparse attention selects tokens.
    Indexer,
    /// A state of fixed size for each sequence: of a convolution, of a recurrence, or both.
    State,
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attention => f.pad("full attention"),
            Self::SlidingAttention { window } => write!(f, "attention in a window of {window}"),
            Self::ChunkedAttention { chunk } => write!(f, "attention in chunks of {chunk}"),
            Self::Latent => f.pad("latents"),
            Self::Indexer => f.pad("keys of the indexer"),
            Self::State => f.pad("states"),
        }
    }
}
