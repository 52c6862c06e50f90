//! Field names that several model types share.

use super::families::{Mamba2, Names};

pub(super) const STANDARD: Names = Names {
    layers: &["num_hidden_layers"],
    heads: &["num_attention_heads"],
    kv_heads: &["num_key_value_heads"],
    hidden: &["hidden_size"],
    head_dim: &["head_dim"],
};

/// Field names of models from before the names were standardised.
pub(super) const GPT: Names = Names {
    layers: &["n_layer", "num_hidden_layers"],
    heads: &["n_head", "num_attention_heads"],
    hidden: &["n_embd", "n_embed", "hidden_size"],
    ..STANDARD
};

pub(super) const FALCON: Names = Names {
    layers: &["num_hidden_layers", "n_layer"],
    heads: &["num_attention_heads", "n_head"],
    kv_heads: &["num_kv_heads", "n_head_kv"],
    hidden: &["hidden_size"],
    ..STANDARD
};

pub(super) const CHATGLM: Names = Names {
    layers: &["num_layers"],
    kv_heads: &["multi_query_group_num"],
    head_dim: &["kv_channels"],
    ..STANDARD
};

pub(super) const DBRX: Names = Names {
    layers: &["n_layers"],
    heads: &["n_heads"],
    kv_heads: &["attn_config.kv_n_heads"],
    hidden: &["d_model"],
    ..STANDARD
};

pub(super) const LONGCAT: Names = Names { layers: &["num_layers"], ..STANDARD };
pub(super) const HUNYUAN: Names =
    Names { head_dim: &["head_dim", "attention_head_dim"], ..STANDARD };
pub(super) const ZAMBA: Names = Names { head_dim: &["attention_head_dim"], ..STANDARD };
pub(super) const STEP: Names =
    Names { kv_heads: &["num_attention_groups", "num_key_value_heads"], ..STANDARD };

pub(super) const MAMBA2: Mamba2 = Mamba2 {
    heads: "num_heads",
    head_dim: "head_dim",
    inner: "",
    expand: "expand",
    groups: &["n_groups"],
    size: "state_size",
    conv: &["conv_kernel"],
};
pub(super) const FALCON_H1: Mamba2 = Mamba2 {
    heads: "mamba_n_heads",
    head_dim: "mamba_d_head",
    inner: "mamba_d_ssm",
    expand: "mamba_expand",
    groups: &["mamba_n_groups"],
    size: "mamba_d_state",
    conv: &["mamba_d_conv"],
};
pub(super) const GRANITE: Mamba2 = Mamba2 { inner: "", ..FALCON_H1 };
pub(super) const ZAMBA2: Mamba2 = Mamba2 {
    heads: "n_mamba_heads",
    head_dim: "mamba_headdim",
    groups: &["mamba_ngroups"],
    ..GRANITE
};
pub(super) const NEMOTRON_H: Mamba2 = Mamba2 {
    heads: "mamba_num_heads",
    head_dim: "mamba_head_dim",
    // These configurations state an `expand` that has no effect.
    expand: "",
    groups: &["n_groups", "mamba_n_groups"],
    size: "ssm_state_size",
    conv: &["conv_kernel", "mamba_d_conv"],
    ..GRANITE
};

pub(super) const MAMBA: &[&str] =
    &["mamba_", "ssm_", "conv_", "state_size", "layers_block_type", "hybrid_layer_ids"];
pub(super) const LATENT: &[&str] = &["kv_lora_rank", "v_head_dim"];
pub(super) const INDEXED: &[&str] = &["kv_lora_rank", "v_head_dim", "index_", "indexer_"];
pub(super) const LINEAR: &[&str] = &["linear_", "full_attention_interval", "mamba_"];
pub(super) const TYPED: &[&str] = &["attention", "full_attention", "mamba", "linear_attention"];
pub(super) const BLOCKS: &[&str] = &["mamba", "linear_attention", "hybrid"];
