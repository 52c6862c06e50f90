"""A HiCache storage backend for SGLang.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "terrane",
      "module_path": "terrane_kv.sglang", "class_name": "TerraneHiCacheStorage", "interface_v1": 1,
      "root_dir": "/nvme/kv", "capacity": "500GiB"}'
"""

from terrane_kv.sglang.backend import TerraneHiCacheStorage

__all__ = ["TerraneHiCacheStorage"]
