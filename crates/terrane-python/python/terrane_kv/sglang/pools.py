"""The memory of SGLang's host pools: pages, their spans, and their groups in a store."""

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from terrane_kv._native import Blocks, StoreError


def has_some_layers(pool):
    """Whether each rank of context parallelism has other layers in this pool."""
    sharded = getattr(getattr(pool, "device_pool", None), "layer_shard_enabled", False)
    return bool(sharded or getattr(pool, "_layer_shard_enabled", False))


def weighted_groups(pools):
    """The groups of these pools with weights. Every page has a block in each pool, but few have a state of Mamba layers.

    All other pools get equally many slots. The states get as many bytes as all other pools together.
    """
    state = PoolName.MAMBA.value
    others = sum(size for name, size in pools.items() if name != state)
    return [(name, size, others or size if name == state else size) for name, size in pools.items()]


def is_logical(pool):
    """Whether a pool only counts pages, because other pools or another rank have the memory. It has each page.

    The absence of a buffer is not enough: a pool of unified memory has a view instead, and a destroyed pool has none.
    """
    # A group has the memory of its first pool.
    pool = getattr(getattr(pool, "anchor_entry", None), "host_pool", pool)
    is_empty = getattr(pool, "kv_buffer", False) is None and getattr(pool, "size_per_token", None) == 0
    return is_empty or bool(getattr(pool, "_is_dummy", False))


def page_bytes(pool):
    """The bytes of one page of a host pool."""
    try:
        spans = spans_in(pool, torch.arange(getattr(pool, "page_size", 1) or 1))
    except AssertionError:
        # Unified memory has no address for a page that is not allocated.
        spans = None
    if spans is not None:
        return sum(spans[1])
    page = pool.get_dummy_flat_data_page()
    return page.numel() * page.element_size()


def spans_in(pool, indices):
    """The pointers and sizes of pages in a host pool, or None if its layout has no zero-copy form."""
    meta = getattr(pool, "get_page_buffer_meta", None)
    try:
        return meta and meta(indices)
    except (NotImplementedError, ValueError):
        return None


def page_copies(verb, pool, indices, count):
    """For each page, the index of its first token and a tensor: its bytes for a put, and room for them for a get."""
    tokens = len(indices) // count
    if tokens * count != len(indices) or tokens == 0:
        raise ValueError(f"{len(indices)} host indices for {count} pages")
    firsts = [int(index) for index in indices[::tokens]]
    if verb == "put":
        return {index: pool.get_data_page(index).contiguous() for index in firsts}
    return {index: pool.get_dummy_flat_data_page() for index in firsts}


def tensor_spans(tensors):
    """The pointers and sizes of tensors of host memory, and their owner."""
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise StoreError("a page is not a contiguous tensor of host memory")
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return [tensor.data_ptr() for tensor in tensors], sizes, tensors


def _spans_of_page(pointers, sizes, count):
    each = len(pointers) // max(count, 1)
    if each * count != len(pointers) or len(sizes) != len(pointers):
        raise ValueError(f"{len(pointers)} pointers and {len(sizes)} sizes for {count} pages")
    return each


def page_blocks(pointers, sizes, count, owner):
    """A function that returns the blocks from one page to another one."""
    each = _spans_of_page(pointers, sizes, count)

    def blocks(start, end):
        of_part = slice(start * each, end * each)
        return Blocks.at(pointers[of_part], sizes[of_part], end - start, keep=owner)

    return blocks


def page_spans(pointers, sizes, count):
    """For each page, a list of pairs of address and size."""
    each = _spans_of_page(pointers, sizes, count)
    pairs = [(int(pointer), int(size)) for pointer, size in zip(pointers, sizes)]
    return [pairs[at * each : (at + 1) * each] for at in range(count)]


def is_sharded(pool):
    """Whether each tensor-parallel rank has different attention heads in this pool."""
    return any("MHA" in base.__name__ for base in type(pool).__mro__)
