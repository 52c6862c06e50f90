"""A HiCache storage backend for SGLang.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "terrane",
      "module_path": "terrane_kv.sglang", "class_name": "TerraneHiCacheStorage", "interface_v1": 1,
      "root_dir": "/nvme/kv", "capacity": "500GiB"}'
"""

import difflib
import hashlib
import logging
import threading
import time

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from terrane_kv import keys as key_seeds
from terrane_kv import sharing
from terrane_kv._native import Blocks, NamespaceError, StoreError
from terrane_kv.folders import Seldom, capacity_bytes, log_like, namespace_name, open_unowned, rank_folder, seconds
from terrane_kv.sharing import Client, RefusedError, Server

logger = logging.getLogger("terrane_kv")

OPTIONS = (
    "root_dir", "capacity", "memory", "engines", "engine", "dp_groups", "kv_dtype", "revision", "rope_scaling",
    "timeout_s",
)
READY = 2
# The time after which a rank that cannot connect to rank 0 logs a warning.
PATIENCE_S = 60.0
REMEDY = "All ranks must run on one machine, as one user, with one root_dir"


class _Outage:
    """The failures of one kind of call to rank 0."""

    def __init__(self):
        # The first call of those that could not connect.
        self.since = None
        # Failures of other kinds.
        self.warnings = Seldom()


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
        for name in extra:
            near = difflib.get_close_matches(name, OPTIONS, 1, 0.8)
            if near and name not in OPTIONS:
                logger.warning("the extra config has %r, which is not an option; did you mean %r?", name, near[0])
        # The store is opened with the first page. Invalid options are reported at the start.
        capacity_bytes(extra["capacity"])
        if extra.get("memory"):
            capacity_bytes(extra["memory"])
        self._config = storage_config
        self._extra = extra
        self._timeout_s = seconds("timeout_s", extra.get("timeout_s", 30.0))
        log_like("sglang")
        self.registered_pools = {}
        self._lock = threading.Lock()
        # If several ranks have the same cache, it is in the store of rank 0.
        self._is_shared = bool(storage_config.is_mla_model) and storage_config.tp_size > 1
        self._store = None
        self._server = None
        # A failure to open the store is final, or the store is opened again after this time.
        self._is_refused = False
        self._rests_until = 0.0
        self._openings = Seldom()
        # Lookups and moves fail separately: a lookup needs no memory.
        self._lookups, self._moves = _Outage(), _Outage()
        self._has_warned = False
        # The group of each pool, once the store is open.
        self._groups = {}

    # Host pools: the store is opened with the first page, once all of them are known.

    def register_mem_pool_host(self, mem_pool_host):
        super().register_mem_pool_host(mem_pool_host)
        self.registered_pools.setdefault(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        self.registered_pools[host_pool_name] = host_pool

    def on_host_pools_registered(self):
        # SGLang registers the pools of a draft model later, so the store is not opened yet.
        self._engines()
        self._kv_dtype()

    def _open(self):
        with self._lock:
            if self._store is not None:
                return self._store
            pools = {
                str(getattr(name, "value", name)): _page_bytes(pool)
                for name, pool in self.registered_pools.items()
                if not _is_logical(pool)
            }
            self._groups = {name: group for group, name in enumerate(pools)}
            self._store = self._rank_store(pools)
            return self._store

    def _rank_store(self, pools):
        """The store of this rank, or a connection to the store of rank 0."""
        config = self._config
        group, groups, engines, numbers = self._engines()
        # With dp attention, tp_rank counts within the attention group.
        sizes = {
            "dp": (group, groups),
            "tp": (0, 1) if self._is_shared else (config.tp_rank, config.tp_size),
            "pp": (config.pp_rank, config.pp_size),
            "cp": (0, 1) if self._shares_contexts() else (config.attn_cp_rank, config.attn_cp_size),
        }
        rank, ranks = 0, 1
        for at, count in sizes.values():
            rank, ranks = rank * count + at, ranks * count
        fields = {
            "pools": pools,
            "page_size": getattr(self.mem_pool_host, "page_size", 1),
            "dtype": str(getattr(self.mem_pool_host, "dtype", None)),
            "kv_dtype": self._kv_dtype(),
            "layout": getattr(self.mem_pool_host, "layout", None),
            "page_order": self._page_order(),
            "parallel": sizes,
            "context_parallel_decoding": [
                # If ranks share a store, their keys contain the rank.
                0 if self._is_shared else getattr(config, "dcp_rank", 0),
                getattr(config, "dcp_size", 1),
                getattr(config, "logical_page_size", None),
            ],
            "split_heads": [config.tp_lcm_size, config.should_split_heads],
            # The model's name may be the alias that clients use (--served-model-name).
            "model_path": _stated("get_model", "model_path"),
            "model_revision": _stated("get_model", "revision"),
            "revision": self._extra.get("revision"),
            "rope_scaling": self._extra.get("rope_scaling"),
        }
        model, root = config.model_name or "unnamed", self._extra["root_dir"]
        ranks *= engines
        if self._is_shared:
            folder = rank_folder(root, numbers[0] * ranks // engines + rank, ranks)
            # The name is short, because the kernel limits the length of a socket's path.
            name = hashlib.sha256(namespace_name("sglang", model).encode()).hexdigest()[:12]
            path, identity = f"{folder}-{name}.socket", {"model": model, **fields}
            if config.tp_rank != 0:
                logger.info("pages are read from the store of tensor-parallel rank 0, by %s", path)
                return Client(path, identity, max(pools.values(), default=0))
        memory = self._extra.get("memory")
        if memory is None:
            # The ranks load the same pages, and should read each page from disk once.
            memory = max(1 << 30, 16 * ranks * sum(pools.values())) if self._is_shared else 0
        store = open_unowned(
            [number * (ranks // engines) + rank for number in numbers],
            ranks=ranks,
            engine="sglang",
            directory=root,
            capacity=self._extra["capacity"],
            memory=memory,
            groups=_weighted(pools),
            model=model,
            fields=fields,
            seed=key_seeds.sglang(),
        )
        if self._is_shared:
            try:
                self._server = Server(store, path, identity)
            except OSError:
                store.close()
                raise
        return store

    def _shares_contexts(self):
        """Whether the ranks of context parallelism also share rank 0's store.

        SGLang then counts them by `tp_rank`, each has the whole cache, and rank 0 alone writes. With a layer split, each
        has other layers.
        """
        if not self._is_shared or any(_has_some_layers(pool) for pool in self.registered_pools.values()):
            return False
        return (_parallel("attn_tp_size") or self._config.tp_size) != self._config.tp_size

    def _kv_dtype(self):
        """The type of the cache's elements, if the pools do not have it: they store types of 8 bits and less as uint8."""
        if not any(str(getattr(pool, "dtype", None)) == "torch.uint8" for pool in self.registered_pools.values()):
            return None
        dtype = self._extra.get("kv_dtype") or _stated("get_model", "kv_cache_dtype")
        if dtype is None:
            raise ValueError(
                "the host pool has elements of uint8, and SGLang does not pass their type; set `kv_dtype` in the extra "
                "config to the value of --kv-cache-dtype, for example fp8_e4m3"
            )
        return dtype

    def _page_order(self):
        """How a page of the pool KV is stored, if the two interfaces of SGLang store its bytes in different orders."""
        if getattr(self.mem_pool_host, "layout", None) != "layer_first" or self._config.is_mla_model:
            return None
        # The keys and values of each layer alternate in spans. The older interface stores the keys of all layers first.
        return "spans" if self._extra.get("interface_v1") else "flat"

    def _opened(self):
        """The store, or None if it cannot be opened. Each page is then a miss.

        The failure is logged. It is final if the options or the namespace are wrong. Otherwise, a call tries again after
        `REST_S` seconds, because another process may end or free space.
        """
        if self._store is not None:
            return self._store
        if self._is_refused or time.monotonic() < self._rests_until:
            return None
        try:
            return self._open()
        except Exception as error:
            self._rests_until = time.monotonic() + sharing.REST_S
            # The texts of these errors contain a remedy.
            is_known = isinstance(error, (StoreError, ValueError, OSError))
            self._is_refused = not is_known or isinstance(error, (NamespaceError, ValueError))
            if self._is_refused or self._openings.is_due():
                what = "the store cannot be opened; no page is stored or loaded"
                until = "" if self._is_refused else f"; it is opened again after {sharing.REST_S:g} seconds"
                logger.error("%s: %s%s", what, error, until, exc_info=not is_known)
            return None

    def _engines(self):
        """The group of dp attention, the number of groups, the number of engines, and the numbers that this engine may
        use, the preferred number first."""
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
            raise ValueError(f"the extra config has {engines} engines; set 1 or more")
        if "engine" in self._extra:
            return group, groups, engines, [int(self._extra["engine"])]
        replica = _parallel("dp_rank") if groups == 1 else None
        if self._is_shared and engines > 1:
            if replica is None or replica >= engines:
                raise ValueError(
                    f"{engines} engines share root_dir, and the ranks of each must find their rank 0; set `engine` in the "
                    "extra config to the number of this engine, from 0"
                )
            return group, groups, engines, [replica]
        numbers = sorted(range(engines), key=lambda number: number != replica)
        return group, groups, engines, numbers

    # Presence

    def _ready(self, keys, pool=PoolName.KV):
        store = self._opened()
        group = self._groups.get(str(getattr(pool, "value", pool)))
        if store is None or group is None:
            return [False] * len(keys)
        try:
            found = store.presences(self._rank_keys(keys, pool), group=group)
            self._lookups.since = None
            return [presence >= READY for presence in found]
        except Exception as error:
            self._failed(self._lookups, f"a lookup of {len(keys)} pages failed", error)
            return [False] * len(keys)

    def _rank_keys(self, keys, pool):
        """The keys in the store. They contain the rank if ranks share the store and these pages differ between
        ranks."""
        if not self._is_shared:
            return keys
        config = self._config
        if pool == PoolName.MAMBA or _is_sharded(self.registered_pools.get(pool)):
            return [f"tp{config.tp_rank}-{config.tp_size}:{key}" for key in keys]
        if (getattr(config, "dcp_size", 1) or 1) > 1:
            return [f"dcp{config.dcp_rank}:{key}" for key in keys]
        return keys

    def _failed(self, outage, what, error):
        """Logs that a call has failed. No exception reaches a step of the engine."""
        if not isinstance(self._store, Client) or not isinstance(error, (OSError, RefusedError)):
            logger.warning("%s: %r", what, error)
            return
        if not isinstance(error, (ConnectionError, FileNotFoundError, RefusedError)):
            if outage.warnings.is_due():
                remedy = f". {REMEDY}" if isinstance(error, PermissionError) else ""
                logger.warning("%s in the store of tensor-parallel rank 0: %r%s", what, error, remedy)
            return
        # Rank 0 may start later than this rank.
        now = time.monotonic()
        since = outage.since = outage.since or now
        if not self._has_warned and (isinstance(error, RefusedError) or now - since > PATIENCE_S):
            self._has_warned = True
            logger.warning(
                "the store of tensor-parallel rank 0 cannot be used, and each page is a miss: %r. %s", error, REMEDY
            )

    def exists(self, key):
        return self.batch_exists([key]) == 1

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
        if _is_logical(memory):
            return [True] * len(keys)

        # A pool whose layout has no zero-copy form copies each page.
        copies = {}

        def spans():
            found = _spans_in(memory, host_indices)
            if found is not None:
                return (*found, memory)
            copies.update(_copies(verb, memory, host_indices, len(keys)))
            return _memory(list(copies.values()))

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
            self._failed(self._moves, f"{len(copies)} pages could not be copied to a pool", error)
            return [False] * len(done)
        return done

    def _run(self, verb, pool, keys, memory):
        """Runs a job on the pointers and sizes that `memory` returns with their owner, and waits for it."""
        store = self._opened()
        if store is None:
            return [False] * len(keys)
        group = self._groups.get(str(getattr(pool, "value", pool)))
        if group is None:
            logger.warning("the pool %s was registered after the store was opened; it is not stored", pool)
            return [False] * len(keys)
        try:
            pointers, sizes, owner = memory()
            names = self._rank_keys(keys, pool)
            if isinstance(store, Client):
                done, error = store.run(verb, names, _spans(pointers, sizes, len(keys)), group, self._timeout_s)
                self._moves.since = None
            else:
                options = {"group": group, "timeout": self._timeout_s, "priority": "low" if verb == "put" else "high"}
                if self._is_shared:
                    blocks = _parts(pointers, sizes, len(keys), owner)
                    done, error = sharing.run(store, verb, names, blocks, options)
                else:
                    blocks = Blocks.at(pointers, sizes, len(keys), keep=owner)
                    outcome = (store.put if verb == "put" else store.get)(names, blocks, **options).wait()
                    done, error = outcome.done, outcome.error
        except Exception as error:
            self._failed(self._moves, f"{verb} of {len(keys)} pages was refused", error)
            return [False] * len(keys)
        if error is not None:
            logger.warning("%s: %s", verb, error)
        return done

    # The older interface: one tensor for each page.

    def get(self, key, target_location=None, target_sizes=None):
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys, target_locations=None, target_sizes=None):
        if not target_locations or any(tensor is None for tensor in target_locations):
            return [None] * len(keys)
        if _is_logical(self.mem_pool_host):
            return list(target_locations)
        done = self._run("get", PoolName.KV, keys, lambda: _memory(target_locations))
        return [tensor if is_done else None for tensor, is_done in zip(target_locations, done)]

    def set(self, key, value=None, target_location=None, target_sizes=None):
        return self.batch_set([key], [value])

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
        if values is None or any(tensor is None for tensor in values):
            return False
        if _is_logical(self.mem_pool_host):
            return True
        return all(self._run("put", PoolName.KV, keys, lambda: _memory([it.contiguous() for it in values])))

    def clear(self):
        self._open().clear()

    def close(self):
        with self._lock:
            if self._server is not None:
                self._server.close()
            if isinstance(self._store, Client):
                self._store.close()
            elif self._store is not None:
                self._store.close(timeout=30.0)


def _parallel(name):
    """A rank or a size from SGLang's context of this process, or None."""
    value = _stated("get_parallel", name)
    return value if isinstance(value, int) else None


def _stated(part, name):
    """A value in a part of SGLang's context of this process, or None."""
    try:
        from sglang.srt import runtime_context

        return getattr(getattr(runtime_context, part)(), name)
    except Exception:
        # The context raises errors of several types for an unknown name, or before SGLang has started.
        return None


def _has_some_layers(pool):
    """Whether each rank of context parallelism has other layers in this pool."""
    sharded = getattr(getattr(pool, "device_pool", None), "layer_shard_enabled", False)
    return bool(sharded or getattr(pool, "_layer_shard_enabled", False))


def _weighted(pools):
    """The groups of these pools with weights. Every page has a block in each pool, but few have a state of Mamba layers.

    All other pools get equally many slots. The states get as many bytes as all other pools together.
    """
    state = PoolName.MAMBA.value
    others = sum(size for name, size in pools.items() if name != state)
    return [(name, size, others or size if name == state else size) for name, size in pools.items()]


def _leading(flags):
    return next((at for at, flag in enumerate(flags) if not flag), len(flags))


def _is_logical(pool):
    """Whether a pool only counts pages, with its memory in other pools."""
    return getattr(pool, "kv_buffer", False) is None


def _page_bytes(pool):
    """The bytes of one page of a host pool."""
    spans = _spans_in(pool, torch.arange(getattr(pool, "page_size", 1) or 1))
    if spans is not None:
        return sum(spans[1])
    page = pool.get_dummy_flat_data_page()
    return page.numel() * page.element_size()


def _spans_in(pool, indices):
    """The pointers and sizes of pages in a host pool, or None if its layout has no zero-copy form."""
    meta = getattr(pool, "get_page_buffer_meta", None)
    try:
        return meta and meta(indices)
    except (NotImplementedError, ValueError):
        return None


def _copies(verb, pool, indices, count):
    """For each page, the index of its first token and a tensor: its bytes for a put, and room for them for a get."""
    tokens = len(indices) // count
    if tokens * count != len(indices) or tokens == 0:
        raise ValueError(f"{len(indices)} host indices for {count} pages")
    firsts = [int(index) for index in indices[::tokens]]
    if verb == "put":
        return {index: pool.get_data_page(index).contiguous() for index in firsts}
    return {index: pool.get_dummy_flat_data_page() for index in firsts}


def _memory(tensors):
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise StoreError("a page is not a contiguous tensor of host memory")
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return [tensor.data_ptr() for tensor in tensors], sizes, tensors


def _spans_of_page(pointers, sizes, count):
    each = len(pointers) // max(count, 1)
    if each * count != len(pointers) or len(sizes) != len(pointers):
        raise ValueError(f"{len(pointers)} pointers and {len(sizes)} sizes for {count} pages")
    return each


def _parts(pointers, sizes, count, owner):
    """A function that returns the blocks from one page to another one."""
    each = _spans_of_page(pointers, sizes, count)

    def blocks(start, end):
        of_part = slice(start * each, end * each)
        return Blocks.at(pointers[of_part], sizes[of_part], end - start, keep=owner)

    return blocks


def _spans(pointers, sizes, count):
    """For each page, a list of pairs of address and size."""
    each = _spans_of_page(pointers, sizes, count)
    pairs = [(int(pointer), int(size)) for pointer, size in zip(pointers, sizes)]
    return [pairs[at * each : (at + 1) * each] for at in range(count)]


def _is_sharded(pool):
    """Whether each tensor-parallel rank has different attention heads in this pool."""
    return any("MHA" in base.__name__ for base in type(pool).__mro__)
