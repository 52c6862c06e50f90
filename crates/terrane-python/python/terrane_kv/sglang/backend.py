"""The methods of the backend that SGLang calls."""

import logging
import time

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from terrane_kv import sharing
from terrane_kv._native import Blocks
from terrane_kv.folders import RateLimitedWarning, capacity_bytes, log_like, seconds, warn_about_names, whole
from terrane_kv.sglang.pools import is_logical, page_blocks, page_copies, page_spans, spans_in, tensor_spans
from terrane_kv.sglang.rank_store import RankStore
from terrane_kv.sharing import Client, RefusedError

logger = logging.getLogger("terrane_kv")

OPTIONS = (
    "root_dir", "capacity", "memory", "engines", "engine", "dp_groups", "kv_dtype", "revision", "rope_scaling",
    "timeout_s",
)
READY = 2
# The time after which a rank that cannot connect to rank 0 logs a warning. Another one follows each minute.
WARN_AFTER_S = 60.0
REMEDY = "All ranks must run on one machine, as one user, with one root_dir"


class _Outage:
    """The failures of one kind of call to rank 0."""

    def __init__(self):
        # The first call of those that could not connect.
        self.since = None
        # All other failures.
        self.warnings = RateLimitedWarning()


class TerraneHiCacheStorage(HiCacheStorage):
    """A HiCache backend with one `terrane_kv.Store` for each rank, and one group of blocks for each host pool.

    Keys of `extra_config`:

    - `root_dir`: a folder on a local drive; `capacity`: bytes, or a text such as "500GiB", for all ranks together.
    - `memory`: bytes of host memory above the disk, for all ranks together (default 0; at least 1 GiB if ranks share a
      store).
    - `engines`: the number of SGLang servers, or replicas of `--dp-size`, that share `root_dir`. Each opens a folder
      that no other process owns. `engine`, the number of this server, selects one folder.
    - `dp_groups`: the number of groups of dp attention, if SGLang does not pass it.
    - `kv_dtype`: the type of the cache's elements, such as "fp8_e4m3", if SGLang does not pass it. SGLang's pools of all
      types of 8 bits have one type.
    - `revision`, `rope_scaling`: set them if two models of the same name differ in them.
    - `timeout_s`: a page that takes longer is a miss; in seconds (default 30).

    With multi-head latent attention, all tensor-parallel ranks have the same cache, and SGLang writes it from one rank.
    Rank 0 then opens the store, and the other ranks of the machine connect to it by a socket in `root_dir`. The keys of
    pages that differ between ranks contain the rank.

    Calls wait for their I/O, with the GIL released. No call raises an exception in a step of the engine: if a page
    fails, its result is False, and the error is logged.
    """

    def __init__(self, storage_config, kwargs=None):
        extra = storage_config.extra_config or {}
        missing = [name for name in ("root_dir", "capacity") if name not in extra]
        if missing:
            raise ValueError(f"the extra config lacks {' and '.join(missing)}")
        warn_about_names(extra, OPTIONS, "the extra config")
        # The store is opened with the first page. Invalid options are reported at the start.
        capacity_bytes(extra["capacity"])
        if extra.get("memory"):
            capacity_bytes(extra["memory"])
        for name, least in (("engines", 1), ("engine", 0)):
            if name in extra:
                whole(name, extra[name], least)
        self._timeout_s = seconds("timeout_s", extra.get("timeout_s", 30.0))
        log_like("sglang")
        self._rank = RankStore(storage_config, extra)
        self.registered_pools = self._rank.pools
        # Lookups and moves fail separately: a lookup needs no memory.
        self._lookups, self._moves = _Outage(), _Outage()
        self._outage_warnings = RateLimitedWarning()
        # The pools that were registered after the store was opened.
        self._late_pools = set()

    # Host pools: the store is opened with the first page, once all of them are known.

    def register_mem_pool_host(self, mem_pool_host):
        super().register_mem_pool_host(mem_pool_host)
        self._rank.main_pool = mem_pool_host
        self.registered_pools.setdefault(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        self.registered_pools[host_pool_name] = host_pool

    def on_host_pools_registered(self):
        # SGLang registers the pools of a draft model later, so the store is not opened yet.
        self._rank.check()

    # Presence

    def _ready(self, keys, pool=PoolName.KV):
        if is_logical(self.registered_pools.get(pool)):
            return [True] * len(keys)
        store, group = self._rank.store_or_none(), self._rank.group(pool)
        if store is None or group is None:
            return [False] * len(keys)
        try:
            found = store.presences(self._rank.keys(keys, pool), group=group)
            self._lookups.since = None
            return [presence >= READY for presence in found]
        except Exception as error:
            self._log_failure(self._lookups, f"a lookup of {len(keys)} pages failed", error)
            return [False] * len(keys)

    def _log_failure(self, outage, what, error):
        """Logs that a call has failed. No exception reaches a step of the engine."""
        is_of_rank_0 = isinstance(self._rank.store, Client) and isinstance(error, (OSError, RefusedError))
        if not is_of_rank_0 or not isinstance(error, (ConnectionError, FileNotFoundError, RefusedError)):
            if outage.warnings.is_due():
                place = " in the store of tensor-parallel rank 0" if is_of_rank_0 else ""
                remedy = f". {REMEDY}" if is_of_rank_0 and isinstance(error, PermissionError) else ""
                logger.warning("%s%s: %r%s", what, place, error, remedy)
            return
        # Rank 0 may start later than this rank.
        now = time.monotonic()
        since = outage.since = outage.since or now
        is_long = isinstance(error, RefusedError) or now - since > WARN_AFTER_S
        if is_long and self._outage_warnings.is_due():
            logger.warning(
                "the store of tensor-parallel rank 0 cannot be used, and each page is a miss: %r. %s", error, REMEDY
            )

    def exists(self, key):
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys, extra_info=None):
        if is_logical(self.mem_pool_host):
            return len(keys)
        return _leading(self._ready(keys))

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None):
        kv_pages = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            ready = self._ready(keys[:kv_pages], transfer.name)
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                lengths = set(range(1, _leading(ready) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                lengths = {
                    length
                    for length in range(1, kv_pages + 1)
                    if all(ready[max(0, length - window) : length])
                }
            else:
                # Such a pool never shortens the prefix. If the report omits it, SGLang computes it.
                continue
            if lengths:
                hits[transfer.name] = max(lengths)
            restorable = [length for length in restorable if length in lengths]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    # Zero copy between the host pool and the disk

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        return self._move("get", PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys, host_indices, extra_info=None):
        return self._move("put", PoolName.KV, keys, host_indices)

    def batch_get_v2(self, transfers, extra_info=None):
        return {it.name: self._move("get", it.name, it.keys, it.host_indices) for it in transfers}

    def batch_set_v2(self, transfers, extra_info=None):
        return {it.name: self._move("put", it.name, it.keys, it.host_indices) for it in transfers}

    def _move(self, verb, pool, keys, host_indices):
        keys = keys or []
        memory = self.registered_pools.get(pool)
        if memory is None or host_indices is None or not keys:
            return [False] * len(keys)
        if is_logical(memory):
            return [True] * len(keys)

        # A pool whose layout has no zero-copy form copies each page.
        copies = {}

        def spans():
            found = spans_in(memory, host_indices)
            if found is not None:
                return (*found, memory)
            copies.update(page_copies(verb, memory, host_indices, len(keys)))
            return tensor_spans(list(copies.values()))

        done = self._run(verb, pool, keys, spans)
        if verb == "get" and any(done):
            done = self._filled(memory, copies, done)
        return done

    def _filled(self, memory, copies, done):
        """Copies loaded pages to their places in a pool, and returns the results."""
        try:
            for (index, page), is_done in zip(copies.items(), done):
                if is_done:
                    memory.set_from_flat_data_page(index, page)
        except Exception as error:
            self._log_failure(self._moves, f"{len(copies)} pages could not be copied to a pool", error)
            return [False] * len(done)
        return done

    def _run(self, verb, pool, keys, memory):
        """Runs a job on the pointers and sizes that `memory` returns with their owner, and waits for it."""
        store = self._rank.store_or_none()
        if store is None:
            return [False] * len(keys)
        group = self._rank.group(pool)
        if group is None:
            if pool not in self._late_pools:
                self._late_pools.add(pool)
                logger.warning("the pool %s was registered after the store was opened; it is not stored", pool)
            return [False] * len(keys)
        try:
            pointers, sizes, owner = memory()
            names = self._rank.keys(keys, pool)
            if isinstance(store, Client):
                done, error = store.run(verb, names, page_spans(pointers, sizes, len(keys)), group, self._timeout_s)
                self._moves.since = None
            else:
                options = {"group": group, "timeout": self._timeout_s, "priority": "low" if verb == "put" else "high"}
                if self._rank.is_shared:
                    blocks = page_blocks(pointers, sizes, len(keys), owner)
                    done, error = sharing.run(store, verb, names, blocks, options)
                else:
                    blocks = Blocks.at(pointers, sizes, len(keys), keep=owner)
                    outcome = (store.put if verb == "put" else store.get)(names, blocks, **options).wait()
                    done, error = outcome.done, outcome.error
        except Exception as error:
            self._log_failure(self._moves, f"{verb} of {len(keys)} pages was refused", error)
            return [False] * len(keys)
        if error is not None and self._moves.warnings.is_due():
            logger.warning("%s: %s", verb, error)
        return done

    # The older interface: one tensor for each page.

    def get(self, key, target_location=None, target_sizes=None):
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        if not target_locations or any(tensor is None for tensor in target_locations):
            return [None] * len(keys)
        if is_logical(self.mem_pool_host):
            return list(target_locations)
        done = self._run("get", PoolName.KV, keys, lambda: tensor_spans(target_locations))
        return [tensor if is_done else None for tensor, is_done in zip(target_locations, done)]

    def set(self, key, value=None, target_location=None, target_sizes=None):
        return self.batch_set([key], [value])

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        if values is None or any(tensor is None for tensor in values):
            return False
        if is_logical(self.mem_pool_host):
            return True
        return all(self._run("put", PoolName.KV, keys, lambda: tensor_spans([it.contiguous() for it in values])))

    def clear(self):
        self._rank.open().clear()

    def close(self):
        self._rank.close()


def _leading(flags):
    return next((at for at, flag in enumerate(flags) if not flag), len(flags))
