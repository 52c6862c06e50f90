"""For vLLM: a disk tier below its host memory, a manager that waits for free host memory, and a worker.

    "kv_connector_extra_config": {
        "spec_name": "TerraneOffloadingSpec",
        "cpu_bytes_to_use": 34359738368,
        "secondary_tiers": [{"type": "terrane", "root_dir": "/nvme/kv", "capacity": "500GiB"}]
    }

With `"spec_name": "TieringOffloadingSpec"`, vLLM uses only the tier.
"""

from terrane_kv.vllm.manager import WaitingTieringManager
from terrane_kv.vllm.spec import TerraneOffloadingSpec
from terrane_kv.vllm.tier import TerraneTier
from terrane_kv.vllm.worker import TerraneOffloadingWorker

__all__ = ["TerraneOffloadingSpec", "TerraneOffloadingWorker", "TerraneTier", "WaitingTieringManager"]
