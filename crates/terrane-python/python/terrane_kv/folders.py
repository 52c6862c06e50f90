"""Opens the store of one rank of an engine."""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence

from terrane_kv import report
from terrane_kv._native import Store
from terrane_kv.keys import KeySeed

logger = logging.getLogger("terrane_kv")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def capacity_bytes(capacity: int | str) -> int:
    """A capacity in bytes: a number, or a text such as "500GiB" (units are powers of 1,024).

    Raises `ValueError` if it is neither, or not positive.
    """
    if isinstance(capacity, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", capacity, re.IGNORECASE)
        if found is None:
            raise ValueError(f"the capacity {capacity!r} is no size; write for example 500GiB")
        capacity = int(float(found[1]) * _UNITS[found[2].upper()])
    if capacity <= 0:
        raise ValueError(f"the capacity is {capacity} bytes; it must be positive")
    return capacity


def open_rank(
    *,
    engine: str,
    directory: str,
    capacity: int | str,
    groups: Sequence[tuple[str, int]],
    model: str,
    fields: Mapping[str, object],
    seed: KeySeed,
    rank: int,
    ranks: int,
    read_only: bool = False,
) -> Store:
    """Opens `directory/rank-R-of-N` with an equal share of the capacity.

    Each process needs its own folder, because a store has one owner. `fields` are what else must agree before one
    process may read what another has written. `groups` are names and block sizes in bytes.
    """
    share = capacity_bytes(capacity) // ranks
    if not seed.is_reproducible:
        logger.warning("the cache in %s will not survive a restart: %s", directory, seed.remedy)
    namespace = {
        "engine": engine,
        "model": model,
        "rank": f"{rank} of {ranks}",
        "key_algorithm": seed.algorithm,
        "key_seed": seed.seed,
        **{name: _text(value) for name, value in fields.items() if value is not None},
    }
    store = Store(
        os.path.join(directory, f"rank-{rank}-of-{ranks}"),
        share,
        groups=list(groups),
        namespace=re.sub(r"[^A-Za-z0-9._-]+", "-", f"{engine}-{model}").strip("-.") or engine,
        fields=namespace,
        persistent=seed.is_reproducible,
        read_only=read_only,
        keep_keys=True,
    )
    report.note_store(store, engine, directory, seed)
    logger.info("opened %s with %d bytes: %s", directory, share, store.recovery)
    return store


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
