"""The store of one rank of SGLang."""

import hashlib
import logging
import threading
import time

from sglang.srt.mem_cache.hicache_storage import PoolName

from terrane_kv import keys as key_seeds
from terrane_kv._native import ClosedError, NamespaceError, StoreError
from terrane_kv.folders import RateLimitedWarning, namespace_name, open_unowned, rank_folder
from terrane_kv.sharing import Client, Server
from terrane_kv.sglang.pools import has_some_layers, is_logical, is_sharded, page_bytes, weighted_groups
from terrane_kv.sglang.ranks import engine_numbers, engine_setting, parallel_setting

logger = logging.getLogger("terrane_kv")

# The pause after a store could not be opened.
RETRY_DELAY_S = 30.0


class RankStore:
    """The store of one rank, or the connection to rank 0's store. The first page opens it, once all pools are known."""

    def __init__(self, config, extra):
        self._config, self._extra = config, extra
        # SGLang's host pools by name, and the first of them.
        self.pools, self.main_pool = {}, None
        # If several ranks have the same cache, it is in the store of rank 0.
        self.is_shared = bool(config.is_mla_model) and config.tp_size > 1
        self._lock = threading.Lock()
        # The store, once it is open.
        self.store = None
        self._server = None
        self._is_closed = False
        # A failure to open the store is final, or the store is opened again after this time.
        self._is_refused = False
        self._retry_at = 0.0
        self._warnings = RateLimitedWarning()
        # The group of each pool, once the store is open.
        self._groups = {}

    def check(self):
        """Raises `ValueError` if the options do not match the ranks or the pools. SGLang may register more pools."""
        self._engines()
        self._kv_dtype()

    def open(self):
        """Opens the store, and returns it. Raises the error if it cannot be opened."""
        with self._lock:
            if self.store is None:
                if self._is_closed:
                    raise ClosedError("the backend is closed; attach it again")
                pools = {_name(name): page_bytes(pool) for name, pool in self.pools.items() if not is_logical(pool)}
                self._groups = {name: group for group, name in enumerate(pools)}
                self.store = self._open_or_connect(pools)
            return self.store

    def store_or_none(self):
        """The store, or None if it cannot be opened. Each page is then a miss.

        The failure is logged. It is final if the options or the namespace are wrong. Otherwise, a call tries again after
        `RETRY_DELAY_S` seconds, because another process may end or free space.
        """
        if self.store is not None:
            return self.store
        if self._is_closed or self._is_refused or time.monotonic() < self._retry_at:
            return None
        try:
            return self.open()
        except Exception as error:
            self._retry_at = time.monotonic() + RETRY_DELAY_S
            # The texts of these errors contain a remedy.
            is_known = isinstance(error, (StoreError, ValueError, OSError))
            self._is_refused = not is_known or isinstance(error, (NamespaceError, ValueError))
            if self._is_refused or self._warnings.is_due():
                what = "the store cannot be opened; no page is stored or loaded"
                until = "" if self._is_refused else f"; it is opened again after {RETRY_DELAY_S:g} seconds"
                logger.error("%s: %s%s", what, error, until, exc_info=not is_known)
            return None

    def group(self, pool):
        """The number of a pool's group in the open store, or None if the pool was registered later."""
        return self._groups.get(_name(pool))

    def keys(self, keys, pool):
        """The keys in the store. They contain the rank if ranks share the store and these pages differ between
        ranks."""
        if not self.is_shared:
            return keys
        config = self._config
        if pool == PoolName.MAMBA or is_sharded(self.pools.get(pool)):
            return [f"tp{config.tp_rank}-{config.tp_size}:{key}" for key in keys]
        if (getattr(config, "dcp_size", 1) or 1) > 1:
            return [f"dcp{config.dcp_rank}:{key}" for key in keys]
        return keys

    def close(self):
        """Closes the store. A store that was not opened stays closed, because a thread of SGLang may still call."""
        with self._lock:
            self._is_closed = True
            if self._server is not None:
                self._server.close()
            if isinstance(self.store, Client):
                self.store.close()
            elif self.store is not None:
                self.store.close(timeout=30.0)

    def _open_or_connect(self, pools):
        """The store of this rank, or a connection to the store of rank 0."""
        config = self._config
        group, groups, engines, numbers = self._engines()
        # With dp attention, tp_rank counts within the attention group.
        sizes = {
            "dp": (group, groups),
            "tp": (0, 1) if self.is_shared else (config.tp_rank, config.tp_size),
            "pp": (config.pp_rank, config.pp_size),
            "cp": (0, 1) if self._shares_contexts() else (config.attn_cp_rank, config.attn_cp_size),
        }
        rank, ranks = 0, 1
        for at, count in sizes.values():
            rank, ranks = rank * count + at, ranks * count
        fields = {
            "pools": pools,
            "page_size": getattr(self.main_pool, "page_size", 1),
            "dtype": str(getattr(self.main_pool, "dtype", None)),
            "kv_dtype": self._kv_dtype(),
            "layout": getattr(self.main_pool, "layout", None),
            "page_order": self._page_order(),
            "parallel": sizes,
            "context_parallel_decoding": [
                # If ranks share a store, their keys contain the rank.
                0 if self.is_shared else getattr(config, "dcp_rank", 0),
                getattr(config, "dcp_size", 1),
                getattr(config, "logical_page_size", None),
            ],
            "split_heads": [config.tp_lcm_size, config.should_split_heads],
            # The model's name may be the alias that clients use (--served-model-name).
            "model_path": engine_setting("get_model", "model_path"),
            "model_revision": engine_setting("get_model", "revision"),
            "revision": self._extra.get("revision"),
            "rope_scaling": self._extra.get("rope_scaling"),
        }
        model, root = config.model_name or "unnamed", self._extra["root_dir"]
        ranks *= engines
        if self.is_shared:
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
            memory = max(1 << 30, 16 * ranks * sum(pools.values())) if self.is_shared else 0
        store = open_unowned(
            [number * (ranks // engines) + rank for number in numbers],
            ranks=ranks,
            engine="sglang",
            directory=root,
            capacity=self._extra["capacity"],
            memory=memory,
            groups=weighted_groups(pools),
            model=model,
            fields=fields,
            seed=key_seeds.sglang(),
        )
        if self.is_shared:
            try:
                self._server = Server(store, path, identity)
            except BaseException:
                store.close()
                raise
        return store

    def _shares_contexts(self):
        """Whether the ranks of context parallelism also share rank 0's store.

        SGLang then counts them by `tp_rank`, each has the whole cache, and rank 0 alone writes. With a layer split, each
        has other layers.
        """
        if not self.is_shared or any(has_some_layers(pool) for pool in self.pools.values()):
            return False
        return (parallel_setting("attn_tp_size") or self._config.tp_size) != self._config.tp_size

    def _kv_dtype(self):
        """The type of the cache's elements, if the pools do not have it: they store types of 8 bits and less as uint8."""
        if not any(str(getattr(pool, "dtype", None)) == "torch.uint8" for pool in self.pools.values()):
            return None
        dtype = self._extra.get("kv_dtype") or engine_setting("get_model", "kv_cache_dtype")
        if dtype is None:
            raise ValueError(
                "the host pool has elements of uint8, and SGLang does not pass their type; set `kv_dtype` in the extra "
                "config to the value of --kv-cache-dtype, for example fp8_e4m3"
            )
        return dtype

    def _page_order(self):
        """How a page of the pool KV is stored, if the two interfaces of SGLang store its bytes in different orders."""
        if getattr(self.main_pool, "layout", None) != "layer_first" or self._config.is_mla_model:
            return None
        # The keys and values of each layer alternate in spans. The older interface stores the keys of all layers first.
        return "spans" if self._extra.get("interface_v1") else "flat"

    def _engines(self):
        return engine_numbers(getattr(self._config, "dp_rank", None), self._extra, self.is_shared)


def _name(pool):
    """The name of a pool: SGLang passes members of its enumeration, and texts."""
    return str(getattr(pool, "value", pool))
