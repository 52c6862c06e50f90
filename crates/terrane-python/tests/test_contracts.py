"""Each call of an engine binds to the adapters' methods, for its three newest releases."""

import importlib
import inspect
import json

import pytest

from engines import RELEASES, SIGNATURES, installed, tables

OURS = {
    "tier": "TerraneTier",
    "spec": "TerraneOffloadingSpec",
    "manager": "WaitingTieringManager",
    "worker": "TerraneOffloadingWorker",
    "connector": "Connector",
    "storage": "TerraneHiCacheStorage",
    "linker": "TerraneCacheLinker",
    "counter": "LayerCounter",
}

# The module that loads linkers of other packages, and the classes that only its releases use.
LINKER_FACTORY = ("sglang.srt.mem_cache.unified_cache.linker_factory", "create_unified_cache_linker")
OF_LINKERS = {"linker", "counter"}

# Keys of a tier's configuration, or parameters of LMCache's adapter, that users set. The engine passes them with `**`.
STATED = {
    "tier": {"root_dir", "capacity"},
    "connector": {"directory", "capacity", "chunk_bytes", "kv_dtype"},
}

# The interfaces that the adapters implement. Parameters are passed by position and by name.
INTERFACES = {
    "vllm": [
        ("vllm.v1.kv_offload.tiering.base", "SecondaryTierManager", "tier"),
        ("vllm.v1.kv_offload.base", "OffloadingWorker", "worker"),
    ],
    "sglang": [
        ("sglang.srt.mem_cache.hicache_storage", "HiCacheStorage", "storage"),
        ("sglang.srt.mem_cache.unified_cache.unified_cache_linker", "UnifiedCacheLinker", "linker"),
    ],
    "lmcache": [],
}


def loads_linkers(engine, version):
    if engine != "sglang":
        return False
    module, name = LINKER_FACTORY
    return tables(engine)[version]["interfaces"][module][name] is not None


def ours_named(adapter, key):
    module = importlib.import_module("terrane_kv.sglang.loads") if key == "counter" else adapter
    return getattr(module, OURS[key])


def bind(function, positional, keywords, skip_self):
    arguments = [object()] * (positional + skip_self)
    inspect.signature(function).bind(*arguments, **dict.fromkeys(keywords))


@pytest.mark.parametrize(("engine", "version"), RELEASES)
def test_every_call_of_the_engine_binds(engine, version):
    calls = tables(engine)[version]["calls"]
    assert calls, "the table has calls"
    recorded = [it for names in tables(engine)[version]["interfaces"].values() for it in names.values()]
    inherited = {method for it in recorded if it for method in it.get("class", {}).get("methods", ())}
    with installed(engine, version) as adapter:
        for call in calls:
            if call["ours"] in OF_LINKERS and not loads_linkers(engine, version):
                continue
            ours = ours_named(adapter, call["ours"])
            keywords = set(call["keywords"])
            if "**" in keywords:
                keywords = keywords - {"**"} | STATED[call["ours"]]
            function = inspect.getattr_static(ours, call["method"], None)
            if function is None:
                # Inherited from a class of the engine between Terrane's class and the interface.
                assert call["method"] in inherited, f"{ours.__name__} lacks {call}"
                continue
            if isinstance(function, classmethod):
                function = function.__func__
            bind(function, call["positional"], keywords, skip_self=1)


@pytest.mark.parametrize(("engine", "version"), RELEASES)
def test_each_method_takes_the_parameters_of_the_interface(engine, version):
    interfaces = tables(engine)[version]["interfaces"]
    with installed(engine, version) as adapter:
        for module, name, key in INTERFACES[engine]:
            if key in OF_LINKERS and not loads_linkers(engine, version):
                continue
            ours = ours_named(adapter, key)
            methods = interfaces[module][name]["class"]["methods"]
            assert not ours.__abstractmethods__, "abstract methods are left"
            for method, described in methods.items():
                if method not in vars(ours) or method == "__init__":
                    continue
                names = [name for name, kind, _ in described["parameters"][1:] if kind == "any"]
                function = vars(ours)[method]
                bind(function, len(names), (), skip_self=1)
                if engine == "sglang":
                    bind(function, 0, names, skip_self=1)


@pytest.mark.parametrize("version", tables("vllm"))
def test_the_methods_that_our_manager_overrides_are_vllm_s(version):
    interfaces = tables("vllm")[version]["interfaces"]
    manager = interfaces["vllm.v1.kv_offload.tiering.manager"]["TieringOffloadingManager"]
    methods = manager["class"]["methods"]
    promotion = [name for name, _, _ in methods["_initiate_promotion"]["parameters"]]
    assert promotion == ["self", "tier_idx", "key", "req_context"]
    lookup = [name for name, _, _ in methods["lookup"]["parameters"]]
    assert lookup == ["self", "key", "req_context", "exclude_tier_idx"]
    schedule_end = [name for name, _, _ in methods["on_schedule_end"]["parameters"]]
    assert schedule_end == ["self", "context"]
    constructor = [name for name, _, _ in methods["__init__"]["parameters"]]
    assert constructor[:3] == ["self", "primary_tier", "secondary_tiers"]


@pytest.mark.parametrize("version", tables("vllm"))
def test_the_attributes_that_our_worker_reads_are_vllm_s(version):
    module = tables("vllm")[version]["interfaces"]["vllm.v1.kv_offload.cpu.gpu_worker"]
    handler = module["SingleDirectionOffloadingHandler"]["class"]["attributes"]
    assert {"src_tensors", "dst_tensors", "layer_refs_per_group", "dst_blocks_per_chunk"} <= set(handler)
    assert "_canonical_copy_plans" in handler
    assert {"_store_handler", "_mmap_region"} <= set(module["CPUOffloadingWorker"]["class"]["attributes"])
    spec = tables("vllm")[version]["interfaces"]["vllm.v1.kv_offload.tiering.spec"]["TieringOffloadingSpec"]
    create = [name for name, _, _ in spec["class"]["methods"]["create_worker"]["parameters"]]
    assert create == ["self", "kv_caches"]


def test_the_newest_release_of_sglang_loads_our_linker():
    newest = next(iter(tables("sglang")))
    assert loads_linkers("sglang", newest)
    interfaces = tables("sglang")[newest]["interfaces"]
    described = interfaces["sglang.srt.mem_cache.unified_cache.unified_cache_linker"]["UnifiedCacheLinker"]["class"]
    abstract = {name for name, how in described["methods"].items() if "abstractmethod" in how["decorators"]}
    with installed("sglang", newest) as adapter:
        assert len(abstract) == 10 and abstract <= set(vars(adapter.TerraneCacheLinker))
    assert {"layer_done_counter", "pools", "forward_stream"} == {name for name, _, _ in described["fields"]}


def test_the_attributes_that_our_linker_reads_are_sglang_s():
    interfaces = tables("sglang")[next(iter(tables("sglang")))]["interfaces"]
    pools = interfaces["sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler"]
    entry, group = pools["DevicePoolEntry"]["class"], pools["DevicePoolGroup"]["class"]
    read = {"name", "components", "buffer_meta", "layer_mapping"}
    assert read <= set(entry["attributes"]) and "prepare_locations" in entry["methods"]
    assert {"entry_map", "num_layers"} <= set(group["attributes"]) and "resolve_transfers" in group["methods"]
    made = {"name", "indices_from_pool", "device_pool", "components", "layer_mapping", "page_size", "rows_are_pages"}
    assert made <= {name for name, _, _ in entry["methods"]["__init__"]["parameters"]}
    params = interfaces["sglang.srt.mem_cache.cache_init_params"]["CacheInitParams"]["class"]["fields"]
    read = {"page_size", "token_to_kv_pool_allocator", "req_to_token_pool", "pp_rank", "pp_size", "attn_cp_rank"}
    assert read | {"attn_cp_size", "is_eagle"} <= {name for name, _, _ in params}


@pytest.mark.parametrize("version", tables("lmcache"))
def test_our_connector_has_the_methods_that_lmcache_requires(version):
    with installed("lmcache", version) as adapter:
        called = {call["method"] for call in tables("lmcache")[version]["calls"]} - {"__init__"}
        assert called <= set(vars(adapter.Connector))
        assert len(called) == 7


def test_every_source_is_pinned_by_its_hash():
    pinned = json.loads((SIGNATURES / "sources.json").read_text(encoding="utf-8"))
    for engine, sources in pinned.items():
        assert [source["version"] for source in sources] == list(tables(engine))
        assert len(sources) == 3
        assert all(len(source["sha256"]) == 64 for source in sources)
