"""For SGLang: a HiCache storage backend, and a linker between its device pools and a store.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "terrane",
      "module_path": "terrane_kv.sglang", "class_name": "TerraneHiCacheStorage", "interface_v1": 1,
      "root_dir": "/nvme/kv", "capacity": "500GiB"}'

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
      --unified-cache-external-linker-config '{"linker": "TerraneCacheLinker", "linker_module_path": "terrane_kv.sglang",
      "linker_extra_config": {"root_dir": "/nvme/kv", "capacity": "500GiB"}}'
"""

from terrane_kv.sglang.backend import TerraneHiCacheStorage

__all__ = ["TerraneCacheLinker", "TerraneHiCacheStorage"]


def __getattr__(name):
    # Releases before 0.5.23 load no linker of other packages, and some lack its interface.
    if name == "TerraneCacheLinker":
        from terrane_kv.sglang.linker import TerraneCacheLinker

        return TerraneCacheLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
