"""Stand-ins for an engine's modules, generated from the tables of its interfaces.

The classes have the engine's names, bases, fields and abstract methods. So an adapter fails as in the engine if it
lacks a method or uses a field that a release does not have.
"""

import abc
import contextlib
import dataclasses
import enum
import importlib
import json
import os
import pathlib
import sys
import types
import typing

import numpy

SIGNATURES = pathlib.Path(__file__).parent.parent / "signatures"


def tables(engine):
    """The table of each release, the newest first."""
    return json.loads((SIGNATURES / f"{engine}.json").read_text(encoding="utf-8"))


RELEASES = [(engine, version) for engine in ("vllm", "lmcache", "sglang") for version in tables(engine)]


def releases(engine):
    return [version for name, version in RELEASES if name == engine]


class TierBase:
    """A tier with the constructor of the engine's class."""

    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self._primary_kv_view = primary_kv_view
        self.tier_type = tier_type
        self.locality = None


class ManagerBase:
    """The part of the tiering manager for promotions without free memory."""

    def __init__(self, primary_tier=None, secondary_tiers=None, **options):
        self.primary_tier, self.secondary_tiers = primary_tier, secondary_tiers
        self.options = options

    def lookup(self, key, req_context, *, exclude_tier_idx=None):
        result = sys.modules["vllm.v1.kv_offload.base"].LookupResult
        if self.primary_tier.holds(key):
            return result.HIT
        if self.primary_tier.is_loading(key):
            return result.HIT_PENDING
        if self.secondary_tiers[0].lookup(key, req_context) is not result.HIT:
            return result.MISS
        promoted = self._initiate_promotion(0, key, req_context)
        return result.HIT_PENDING if promoted else result.MISS

    def _initiate_promotion(self, tier_idx, key, req_context):
        return self.primary_tier.take_room(key)

    def on_schedule_end(self, context):
        pass

    def on_request_finished(self, req_context, *, exclude_tier_idx=None):
        pass

    def reset_cache(self):
        pass


class SpecBase:
    """The parts of the tiering spec that Terrane's class uses."""

    def __init__(self, config):
        self.extra_config = config.extra_config
        self.tier_poll_interval_s = 0.001
        self._manager = None

    def get_manager(self):
        manager = sys.modules["vllm.v1.kv_offload.tiering.manager"].TieringOffloadingManager
        self._manager = manager("primary", ["tier"], tier_poll_interval_s=self.tier_poll_interval_s)
        return self._manager


class StorageBase:
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host


class LinkerBase:
    """The base of SGLang's linkers. Host memory has no streams."""

    forward_stream = None

    def record_offload_ready(self):
        cuda = getattr(sys.modules["torch"], "cuda", None)
        if cuda is None:
            return []
        streams = [cuda.current_stream(), self.forward_stream]
        return [stream.record_event() for stream in streams if stream is not None]


class DevicePoolEntry:
    """A device pool: the address, the stride of rows and the bytes of a page of each buffer."""

    def __init__(self, *, name, indices_from_pool, device_pool, components, layer_mapping, page_size, rows_are_pages):
        self.name, self.indices_from_pool, self.device_pool = name, indices_from_pool, device_pool
        self.components, self.layer_mapping, self.page_size = components, layer_mapping, page_size
        self._row_span = 1 if rows_are_pages else page_size
        self.buffer_meta = [[self._meta(buffer) for buffer in component] for component in components]

    def _meta(self, buffer):
        row_bytes = buffer.nbytes // buffer.shape[0]
        return buffer.data_ptr(), buffer.stride(0) * buffer.element_size(), row_bytes * self._row_span

    def translate_indices(self, indices):
        return indices

    def prepare_locations(self, indices):
        firsts = [int(index) for index in indices.tolist()][:: self.page_size]
        if len(indices) % self.page_size or any(index % self.page_size for index in firsts):
            raise ValueError(f"the pool {self.name} got a part of a page")
        return [index // self.page_size if self._row_span == 1 else index for index in firsts]


class DevicePoolGroup:
    """The device pools of a model. Pools such as an indexer use the indices of another pool."""

    def __init__(self, entries, num_layers, page_size, *, rank_replicated=False):
        self.entries, self.num_layers, self.page_size = entries, num_layers, page_size
        self.entry_map = {entry.name: entry for entry in entries}
        self.rank_replicated = rank_replicated

    def resolve_transfers(self, transfers, *, allow_partial=False, allow_missing_kv=False):
        types = sys.modules["sglang.srt.mem_cache.hicache_storage"]
        known = {transfer.name: transfer for transfer in transfers if transfer.keys}
        is_whole = all(entry.indices_from_pool in [it.name for it in transfers] for entry in self.entries)
        if (types.PoolName.KV not in known and not allow_missing_kv) or not (is_whole or allow_partial):
            return []
        expanded = []
        for entry in self.entries:
            source = known.get(entry.indices_from_pool)
            if source is not None:
                is_kv = entry.indices_from_pool == types.PoolName.KV
                policy = types.PoolHitPolicy.ALL_PAGES if is_kv else source.hit_policy
                indices = source.device_indices
                indices = None if indices is None else entry.translate_indices(indices)
                expanded.append(
                    dataclasses.replace(source, name=entry.name, host_indices=indices, hit_policy=policy)
                )
        return expanded


BEHAVIOUR = {
    "SecondaryTierManager": TierBase,
    "TieringOffloadingManager": ManagerBase,
    "TieringOffloadingSpec": SpecBase,
    "HiCacheStorage": StorageBase,
    "UnifiedCacheLinker": LinkerBase,
    "DevicePoolEntry": DevicePoolEntry,
    "DevicePoolGroup": DevicePoolGroup,
}


def method(described):
    """A method that does nothing. It is abstract if the engine's method is."""

    def body(self, *arguments, **options):
        return None

    decorators = described["decorators"]
    if "abstractmethod" in decorators:
        return abc.abstractmethod(body)
    return classmethod(body) if "classmethod" in decorators else body


def enumeration(name, described):
    members = {field: field if value is None else value for field, _, value in described["fields"]}
    is_text = "str" in described["bases"]
    return enum.Enum(name, members, type=str) if is_text else enum.Enum(name, members)


def record(name, described):
    fields = sorted(described["fields"], key=lambda field: bool(field[2]))
    if "NamedTuple" in described["bases"]:
        return typing.NamedTuple(name, [(field, object) for field, _, _ in fields])
    made = [
        (field, object, dataclasses.field(default=None)) if default else (field, object)
        for field, kind, default in fields
        if "ClassVar" not in (kind or "")
    ]
    return dataclasses.make_dataclass(name, made)


def made(name, described):
    """The stand-in for a recorded name."""
    if "value" in described:
        return described["value"]
    if "function" in described:
        return lambda *arguments, **options: None
    described = described["class"]
    if "Enum" in described["bases"]:
        return enumeration(name, described)
    if "NamedTuple" in described["bases"] or any("dataclass" in it for it in described["decorators"]):
        return record(name, described)
    behaviour = BEHAVIOUR.get(name, object)
    body = {it: method(how) for it, how in described["methods"].items() if it not in vars(behaviour)}
    return abc.ABCMeta(name, (behaviour,), body)


@contextlib.contextmanager
def installed(engine, version):
    """Adds the stand-ins to `sys.modules`, and yields the adapter's module, which imports them."""
    before = dict(sys.modules)
    for module, names in tables(engine)[version]["interfaces"].items():
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            sys.modules.setdefault(path, types.ModuleType(path))
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[path])
        for name, described in names.items():
            if described is not None:
                setattr(sys.modules[module], name, made(name, described))
    if engine == "vllm":
        utils = sys.modules["vllm.v1.core.kv_cache_utils"]
        default = utils.DEFAULT_NONE_HASH_SEED
        utils.get_none_hash_seed = lambda: os.environ.get("PYTHONHASHSEED", default)
    if engine == "sglang":
        sys.modules.setdefault("torch", types.SimpleNamespace(arange=numpy.arange))
    for name in [name for name in sys.modules if f"{name}.".startswith(f"terrane_kv.{engine}.")]:
        del sys.modules[name]
    try:
        yield importlib.import_module(f"terrane_kv.{engine}")
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)
