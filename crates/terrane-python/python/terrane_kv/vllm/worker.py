"""A worker that copies vLLM's KV blocks between a GPU and host memory with Terrane's copy engines."""

import contextlib
import dataclasses
import logging
from typing import Any

import numpy
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from terrane_kv._native import KvCache, Manager, StoreError
from terrane_kv.folders import RateLimitedWarning

logger = logging.getLogger("terrane_kv")


@dataclasses.dataclass
class Job:
    """A job of vLLM in flight: its copies, and the call that repeats it with vLLM's own worker."""

    copies: list
    repeat: Any
    # The caches that the copies write, with the ids of the blocks.
    written: list = dataclasses.field(default_factory=list)
    is_refused: bool = False


class TerraneOffloadingWorker(OffloadingWorker):
    """Copies the blocks of vLLM's worker `own` between its GPU tensors and its host memory.

    `own` keeps both memories, and repeats a job that Terrane refuses or that fails. vLLM ends the engine if a job fails.

    Raises `StoreError` or `ValueError` for memory that Terrane cannot describe.
    """

    def __init__(self, own):
        handler = own._store_handler
        if handler._canonical_copy_plans is not None:
            raise ValueError("vLLM's option canonical_layout copies parts of pages; Terrane copies whole pages")
        self._own = own
        self._device = handler.src_tensors[0].device
        if self._device.type not in ("cuda", "cpu"):
            raise ValueError(f"the KV cache is on the device {self._device}; Terrane copies to and from CUDA devices")
        self._blocks_per_chunk = handler.dst_blocks_per_chunk
        self._manager = Manager([self._device.index or 0] if self._device.type == "cuda" else [])
        self._groups = self._caches(handler)
        self._jobs = {}
        self._failures = RateLimitedWarning()

    def _caches(self, handler):
        """The caches of each group on the GPU and on the host, or None for a group without layers."""
        groups = [self._parts(handler, refs) for refs in handler.layer_refs_per_group]
        region = self._own._mmap_region
        is_pinned = handler.dst_tensors[0].is_pinned() if region is None else region.is_pinned
        on_gpu = KvCache.pages(
            [[gpu for gpu, _ in parts] for parts in groups if parts],
            keep=list(handler.src_tensors),
            memory=(self._device.index or 0) if self._device.type == "cuda" else "host",
        )
        on_host = KvCache.pages(
            [[host for _, host in parts] for parts in groups if parts],
            keep=list(handler.dst_tensors),
            memory="pinned" if is_pinned else "host",
        )
        caches = iter(zip(on_gpu, on_host, strict=True))
        return [next(caches) if parts else None for parts in groups]

    def _parts(self, handler, refs):
        """The tensors of a group on the GPU and on the host, one part for each size of page."""
        members = {}
        for ref in refs:
            gpu, host = handler.src_tensors[ref.tensor_idx], handler.dst_tensors[ref.tensor_idx]
            shape = (ref.page_size_bytes, len(gpu), gpu.stride(0), len(host), host.stride(0), host.shape[1])
            members.setdefault(shape, []).append((gpu.data_ptr(), host.data_ptr()))
        parts = []
        for (page, blocks, gpu_stride, chunks, host_stride, chunk_bytes), pointers in members.items():
            on_gpu, on_host = zip(*pointers)
            per_chunk = self._blocks_per_chunk
            host_strides = [host_stride, chunk_bytes // per_chunk]
            parts.append(
                ((on_gpu, page, [blocks], [gpu_stride]), (on_host, page, [chunks, per_chunk], host_strides))
            )
        return parts

    def submit_store(self, job_id, src_spec, dst_spec):
        repeat = lambda: self._own.submit_store(job_id, src_spec, dst_spec)
        return self._submit(job_id, repeat, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        # Terrane gives short copies a turn between the parts of long ones, so it ignores `expedited`.
        options = {"expedited": True} if expedited else {}
        repeat = lambda: self._own.submit_load(job_id, src_spec, dst_spec, **options)
        return self._submit(job_id, repeat, dst_spec, src_spec, is_store=False)

    def _submit(self, job_id, repeat, gpu_spec, host_spec, is_store):
        job = self._jobs[job_id] = Job([], repeat)
        try:
            for caches, *ids in self._ids(gpu_spec, host_spec.block_ids):
                gpu, host = (cache.blocks(numbers) for cache, numbers in zip(caches, ids))
                job.copies.append(self._copy(gpu, host) if is_store else self._copy(host, gpu))
                job.written.append((caches[is_store], ids[is_store]))
        except Exception as error:
            # No exception reaches a step of the engine. The job is repeated when its other copies have ended.
            job.is_refused = True
            self._warn(job_id, error)
        return True

    def _ids(self, gpu_spec, chunk_ids):
        """The caches of each group with blocks, and the ids of these blocks on the GPU and on the host."""
        per_chunk, first_block, first_chunk = self._blocks_per_chunk, 0, 0
        for group, size, index in zip(self._groups, gpu_spec.group_sizes, gpu_spec.block_indices, strict=True):
            if size == 0:
                continue
            # The first chunk and the last one may be used in part.
            skipped = index % per_chunk
            end_chunk = first_chunk + -(-(skipped + size) // per_chunk)
            chunks = numpy.asarray(chunk_ids[first_chunk:end_chunk], dtype=numpy.int64)
            host_ids = (chunks[:, None] * per_chunk + numpy.arange(per_chunk)).ravel()[skipped : skipped + size]
            gpu_ids = numpy.asarray(gpu_spec.block_ids[first_block : first_block + size], dtype=numpy.int64)
            yield group, gpu_ids, host_ids
            first_block, first_chunk = first_block + size, end_chunk
        if (first_block, first_chunk) != (len(gpu_spec.block_ids), len(chunk_ids)):
            blocks, chunks = len(gpu_spec.block_ids), len(chunk_ids)
            raise ValueError(
                f"a job has {blocks} blocks and {chunks} chunks, and its groups need {first_block} and {first_chunk}"
            )

    def _copy(self, source, destination):
        stream = self._stream()
        try:
            return self._manager.copy(source, destination, stream=stream)
        except StoreError:
            # A job in flight may use the same blocks. vLLM does not order such jobs, so this one runs after all others.
            earlier = [copy for job in self._jobs.values() for copy in job.copies if not copy.has_ended()]
            return self._manager.copy(source, destination, stream=stream, after=earlier)

    def _stream(self):
        """The stream with the kernels that write or zero the blocks. A copy runs after its work."""
        if self._device.type != "cuda":
            return None
        import torch

        return torch.cuda.current_stream(self._device).cuda_stream

    def get_finished(self):
        finished = []
        for job_id, job in list(self._jobs.items()):
            if all(copy.has_ended() for copy in job.copies) and (copied := self._end(job_id)) is not None:
                del self._jobs[job_id]
                finished.append(
                    TransferResult(
                        job_id=job_id,
                        success=True,
                        transfer_size=sum(each.bytes for each in copied),
                        transfer_time=max((each.seconds for each in copied), default=0.0),
                    )
                )
        return finished + self._own.get_finished()

    def wait(self, job_ids):
        for job_id in job_ids:
            if job_id in self._jobs:
                self._end(job_id)
        self._own.wait(job_ids)

    def _end(self, job_id):
        """Waits for the copies of a job, and returns their results, or None if vLLM's worker repeats the job."""
        job = self._jobs[job_id]
        copied = []
        for copy in job.copies:
            try:
                copied.append(wait(copy))
            except StoreError as error:
                job.is_refused = True
                self._warn(job_id, error)
        if not job.is_refused:
            return copied
        del self._jobs[job_id]
        for cache, ids in job.written:
            # Otherwise later jobs could not read blocks that a failed copy may have written in part.
            with contextlib.suppress(StoreError):
                cache.mark_written(ids)
        job.repeat()
        return None

    def _warn(self, job_id, error):
        if self._failures.is_due():
            logger.warning("job %d is repeated by vLLM's own worker: %r", job_id, error)

    def shutdown(self):
        copies = [copy for job in self._jobs.values() for copy in job.copies]
        for copy in copies:
            with contextlib.suppress(StoreError):
                wait(copy)
        # The caches reference vLLM's memory, which its worker unmaps.
        self._jobs.clear()
        self._groups.clear()
        self._manager = None
        self._own.shutdown()


def wait(copy):
    """Waits for a copy, and returns its result. Each second, Python can handle signals."""
    while True:
        try:
            return copy.wait(1.0)
        except TimeoutError:
            pass
