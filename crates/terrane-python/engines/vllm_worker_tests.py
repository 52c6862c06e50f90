"""A pytest plugin that runs vLLM's own tests of its offloading worker with Terrane's worker, on a machine with a GPU.

A test that is not listed fails the run. A copy that Terrane refuses, or that fails, fails its test.
"""

import ctypes
import importlib.util
import sys
import types

import pytest

HANDLERS = "handlers of vLLM that the test makes or replaces"
OTHER = "functions of vLLM's handlers"
RUN = "run"

TESTS = {
    "test_rocm_cpu_to_gpu_uses_dma": OTHER,
    "test_unpinned_cpu_to_gpu_uses_dma": OTHER,
    "test_worker_shutdown_releases_region_and_runs_both_handlers": HANDLERS,
    "test_worker_logs_handler_error_and_cleans_region": HANDLERS,
    "test_handler_shutdown_skips_transfers_after_event_sync_failure": HANDLERS,
    "test_worker_syncs_before_cleanup_after_handler_failure": HANDLERS,
    "test_transfer": RUN,
    "test_transfer_multi_group": RUN,
    "test_load_waits_for_pending_compute_stream_writes": RUN,
}


@pytest.fixture
def default_vllm_config():
    """The tests that run use no configuration."""


@pytest.fixture
def caplog_vllm(caplog):
    return caplog


class Handler:
    """A copy handler of vLLM, whose transfers are Terrane's jobs."""

    def __init__(self, own, worker):
        self._own, self._worker = own, worker

    @property
    def _transfers(self):
        return [types.SimpleNamespace(job_id=job_id) for job_id in self._worker._jobs]

    def __getattr__(self, name):
        return getattr(self._own, name)


def worker_class(own_class):
    from terrane_kv.vllm import TerraneOffloadingWorker

    class Worker(TerraneOffloadingWorker):
        """Terrane's worker with the constructor and the handlers of vLLM's."""

        def __init__(self, *arguments, **options):
            super().__init__(own_class(*arguments, **options))

        @property
        def _store_handler(self):
            return Handler(self._own._store_handler, self)

        @property
        def _load_handler(self):
            return Handler(self._own._load_handler, self)

        def _warn(self, job_id, error):
            raise AssertionError(f"job {job_id} is repeated") from error

    return Worker


def replace_extensions():
    """Defines the only operator of vLLM's C extensions that its worker uses, if they are not built."""
    import torch

    for name in ("vllm._C", "vllm._C_stable_libtorch"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
    if hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        return
    from vllm.v1.simple_kv_offload import cuda_mem_ops as memory

    def copy(sources, destinations, sizes, is_any):
        function, _ = memory._resolve_batch_memcpy()
        order = memory.CU_MEMCPY_SRC_ACCESS_ORDER_ANY if is_any else memory.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        attributes, first = memory._CUmemcpyAttributes(srcAccessOrder=order), ctypes.c_size_t(0)
        stream = torch.cuda.current_stream().cuda_stream
        pointers = (destinations.data_ptr(), sources.data_ptr(), sizes.data_ptr(), len(sizes))
        error = function(*pointers, ctypes.addressof(attributes), ctypes.addressof(first), 1, None, stream)
        if error != 0:
            raise RuntimeError(f"cuMemcpyBatchAsync returned {error}")

    replace_extensions.library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    replace_extensions.library.define("swap_blocks_batch(Tensor src, Tensor dst, Tensor sizes, bool any) -> ()")
    replace_extensions.library.impl("swap_blocks_batch", copy, "CPU")


def pytest_configure(config):
    # The modules of the tests import vLLM's platform, which imports its extensions.
    replace_extensions()


def pytest_collection_modifyitems(config, items):
    replaced = set()
    for item in items:
        module, name = item.module, item.originalname or item.name
        verdict = TESTS.get(name)
        if verdict is None:
            raise pytest.UsageError(f"{name} is not in the table of this plugin")
        if verdict is not RUN:
            item.add_marker(pytest.mark.skip(reason=f"not applicable: {verdict}"))
        elif module not in replaced:
            replaced.add(module)
            module.CPUOffloadingWorker = worker_class(module.CPUOffloadingWorker)
