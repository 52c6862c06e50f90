"""A block store for KV caches, with a limited capacity and checksums. Its blocks survive a restart.

`Store` stores blocks of bytes by key on disk. `terrane_kv.vllm`, `terrane_kv.lmcache` and `terrane_kv.sglang` connect
it to those engines. Importing this package needs neither NumPy nor PyTorch.
"""

from terrane_kv._native import (
    Blocks,
    ClosedError,
    Job,
    CompletionQueue,
    Copied,
    ForkedError,
    InUseError,
    KvCache,
    KvTensor,
    Manager,
    NamespaceError,
    Outcome,
    QueueFullError,
    Region,
    Store,
    StoreError,
    Tier,
    Transfer,
    __version__,
)
from terrane_kv.planning import plan
from terrane_kv.report import doctor

__all__ = [
    "Blocks",
    "ClosedError",
    "Job",
    "CompletionQueue",
    "Copied",
    "ForkedError",
    "InUseError",
    "KvCache",
    "KvTensor",
    "Manager",
    "NamespaceError",
    "Outcome",
    "QueueFullError",
    "Region",
    "Store",
    "StoreError",
    "Tier",
    "Transfer",
    "__version__",
    "doctor",
    "plan",
]
