"""Plans of a KV cache's memory."""

import json
import operator
import os
from collections.abc import Mapping

from terrane_kv import _native


def _number(name, number, bits=64):
    """An integer in the range of the native module."""
    if number is None:
        return None
    number = operator.index(number)
    if not 0 <= number < 1 << bits:
        raise ValueError(f"{name}={number}; pass a number from 0 to {(1 << bits) - 1}")
    return number


def _bytes(name, size):
    if isinstance(size, str):
        from terrane_kv.folders import capacity_bytes

        size = capacity_bytes(size)
    return _number(name, size)


def plan(
    model,
    *,
    tensor_parallel: int = 1,
    kv_dtype: str | None = None,
    block_tokens: int = 16,
    chunk_tokens: int | None = None,
    gpu_memory: int | str | None = None,
    host: int | str | None = None,
    disks: Mapping[str | os.PathLike, int | str] | None = None,
    context: int | None = None,
    users: int | None = None,
    machine: str | None = None,
) -> dict:
    """Computes the memory that a model's KV cache needs, and the tokens that fit. It reads only the model's config.

    - `model`: the name of a published model (`terrane plan --list`), the path of a `config.json` or of its folder, or a
      mapping with its content, such as `config.to_dict()` of transformers.
    - `tensor_parallel`: the number of ranks on this machine. `kv_dtype`: "fp8", "bf16", "fp16", "fp32", "mxfp4",
      "mxfp8" or "nvfp4", if it is not the model's type.
    - `gpu_memory` (of each GPU), `host`, `disks` (a size for each directory): bytes, or texts such as "64GiB".
    - `context`, `users`: the tokens of a user's context, and the number of users. `machine`: the name of a profile, for
      predicted times.

    Returns the dictionary that `terrane plan --json` prints: `groups` with bytes per token and per block, `tiers` with
    blocks and tokens, `host` with the needs of the host tier, `limits`, and more.

    Raises `ValueError` if the model or a size is not valid, and `OSError` if a file cannot be read.
    """
    config = None
    if isinstance(model, Mapping):
        name, config = str(model.get("_name_or_path") or "the model"), json.dumps(dict(model), default=str).encode()
    else:
        name = os.fspath(model)
        path = os.path.join(name, "config.json") if os.path.isdir(name) else name
        if os.path.isfile(path) or name.endswith(".json"):
            with open(path, "rb") as file:
                config = file.read()
    arguments = {
        "model": name,
        "config": config,
        "tensor_parallel": _number("tensor_parallel", tensor_parallel, 32),
        "kv_dtype": kv_dtype,
        "block_tokens": _number("block_tokens", block_tokens, 32),
        "chunk_tokens": _number("chunk_tokens", chunk_tokens, 32),
        "gpu_memory": _bytes("gpu_memory", gpu_memory),
        "host": _bytes("host", host),
        "disks": [(os.fsdecode(directory), _bytes("disks", size)) for directory, size in (disks or {}).items()],
        "context": _number("context", context),
        "users": _number("users", users),
        "machine": machine,
    }
    return json.loads(_native.plan_json(arguments))
