#!/usr/bin/env python3
"""Prints the caches of one rank for each model of terrane-plan, in the form of expected.json.

    python3 expected_bytes.py > expected.json

It computes the shapes of tensors layer by layer, and so checks a program that derives groups of
layers.
A layer has a list of tensors. A tensor is a kind, a shape, and bytes per element. A cache of tokens
has no token axis: its bytes are those of one token. A group consists of the layers with tensors of
one kind and one size.
"""

import json
import math
import pathlib

MODELS = pathlib.Path(__file__).parents[3] / "terrane-plan/src/data/models"
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
# gpt-oss is published without a dtype.
UNSTATED = {"gpt_oss": "bfloat16"}


class Refused(Exception):
    """This many ranks cannot hold the model."""


def split(number, ranks):
    if number % ranks:
        raise Refused
    return number // ranks


def split_heads(heads, ranks):
    """If there are more ranks than heads, several ranks hold copies."""
    if heads % ranks == 0:
        return heads // ranks
    if ranks % heads == 0:
        return 1
    raise Refused


def head_size(c):
    for name in ("attention_head_dim", "head_dim"):
        if c.get(name):
            return c[name]
    return c.get("hidden_size", c.get("n_embd")) // c.get("num_attention_heads", c.get("n_head"))


def kv_heads(c):
    queries = c.get("num_attention_heads", c.get("n_head"))
    if c["model_type"] == "falcon":
        if c["new_decoder_architecture"]:
            return c["num_kv_heads"]
        return 1 if c["multi_query"] else queries
    if c["model_type"] == "gpt_bigcode":
        return 1 if c["multi_query"] else queries
    if c["model_type"] in ("minicpm3", "zamba2"):
        return queries
    return c.get("num_attention_groups") or c.get("num_key_value_heads") or queries


def kv(c, ranks, kind=("attention",), heads=None, size=None):
    """K and V of one token."""
    shape = (2, split_heads(heads or kv_heads(c), ranks), size or head_size(c))
    return [(kind, shape, c["width"])]


def latent(c):
    return [(("latent",), (c["kv_lora_rank"] + c["qk_rope_head_dim"],), c["width"])]


def indexer(c):
    """64 tokens have 64 rows of fp8 values, and then 64 rows of fp32 scales. This is a token's share."""
    dim = c["index_head_dim"]
    block = 64 * dim * 1 + 64 * math.ceil(dim / 128) * 4
    return [(("indexer",), (block // 64,), 1)]


def windowed(c, is_sliding):
    return ("sliding", c["sliding_window"]) if is_sliding else ("attention",)


def mamba1(c, ranks, inner, taps, size):
    inner = split(inner, ranks)
    return [(("state",), (taps - 1, inner), c["width"]), (("state",), (inner, size), c["width"])]


def mamba2(c, ranks, heads, size, groups, state, taps, width=None):
    # If there are more ranks than groups, several ranks hold copies.
    if groups % ranks:
        groups = max(groups, ranks)
        split(groups, ranks)
    heads_here = split(heads, ranks)
    channels = split(heads * size + 2 * groups * state, ranks)
    return [
        (("state",), (taps - 1, channels), c["width"]),
        (("state",), (heads_here, size, state), width or c["width"]),
    ]


def delta_net(c, ranks):
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    split(keys, ranks)
    key, value = c["linear_key_head_dim"], c["linear_value_head_dim"]
    channels = split(keys * key + keys * key + values * value, ranks)
    recurrent = WIDTHS[c["mamba_ssm_dtype"]] if "mamba_ssm_dtype" in c else c["width"]
    return [
        (("state",), (c["linear_conv_kernel_dim"] - 1, channels), c["width"]),
        (("state",), (split(values, ranks), value, key), recurrent),
    ]


def layers_of(c, ranks):
    """The tensors of each layer."""
    kind = c["model_type"]
    count = c.get("num_hidden_layers", c.get("n_layer", c.get("num_layers")))
    if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        return [latent(c) for _ in range(count)]
    if kind == "longcat_flash":
        # Two attentions per layer.
        return [latent(c) for _ in range(2 * count)]
    if kind == "deepseek_v32":
        return [latent(c) + indexer(c) for _ in range(count)]
    if kind in ("glm_moe_dsa", "hy_v4"):
        own = [each == "full" for each in c["indexer_types"]]
        return [latent(c) + (indexer(c) if has else []) for has in own]
    if kind == "minicpm3":
        size = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        return [kv(c, ranks, size=size) for _ in range(count)]
    if kind == "kimi_linear":
        heads = split(c["linear_num_heads"], ranks)
        size, taps = c["linear_head_dim"], c["linear_conv_kernel_dim"]
        state = [
            (("state",), (taps - 1, heads * size * 3), c["width"]),
            (("state",), (heads, size, size), 4),
        ]
        return [latent(c) if t == "full_attention" else state for t in c["layer_types"]]
    if kind in ("qwen3_next", "qwen3_5_text", "olmo_hybrid"):
        every = c.get("full_attention_interval")
        full = (
            [t == "full_attention" for t in c["layer_types"]]
            if "layer_types" in c
            else [n % every == every - 1 for n in range(count)]
        )
        return [kv(c, ranks) if each else delta_net(c, ranks) for each in full]
    if kind in ("mamba", "falcon_mamba"):
        inner = c["expand"] * c["hidden_size"]
        one = mamba1(c, ranks, inner, c["conv_kernel"], c["state_size"])
        return [one for _ in range(count)]
    if kind == "jamba":
        inner = c["mamba_expand"] * c["hidden_size"]
        state = mamba1(c, ranks, inner, c["mamba_d_conv"], c["mamba_d_state"])
        period, offset = c["attn_layer_period"], c["attn_layer_offset"]
        return [kv(c, ranks) if n % period == offset else state for n in range(count)]
    if kind == "mamba2":
        one = mamba2(
            c, ranks, c["num_heads"], c["head_dim"], c["n_groups"], c["state_size"],
            c["conv_kernel"],
        )
        return [one for _ in range(count)]
    if kind in ("falcon_h1", "granitemoehybrid"):
        state = mamba2(
            c, ranks, c["mamba_n_heads"], c["mamba_d_head"], c["mamba_n_groups"],
            c["mamba_d_state"], c["mamba_d_conv"],
        )
        if kind == "falcon_h1":
            return [kv(c, ranks) + state for _ in range(count)]
        return [kv(c, ranks) if t == "full_attention" else state for t in c["layer_types"]]
    if kind == "zamba2":
        state = mamba2(
            c, ranks, c["n_mamba_heads"], c["mamba_headdim"], c["mamba_ngroups"],
            c["mamba_d_state"], c["mamba_d_conv"],
        )
        both = [t == "hybrid" for t in c["layers_block_type"]]
        return [kv(c, ranks) + state if each else state for each in both]
    if kind == "nemotron_h":
        state = mamba2(
            c, ranks, c["mamba_num_heads"], c["mamba_head_dim"], c["n_groups"],
            c["ssm_state_size"], c["conv_kernel"], WIDTHS[c["mamba_ssm_cache_dtype"]],
        )
        tensors = {"linear_attention": state, "full_attention": kv(c, ranks)}
        return [tensors.get(t, []) for t in c["layers_block_type"]]
    if kind == "llama4_text":
        chunk = ("chunked", c["attention_chunk_size"])
        return [kv(c, ranks, chunk if rope else ("attention",)) for rope in c["no_rope_layers"]]
    if kind == "gemma4_text":
        layers = []
        for each in c["layer_types"][: count - c["num_kv_shared_layers"]]:
            is_sliding = each == "sliding_attention"
            size = c["head_dim"] if is_sliding else c["global_head_dim"]
            layers.append(kv(c, ranks, windowed(c, is_sliding), size=size))
        return layers
    if kind == "cwm":
        return [kv(c, ranks, windowed(c, n % 4 != 0)) for n in range(count)]
    if kind in ("mistral", "phi3"):
        return [kv(c, ranks, windowed(c, bool(c.get("sliding_window")))) for _ in range(count)]
    if "layer_types" in c:
        own = c["layer_types"][: count - c.get("num_kv_shared_layers", 0)]
        return [kv(c, ranks, windowed(c, t == "sliding_attention")) for t in own]
    return [kv(c, ranks) for _ in range(count)]


def groups_of(c, ranks):
    """Kind, layers and bytes of each group, over all its layers."""
    groups = {}
    for number, tensors in enumerate(layers_of(c, ranks)):
        sizes = {}
        for kind, shape, width in tensors:
            sizes[kind] = sizes.get(kind, 0) + math.prod(shape) * width
        for kind, size in sizes.items():
            group = groups.setdefault((kind, size), [])
            group.append(number)
    order = ["attention", "sliding", "chunked", "latent", "indexer", "state"]
    result = []
    for (kind, size), layers in sorted(groups.items(), key=lambda g: order.index(g[0][0][0])):
        per = "sequence" if kind == ("state",) else "token"
        group = {"kind": kind[0]}
        if kind[1:]:
            group["tokens"] = kind[1]
        group |= {"layers": len(layers), "first": layers[0], f"bytes_per_{per}": size * len(layers)}
        result.append(group)
    return result


def main():
    expected = {}
    for path in sorted(MODELS.glob("*.json")):
        file = json.loads(path.read_text())
        c = {"torch_dtype": file.get("torch_dtype")} | file.get("text_config", file)
        # Engines serve a float32 checkpoint in 16 bits.
        c["width"] = min(2, WIDTHS[c.get("torch_dtype") or UNSTATED[c["model_type"]]])
        cases = {}
        for ranks in (1, 4, 8):
            try:
                cases[f"{ranks}"] = groups_of(c, ranks)
            except Refused:
                cases[f"{ranks}"] = None
        expected[path.stem] = cases
    lines = []
    for name, cases in expected.items():
        ranks = [f'  "{rank}": {json.dumps(groups)}' for rank, groups in cases.items()]
        lines.append(f' "{name}": {{\n' + ",\n".join(ranks) + "\n }")
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main()
