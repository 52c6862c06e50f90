//! How the configuration of a model type is to be read: the vocabulary of [`table`](super::table).

/// How the configurations of a model type are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    /// The value of `model_type`.
    pub model_type: &'static str,
    pub caches: Caches,
    pub names: &'static Names,
    /// The dtype of the published models, where their configurations state none.
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

/// What the layers cache.
#[derive(Clone, Copy, Debug)]
pub(super) enum Caches {
    /// K and V.
    Attention(Attention),
    /// One latent for all heads (`kv_lora_rank`) beside the rotary key (`qk_rope_head_dim`), this
    /// many a layer.
    Latent { each: u32 },
    /// A latent in every layer, and an indexer's keys in those that select tokens themselves: one
    /// of so many, unless the configuration states them.
    Indexed { every: u32 },
    /// Some layers have K and V, or a latent; some have a state; some have both or neither.
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

/// What sets the attention of some model types apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    None,
    /// The last `num_kv_shared_layers` layers read the caches of layers before them.
    Shared,
    /// As `Shared`, and layers with full attention have heads of `global_head_dim`, and
    /// `num_global_key_value_heads` of them where K serves as V (`attention_k_eq_v`).
    SharedAndGlobal,
    /// Heads of V have `v_head_dim` elements, and share a row with those of K. Layers with a window
    /// have `swa_num_key_value_heads` of `swa_head_dim` and `swa_v_head_dim`.
    Unequal,
}

/// The number of KV heads where no field states it.
#[derive(Clone, Copy, Debug)]
pub(super) enum KvHeads {
    Stated,
    /// As many as query heads.
    OrAllHeads,
    /// As many as query heads, whatever other fields state.
    All,
    /// These many.
    Or(u32),
    /// The stated number if the flag `grouped` is set; else one if the flag `single` is set; else
    /// as many as query heads. One of the flags has to be stated.
    Flags {
        grouped: &'static str,
        single: &'static str,
    },
}

/// The head dimension where no field states it.
#[derive(Clone, Copy, Debug)]
pub(super) enum HeadDim {
    /// One has to: the hidden size over the heads is another number in these models.
    Stated,
    /// The hidden size over the query heads.
    OrHiddenPerHead,
    /// This.
    Or(u32),
    /// `qk_nope_head_dim + qk_rope_head_dim`, whatever other fields state.
    NopeAndRope,
}

/// Which layers have a sliding window where `layer_types` does not state it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Windows {
    /// None: a `sliding_window` in these configurations has no meaning.
    Never,
    /// All, if there is a `sliding_window`.
    All,
    /// With `use_sliding_window`, those from `max_window_layers` on.
    FromLayer,
    /// With `use_sliding_window`, only `layer_types` can tell.
    LayerTypesOnly,
    /// Only `layer_types` can tell.
    Listed,
    /// Those that have a 1 in the list of this field. Another one states the window.
    Numbered { field: &'static str, window: &'static str },
    /// All but the last of each so many layers. The field states another number.
    AllButLast { field: &'static str, of: u32 },
    /// All but the first of each so many layers.
    AllButFirst { of: u32 },
    /// `attention_chunk_size` in place of a window, in all layers but those without rotary
    /// embedding: `no_rope_layers`, or the last of each `no_rope_layer_interval`.
    Chunks,
}

/// What the layers of a hybrid cache for each token.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tokens {
    None,
    Attention(Attention),
    Latent,
}

/// Which layers of a hybrid have a state, and which cache tokens.
#[derive(Clone, Copy, Debug)]
pub(super) enum StateLayers {
    /// All have a state, and tokens if any layer has.
    All,
    /// A field states each layer.
    Typed { field: &'static str, of: &'static [&'static str] },
    /// `layer_types`, or every layer but the last of each `full_attention_interval` has a state.
    Interval(u32),
    /// `layer_types`, or every layer outside `full_attn_idxs` has a state.
    Indices,
    /// Every layer but those at `attn_layer_offset` of each `attn_layer_period`.
    Period,
    /// `layers_block_type`, or `hybrid_override_pattern`, a letter a layer.
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

/// The fields that decide a state's size.
#[derive(Clone, Copy, Debug)]
pub(super) enum StateShape {
    /// A convolution and a recurrence of `inner` rows.
    Mamba1 { inner: &'static str, expand: &'static str, size: &'static str, conv: &'static str },
    /// A convolution over heads and groups, and a recurrence a head.
    Mamba2(&'static Mamba2),
    /// `linear_*`: a gated delta network.
    DeltaNet,
    /// `linear_attn_config`: Kimi's delta attention.
    Kda,
    /// A convolution alone, over this many channels.
    ShortConv { channels: &'static str },
}

/// The names of a Mamba 2 layer's fields.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mamba2 {
    pub heads: &'static str,
    pub head_dim: &'static str,
    /// Rows of the recurrence, where a field states them.
    pub inner: &'static str,
    /// Their number over the hidden size.
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
    /// That of this field, or the model's.
    FieldOrModel(&'static str),
    /// That of this field, or float32.
    FieldOrFloat32(&'static str),
}
