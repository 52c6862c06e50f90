//! How to read the configuration of a model type: the vocabulary of [`table`](super::table).

/// How to read the configurations of a model type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    /// The value of `model_type`.
    pub model_type: &'static str,
    pub caches: Caches,
    pub names: &'static Names,
    /// The dtype of the published models if their configurations state none.
    pub default_dtype: Option<&'static str>,
    /// The guarded fields that this reader counts; see [`guard`](super::guard).
    pub counts: &'static [&'static str],
}

/// The names of fields, in order of preference. A name with a point is a field of an inner object.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names {
    pub layers: &'static [&'static str],
    pub heads: &'static [&'static str],
    pub kv_heads: &'static [&'static str],
    pub hidden: &'static [&'static str],
    pub head_dim: &'static [&'static str],
}

/// The caches of the layers.
#[derive(Clone, Copy, Debug)]
pub(super) enum Caches {
    /// K and V.
    Attention(Attention),
    /// One latent for all heads (`kv_lora_rank`) with the rotary key (`qk_rope_head_dim`), this
    /// many per layer.
    Latent { each: u32 },
    /// A latent in every layer, and an indexer's keys in the layers that select tokens. By default
    /// these are one of each `every` layers; the configuration can state them.
    Indexed { every: u32 },
    /// Some layers have K and V, or a latent. Some have a state. A layer may have both, or no
    /// cache.
    Hybrid { tokens: Tokens, layers: StateLayers, state: State },
}

/// K and V.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    pub kv_heads: KvHeads,
    pub head_dim: HeadDim,
    pub windows: Windows,
    pub variant: Variant,
}

/// The special attention of some model types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    None,
    /// The last `num_kv_shared_layers` layers read the caches of earlier layers.
    Shared,
    /// As `Shared`. In addition, layers with full attention have heads of `global_head_dim`. If K
    /// serves as V (`attention_k_eq_v`), they have `num_global_key_value_heads` heads.
    SharedAndGlobal,
    /// Heads of V have `v_head_dim` elements, and share a row with those of K. Layers with a window
    /// have `swa_num_key_value_heads` of `swa_head_dim` and `swa_v_head_dim`.
    Unequal,
}

/// The number of KV heads if no field states it.
#[derive(Clone, Copy, Debug)]
pub(super) enum KvHeads {
    Stated,
    /// As many as query heads.
    OrAllHeads,
    /// As many as query heads, whatever other fields state.
    All,
    /// This number.
    Or(u32),
    /// The stated number if the flag `grouped` is set; one if the flag `single` is set; otherwise
    /// as many as query heads. One of the flags must be stated.
    Flags {
        grouped: &'static str,
        single: &'static str,
    },
}

/// The head dimension if no field states it.
#[derive(Clone, Copy, Debug)]
pub(super) enum HeadDim {
    /// A field must state it: in these models, it is not the hidden size over the heads.
    Stated,
    /// The hidden size over the query heads.
    OrHiddenPerHead,
    /// This number.
    Or(u32),
    /// `qk_nope_head_dim + qk_rope_head_dim`, whatever other fields state.
    NopeAndRope,
}

/// The layers with a sliding window, if `layer_types` does not state them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Windows {
    /// None: a `sliding_window` in these configurations has no meaning.
    Never,
    /// All, if there is a `sliding_window`.
    All,
    /// With `use_sliding_window`, the layers from `max_window_layers` on.
    FromLayer,
    /// With `use_sliding_window`, only `layer_types` can state them.
    LayerTypesOnly,
    /// Only `layer_types` can state them.
    Listed,
    /// The layers with a 1 in the list of this field. Another field states the window.
    Numbered { field: &'static str, window: &'static str },
    /// All layers except the last of each `of` layers. The field can state another number.
    AllButLast { field: &'static str, of: u32 },
    /// All layers except the first of each `of` layers.
    AllButFirst { of: u32 },
    /// `attention_chunk_size` instead of a window, in all layers with rotary embedding. The other
    /// layers are in `no_rope_layers`, or are the last of each `no_rope_layer_interval` layers.
    Chunks,
}

/// The cache per token of a hybrid's layers.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tokens {
    None,
    Attention(Attention),
    Latent,
}

/// The layers of a hybrid that have a state, and those that cache tokens.
#[derive(Clone, Copy, Debug)]
pub(super) enum StateLayers {
    /// All have a state, and all cache tokens if any layer does.
    All,
    /// A field states each layer.
    Typed { field: &'static str, of: &'static [&'static str] },
    /// `layer_types` states the layers. Otherwise, every layer except the last of each
    /// `full_attention_interval` has a state.
    Interval(u32),
    /// `layer_types` states the layers. Otherwise, every layer outside `full_attn_idxs` has a
    /// state.
    Indices,
    /// Every layer except the layer at `attn_layer_offset` of each `attn_layer_period` layers.
    Period,
    /// `layers_block_type` states the layers, or `hybrid_override_pattern` does, with one letter
    /// per layer.
    Letters,
    /// `linear_attn_config` lists the layers of each kind, counted from 1.
    Lists,
}

/// The state of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct State {
    pub shape: StateShape,
    pub recurrent: Recurrent,
}

/// The fields that define a state's size.
#[derive(Clone, Copy, Debug)]
pub(super) enum StateShape {
    /// A convolution and a recurrence of `inner` rows.
    Mamba1 { inner: &'static str, expand: &'static str, size: &'static str, conv: &'static str },
    /// A convolution over heads and groups, and a recurrence per head.
    Mamba2(&'static Mamba2),
    /// `linear_*`: a gated delta network.
    DeltaNet,
    /// `linear_attn_config`: Kimi's delta attention.
    Kda,
    /// Only a convolution, over this many channels.
    ShortConv { channels: &'static str },
}

/// The field names of a Mamba 2 layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mamba2 {
    pub heads: &'static str,
    pub head_dim: &'static str,
    /// Rows of the recurrence, if a field states them.
    pub inner: &'static str,
    /// Their number divided by the hidden size.
    pub expand: &'static str,
    pub groups: &'static [&'static str],
    pub size: &'static str,
    pub conv: &'static [&'static str],
}

/// The dtype of a recurrence, unless the caller states it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Recurrent {
    /// The model's.
    Model,
    /// The dtype in this field, or the model's.
    FieldOrModel(&'static str),
    /// The dtype in this field, or float32.
    FieldOrFloat32(&'static str),
}
