"""SGLang: a HiCache storage backend.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "terrane",
      "module_path": "terrane_kv.sglang", "class_name": "TerraneHiCacheStorage", "interface_v1": 1,
      "root_dir": "/nvme/kv", "capacity": "500GiB"}'
"""

import logging
import threading

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from terrane_kv import keys as key_seeds
from terrane_kv._native import Blocks, StoreError
from terrane_kv.folders import open_unowned

logger = logging.getLogger("terrane_kv")

READY = 2


class TerraneHiCacheStorage(HiCacheStorage):
    """A HiCache backend over one `terrane_kv.Store` a rank, with one group of blocks for each host pool.

    Keys of `extra_config`:

    - `root_dir`: a folder on a local drive; `capacity`: bytes, or a text such as "500GiB", for all ranks together.
    - `engines`: the number of SGLang servers, or replicas of `--dp-size`, that share `root_dir`. Each takes a folder
      that no other process owns; `engine`, its number, makes it take that one only.
    - `dp_groups`: the groups of dp attention, if SGLang does not state them.
    - `revision`, `rope_scaling`: state them if two models of one name differ by them.
    - `timeout_s`: a page that takes longer is a miss (default 30).

    Calls wait for their I/O, with the GIL released. No call raises in a step of the engine: a page that fails is
    False, and logged.
    """

    def __init__(self, storage_config, kwargs=None):
        extra = storage_config.extra_config or {}
        missing = [name for name in ("root_dir", "capacity") if name not in extra]
        if missing:
            raise ValueError(f"the extra config lacks {' and '.join(missing)}")
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ValueError(
                f"the model's cache is alike on its {storage_config.tp_size} tensor-parallel ranks, and SGLang writes it "
                "from rank 0 alone; other ranks cannot read a Terrane store of another process. Use dp attention with "
                "one rank a group, or another backend"
            )
        self._config = storage_config
        self._extra = extra
        self._timeout_s = float(extra.get("timeout_s", 30.0))
        self.registered_pools = {}
        self._lock = threading.Lock()
        self._store = None
        self._is_refused = False
        # The group of each pool, once the store is open.
        self._groups = {}

    # Host pools: the store opens once all of them are known.

    def register_mem_pool_host(self, mem_pool_host):
        super().register_mem_pool_host(mem_pool_host)
        self.registered_pools.setdefault(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        self.registered_pools[host_pool_name] = host_pool

    def on_host_pools_registered(self):
        self._open()

    def _open(self):
        with self._lock:
            if self._store is not None:
                return self._store
            pools = {
                str(getattr(name, "value", name)): _page_bytes(pool)
                for name, pool in self.registered_pools.items()
                if not _is_logical(pool)
            }
            config = self._config
            group, groups, engines, numbers = self._engines()
            # With dp attention, tp_rank counts within the attention group.
            sizes = {
                "dp": (group, groups),
                "tp": (config.tp_rank, config.tp_size),
                "pp": (config.pp_rank, config.pp_size),
                "cp": (config.attn_cp_rank, config.attn_cp_size),
            }
            rank, ranks = 0, 1
            for at, count in sizes.values():
                rank, ranks = rank * count + at, ranks * count
            fields = {
                "pools": pools,
                "page_size": getattr(self.mem_pool_host, "page_size", 1),
                "dtype": str(getattr(self.mem_pool_host, "dtype", None)),
                "layout": getattr(self.mem_pool_host, "layout", None),
                "parallel": sizes,
                "context_parallel_decoding": [
                    getattr(config, "dcp_rank", 0),
                    getattr(config, "dcp_size", 1),
                    getattr(config, "logical_page_size", None),
                ],
                "split_heads": [config.tp_lcm_size, config.should_split_heads],
                "revision": self._extra.get("revision"),
                "rope_scaling": self._extra.get("rope_scaling"),
            }
            self._store = open_unowned(
                [number * ranks + rank for number in numbers],
                ranks=engines * ranks,
                engine="sglang",
                directory=self._extra["root_dir"],
                capacity=self._extra["capacity"],
                groups=list(pools.items()),
                model=config.model_name or "unnamed",
                fields=fields,
                seed=key_seeds.sglang(),
            )
            self._groups = {name: group for group, name in enumerate(pools)}
            return self._store

    def _opened(self):
        """The store, or None if it cannot be opened. That is logged once, and each page is then a miss."""
        try:
            return None if self._is_refused else self._open()
        except Exception:
            self._is_refused = True
            logger.exception("the store cannot be opened; no page is stored or loaded")
            return None

    def _engines(self):
        """The group of dp attention, the number of groups, the number of engines, and the numbers that this engine may
        take, the preferred one first."""
        group = getattr(self._config, "dp_rank", 0) or 0
        groups = int(self._extra.get("dp_groups") or _parallel("attn_dp_size") or 1)
        if group >= groups:
            raise ValueError(
                f"this is group {group} (from 0) of dp attention, and {groups} are known; set `dp_groups` in the extra "
                "config to the value of --dp-size"
            )
        replicas = max(1, (_parallel("num_dp_ranks") or groups) // groups)
        engines = int(self._extra.get("engines", replicas))
        if engines < 1:
            raise ValueError(f"the extra config has {engines} engines; state 1 or more")
        if "engine" in self._extra:
            return group, groups, engines, [int(self._extra["engine"])]
        replica = _parallel("dp_rank") if groups == 1 else None
        numbers = sorted(range(engines), key=lambda number: number != replica)
        return group, groups, engines, numbers

    # Presence

    def _ready(self, keys, pool=PoolName.KV):
        store = self._opened()
        group = self._groups.get(str(getattr(pool, "value", pool)))
        if store is None or group is None:
            return [False] * len(keys)
        try:
            return [presence >= READY for presence in store.presences(keys, group=group)]
        except Exception as error:
            logger.warning("a lookup of %d pages failed: %r", len(keys), error)
            return [False] * len(keys)

    def exists(self, key):
        return self._ready([key])[0]

    def batch_exists(self, keys, extra_info=None):
        if _is_logical(self.mem_pool_host):
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
                # Such a pool never shortens the prefix; without a report of it, SGLang computes it.
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
        if _is_logical(memory):
            return [True] * len(keys)

        def blocks():
            pointers, sizes = memory.get_page_buffer_meta(host_indices)
            return Blocks.at(pointers, sizes, len(keys), keep=memory)

        return self._run(verb, pool, keys, blocks)

    def _run(self, verb, pool, keys, blocks):
        """Runs a job over the memory that `blocks` returns, and waits for it."""
        store = self._opened()
        if store is None:
            return [False] * len(keys)
        group = self._groups.get(str(getattr(pool, "value", pool)))
        if group is None:
            logger.warning("the pool %s was registered after the store was opened; it is not stored", pool)
            return [False] * len(keys)
        try:
            run = store.put if verb == "put" else store.get
            priority = "low" if verb == "put" else "high"
            job = run(keys, blocks(), group=group, timeout=self._timeout_s, priority=priority)
            outcome = job.wait()
        except Exception as error:
            # No exception reaches a step of the engine.
            logger.warning("%s of %d pages was refused: %r", verb, len(keys), error)
            return [False] * len(keys)
        if outcome.error is not None:
            logger.warning("%s: %s", verb, outcome.error)
        return outcome.done

    # The older interface: one tensor a page

    def get(self, key, target_location=None, target_sizes=None):
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        if not target_locations or any(tensor is None for tensor in target_locations):
            return [None] * len(keys)
        done = self._run("get", PoolName.KV, keys, lambda: _memory(target_locations))
        return [tensor if is_done else None for tensor, is_done in zip(target_locations, done)]

    def set(self, key, value=None, target_location=None, target_sizes=None):
        return self.batch_set([key], [value])

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        if values is None or any(tensor is None for tensor in values):
            return False
        return all(self._run("put", PoolName.KV, keys, lambda: _memory([it.contiguous() for it in values])))

    def clear(self):
        self._open().clear()

    def close(self):
        with self._lock:
            if self._store is not None:
                self._store.close(timeout=30.0)


def _parallel(name):
    """A rank or a size that SGLang states for this process, or None."""
    try:
        from sglang.srt.runtime_context import get_parallel

        value = getattr(get_parallel(), name)
    except Exception:
        # Its context raises errors of several types for a name that it does not know, or before its start.
        return None
    return value if isinstance(value, int) else None


def _leading(flags):
    return next((at for at, flag in enumerate(flags) if not flag), len(flags))


def _is_logical(pool):
    """A pool that only counts pages; its memory is in other pools."""
    return getattr(pool, "kv_buffer", False) is None


def _page_bytes(pool):
    """The bytes of one page of a host pool."""
    meta = getattr(pool, "get_page_buffer_meta", None)
    if meta is not None:
        page_size = getattr(pool, "page_size", 1) or 1
        try:
            return sum(meta(torch.arange(page_size))[1])
        except (NotImplementedError, ValueError):
            # This layout of the pool has no zero-copy form; pages are then copied one by one.
            pass
    page = pool.get_dummy_flat_data_page()
    return page.numel() * page.element_size()


def _memory(tensors):
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise StoreError("a page is not a contiguous tensor of host memory")
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return Blocks.at([tensor.data_ptr() for tensor in tensors], sizes, len(tensors), keep=tensors)
