//! Serving options of a model, which its configuration does not contain.

use crate::ElementFormat;

/// Serving options of a model, which its configuration does not contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelOptions {
    pub(super) tensor_parallel: u32,
    pub(super) kv_element: Option<ElementFormat>,
    pub(super) recurrent_width: Option<u8>,
}

impl ModelOptions {
    /// One rank, and the cache in the format of the configuration.
    #[must_use]
    pub const fn new() -> Self {
        Self { tensor_parallel: 1, kv_element: None, recurrent_width: None }
    }

    /// The number of tensor-parallel ranks that share the KV heads and states.
    ///
    /// With more ranks than heads, several ranks replicate each head, if the numbers divide evenly.
    /// A latent and an indexer are not divided: each rank has all of them.
    #[must_use]
    pub const fn tensor_parallel(self, ranks: u32) -> Self {
        Self { tensor_parallel: ranks, ..self }
    }

    /// The format of K, V and latents, if it is not that of the configuration.
    /// [`ElementFormat::Width`] of 1 is fp8. [`ElementFormat::RowBytes`] is for rows that an engine
    /// packs in its own way.
    ///
    /// The default is fp8 if `quantization_config` states an fp8 cache, and otherwise the model's
    /// dtype. As in vLLM, a model of float32 is served in 16 bits.
    ///
    /// Indexers have their own format, and states keep the model's dtype.
    #[must_use]
    pub const fn kv_element(self, element: ElementFormat) -> Self {
        Self { kv_element: Some(element), ..self }
    }

    /// Bytes per element of recurrent states, 1 to 8. The default follows the model type and its
    /// configuration, as in vLLM: the model's dtype for most types, 4 bytes for others.
    #[must_use]
    pub const fn recurrent_width(self, bytes: u8) -> Self {
        Self { recurrent_width: Some(bytes), ..self }
    }
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self::new()
    }
}
