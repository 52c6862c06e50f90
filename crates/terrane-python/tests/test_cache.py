"""KV caches of NumPy in the axis orders of serving engines, stored and loaded without a copy by Python."""

import gc
import sys
import threading

import numpy
import pytest

import terrane_kv

BLOCKS, LAYERS, PAGE, HEADS, DIM = 6, 3, 4, 2, 8
SHAPES = {
    "outer block token head dim": (2, BLOCKS, PAGE, HEADS, DIM),
    "block outer token head dim": (BLOCKS, 2, PAGE, HEADS, DIM),
    "block outer head token dim": (BLOCKS, 2, HEADS, PAGE, DIM),
    "slot head dim": (BLOCKS * PAGE, HEADS, DIM),
    "block token row": (BLOCKS, PAGE, HEADS * DIM),
    "slot one row": (BLOCKS * PAGE, 1, HEADS * DIM),
}
APART = "slot head dim"


def block_of(axes, array, block):
    if axes.startswith("outer"):
        return array[:, block]
    if axes.startswith("slot"):
        return array[block * PAGE : (block + 1) * PAGE]
    return array[block]


def adopted(axes, arrays):
    return terrane_kv.KvCache(
        arrays, axes, page_size=PAGE if axes.startswith("slot") else None, apart=axes == APART
    )


def arrays_of(axes, seed=0):
    random = numpy.random.default_rng(seed)
    count = LAYERS * (2 if axes == APART else 1)
    return [random.integers(0, 1 << 16, SHAPES[axes], dtype=numpy.uint16) for _ in range(count)]


@pytest.mark.parametrize("axes", SHAPES)
def test_blocks_come_back_to_other_places(opened, axes):
    arrays = arrays_of(axes)
    before = [array.copy() for array in arrays]
    cache = adopted(axes, arrays)
    assert len(cache) == BLOCKS
    assert cache.block_bytes == sum(array.nbytes for array in arrays) // BLOCKS
    store = opened(groups=[("kv", cache)])
    keys = ["one", "three", "four"]
    assert store.put(keys, cache.blocks([1, 3, 4])).wait(10).ok
    for array in arrays:
        for block in (1, 3, 4):
            block_of(axes, array, block)[:] = 0
    assert store.get(keys, cache.blocks(numpy.array([4, 1, 3], dtype=numpy.int32))).wait(10).ok
    for array, old in zip(arrays, before):
        for now, then in ((4, 1), (1, 3), (3, 4), (0, 0), (2, 2), (5, 5)):
            assert (block_of(axes, array, now) == block_of(axes, old, then)).all(), now


def test_another_layout_of_the_same_shape_reads_the_blocks_after_a_restart(opened):
    axes = "outer block token head dim"
    arrays = arrays_of(axes)
    store = opened(groups=[("kv", adopted(axes, arrays))])
    assert store.put(["k"], adopted(axes, arrays).blocks([2])).wait(10).ok
    store.close()
    other = [numpy.zeros((BLOCKS, 2, HEADS, PAGE, DIM), dtype=numpy.uint16) for _ in range(LAYERS)]
    cache = adopted("block outer head token dim", other)
    store = opened(groups=[("kv", cache)])
    assert store.get(["k"], cache.blocks([5])).wait(10).ok
    for array, there in zip(arrays, other):
        assert (array[:, 2].transpose(0, 2, 1, 3) == there[5]).all()


def test_tensors_stay_alive_with_the_cache_and_are_released_after(opened):
    arrays = arrays_of("block token row")
    before = sys.getrefcount(arrays[0])
    cache = adopted("block token row", arrays)
    during = sys.getrefcount(arrays[0])
    assert during > before
    store = opened(groups=[("kv", cache)])
    store.put(["k"], cache.blocks([0])).wait(10)
    store.close()
    del cache, store
    gc.collect()
    after = sys.getrefcount(arrays[0])
    assert after == before


def test_tensors_that_only_a_job_keeps_are_freed_by_a_thread_of_python(opened):
    freed_by = []

    class Tensor(numpy.ndarray):
        def __del__(self):
            freed_by.append(threading.current_thread())

    store = opened(groups=[("kv", 64 << 10)], capacity=64 << 20)
    for turn in range(20):
        tensors = [numpy.zeros((BLOCKS, PAGE, 2048), dtype=numpy.uint16).view(Tensor) for _ in range(LAYERS)]
        cache = terrane_kv.KvCache(tensors, "block token row")
        store.put([f"{turn}"], cache.blocks([0]))
        del cache, tensors
    store.drain()
    gc.collect()
    assert len(freed_by) == 20 * LAYERS and set(freed_by) == {threading.main_thread()}


def test_what_does_not_fit_is_named():
    arrays = arrays_of("block token row")
    with pytest.raises(ValueError, match="no axis .layer."):
        terrane_kv.KvCache(arrays, "layer token row")
    with pytest.raises(ValueError, match="3 dimensions and 2 axes"):
        terrane_kv.KvCache(arrays, "block token")
    with pytest.raises(ValueError, match="page_size"):
        terrane_kv.KvCache(arrays_of("slot one row"), "slot one row")
    with pytest.raises(terrane_kv.StoreError):
        terrane_kv.KvCache([*arrays, arrays[0][:, :2]], "block token row")
    with pytest.raises((AttributeError, TypeError)):
        terrane_kv.KvCache([object()], "block token row")
