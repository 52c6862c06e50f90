"""Compares Terrane's offloading worker with vLLM's, on a machine with a GPU. It needs vLLM, or its unpacked source.

usage: vllm_worker_bench.py [ROUNDS]

Each line is the median of ROUNDS (default 9) alternating jobs: the rates of both workers, their ratio, and the time that
each takes to submit a job. `busy` is with matrix products on another stream, and then states their slowdown. Terrane's
paths come last.
"""

import statistics
import sys
import time
import uuid

import numpy
import torch
import vllm_worker_tests

vllm_worker_tests.replace_extensions()

from terrane_kv.vllm import TerraneOffloadingWorker, worker  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec  # noqa: E402
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker  # noqa: E402
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion  # noqa: E402

# Tensors, bytes of a page, blocks of a chunk: 8 KV heads in 32 layers, all layers in one tensor, a latent in 61 layers, and
# 2 KV heads in 80 layers.
SHAPES = [(32, 65_536, 1), (32, 65_536, 16), (1, 2 << 20, 1), (61, 18_432, 1), (64, 8192, 1), (80, 16_384, 4)]
BLOCKS, SIZES = 512, (1, 16, 256)
PRODUCTS, SIDE = 16, 8192


def workers(tensors, page, per_chunk):
    """vLLM's worker with one group of layers, and Terrane's over it."""
    gpu = [torch.randint(-128, 127, (BLOCKS, page), dtype=torch.int8, device="cuda") for _ in range(tensors)]
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor=tensor, page_size_bytes=page) for tensor in gpu],
        group_data_refs=[[CanonicalKVCacheRef(tensor_idx=at, page_size_bytes=page) for at in range(tensors)]],
    )
    cell, chunks = tensors * page * per_chunk, BLOCKS // per_chunk
    row = -(-cell // 4096) * 4096
    region = SharedOffloadRegion(
        engine_id=str(uuid.uuid4()), num_chunks=chunks, rank=0, kv_bytes_per_chunk=row, cpu_page_size=cell
    )
    own = CPUOffloadingWorker(
        kv_caches=caches, blocks_per_chunk=per_chunk, num_cpu_chunks=chunks, mmap_region=region
    )
    return own, TerraneOffloadingWorker(own)


def products(matrix):
    """Submits matrix products to a stream of their own, and returns the events around them."""
    stream, begin, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record(stream)
        for _ in range(PRODUCTS):
            matrix @ matrix
        end.record(stream)
    return begin, end


def measured(mover, job, matrix):
    """The times of a job and of its submission, and of the products beside it, in seconds."""
    torch.cuda.synchronize()
    events = products(matrix) if matrix is not None else None
    begin = time.perf_counter()
    if mover is not None:
        job(mover)
    submitted = time.perf_counter()
    while mover is not None and not mover.get_finished():
        pass
    ended = time.perf_counter()
    torch.cuda.synchronize()
    beside = events[0].elapsed_time(events[1]) * 1e-3 if events else 0.0
    return ended - begin, submitted - begin, beside


def compare(shape, own, ours, size, is_store, matrix, rounds, paths):
    tensors, page, per_chunk = shape
    random = numpy.random.default_rng(3)
    blocks = random.permutation(BLOCKS)[:size].tolist()
    chunks = random.permutation(BLOCKS // per_chunk)[: size // per_chunk].tolist()
    gpu = GPULoadStoreSpec(blocks, group_sizes=(size,), block_indices=(0,))
    host = CPULoadStoreSpec(chunks)

    def job(mover):
        job.number += 1
        return mover.submit_store(job.number, gpu, host) if is_store else mover.submit_load(job.number, host, gpu)

    job.number = 0
    movers = [own, ours] + ([None] if matrix is not None else [])
    paths.clear()
    turns = [[measured(mover, job, matrix) for mover in movers] for _ in range(rounds)]
    times = [[statistics.median(values) for values in zip(*of_mover)] for of_mover in zip(*turns)]
    (theirs, their_submit, their_products), (mine, my_submit, my_products) = times[:2]
    total = size * page * tensors
    line = f"{tensors} × {page} B, {per_chunk} a chunk, {size:3} blocks, {'store' if is_store else 'load '}"
    line += f" {'busy' if matrix is not None else 'idle'}: {total / mine * 1e-9:5.1f} GB/s, vLLM"
    line += f" {total / theirs * 1e-9:5.1f} ({theirs / mine:.2f} ×); submit {my_submit * 1e6:.0f} µs, vLLM {their_submit * 1e6:.0f}"
    if matrix is not None:
        line += f"; products {my_products / times[2][2]:.3f}, vLLM {their_products / times[2][2]:.3f}"
    print(line, ", ".join(sorted(paths)), sep="; ", flush=True)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    paths, wait = set(), worker.wait

    def traced(copy):
        copied = wait(copy)
        paths.add(copied.path)
        return copied

    worker.wait = traced
    matrix = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    for shape in SHAPES:
        own, ours = workers(*shape)
        for size in (size for size in SIZES if size >= shape[2]):
            for is_store in (True, False):
                compare(shape, own, ours, size, is_store, None, rounds, paths)
                if size == SIZES[-1]:
                    compare(shape, own, ours, size, is_store, matrix, rounds, paths)
        ours.shutdown()


if __name__ == "__main__":
    main()
