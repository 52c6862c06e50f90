"""The modules, names and calls of each engine that the tables record."""

# Modules whose classes, functions and constants are recorded: the engine's interfaces and data classes.
MODULES = {
    "vllm": {
        "vllm.v1.kv_offload.base": [
            "Medium", "Locality", "LookupResult", "OffloadPolicy", "RequestOffloadingContext",
            "ScheduleEndContext", "OffloadingEvent", "ReqContext", "OffloadingManager",
            "OffloadingSpec", "OffloadingKVEventsConfig", "make_offload_key", "OffloadingWorker",
            "TransferResult", "GPULoadStoreSpec", "CanonicalKVCacheRef",
        ],
        "vllm.v1.kv_offload.cpu.gpu_worker": [
            "SingleDirectionOffloadingHandler", "CPUOffloadingWorker",
        ],
        "vllm.v1.kv_offload.cpu.manager": ["CPUOffloadingManager"],
        "vllm.v1.kv_offload.config": [
            "OffloadingGroupConfig", "OffloadingModelConfig", "OffloadingCacheConfig",
            "OffloadingParallelConfig", "OffloadingConfig",
        ],
        "vllm.v1.kv_offload.factory": ["OffloadingSpecFactory"],
        "vllm.v1.kv_offload.tiering.base": ["TransferJob", "JobResult", "SecondaryTierManager"],
        "vllm.v1.kv_offload.tiering.factory": ["SecondaryTierFactory"],
        "vllm.v1.kv_offload.tiering.manager": ["TieringOffloadingManager"],
        "vllm.v1.kv_offload.tiering.spec": ["TieringOffloadingSpec"],
        "vllm.v1.core.kv_cache_utils": [
            "DEFAULT_NONE_HASH_SEED", "get_none_hash_seed", "resolve_none_hash_seed", "init_none_hash",
        ],
    },
    "lmcache": {
        "lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter": [
            "NativeConnectorL2Adapter",
        ],
        "lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter": [
            "NativePluginL2AdapterConfig",
        ],
        "lmcache.v1.multiprocess.token_hasher": ["TokenHasher"],
    },
    "sglang": {
        "sglang.srt.mem_cache.hicache_storage": [
            "HiCacheStorageConfig", "HiCacheStorageExtraInfo", "PoolName", "PoolHitPolicy",
            "PoolTransfer", "PoolTransferResult", "HiCacheStorage",
        ],
        "sglang.srt.mem_cache.storage.backend_factory": ["StorageBackendFactory"],
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker": ["UnifiedCacheLinker"],
        # The other modules of the linker, of which releases before 0.5.23 lack the factory.
        "sglang.srt.mem_cache.unified_cache.linker_factory": ["create_unified_cache_linker"],
        "sglang.srt.mem_cache.unified_cache.linker_config": ["UnifiedCacheLinkerConfig"],
        "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler": [
            "DevicePoolEntry", "DevicePoolGroup", "resolve_hybrid_device_pool_group",
        ],
        "sglang.srt.mem_cache.cache_init_params": ["CacheInitParams"],
    },
}

# Classes whose attributes are recorded as well, because Terrane reads them.
ATTRIBUTES = {
    "CPUOffloadingManager", "CPUOffloadingWorker", "SingleDirectionOffloadingHandler", "DevicePoolEntry",
    "DevicePoolGroup",
}

# Expressions in these files whose value is one of Terrane's objects: (receiver, Terrane's class). A receiver is the
# text before the call's last dot, or the called name itself.
CALLS = {
    "vllm": {
        "vllm/v1/kv_offload/tiering/manager.py": [
            ("tier", "tier"), ("self.secondary_tiers[tier_idx]", "tier"),
        ],
        "vllm/v1/kv_offload/tiering/spec.py": [("tier", "tier"), ("tier_cls", "tier")],
        "vllm/v1/kv_offload/tiering/factory.py": [("tier_cls(", "tier")],
        "vllm/v1/kv_offload/factory.py": [("spec_cls(", "spec")],
        "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py": [
            ("self.manager", "manager"), ("spec", "spec"), ("self.spec", "spec"),
        ],
        "vllm/distributed/kv_transfer/kv_connector/v1/offloading/worker.py": [
            ("self.spec", "spec"), ("spec", "spec"), ("self.worker", "worker"),
        ],
    },
    "lmcache": {
        "lmcache/v1/distributed/l2_adapters/native_connector_l2_adapter.py": [
            ("self._client", "connector"), ("native_client", "connector"),
        ],
        "lmcache/v1/distributed/l2_adapters/native_plugin_l2_adapter.py": [
            ("native_client", "connector"), ("connector_cls(", "connector"),
        ],
    },
    "sglang": {
        "sglang/srt/managers/cache_controller.py": [("self.storage_backend", "storage")],
        "sglang/srt/mem_cache/hybrid_cache/hybrid_cache_controller.py": [
            ("self.storage_backend", "storage"),
        ],
        "sglang/srt/mem_cache/unified_radix_cache.py": [
            ("self.cache_controller.storage_backend", "storage"),
        ],
        "sglang/srt/mem_cache/storage/backend_factory.py": [("backend_class(", "storage")],
        "sglang/srt/mem_cache/unified_cache/linker_factory.py": [("linker_cls(", "linker")],
        "sglang/srt/mem_cache/unified_cache/unified_cache_linker.py": [("self.cache_linker", "linker")],
        "sglang/srt/managers/tp_worker.py": [("self.hicache_layer_transfer_counter", "counter")],
        "sglang/srt/mem_cache/memory_pool.py": [("self.layer_transfer_counter", "counter")],
        "sglang/srt/mem_cache/deepseek_v4_memory_pool.py": [("self.layer_transfer_counter", "counter")],
        "sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py": [("counter", "counter")],
    },
}
