//! Groups that the caller describes, and their checks.

use terrane_core::convert::{to_u64, to_usize};

use super::error::ModelError;
use super::group::{CacheGroup, GroupKind};
use super::limits::{LARGEST_DIMENSION, LARGEST_LAYER_COUNT};
use crate::{ElementFormat, LayoutError};

/// The caller's description of a group of caches, on one rank.
/// [`ModelGeometry::from_groups`](super::ModelGeometry::from_groups) checks it.
///
/// ```
/// use terrane_layout::ElementFormat;
/// use terrane_layout::model::{GroupSpec, ModelGeometry};
///
/// # fn main() -> Result<(), terrane_layout::LayoutError> {
/// let groups = [
///     GroupSpec::attention((0..48).filter(|layer| layer % 4 == 3), 2, 256, ElementFormat::Width(2)),
///     GroupSpec::state((0..48).filter(|layer| layer % 4 != 3), 1_097_728),
/// ];
/// let model = ModelGeometry::from_groups("my_hybrid", groups)?;
/// assert_eq!(model.bytes_per_token()?.get(), 12 * 2 * 2 * 256 * 2);
/// assert_eq!(model.bytes_per_sequence()?.get(), 36 * 1_097_728);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    kind: GroupKind,
    layers: Vec<u32>,
    heads: u32,
    head_dim: u32,
    outer_dim: u32,
    element: ElementFormat,
}

impl GroupSpec {
    /// A group of any kind: `heads` heads of `head_dim` elements in one row for each token and
    /// layer, or in two rows with [`outer_dim`](Self::outer_dim).
    #[must_use]
    pub fn new(
        kind: GroupKind,
        layers: impl IntoIterator<Item = u32>,
        heads: u32,
        head_dim: u32,
        element: ElementFormat,
    ) -> Self {
        // One more than the maximum is enough to refuse them.
        let most = to_usize(LARGEST_LAYER_COUNT.into()) + 1;
        let layers = layers.into_iter().take(most).collect();
        Self { kind, layers, heads, head_dim, outer_dim: 1, element }
    }

    /// K and V in separate rows, of all previous tokens.
    #[must_use]
    pub fn attention(
        layers: impl IntoIterator<Item = u32>,
        heads: u32,
        head_dim: u32,
        element: ElementFormat,
    ) -> Self {
        Self::new(GroupKind::Attention, layers, heads, head_dim, element).outer_dim(2)
    }

    /// One latent per token and layer, of `latent_dim` elements with its rotary part.
    #[must_use]
    pub fn latent(
        layers: impl IntoIterator<Item = u32>,
        latent_dim: u32,
        element: ElementFormat,
    ) -> Self {
        Self::new(GroupKind::Latent, layers, 1, latent_dim, element)
    }

    /// An indexer's keys: `row_bytes` bytes per token and layer, scales included.
    #[must_use]
    pub fn indexer(layers: impl IntoIterator<Item = u32>, row_bytes: u32) -> Self {
        let element = ElementFormat::RowBytes(row_bytes);
        Self::new(GroupKind::Indexer, layers, 1, row_bytes, element)
    }

    /// States of `state_bytes` bytes per sequence and layer.
    #[must_use]
    pub fn state(layers: impl IntoIterator<Item = u32>, state_bytes: u32) -> Self {
        Self::new(GroupKind::State, layers, 1, state_bytes, ElementFormat::Width(1))
    }

    /// The kind of the group.
    #[must_use]
    pub fn kind(self, kind: GroupKind) -> Self {
        Self { kind, ..self }
    }

    /// 2 for K and V in separate rows, 1 if one row contains the whole cache.
    #[must_use]
    pub fn outer_dim(self, outer_dim: u32) -> Self {
        Self { outer_dim, ..self }
    }

    /// Checks the numbers, and derives the bytes of a row.
    pub(super) fn check(self, group: usize) -> Result<CacheGroup, LayoutError> {
        let Self { kind, layers, heads, head_dim, outer_dim, element } = self;
        let refuse = |field, value: u64, least, largest| {
            Err(ModelError::GroupField { group, field, value, least, largest }.into())
        };
        let count = to_u64(layers.len());
        if count == 0 || count > u64::from(LARGEST_LAYER_COUNT) {
            return refuse("layers", count, 1, LARGEST_LAYER_COUNT);
        }
        for pair in layers.windows(2) {
            if let [before, after] = pair
                && before >= after
            {
                let (before, after) = (*before, *after);
                return Err(ModelError::LayersUnordered { group, before, after }.into());
            }
        }
        // With one head, the row has no other factor that could overflow.
        let largest = if heads == 1 { u32::MAX } else { LARGEST_DIMENSION };
        let mut fields = vec![
            ("heads", heads, LARGEST_DIMENSION),
            ("head_dim", head_dim, largest),
            ("outer_dim", outer_dim, 2),
        ];
        match kind {
            GroupKind::SlidingAttention { window } => fields.push(("window", window, u32::MAX)),
            GroupKind::ChunkedAttention { chunk } => fields.push(("chunk", chunk, u32::MAX)),
            GroupKind::State => fields.push(("outer_dim of a state", outer_dim, 1)),
            GroupKind::Attention | GroupKind::Latent | GroupKind::Indexer => {}
        }
        for (field, value, largest) in fields {
            if value == 0 || value > largest {
                return refuse(field, value.into(), 1, largest);
            }
        }
        // Both factors are below 2^16, or one of them is 1.
        let inner_dim = heads * head_dim;
        let row_bytes = element.row_bytes(inner_dim)?;
        Ok(CacheGroup { kind, layers, heads, head_dim, inner_dim, outer_dim, element, row_bytes })
    }
}

/// Checks each group, and that no two groups of one kind have the same layer.
pub(super) fn check_groups(
    specs: impl IntoIterator<Item = GroupSpec>,
) -> Result<Vec<CacheGroup>, LayoutError> {
    let groups: Vec<CacheGroup> = specs
        .into_iter()
        .take(MOST_GROUPS + 1)
        .enumerate()
        .map(|(number, spec)| spec.check(number))
        .collect::<Result<_, _>>()?;
    if groups.is_empty() || groups.len() > MOST_GROUPS {
        return Err(ModelError::GroupCount { groups: groups.len(), largest: MOST_GROUPS }.into());
    }
    for (number, group) in groups.iter().enumerate() {
        for (earlier, other) in groups.iter().enumerate().take(number) {
            let same = |layer: &&u32| other.layers.binary_search(layer).is_ok();
            if std::mem::discriminant(&group.kind) == std::mem::discriminant(&other.kind)
                && group.kind != GroupKind::State
                && let Some(layer) = group.layers.iter().find(same)
            {
                let layer = *layer;
                return Err(ModelError::LayerTwice { layer, first: earlier, second: number }.into());
            }
        }
    }
    Ok(groups)
}

/// The most groups: ten times as many as any supported model type has.
const MOST_GROUPS: usize = 64;
