//! The supported model types.
//!
//! Every entry follows the published configurations of its models. If they omit a field, the entry
//! follows the defaults of the `transformers` library (`configuration_*.py` of the model type).

use super::families::{
    Attention, Caches, Family, HeadDim, KvHeads, Mamba2, Names, Recurrent, State, StateLayers,
    StateShape, Tokens, Variant, Windows,
};
use super::names::{
    self, BLOCKS, CHATGLM, DBRX, FALCON, FALCON_H1, GPT, GRANITE, HUNYUAN, INDEXED, LATENT, LINEAR,
    LONGCAT, MAMBA, MAMBA2, NEMOTRON_H, STEP, TYPED, ZAMBA, ZAMBA2,
};
use HeadDim::{OrHiddenPerHead, Stated as StatedDim};
use KvHeads::{All, OrAllHeads, Stated};
use Windows::{AllButFirst, FromLayer, LayerTypesOnly, Listed, Never};

const fn family(
    model_type: &'static str,
    caches: Caches,
    counts: &'static [&'static str],
) -> Family {
    Family { model_type, caches, names: &names::STANDARD, default_dtype: None, counts }
}

const fn plain(kv_heads: KvHeads, head_dim: HeadDim, windows: Windows) -> Attention {
    Attention { kv_heads, head_dim, windows, variant: Variant::None }
}

const fn heads(
    model_type: &'static str,
    kv_heads: KvHeads,
    head_dim: HeadDim,
    windows: Windows,
) -> Family {
    family(model_type, Caches::Attention(plain(kv_heads, head_dim, windows)), &[])
}

const fn latent(model_type: &'static str) -> Family {
    family(model_type, Caches::Latent { each: 1 }, LATENT)
}

const fn indexed(model_type: &'static str, every: u32) -> Family {
    family(model_type, Caches::Indexed { every }, INDEXED)
}

/// The last of each `of` layers has full attention, unless `sliding_window_pattern` states another
/// number.
const fn last_full(of: u32) -> Windows {
    Windows::AllButLast { field: "sliding_window_pattern", of }
}

const fn hybrid(
    model_type: &'static str,
    attention: Attention,
    layers: StateLayers,
    state: State,
    counts: &'static [&'static str],
) -> Family {
    let caches = Caches::Hybrid { tokens: Tokens::Attention(attention), layers, state };
    family(model_type, caches, counts)
}

/// Every layer has a state, and none has tokens.
const fn mamba(model_type: &'static str, state: State) -> Family {
    let (tokens, layers) = (Tokens::None, StateLayers::All);
    family(model_type, Caches::Hybrid { tokens, layers, state }, MAMBA)
}

const MAMBA1: State = State {
    shape: StateShape::Mamba1 {
        inner: "intermediate_size",
        expand: "expand",
        size: "state_size",
        conv: "conv_kernel",
    },
    recurrent: Recurrent::Model,
};

const fn mamba2(shape: &'static Mamba2, recurrent: Recurrent) -> State {
    State { shape: StateShape::Mamba2(shape), recurrent }
}

/// One of four layers has attention, the others have states of Gated DeltaNet.
const fn gated(model_type: &'static str, attention: Attention, recurrent: Recurrent) -> Family {
    let state = State { shape: StateShape::DeltaNet, recurrent };
    hybrid(model_type, attention, StateLayers::Interval(4), state, LINEAR)
}

const fn qwen3_5(model_type: &'static str) -> Family {
    let recurrent = Recurrent::FieldOrModel("mamba_ssm_dtype");
    gated(model_type, plain(Stated, StatedDim, Never), recurrent)
}

/// Flags state whether several heads share K and V, or all of them do.
const fn flags(grouped: &'static str, single: &'static str) -> KvHeads {
    KvHeads::Flags { grouped, single }
}

const fn lfm2(model_type: &'static str, channels: &'static str) -> Family {
    let state = State { shape: StateShape::ShortConv { channels }, recurrent: Recurrent::Model };
    let attention = plain(Stated, OrHiddenPerHead, Never);
    hybrid(model_type, attention, StateLayers::Indices, state, &["conv_", "full_attn_"])
}

const fn gemma4(model_type: &'static str) -> Family {
    let counts = &["num_kv_shared_layers", "global_head_dim", "num_global_"];
    heads(model_type, Stated, StatedDim, Listed).variant(Variant::SharedAndGlobal, counts)
}

impl Family {
    const fn names(self, names: &'static Names) -> Self {
        Self { names, ..self }
    }

    const fn variant(self, variant: Variant, counts: &'static [&'static str]) -> Self {
        match self.caches {
            Caches::Attention(attention) => {
                let caches = Caches::Attention(Attention { variant, ..attention });
                Self { caches, counts, ..self }
            }
            _ => self,
        }
    }
}

/// In alphabetical order.
const FAMILIES: &[Family] = &[
    heads(
        "afmoe",
        OrAllHeads,
        StatedDim,
        Windows::AllButLast { field: "global_attn_every_n_layers", of: 4 },
    ),
    heads("apertus", OrAllHeads, OrHiddenPerHead, Never),
    heads("arcee", OrAllHeads, OrHiddenPerHead, Never),
    heads("aria_text", OrAllHeads, OrHiddenPerHead, Never),
    latent("axk1"),
    heads("beam", Stated, StatedDim, Listed),
    heads("bloom", All, OrHiddenPerHead, Never).names(&GPT),
    heads("chatglm", flags("multi_query_attention", ""), StatedDim, Never).names(&CHATGLM),
    heads("cohere", OrAllHeads, OrHiddenPerHead, Never),
    heads("cohere2", OrAllHeads, OrHiddenPerHead, last_full(4)),
    heads("cohere2_moe", OrAllHeads, StatedDim, Listed),
    heads("cohere_compass_text", OrAllHeads, OrHiddenPerHead, Listed),
    heads("cosmos3_edge_text", Stated, StatedDim, Never),
    heads("cwm", Stated, StatedDim, AllButFirst { of: 4 }),
    heads("dbrx", Stated, OrHiddenPerHead, Never).names(&DBRX),
    heads("deepseek_ocr2_text", OrAllHeads, OrHiddenPerHead, Never),
    latent("deepseek_v2"),
    latent("deepseek_v3"),
    indexed("deepseek_v32", 1),
    heads("emu3_text_model", Stated, OrHiddenPerHead, Never),
    heads("ernie4_5", Stated, StatedDim, Never),
    heads("ernie4_5_moe", Stated, OrHiddenPerHead, Never),
    heads("ernie4_5_vl_moe_text", Stated, OrHiddenPerHead, Never),
    heads("exaone4", Stated, OrHiddenPerHead, last_full(4)),
    heads("exaone_moe", Stated, OrHiddenPerHead, last_full(4)),
    heads("falcon", flags("new_decoder_architecture", "multi_query"), OrHiddenPerHead, Never)
        .names(&FALCON),
    hybrid(
        "falcon_h1",
        plain(Stated, OrHiddenPerHead, Never),
        StateLayers::All,
        mamba2(&FALCON_H1, Recurrent::Model),
        MAMBA,
    ),
    mamba("falcon_mamba", MAMBA1),
    heads("flex_olmo", OrAllHeads, OrHiddenPerHead, Never),
    heads("flint", Stated, StatedDim, Listed),
    heads("gemma", Stated, StatedDim, Never),
    // Every second layer, from the first on, has a window (Gemma2Config).
    heads("gemma2", Stated, StatedDim, last_full(2)),
    // Multimodal configurations omit fields that equal the defaults of Gemma3TextConfig. The
    // configuration of the 4B model omits 4 KV heads of 256.
    heads("gemma3", KvHeads::Or(4), HeadDim::Or(256), last_full(6)),
    heads("gemma3_text", KvHeads::Or(4), HeadDim::Or(256), last_full(6)),
    heads("gemma3n_text", Stated, StatedDim, last_full(5))
        .variant(Variant::Shared, &["num_kv_shared_layers"]),
    gemma4("gemma4_text"),
    gemma4("gemma4_unified_text"),
    heads("glm", Stated, StatedDim, Never),
    heads("glm4", Stated, StatedDim, Never),
    heads("glm4_moe", Stated, StatedDim, Never),
    latent("glm4_moe_lite"),
    heads("glm4v_moe_text", Stated, StatedDim, Never),
    heads("glm4v_text", Stated, OrHiddenPerHead, Never),
    indexed("glm_moe_dsa", 1),
    heads("glm_ocr_text", Stated, StatedDim, Never),
    heads("gpt-sw3", All, OrHiddenPerHead, Never).names(&GPT),
    heads("gpt2", All, OrHiddenPerHead, Never).names(&GPT),
    heads("gpt_bigcode", flags("", "multi_query"), OrHiddenPerHead, Never).names(&GPT),
    heads("gpt_neox", All, OrHiddenPerHead, Never),
    // The published configurations state no dtype; their attention is in bfloat16.
    Family { default_dtype: Some("bfloat16"), ..heads("gpt_oss", Stated, StatedDim, last_full(2)) },
    heads("gptj", All, OrHiddenPerHead, Never).names(&GPT),
    heads("granite", OrAllHeads, OrHiddenPerHead, Never),
    heads("granite4_vision_text", OrAllHeads, OrHiddenPerHead, Never),
    heads("granite_swa", Stated, OrHiddenPerHead, AllButFirst { of: 4 }),
    heads("granitemoe", OrAllHeads, OrHiddenPerHead, Never),
    heads("granitemoe_swa", OrAllHeads, OrHiddenPerHead, AllButFirst { of: 4 }),
    hybrid(
        "granitemoehybrid",
        plain(OrAllHeads, OrHiddenPerHead, Never),
        StateLayers::Typed { field: "layer_types", of: TYPED },
        mamba2(&GRANITE, Recurrent::Model),
        MAMBA,
    ),
    heads("granitemoeshared", OrAllHeads, OrHiddenPerHead, Never),
    heads("hunyuan_v1_dense", OrAllHeads, OrHiddenPerHead, Never).names(&HUNYUAN),
    heads("hunyuan_v1_moe", OrAllHeads, OrHiddenPerHead, Never).names(&HUNYUAN),
    heads("hunyuan_vl_text", OrAllHeads, OrHiddenPerHead, Never).names(&HUNYUAN),
    heads("hy_v3", Stated, StatedDim, Never),
    indexed("hy_v4", 4),
    heads("hyperclovax", OrAllHeads, OrHiddenPerHead, Never),
    heads("internlm2", Stated, OrHiddenPerHead, Never),
    heads("internlm3", Stated, StatedDim, Never),
    heads("iquestcoder", Stated, StatedDim, Never),
    heads("jais2", OrAllHeads, OrHiddenPerHead, Never),
    hybrid(
        "jamba",
        plain(Stated, OrHiddenPerHead, Never),
        StateLayers::Period,
        State {
            shape: StateShape::Mamba1 {
                inner: "",
                expand: "mamba_expand",
                size: "mamba_d_state",
                conv: "mamba_d_conv",
            },
            recurrent: Recurrent::Model,
        },
        &["mamba_", "attn_layer_", "layers_block_type"],
    ),
    // DeepSeek V3's architecture under another name.
    latent("kimi_k2"),
    family(
        "kimi_linear",
        Caches::Hybrid {
            tokens: Tokens::Latent,
            layers: StateLayers::Lists,
            state: State { shape: StateShape::Kda, recurrent: Recurrent::FieldOrFloat32("") },
        },
        &["kv_lora_rank", "v_head_dim", "linear_"],
    ),
    heads("kolibri1", Stated, StatedDim, last_full(5)),
    heads("laguna", Stated, StatedDim, Never),
    lfm2("lfm2", "conv_dim"),
    lfm2("lfm2_moe", "hidden_size"),
    heads("llama", OrAllHeads, OrHiddenPerHead, Never),
    Family {
        counts: &["attention_chunk_size"],
        ..heads("llama4_text", Stated, StatedDim, Windows::Chunks)
    },
    // Each layer attends twice.
    Family { names: &LONGCAT, ..family("longcat_flash", Caches::Latent { each: 2 }, LATENT) },
    mamba("mamba", MAMBA1),
    mamba("mamba2", mamba2(&MAMBA2, Recurrent::Model)),
    heads("mellum", Stated, StatedDim, Never),
    heads(
        "mimo_v2_flash",
        Stated,
        StatedDim,
        Windows::Numbered { field: "hybrid_layer_pattern", window: "sliding_window_size" },
    )
    // The windows are those of the numbered layers, so `attention_chunk_size` has no meaning.
    .variant(
        Variant::Unequal,
        &["v_head_dim", "swa_", "hybrid_layer_pattern", "attention_chunk_size"],
    ),
    heads("minicpm", OrAllHeads, OrHiddenPerHead, Never),
    // The latents of this model become K and V of all heads before they are cached.
    Family { counts: LATENT, ..heads("minicpm3", All, HeadDim::NopeAndRope, Never) },
    heads("minimax_m2", Stated, StatedDim, Never),
    heads("ministral3", Stated, StatedDim, Windows::All),
    heads("mistral", Stated, OrHiddenPerHead, Windows::All),
    heads("mixtral", Stated, OrHiddenPerHead, Windows::All),
    heads("molmo2_text", Stated, StatedDim, Never),
    heads("muse_glimmer_text", Stated, StatedDim, Listed),
    heads("muse_spark_text", Stated, StatedDim, Listed),
    heads("nemotron", OrAllHeads, OrHiddenPerHead, Never),
    Family {
        names: &HUNYUAN,
        ..hybrid(
            "nemotron_h",
            plain(Stated, StatedDim, Never),
            StateLayers::Letters,
            mamba2(&NEMOTRON_H, Recurrent::FieldOrFloat32("mamba_ssm_cache_dtype")),
            &["mamba_", "ssm_", "conv_", "layers_block_type", "hybrid_override_pattern"],
        )
    },
    heads("olmo", OrAllHeads, OrHiddenPerHead, Never),
    heads("olmo2", OrAllHeads, OrHiddenPerHead, Never),
    heads("olmo3", OrAllHeads, OrHiddenPerHead, last_full(4)),
    gated("olmo_hybrid", plain(OrAllHeads, OrHiddenPerHead, Never), Recurrent::Model),
    heads("olmoe", OrAllHeads, OrHiddenPerHead, Never),
    heads("opt", All, OrHiddenPerHead, Never),
    heads("orion", OrAllHeads, OrHiddenPerHead, Never),
    heads("paddleocr_vl_text", Stated, StatedDim, Never),
    heads("phi", OrAllHeads, OrHiddenPerHead, Never),
    heads("phi3", OrAllHeads, OrHiddenPerHead, Windows::All),
    heads("phimoe", Stated, OrHiddenPerHead, Windows::All),
    heads("qwen2", Stated, OrHiddenPerHead, FromLayer),
    heads("qwen2_5_omni_text", Stated, OrHiddenPerHead, FromLayer),
    heads("qwen2_5_vl", Stated, OrHiddenPerHead, FromLayer),
    heads("qwen2_5_vl_text", Stated, OrHiddenPerHead, FromLayer),
    heads("qwen2_moe", Stated, OrHiddenPerHead, LayerTypesOnly),
    heads("qwen2_vl", Stated, OrHiddenPerHead, FromLayer),
    heads("qwen2_vl_text", Stated, OrHiddenPerHead, FromLayer),
    heads("qwen3", Stated, StatedDim, FromLayer),
    qwen3_5("qwen3_5_moe_text"),
    qwen3_5("qwen3_5_text"),
    heads("qwen3_moe", Stated, StatedDim, LayerTypesOnly),
    gated("qwen3_next", plain(Stated, StatedDim, Never), Recurrent::Model),
    heads("qwen3_omni_moe_text", Stated, StatedDim, Never),
    heads("qwen3_vl_moe_text", Stated, OrHiddenPerHead, Never),
    heads("qwen3_vl_text", Stated, StatedDim, Never),
    latent("sarvam_mla"),
    heads("seed_oss", Stated, StatedDim, Never),
    heads("smollm3", Stated, OrHiddenPerHead, LayerTypesOnly),
    heads("stablelm", Stated, OrHiddenPerHead, Never),
    heads("starcoder2", Stated, OrHiddenPerHead, Windows::All),
    heads("step3_text", KvHeads::Or(1), StatedDim, Never).names(&STEP),
    heads("step3p5", Stated, StatedDim, Listed).names(&STEP),
    heads("vaultgemma", Stated, StatedDim, last_full(2)),
    hybrid(
        "zamba2",
        plain(All, StatedDim, Never),
        StateLayers::Typed { field: "layers_block_type", of: BLOCKS },
        mamba2(&ZAMBA2, Recurrent::Model),
        MAMBA,
    )
    .names(&ZAMBA),
];

/// The names of all types, in alphabetical order.
static NAMES: [&str; FAMILIES.len()] = {
    let mut names = [""; FAMILIES.len()];
    let mut n = 0;
    while n < names.len() {
        names[n] = FAMILIES[n].model_type;
        n += 1;
    }
    names
};

/// The model types that [`ModelGeometry::from_json`](super::ModelGeometry::from_json) reads, in
/// alphabetical order.
#[must_use]
pub fn supported_model_types() -> &'static [&'static str] {
    &NAMES
}

/// How to read the configurations of this model type, if it is supported.
pub(super) fn find(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_type == model_type)
}
