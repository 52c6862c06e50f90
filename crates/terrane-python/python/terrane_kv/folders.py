"""Opens the store of one rank of an engine."""

import decimal
import difflib
import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence

from terrane_kv import report
from terrane_kv._native import InUseError, KvCache, Store, Tier
from terrane_kv.keys import KeySeed

logger = logging.getLogger("terrane_kv")

# The limits of a store: the bytes of a namespace's name, and of the value of a field.
MAX_NAME_BYTES, MAX_VALUE_BYTES = 128, 512
# The maximum of a time limit, one day. Sockets refuse much longer times.
MAX_SECONDS = 86_400
# A failure that repeats is logged once in this time.
WARNING_INTERVAL_S = 60.0

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)},
    # The usual abbreviation in container settings.
    "gi": 1 << 30,
}


def capacity_bytes(capacity: int | str) -> int:
    """A capacity in bytes: a number, or a text such as "500GiB" (units of 1,024) or "500GB" (units of 1,000).

    The units are those of Terrane's command line. Raises `ValueError` for any other text or type, and for numbers that
    are not positive.
    """
    if isinstance(capacity, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", capacity)
        unit = _UNITS.get(found[2].lower()) if found else None
        if unit is None:
            raise ValueError(f"the capacity {capacity!r} is not a size; write for example 500GiB or 500GB")
        capacity = int(decimal.Decimal(found[1]) * unit)
    if type(capacity) is not int:
        raise ValueError(f"the capacity {capacity!r} is not a whole number of bytes; write for example 500GiB or 500GB")
    if capacity <= 0:
        raise ValueError(f"the capacity is {capacity} bytes; it must be positive")
    return capacity


def seconds(name: str, value: object) -> float:
    """An option of an engine that is a time limit. Raises `ValueError` unless it is above 0 and at most a day."""
    try:
        limit = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        limit = math.nan
    if not 0 < limit <= MAX_SECONDS:
        raise ValueError(f"{name} is {value!r}; set seconds above 0 and at most {MAX_SECONDS}, for example 30")
    return limit


def whole(name: str, value: object, least: int) -> int:
    """An option of an engine that is a whole number. Raises `ValueError` unless it is at least `least`."""
    try:
        number = int(value)  # type: ignore[call-overload]
        is_whole = number == float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number, is_whole = 0, False
    if not is_whole or isinstance(value, bool) or number < least:
        raise ValueError(f"{name} is {value!r}; set a whole number of {least} or more")
    return number


def warn_about_names(names: Iterable[str], options: Sequence[str], place: str) -> None:
    """Warns about each name that resembles an option but is none. Engines have options of their own in `place`."""
    for name in names:
        near = difflib.get_close_matches(name, options, 1, 0.8)
        if near and name not in options:
            logger.warning("%s has %r, which is not an option; did you mean %r?", place, name, near[0])


class RateLimitedWarning:
    """A warning about a failure that may repeat. It is due the first time, and then once in `WARNING_INTERVAL_S`."""

    def __init__(self) -> None:
        self.next = 0.0

    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self.next:
            return False
        self.next = now + WARNING_INTERVAL_S
        return True


def log_like(engine: str) -> None:
    """Gives this package's logger the handlers and the level of an engine's logger, unless it has handlers.

    Engines configure their own loggers, and no root logger. Without handlers, Python drops messages below WARNING.
    """
    theirs = logging.getLogger(engine)
    if logger.hasHandlers() or not theirs.hasHandlers():
        return
    for handler in theirs.handlers:
        logger.addHandler(handler)
    logger.setLevel(theirs.getEffectiveLevel())


def open_rank(
    *,
    engine: str,
    directory: str,
    capacity: int | str,
    groups: Sequence[tuple[str, int | KvCache] | tuple[str, int | KvCache, int]],
    model: str,
    fields: Mapping[str, object],
    seed: KeySeed,
    rank: int,
    ranks: int,
    memory: int | str = 0,
    device: int | None = None,
    read_only: bool = False,
) -> Store:
    """Opens `directory/rank-R-of-N` with an equal share of the capacity.

    Each process needs its own folder, because one process owns a store. `fields` are the values that must match before
    a process may read blocks that another process has written. A hash replaces the end of a long value. `groups` are
    names, block sizes in bytes or caches, and weights. `memory` is the size of a tier of host memory above the disk, which
    is also divided into equal shares; 0 for no tier. With the number of a CUDA `device`, this memory is pinned.

    Raises `ValueError` if `rank` is not below `ranks`.
    """
    if not 0 <= rank < ranks:
        raise ValueError(
            f"this is process {rank} (from 0) of {ranks} that share {directory}; set the number of processes that "
            "share it"
        )
    share = capacity_bytes(capacity) // ranks
    host_bytes = capacity_bytes(memory) // ranks if memory else 0
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
    namespace = {name: _shortened(value) for name, value in namespace.items()}
    store = Store(
        rank_folder(directory, rank, ranks),
        share,
        groups=list(groups),
        namespace=namespace_name(engine, model),
        fields=namespace,
        persistent=seed.is_reproducible,
        read_only=read_only,
        host_bytes=host_bytes if device is None else 0,
        tiers=[Tier.pinned(host_bytes, device=device)] if device is not None and host_bytes else [],
        keep_keys=True,
    )
    report.note_store(store, engine, directory, seed)
    logger.info("opened %s with %d bytes: %s", os.path.abspath(directory), share, store.recovery)
    return store


def rank_folder(directory: str, rank: int, ranks: int) -> str:
    """The folder of one rank."""
    return os.path.join(directory, f"rank-{rank}-of-{ranks}")


def namespace_name(engine: str, model: str) -> str:
    """The namespace of a model: its name, converted to a file name. A hash replaces the end of a long name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{engine}-{model}").strip("-.") or engine
    if len(name) <= MAX_NAME_BYTES:
        return name
    digest = _digest(f"{engine}-{model}")[:32]
    return f"{name[: MAX_NAME_BYTES - len(digest) - 1]}-{digest}"


def open_unowned(candidates: Sequence[int], *, ranks: int, **options) -> Store:
    """Opens the first rank of `candidates` that no other process owns.

    Raises `InUseError` if each has an owner.
    """
    for rank in candidates[:-1]:
        try:
            return open_rank(rank=rank, ranks=ranks, **options)
        except InUseError as error:
            logger.info("rank %d has an owner: %s", rank, error)
    return open_rank(rank=candidates[-1], ranks=ranks, **options)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _shortened(value: str) -> str:
    """The value of a field. If it is too long for a store, its beginning and its hash."""
    content = value.encode()
    if len(content) <= MAX_VALUE_BYTES:
        return value
    digest = f" sha256:{_digest(value)}"
    # A character that does not fit as a whole is left out.
    return content[: MAX_VALUE_BYTES - len(digest)].decode(errors="ignore") + digest


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
