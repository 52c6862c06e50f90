"""The engines' own disk backends for `python -m terrane_kv.bench --rivals`, as far as their packages are installed.

Each backend moves the chunks of one request at a time, as its engine does: vLLM's fs tier on one thread, LMCache's native
file client on its own threads.
"""

import os
import select
import threading


class VllmFs:
    """The functions that vLLM's fs tier runs for a job."""

    def __init__(self, folder, view, chunk, io):
        self.folder, self.view, self.chunk, self.io = folder, view, chunk, io
        self.use_direct = io.probe_o_direct(folder)

    def move(self, is_write, numbers):
        function = self.io.batch_store_block if is_write else self.io.batch_load_block
        paths = [os.path.join(self.folder, f"{number}.bin") for number in numbers]
        function(paths, self.view, [number * self.chunk for number in numbers], self.chunk, self.use_direct)


class LmcacheFs:
    """LMCache's native file client with its default of four threads, buffered or with direct I/O."""

    def __init__(self, folder, view, chunk, client):
        self.folder, self.view, self.chunk, self.client = folder, view, chunk, client
        self.lock, self.done = threading.Lock(), {}

    def move(self, is_write, numbers):
        keys = [f"m@0x00000000@0@{number:064x}" for number in numbers]
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


def found():
    """The backends that can be used here: for each name a function of folder, view and chunk; and the reasons of others."""
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
    missing["sglang"] = "there is no code for it yet; `buffered` has the method of its file backend"
    return backends, missing
