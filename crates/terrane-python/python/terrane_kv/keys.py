"""Checks whether an engine's keys are the same in the next process.

A key is a hash of tokens that starts from a seed. If the seed is random, a block that was stored before a restart never
hits again, and only wastes space in a persistent store.
"""

import importlib.util
import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class KeySeed:
    """The seed of an engine's keys.

    `algorithm` and `seed` are part of the namespace. `remedy` is None if keys are reproducible. Otherwise it names the
    setting that makes them reproducible.
    """

    algorithm: str
    seed: str
    remedy: str | None = None

    @property
    def is_reproducible(self) -> bool:
        return self.remedy is None


def vllm(algorithm: str = "sha256") -> KeySeed:
    """The seed of vLLM's block hashes: PYTHONHASHSEED, or a constant for cryptographic algorithms.

    `algorithm` is the value of vLLM's `--prefix-caching-hash-algo`.
    """
    hash_seed = os.environ.get("PYTHONHASHSEED")
    if hash_seed is not None:
        return KeySeed(algorithm, hash_seed)
    if algorithm.startswith("sha256"):
        return KeySeed(algorithm, "default")
    return vllm_random(algorithm)


def vllm_random(algorithm: str) -> KeySeed:
    """The seed of vLLM's block hashes when it is random."""
    remedy = (
        f"vLLM's block hashes ({algorithm}) start from random bytes in each process; set PYTHONHASHSEED to a fixed "
        "number, or use `--prefix-caching-hash-algo sha256`"
    )
    return KeySeed(algorithm, "random", remedy)


def lmcache(algorithm: str = "blake3") -> KeySeed:
    """The seed of LMCache's chunk hashes. `algorithm` is the value of its `--hash-algorithm`."""
    # For Python's own hash, "random" means no seed. (vLLM uses it as a seed, like any other text.)
    hash_seed = os.environ.get("PYTHONHASHSEED")
    # Before Python 3.12, the hash of None is its address. LMCache hashes None with its chunks.
    hashes_addresses = algorithm == "builtin" and sys.version_info < (3, 12)
    if hash_seed in ("", "random") or hashes_addresses:
        hash_seed = None
    if algorithm == "blake3":
        # This is LMCache's own function, without a seed.
        return KeySeed(algorithm, "none")
    if hash_seed is not None:
        return KeySeed(algorithm, hash_seed)
    if algorithm.startswith("sha256") and importlib.util.find_spec("vllm") is not None:
        return KeySeed(algorithm, "default")
    remedy = (
        f"LMCache's chunk hashes ({algorithm}) differ in each process; use `--hash-algorithm blake3`"
        + ("" if hashes_addresses else ", or set PYTHONHASHSEED to a fixed number")
    )
    return KeySeed(algorithm, "random", remedy)


def sglang() -> KeySeed:
    """The seed of SGLang's page hashes: they are SHA-256 over the tokens, without a seed."""
    return KeySeed("sha256", "none")
