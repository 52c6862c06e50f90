"""A native connector for LMCache's `native_plugin` adapter.

    --l2-adapter '{"type": "native_plugin", "module_path": "terrane_kv.lmcache", "class_name": "Connector",
                   "adapter_params": {"directory": "/nvme/kv", "capacity": "500GiB", "chunk_bytes": 33554432,
                                      "kv_dtype": "bfloat16"}}'
"""

import logging
import os
import select
import threading
from collections.abc import Sequence

from terrane_kv import keys as key_seeds
from terrane_kv._native import Blocks, CompletionQueue, StoreError
from terrane_kv.folders import RateLimitedWarning, log_like, open_rank, seconds

logger = logging.getLogger("terrane_kv")

ABSENT, WRITING, READY = 0, 1, 2

MAX_JOBS = 65_536

# The module of LMCache that creates the connector. Each of its modules has a logger with handlers.
CREATOR = "lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter"


class Connector:
    """The connector that LMCache's adapter calls. No method waits for I/O, except `close`.

    - `directory`: a folder on a local drive; `capacity`: bytes, or a text such as "500GiB".
    - `chunk_bytes`: the size of LMCache's largest object in bytes, or a list of sizes. With a list, small objects use
      small slots. A shorter object at the end of a sequence uses a slot of the smallest size that fits.
    - `kv_dtype`: the type of the cache's elements, such as "bfloat16" or "fp8_e4m3". LMCache's keys do not contain it.
    - `layout`, `rope_scaling`: set them if they may change, because LMCache's keys do not contain them.
    - `hash_algorithm`: the value of LMCache's `--hash-algorithm`.
    - `model`, `revision`: LMCache's keys contain the model's name; set these if two models share a name.
    - `load_timeout_s`: a load that takes longer fails; in seconds.
    - `rank`, `ranks`: for several servers with one directory. Each gets its own folder, and an equal share.
    """

    def __init__(
        self,
        directory: str,
        capacity: int | str,
        chunk_bytes: int | Sequence[int],
        kv_dtype: str,
        hash_algorithm: str = "blake3",
        model: str = "any",
        revision: str | None = None,
        layout: str | None = None,
        rope_scaling: object = None,
        load_timeout_s: float = 30.0,
        rank: int = 0,
        ranks: int = 1,
    ):
        log_like(CREATOR)
        sizes = chunk_bytes if isinstance(chunk_bytes, (list, tuple)) else [chunk_bytes]
        if not sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"chunk_bytes is {chunk_bytes!r}; pass a positive number of bytes, or a list of them")
        self._sizes = sizes = sorted(set(sizes))
        self._load_timeout_s = seconds("load_timeout_s", load_timeout_s)
        self._failures = RateLimitedWarning()
        self._store = open_rank(
            engine="lmcache",
            directory=directory,
            capacity=capacity,
            # Each chunk of tokens has one object of each size, so all sizes need equally many slots.
            groups=[(f"chunk-{size}", size, size) for size in sizes],
            model=model,
            fields={
                "revision": revision,
                "chunk_bytes": sizes,
                "kv_dtype": kv_dtype,
                "layout": layout,
                "rope_scaling": rope_scaling,
            },
            seed=key_seeds.lmcache(hash_algorithm),
            rank=rank,
            ranks=ranks,
        )
        self._queue = CompletionQueue(MAX_JOBS)
        # The outcomes of jobs are in the store's queue. Results that need no I/O are in `_ready`, with its own
        # descriptor. LMCache polls one descriptor that covers both.
        self._ready_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._both = select.epoll()
        self._both.register(self._queue.fileno(), select.EPOLLIN)
        self._both.register(self._ready_event, select.EPOLLIN)
        self._lock = threading.Lock()
        self._next_id = 1
        self._ready = []
        # Batches in flight: for each number, the jobs that have not ended, and the results by key.
        self._batches = {}
        self._is_closed = False

    def event_fd(self) -> int:
        """A descriptor that is readable while there are completions."""
        return self._both.fileno()

    def submit_batch_set(self, keys: list[str], bufs: list) -> int:
        """Stores each buffer under its key. The buffers stay referenced until the job has ended."""
        return self._submit(keys, bufs, self._store.put, priority="low")

    def submit_batch_get(self, keys: list[str], bufs: list) -> int:
        """Loads each key into its buffer, which must have the stored length."""
        return self._submit(
            keys, bufs, self._store.get, priority="high", timeout=self._load_timeout_s
        )

    def submit_batch_exists(self, keys: list[str]) -> int:
        """Checks which keys can be loaded."""
        found = [False] * len(keys)
        for group in range(len(self._sizes)):
            for at, presence in enumerate(self._store.presences(keys, group=group)):
                found[at] |= presence >= READY
        return self._answer(True, "", found)

    def submit_batch_delete(self, keys: list[str]) -> int:
        """Removes keys. The completion reports the keys that existed, once the removal is durable."""
        found = [False] * len(keys)
        if not keys:
            return self._answer(True, "", found)
        for group in range(len(self._sizes)):
            for at, presence in enumerate(self._store.presences(keys, group=group)):
                found[at] |= presence != ABSENT
        with self._lock:
            number = self._number()
            self._batches[number] = [len(self._sizes), found, ""]
        for group in range(len(self._sizes)):
            try:
                self._store.remove(keys, group=group, queue=self._queue, tag=number)
            except Exception as error:
                self._end(number, range(len(keys)), [False] * len(keys), _error_text(error))
        return number

    def _submit(self, keys, bufs, verb, **options):
        if len(keys) != len(bufs):
            raise ValueError(f"{len(keys)} keys and {len(bufs)} buffers; each key needs one")
        if not keys:
            return self._answer(True, "", [])
        groups, too_large = {}, []
        for at, buf in enumerate(bufs):
            group = self._group(memoryview(buf).nbytes)
            groups.setdefault(group, []).append(at)
        too_large = groups.pop(None, [])
        with self._lock:
            number = self._number()
            self._batches[number] = [len(groups) + bool(too_large), [False] * len(keys), ""]
            jobs = {self._number(): (number, ats) for ats in groups.values()}
            self._batches.update(jobs)
        for (tag, (_, ats)), group in zip(jobs.items(), groups):
            try:
                blocks = Blocks.of([bufs[at] for at in ats])
                verb([keys[at] for at in ats], blocks, group=group, queue=self._queue, tag=tag, **options)
            except Exception as error:
                # The memory may also be read-only or have gaps. The batch then completes with its error.
                self._end(tag, ats, [False] * len(ats), _error_text(error))
        if too_large:
            largest = max(memoryview(bufs[at]).nbytes for at in too_large)
            text = f"an object has {largest} bytes, and slots have {self._sizes[-1]}; set chunk_bytes to {largest}"
            logger.warning(text)
            self._end(number, too_large, [False] * len(too_large), text)
        return number

    def _group(self, size):
        return next((group for group, slot in enumerate(self._sizes) if size <= slot), None)

    def _number(self):
        self._next_id += 1
        return self._next_id - 1

    def _end(self, tag, ats, done, error):
        """Records the end of one job of a batch. The last one completes the batch."""
        with self._lock:
            batch = self._batches[tag]
            if isinstance(batch, tuple):
                del self._batches[tag]
                tag, ats = batch
                batch = self._batches[tag]
            for at, is_done in zip(ats, done):
                batch[1][at] = is_done
            batch[0] -= 1
            batch[2] = batch[2] or error
            if batch[0] > 0:
                return
            del self._batches[tag]
            self._push((tag, all(batch[1]), batch[2], batch[1]))

    def _answer(self, is_ok, error, results):
        with self._lock:
            number = self._number()
            self._push((number, is_ok, error, results))
        return number

    def _push(self, completion):
        self._ready.append(completion)
        if len(self._ready) == 1 and not self._is_closed:
            os.eventfd_write(self._ready_event, 1)

    def drain_completions(self) -> list[tuple[int, bool, str, list[bool] | None]]:
        """Returns the completions since the last call: (number, whether all keys succeeded, error, result of each
        key)."""
        for outcome in self._queue.drain():
            # LMCache does not log the text.
            if outcome.error and self._failures.is_due():
                logger.warning("a job failed: %s", outcome.error)
            # If a removal failed, no key is certain to be removed. Other jobs have a result for each key.
            failed = range(len(outcome.done)) if outcome.error else ()
            self._end(outcome.tag, failed, outcome.done, outcome.error or "")
        with self._lock:
            ready, self._ready = self._ready, []
            if ready and not self._is_closed:
                os.eventfd_read(self._ready_event)
        return ready

    def close(self) -> None:
        """Ends the jobs in flight and closes the store. It may be called more than once."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._store.close(timeout=30.0)
        self._both.close()
        os.close(self._ready_event)


def _error_text(error):
    """The text of an error. A `StoreError` explains itself; for other errors the text includes the type."""
    return str(error) if isinstance(error, StoreError) else repr(error)
