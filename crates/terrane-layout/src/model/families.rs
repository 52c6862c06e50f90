//! The model types that are supported, and how their configurations are to be read.
//!
//! Every entry follows the published configurations of its models and, where those leave a field
//! out, the defaults of the `transformers` library (`configuration_*.py` of the model type).

/// How the configurations of a model type are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Family {
    /// The value of `model_type`.
    pub model_type: &'static str,
    pub cache: Cache,
}

/// What each layer caches.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cache {
    /// K and V for each KV head.
    Heads { kv_heads: KvHeads, head_dim: HeadDim, windows: Windows },
    /// One latent for all heads (`kv_lora_rank`) beside the rotary key (`qk_rope_head_dim`).
    Latent,
}

/// The number of KV heads where `num_key_value_heads` does not state it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KvHeads {
    Stated,
    /// `num_attention_heads`.
    OrAllHeads,
    /// These many.
    Or(u32),
}

/// The head dimension where `head_dim` does not state it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HeadDim {
    /// It has to: `hidden_size / num_attention_heads` is another number in these models.
    Stated,
    /// `hidden_size / num_attention_heads`.
    OrHiddenPerHead,
    /// This.
    Or(u32),
}

/// Which layers have a sliding window where `layer_types` does not state it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Windows {
    /// None: a `sliding_window` in these configurations has no meaning.
    Never,
    /// All, if there is a `sliding_window`.
    All,
    /// With `use_sliding_window`, those from `max_window_layers` on.
    FromLayer,
    /// With `use_sliding_window`, only `layer_types` can tell.
    LayerTypesOnly,
    /// All but the last of each `sliding_window_pattern` layers, which is this if not stated.
    Pattern(u32),
}

const fn heads(
    model_type: &'static str,
    kv_heads: KvHeads,
    head_dim: HeadDim,
    windows: Windows,
) -> Family {
    Family { model_type, cache: Cache::Heads { kv_heads, head_dim, windows } }
}

const fn latent(model_type: &'static str) -> Family {
    Family { model_type, cache: Cache::Latent }
}

static FAMILIES: [Family; 17] = [
    latent("deepseek_v2"),
    latent("deepseek_v3"),
    // Every second layer, from the first on, has a window (Gemma2Config).
    heads("gemma2", KvHeads::Stated, HeadDim::Stated, Windows::Pattern(2)),
    // Multimodal configurations leave out what equals the defaults of Gemma3TextConfig, as those
    // of the 4B model do: 4 KV heads of 256.
    heads("gemma3", KvHeads::Or(4), HeadDim::Or(256), Windows::Pattern(6)),
    heads("gemma3_text", KvHeads::Or(4), HeadDim::Or(256), Windows::Pattern(6)),
    heads("glm4", KvHeads::Stated, HeadDim::Stated, Windows::Never),
    heads("glm4_moe", KvHeads::Stated, HeadDim::Stated, Windows::Never),
    heads("gpt_oss", KvHeads::Stated, HeadDim::Stated, Windows::Pattern(2)),
    // DeepSeek V3's architecture under another name.
    latent("kimi_k2"),
    heads("llama", KvHeads::OrAllHeads, HeadDim::OrHiddenPerHead, Windows::Never),
    heads("mistral", KvHeads::Stated, HeadDim::OrHiddenPerHead, Windows::All),
    heads("mixtral", KvHeads::Stated, HeadDim::OrHiddenPerHead, Windows::All),
    heads("phi3", KvHeads::OrAllHeads, HeadDim::OrHiddenPerHead, Windows::All),
    heads("qwen2", KvHeads::Stated, HeadDim::OrHiddenPerHead, Windows::FromLayer),
    heads("qwen2_moe", KvHeads::Stated, HeadDim::OrHiddenPerHead, Windows::LayerTypesOnly),
    heads("qwen3", KvHeads::Stated, HeadDim::Stated, Windows::FromLayer),
    heads("qwen3_moe", KvHeads::Stated, HeadDim::Stated, Windows::LayerTypesOnly),
];

/// The model types that can be read, in alphabetical order.
pub const SUPPORTED_MODEL_TYPES: &[&str] = &{
    let mut names = [""; FAMILIES.len()];
    let mut n = 0;
    while n < names.len() {
        names[n] = FAMILIES[n].model_type;
        n += 1;
    }
    names
};

/// How configurations of this model type are read, if it is supported.
pub(crate) fn family(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_type == model_type)
}
