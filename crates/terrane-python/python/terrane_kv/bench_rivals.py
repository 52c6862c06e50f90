"""The engines' own disk backends for `python -m terrane_kv.bench --rivals`, if their packages are installed.

Each backend moves the chunks of one request at a time, as in its engine: vLLM's fs tier and SGLang's file backend on
one thread, LMCache's native file client on its own threads.
"""

import os
import select
import sys
import threading
import types


class VllmFs:
    """The functions that vLLM's fs tier runs for a job."""

    def __init__(self, folder, view, chunk, io):
        self.folder, self.view, self.chunk, self.io = folder, view, chunk, io
        self.use_direct = io.probe_o_direct(folder)

    def move(self, is_write, numbers, first):
        function = self.io.batch_store_block if is_write else self.io.batch_load_block
        paths = [os.path.join(self.folder, f"{first + number}.bin") for number in numbers]
        function(paths, self.view, [number * self.chunk for number in numbers], self.chunk, self.use_direct)


class LmcacheFs:
    """LMCache's native file client with its default of four threads, buffered or with direct I/O."""

    def __init__(self, folder, view, chunk, client):
        self.folder, self.view, self.chunk, self.client = folder, view, chunk, client
        self.lock, self.done = threading.Lock(), {}

    def move(self, is_write, numbers, first):
        keys = [f"m@0x00000000@0@{first + number:064x}" for number in numbers]
        views = [self.view[number * self.chunk : (number + 1) * self.chunk] for number in numbers]
        with self.lock:
            submit = self.client.submit_batch_set if is_write else self.client.submit_batch_get
            job = submit(keys, views)
        while job not in self.done:
            select.select([self.client.event_fd()], [], [], 0.001)
            with self.lock:
                for ended, succeeded, error, results in self.client.drain_completions():
                    self.done[ended] = succeeded and (results is None or all(results)) or error or "failed"
        if self.done.pop(job) is not True:
            raise OSError("LMCache's client failed")

    def close(self):
        self.client.close()


class Page:
    """A page for SGLang's file backend without PyTorch: it has the tensor methods that the backend calls."""

    def __init__(self, view, numpy):
        self.array = numpy.frombuffer(view, dtype=numpy.uint8)

    def numel(self):
        return self.array.size

    def element_size(self):
        return 1

    def view(self, dtype=None):
        return self

    def contiguous(self):
        return self

    def numpy(self):
        return self.array


class SglangFile:
    """SGLang's file backend, which has no zero-copy calls. Pages are tensors in host memory."""

    def __init__(self, folder, view, chunk, module, page):
        self.view, self.chunk, self.page = view, chunk, page
        self.backend = module.HiCacheFile(
            module.HiCacheStorageConfig(
                tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
                enable_storage_metrics=False, is_page_first_layout=True, model_name="m",
            ),
            file_path=folder,
        )

    def move(self, is_write, numbers, first):
        keys = [f"{first + number:064x}" for number in numbers]
        pages = [self.page(self.view[number * self.chunk : (number + 1) * self.chunk]) for number in numbers]
        backend = self.backend
        done = [backend.batch_set(keys, pages)] if is_write else [it is not None for it in backend.batch_get(keys, pages)]
        if not all(done):
            raise OSError("SGLang's file backend failed")


def sglang():
    """Returns a function of folder, view and chunk that creates SGLang's backend."""
    try:
        import torch

        page = lambda view: torch.frombuffer(view, dtype=torch.uint8)
    except ImportError:
        import numpy

        # The backend's module uses only this type of PyTorch.
        sys.modules["torch"] = types.SimpleNamespace(uint8=numpy.uint8)
        page = lambda view: Page(view, numpy)
    from sglang.srt.mem_cache import hicache_storage

    return lambda *arguments: SglangFile(*arguments, hicache_storage, page)


def found():
    """The available backends by name, each a function of folder, view and chunk; and the reasons why others are
    missing."""
    backends, missing = {}, {}
    try:
        from vllm.v1.kv_offload.tiering.fs import io

        backends["vllm"] = lambda *arguments: VllmFs(*arguments, io)
    except ImportError as error:
        missing["vllm"] = str(error)
    try:
        from lmcache.lmcache_fs import LMCacheFSClient

        def lmcache(is_direct):
            return lambda folder, view, chunk: LmcacheFs(
                folder, view, chunk, LMCacheFSClient(folder, 4, "", is_direct, 0)
            )

        backends["lmcache"], backends["lmcache-direct"] = lmcache(False), lmcache(True)
    except ImportError as error:
        missing["lmcache"] = str(error)
    try:
        backends["sglang"] = sglang()
    except ImportError as error:
        missing["sglang"] = f"{error}; `buffered` has the method of its file backend"
    return backends, missing
