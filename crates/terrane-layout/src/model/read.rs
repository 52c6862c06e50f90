//! Reads the groups of caches from the fields of a configuration.

use super::attention::{self, Heads};
use super::error::ModelError;
use super::families::{Attention, Caches, Tokens};
use super::fields::Fields;
use super::group::{CacheGroup, GroupKind};
use super::limits::LARGEST_LAYER_COUNT;
use super::options::ModelOptions;
use super::spec::{GroupSpec, check_groups};
use super::{dtype, guard, json, latent, state};
use crate::{ElementFormat, LayoutError};

/// The model type, and its groups.
pub(super) fn read(
    json: &[u8],
    options: &ModelOptions,
) -> Result<(&'static str, Vec<CacheGroup>), LayoutError> {
    if options.tensor_parallel == 0 {
        return Err(ModelError::NoRanks.into());
    }
    let root = json::object(json)?;
    let fields = Fields::new(&root)?;
    guard::check(&fields)?;
    let family = fields.family;
    let stated = fields.any_integer(family.names.layers, 1, LARGEST_LAYER_COUNT)?;
    let layers = match (stated, &family.caches) {
        (Some(layers), _) => layers,
        (None, Caches::Hybrid { layers, .. }) => state::listed_layers(&fields, *layers)?,
        (None, _) => fields.one_integer(family.names.layers, 1, LARGEST_LAYER_COUNT)?,
    };
    let reader = Reader { fields, options: *options };
    let specs = match &family.caches {
        Caches::Attention(attention) => {
            let every: Vec<u32> = (0..layers).collect();
            reader.attention(attention, layers, &every)?
        }
        Caches::Latent { each } => vec![reader.latent((0..layers * each).collect())?],
        Caches::Indexed { every } => {
            let selecting = latent::indexer_layers(&reader.fields, layers, *every)?;
            let row_bytes = latent::indexer_row_bytes(&reader.fields)?;
            vec![reader.latent((0..layers).collect())?, GroupSpec::indexer(selecting, row_bytes)]
        }
        Caches::Hybrid { tokens, layers: kinds, state } => {
            let has_tokens = !matches!(tokens, Tokens::None);
            let caches = state::layers(&reader.fields, *kinds, has_tokens, layers)?;
            let of = |wanted: &dyn Fn(&state::LayerCaches) -> bool| -> Vec<u32> {
                (0..).zip(&caches).filter(|(_, caches)| wanted(caches)).map(|(n, _)| n).collect()
            };
            let token_layers = of(&|caches| caches.tokens);
            let mut specs = match tokens {
                Tokens::Attention(attention) => {
                    reader.attention(attention, layers, &token_layers)?
                }
                Tokens::Latent if !token_layers.is_empty() => vec![reader.latent(token_layers)?],
                Tokens::None | Tokens::Latent => Vec::new(),
            };
            let state_layers = of(&|caches| caches.state);
            if !state_layers.is_empty() {
                let (ranks, width) = (options.tensor_parallel, options.recurrent_width);
                let bytes = state::bytes(&reader.fields, state, ranks, width)?;
                specs.push(GroupSpec::state(state_layers, bytes));
            }
            specs
        }
    };
    Ok((family.model_type, check_groups(specs)?))
}

struct Reader<'a> {
    fields: Fields<'a>,
    options: ModelOptions,
}

impl Reader<'_> {
    /// The format of K, V and latents.
    fn element(&self) -> Result<ElementFormat, ModelError> {
        match self.options.kv_element {
            Some(element) => Ok(element),
            None => dtype::cache_width(&self.fields).map(ElementFormat::Width),
        }
    }

    fn latent(&self, layers: Vec<u32>) -> Result<GroupSpec, ModelError> {
        Ok(GroupSpec::latent(layers, latent::latent_dim(&self.fields)?, self.element()?))
    }

    /// A group for each kind of attention among these layers. `layers` has their numbers in the
    /// model.
    fn attention(
        &self,
        attention: &Attention,
        num_layers: u32,
        layers: &[u32],
    ) -> Result<Vec<GroupSpec>, ModelError> {
        let (fields, ranks) = (&self.fields, self.options.tensor_parallel);
        let element = self.element()?;
        let (full, others) = attention::heads(fields, attention, ranks)?;
        let cached = attention::cached_layers(fields, attention, num_layers)?;
        let kinds = match fields.family.caches {
            // The layer types of a hybrid name states, and were read before.
            Caches::Hybrid { .. } => vec![GroupKind::Attention; layers.len()],
            _ => attention::kinds(fields, attention.windows, num_layers)?,
        };
        let own = || layers.iter().copied().zip(&kinds).filter(|(layer, _)| *layer < cached);
        let mut distinct: Vec<GroupKind> = own().map(|(_, kind)| *kind).collect();
        distinct.sort_unstable();
        distinct.dedup();
        let group = |kind: GroupKind| {
            let Heads { count, dim, value_dim } =
                if kind == GroupKind::Attention { full } else { others };
            let layers = own().filter(|(_, each)| **each == kind).map(|(layer, _)| layer);
            if dim == value_dim {
                GroupSpec::attention(layers, count, dim, element).kind(kind)
            } else {
                GroupSpec::new(kind, layers, count, dim + value_dim, element)
            }
        };
        Ok(distinct.into_iter().map(group).collect())
    }
}
