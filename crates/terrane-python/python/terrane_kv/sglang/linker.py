"""SGLang's linker between its device pools and a store, without SGLang's own host memory in between."""

import collections
import contextlib
import logging
import os
import time

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from terrane_kv import keys as key_seeds
from terrane_kv.folders import (
    RateLimitedWarning,
    capacity_bytes,
    log_like,
    open_unowned,
    seconds,
    warn_about_names,
)
from terrane_kv.sglang.device_pools import DevicePool, pool_group
from terrane_kv.sglang.loads import LayerCounter, Moves, Worker
from terrane_kv.sglang.pools import weighted_groups
from terrane_kv.sglang.ranks import engine_numbers, engine_setting, parallel_setting

logger = logging.getLogger("terrane_kv")

OPTIONS = (
    "root_dir", "capacity", "memory", "engines", "engine", "dp_groups", "revision", "rope_scaling", "timeout_s",
    "clear_on_reset",
)
READY = 2
# The time that jobs have to end when the linker is reset or closed. After it, they are cancelled.
END_TIMEOUT_S = 30.0
# The pages of host memory for each pool, if the option `memory` is not set.
LEAST_PAGES, LEAST_BYTES = 16, 1 << 30


class TerraneCacheLinker(UnifiedCacheLinker):
    """A linker with one `terrane_kv.Store` for each rank, and one group of blocks for each device pool.

    Keys of `linker_extra_config`:

    - `root_dir`: a folder on a local drive; `capacity`: bytes, or a text such as "500GiB", for all ranks together.
    - `memory`: bytes of pinned host memory through which pages pass, for all ranks together. Pages that are used often
      stay in it. The default for each rank is 1 GiB, or 16 pages if these are larger.
    - `engines`, `engine`, `dp_groups`, `revision`, `rope_scaling`, `timeout_s`: as for `TerraneHiCacheStorage`.
    - `clear_on_reset`: whether a reset of SGLang's cache, such as after new weights, also empties the store (default
      false).

    The folder of a rank and the group of a pool separate pages that have one key. No call raises an exception in a step
    of the engine: a lookup that fails is a miss, and a transfer that fails has the result False. In a forked child,
    each page is a miss.

    Raises `ValueError` for wrong options and for pools that Terrane cannot describe, and `StoreError` if the store
    cannot be opened.
    """

    def __init__(self, server_args, params, *, components, extra_config=None, forward_stream=None):
        extra = extra_config or {}
        self._check(extra)
        log_like("sglang")
        if params.pp_size > 1:
            raise ValueError(
                f"pp_size is {params.pp_size}: SGLang compares the results of linkers within one pipeline stage only; use "
                "HiCache (TerraneHiCacheStorage) with pipeline parallelism"
            )
        self.forward_stream = forward_stream
        self._owner = os.getpid()
        self._timeout_s = seconds("timeout_s", extra.get("timeout_s", 30.0))
        self._clears_on_reset = extra.get("clear_on_reset", False)
        self._pool_group = pool_group(params, components)
        self.pools = self._pool_group.entry_map
        made = [DevicePool(number, entry) for number, entry in enumerate(self.pools.values())]
        self._device_pools = dict(zip(self.pools, made))
        devices = {pool.device for pool in made}
        if len(devices) != 1:
            raise ValueError(f"the pools of one rank are on several devices: {sorted(map(str, devices))}")
        (self._device,) = devices
        # The indices of pages are copied to the host on this stream, so that no other work is waited for.
        self._stream = None if self._device is None else torch.cuda.Stream(device=self._device)
        self._store = self._open(params, extra)
        # SGLang's pools keep the counter after the end of the linker, so it must not keep their memory.
        last_layers = {pool.name: pool.layers.last for pool in made}
        self.layer_done_counter = LayerCounter(
            self._pool_group.num_layers, last_layers, self._current_stream, self._has_failed
        )
        if PoolName.MAMBA in self.pools:
            # SGLang registers the counter with the pool of attention layers only.
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._queued, self._offloads = {}, collections.deque()
        self._is_closed = self._is_stale = False
        self._warnings = RateLimitedWarning()
        # Offloads wait for the forward pass. Loads do not wait for offloads.
        self._load_worker, self._offload_worker = Worker("terrane-load"), Worker("terrane-offload")

    @staticmethod
    def _check(extra):
        place = "linker_extra_config"
        missing = [name for name in ("root_dir", "capacity") if name not in extra]
        if missing:
            raise ValueError(f"{place} lacks {' and '.join(missing)}")
        warn_about_names(extra, OPTIONS, place)
        capacity_bytes(extra["capacity"])
        if "memory" in extra:
            capacity_bytes(extra["memory"])
        if not isinstance(extra.get("clear_on_reset", False), bool):
            raise ValueError(f"clear_on_reset is {extra['clear_on_reset']!r}; set true or false")

    def _open(self, params, extra):
        group, groups, engines, numbers = engine_numbers(parallel_setting("attn_dp_rank"), extra, is_shared=False)
        sizes = {
            "dp": (group, groups),
            "tp": (parallel_setting("attn_tp_rank") or 0, parallel_setting("attn_tp_size") or 1),
            "pp": (params.pp_rank, params.pp_size),
            "cp": (params.attn_cp_rank, params.attn_cp_size),
        }
        rank, ranks = 0, 1
        for at, count in sizes.values():
            rank, ranks = rank * count + at, ranks * count
        pools = {pool.name: pool.cache.block_bytes for pool in self._device_pools.values()}
        caches = {pool.name: pool.cache for pool in self._device_pools.values()}
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        model_path = engine_setting("get_model", "model_path")
        all_ranks = ranks * engines
        memory = extra.get("memory", max(LEAST_BYTES, LEAST_PAGES * sum(pools.values())) * all_ranks)
        return open_unowned(
            [number * ranks + rank for number in numbers],
            ranks=all_ranks,
            engine="sglang-linker",
            directory=extra["root_dir"],
            capacity=extra["capacity"],
            memory=memory,
            device=self._device,
            groups=[(name, caches[name], weight) for name, _, weight in weighted_groups(pools)],
            model=model_path or "unnamed",
            fields={
                "pools": {pool.name: pool.form for pool in self._device_pools.values()},
                "page_size": params.page_size,
                "dtype": str(getattr(kvcache, "dtype", None)),
                "layout": getattr(kvcache, "kv_cache_layout", None),
                "is_eagle": getattr(params, "is_eagle", False),
                "parallel": sizes,
                "model_revision": engine_setting("get_model", "revision"),
                "revision": extra.get("revision"),
                "rope_scaling": extra.get("rope_scaling"),
            },
            seed=key_seeds.sglang(),
        )

    def _is_usable(self):
        return not self._is_closed and not self._is_stale and self._owner == os.getpid()

    def _warn(self, what, error):
        if self._warnings.is_due():
            logger.warning("%s: %s", what, error if isinstance(error, str) else repr(error))

    # Presence

    def lookup(self, rid, transfers):
        if not self._is_usable():
            return []
        try:
            return self._restorable(transfers)
        except Exception as error:
            self._warn("a lookup failed", error)
            return []

    def _restorable(self, transfers):
        """The lengths of the prefix at which each pool has the pages that it needs."""
        needed = self._pool_group.resolve_transfers(transfers)
        keys = next((list(it.keys or ()) for it in transfers if it.name == PoolName.KV), [])
        lengths = range(1, len(keys) + 1) if needed else ()
        # Pools of which each page is needed come first, because they shorten the list for the others.
        for transfer in sorted(needed, key=lambda it: it.hit_policy != PoolHitPolicy.ALL_PAGES):
            if not lengths:
                return []
            pool = self._device_pools[transfer.name]
            states = self._store.presences(keys[: lengths[-1]], group=pool.number)
            ready = [state >= READY for state in states]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                window = len(keys)
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
            else:
                raise ValueError(f"SGLang's hit policy {transfer.hit_policy} is unknown")
            # The number of ready pages in a row that end at each length.
            runs, run = [], 0
            for is_ready in ready:
                run = run + 1 if is_ready else 0
                runs.append(run)
            lengths = [length for length in lengths if runs[length - 1] >= min(window, length)]
        if lengths:
            # They are evicted last, because SGLang ends the requests of a load that finds a page gone.
            for transfer in needed:
                self._store.touch(keys[: lengths[-1]], group=self._device_pools[transfer.name].number)
        return list(lengths)

    # Loads

    def load(self, rid, transfers):
        # All ranks must return the same value, so it depends on the transfers alone. A rank that fails reports it at
        # the end of the load.
        try:
            expanded = self._pool_group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        except Exception as error:
            self._warn("a load was refused", error)
            return False
        if expanded:
            self._queued.setdefault(rid, []).extend(expanded)
        return bool(expanded)

    def cancel_queued_load(self, rid):
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self):
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        moves = Moves()
        transfers = [transfer for of_request in queued.values() for transfer in of_request]
        self._start(self._load_worker, moves, "get", transfers, self._indices_ready)
        return self.layer_done_counter.add(moves)

    def _indices_ready(self):
        """The events after which the indices of a load are known, and its pages may be overwritten."""
        if self._device is None:
            return []
        # The forward pass may still write pages that SGLang has freed: the scheduler's stream runs ahead of it.
        streams = [torch.cuda.current_stream(self._device), self.forward_stream]
        return [stream.record_event() for stream in streams if stream is not None]

    def _current_stream(self):
        """The stream of the forward pass, which waits for layers; None if the thread waits."""
        if self._device is None or self._owner != os.getpid():
            return None
        return torch.cuda.current_stream(self._device).cuda_stream

    def finish_layer_wise_loading(self, counter_index):
        return self.layer_done_counter.finish(counter_index)

    # Offloads

    def offload(self, transfers, session_id=None):
        # As for loads, the value depends on the transfers alone.
        try:
            expanded = self._pool_group.resolve_transfers(transfers, allow_partial=True)
        except Exception as error:
            self._warn("an offload was refused", error)
            return False
        if expanded:
            moves = Moves()
            self._offloads.append(moves)
            self._start(self._offload_worker, moves, "put", expanded, self.record_offload_ready)
        return bool(expanded)

    def num_completed_offloads(self):
        # SGLang takes the results in the order of the offloads.
        for number, moves in enumerate(self._offloads):
            if not moves.has_ended():
                return number
        return len(self._offloads)

    def pop_completed_offload(self):
        if not self._offloads:
            return False
        moves = self._offloads.popleft()
        moves.wait()
        failure = moves.failure()
        if failure is not None:
            self._warn("an offload failed", failure)
        return failure is None

    # Both

    def _start(self, worker, moves, verb, transfers, ready_events):
        """Lets a thread submit jobs after these events. Nothing here waits for the device."""
        try:
            if not self._is_usable():
                raise RuntimeError("the linker is closed, or belongs to the parent of this process")
            events = ready_events()
            worker.call(lambda: moves.submit(self._jobs(moves, verb, transfers, events)))
        except Exception as error:
            moves.fail(error)

    def _jobs(self, moves, verb, transfers, events):
        """For each pool, its name and a function that submits its job."""
        for event in events:
            event.synchronize()
        blocks = {}
        own_stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with own_stream:
            for transfer in transfers:
                pool = self._device_pools[transfer.name]
                keys, pages = blocks.setdefault(transfer.name, ([], []))
                ids = pool.page_ids(transfer.host_indices)
                if len(ids) != len(transfer.keys):
                    raise ValueError(
                        f"the pool {pool.name} got {len(ids)} pages for {len(transfer.keys)} keys; pass one page each"
                    )
                keys.extend(transfer.keys)
                pages.extend(ids)
        moves.pages = {name: pages for name, (_, pages) in blocks.items()}
        submit = self._store.put if verb == "put" else self._store.get
        for name, (keys, pages) in blocks.items():
            pool = self._device_pools[name]
            options = {
                "group": pool.number,
                "timeout": self._timeout_s,
                "priority": "low" if verb == "put" else "high",
            }
            if verb == "get":
                options["layer_by_layer"] = True
            if self._device is not None:
                # The events before have ended, so the device has completed the work on these pages.
                options["stream"] = -1
            yield pool.name, lambda: submit(keys, pool.cache.blocks(pages), **options)

    # Ends

    def reset(self):
        self._queued.clear()
        if self._owner != os.getpid():
            return
        self._end(time.monotonic() + END_TIMEOUT_S)
        if self._clears_on_reset and not self._is_closed:
            try:
                self._store.clear()
                self._is_stale = False
            except Exception as error:
                # Its pages may be those of old weights.
                self._is_stale = True
                logger.error("the store could not be emptied, and is not used until a reset succeeds: %r", error)

    def _end(self, deadline):
        """Ends all jobs. No job uses the device's memory afterwards."""
        self.layer_done_counter.end(deadline)
        for moves in self._offloads:
            moves.end(deadline)
        self._offloads.clear()

    def _has_failed(self, moves):
        """Lets later offloads read the pages of a load that failed, which may be written in part.

        Until SGLang has written them, it does not store them.
        """
        if self._is_closed or self._owner != os.getpid():
            return
        try:
            for name, pages in moves.pages.items():
                self._device_pools[name].cache.mark_written(sorted(set(pages)))
        except Exception as error:
            self._warn("some pages of a load that failed cannot be stored", error)

    def close(self):
        if self._is_closed or self._owner != os.getpid():
            return
        self._is_closed = True
        self._queued.clear()
        deadline = time.monotonic() + END_TIMEOUT_S
        self._end(deadline)
        for worker in (self._load_worker, self._offload_worker):
            worker.stop(max(0.1, deadline - time.monotonic()))
        self._store.close(timeout=max(0.1, deadline - time.monotonic()))
        # Their caches keep SGLang's buffers, and own the addresses.
        self._device_pools.clear()
