"""NumPy KV caches in the axis orders of serving engines, stored and loaded without a copy in Python."""

import gc
import os
import sys
import threading

import numpy
import pytest

import terrane_kv
from conftest import damage

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
def test_blocks_are_loaded_to_other_places(opened, axes):
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


def test_rows_of_k_and_v_are_stored_in_the_layout_of_newer_vllm(opened):
    # A layer is (blocks, heads, tokens, K and V of a token).
    arrays = [numpy.arange(BLOCKS * HEADS * PAGE * 2 * DIM, dtype=numpy.uint16) + at for at in range(LAYERS)]
    arrays = [array.reshape(BLOCKS, HEADS, PAGE, 2 * DIM) for array in arrays]
    cache = terrane_kv.KvCache(arrays, "block head token dim")
    assert (len(cache), cache.block_bytes) == (BLOCKS, LAYERS * HEADS * PAGE * 2 * DIM * 2)
    store = opened(groups=[("kv", cache)])
    before = [array[2].copy() for array in arrays]
    assert store.put(["k"], cache.blocks([2])).wait(10).ok and store.get(["k"], cache.blocks([4])).wait(10).ok
    assert all((array[4] == block).all() for array, block in zip(arrays, before))


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


SEEN = [axes for axes in SHAPES if not axes.startswith("slot")]


@pytest.mark.parametrize("axes", SEEN)
def test_a_cache_of_terrane_has_the_same_form(axes):
    arrays = arrays_of(axes)
    cache, manager = adopted(axes, arrays), terrane_kv.Manager()
    tier = cache.allocate_like(9)
    manager.copy(cache.blocks([2, 5]), tier.blocks([0, 7])).wait(30)
    tensors = tier.tensors(axes, "uint16")
    expected = [9 if name == "block" else size for name, size in zip(axes.split(), SHAPES[axes])]
    assert [tensor.shape for tensor in tensors] == [expected] * LAYERS
    seen = [numpy.from_dlpack(tensor) for tensor in tensors]
    for array, there in zip(arrays, seen):
        assert not there.flags.writeable
        for mine, theirs in ((2, 0), (5, 7)):
            assert (block_of(axes, array, mine) == block_of(axes, there, theirs)).all()
    # While the tensors are exported, writes are refused.
    with pytest.raises(terrane_kv.StoreError, match="conflict|read"):
        manager.copy(cache.blocks([1]), tier.blocks([0]))
    manager.copy(tier.blocks([7]), cache.blocks([0])).wait(30)
    del seen, there, tensors
    manager.copy(cache.blocks([1]), tier.blocks([0])).wait(30)


def test_a_tensor_of_a_cache_is_taken_once_and_returned_if_nobody_takes_it():
    axes = "block token row"
    cache, manager = adopted(axes, arrays_of(axes)), terrane_kv.Manager()
    tier = cache.allocate_like(BLOCKS)
    (first, *others) = tier.tensors(axes, "uint16", writable=True)
    assert first.__dlpack_device__() == (1, 0)
    for options in ({"stream": 1}, {"dl_device": (2, 0)}, {"copy": True}):
        with pytest.raises(BufferError):
            first.__dlpack__(**options)
    numpy.from_dlpack(first)[:] = 7
    with pytest.raises(BufferError, match="was already exported"):
        first.__dlpack__()
    # If no consumer takes a capsule, it returns its tensor, for both structures.
    for version, tensor in zip((None, (1, 0)), others):
        tensor.__dlpack__(max_version=version)
    del first, others, tensor
    manager.copy(tier.blocks([3]), cache.blocks([1])).wait(30)
    with pytest.raises(ValueError, match="no type"):
        tier.tensors(axes, "float3")
    with pytest.raises(terrane_kv.StoreError, match="elements"):
        tier.tensors(axes, "uint32")


def test_a_tensor_that_a_structure_cannot_state_can_be_taken_in_another():
    axes = "block token row"
    (tensor, *_) = adopted(axes, arrays_of(axes)).allocate_like(BLOCKS).tensors(axes, "uint16")
    with pytest.raises(BufferError, match="read-only.*max_version"):
        tensor.__dlpack__()
    assert not numpy.from_dlpack(tensor).flags.writeable


class Exporter:
    """An array whose library supports only some arguments of `__dlpack__`."""

    def __init__(self, array, known, copies=False):
        self.array, self.known, self.copies, self.asked = array, known, copies, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        self.asked.append(sorted(options))
        if not set(options) <= self.known:
            raise TypeError("an unexpected keyword argument")
        return self.array.__dlpack__(**(options | {"copy": True} if self.copies else options))


@pytest.mark.parametrize("known", [set(), {"max_version"}, {"max_version", "copy"}])
def test_tensors_of_older_libraries_are_exported_by_older_calls(known):
    exporters = [Exporter(array, known) for array in arrays_of("block token row")]
    cache = terrane_kv.KvCache(exporters, "block token row")
    assert len(cache) == BLOCKS
    asked = [["copy", "max_version"], ["max_version"], []]
    assert exporters[0].asked == asked[: 3 - len(known)]


def test_copies_of_tensors_are_refused():
    exporters = [Exporter(array, {"max_version", "copy"}, copies=True) for array in arrays_of("block token row")]
    with pytest.raises(terrane_kv.StoreError, match="exports a copy"):
        terrane_kv.KvCache(exporters, "block token row")


def test_head_major_by_strides():
    # As in vLLM, the shape does not change, and the memory is head-major.
    arrays = [
        numpy.arange(2 * BLOCKS * PAGE * HEADS * DIM, dtype=numpy.uint16)
        .reshape(2, BLOCKS, HEADS, PAGE, DIM)
        .transpose(0, 1, 3, 2, 4)
        for _ in range(LAYERS)
    ]
    before = [array.copy() for array in arrays]
    cache, manager = terrane_kv.KvCache(arrays, "outer block token head dim"), terrane_kv.Manager()
    tier = cache.allocate_like(4)
    manager.copy(cache.blocks([0]), tier.blocks([3])).wait(30)
    for array in arrays:
        array[:, 0] = 0
    manager.copy(tier.blocks([3]), cache.blocks([0])).wait(30)
    assert all((array == old).all() for array, old in zip(arrays, before))


def test_one_tensor_of_all_layers():
    whole = numpy.arange(BLOCKS * LAYERS * 2 * PAGE * HEADS * DIM, dtype=numpy.uint16)
    whole = whole.reshape(BLOCKS, LAYERS, 2, PAGE, HEADS, DIM)
    before = whole.copy()
    layers = [whole[:, layer] for layer in range(LAYERS)]
    cache, manager = terrane_kv.KvCache(layers, "block outer token head dim"), terrane_kv.Manager()
    tier = cache.allocate_like(4)
    manager.copy(cache.blocks([5]), tier.blocks([3])).wait(30)
    whole[5] = 0
    manager.copy(tier.blocks([3]), cache.blocks([5])).wait(30)
    assert (whole == before).all()


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_copies_and_a_hundred_adoptions_without_growth():
    axes = "outer block token head dim"
    arrays = arrays_of(axes)
    before = [array.copy() for array in arrays]
    manager = terrane_kv.Manager()

    def copies(count):
        cache = adopted(axes, arrays)
        tier = cache.allocate_like(9)
        for _ in range(count):
            manager.copy(cache.blocks([1, 3]), tier.blocks([8, 0])).wait(30)
            manager.copy(tier.blocks([8, 0]), cache.blocks([1, 3])).wait(30)

    for rounds in (lambda: copies(5_000), lambda: [copies(1) for _ in range(100)]):
        rounds()
        growths = []
        for _ in range(3):
            gc.collect()
            start = resident_bytes()
            rounds()
            gc.collect()
            growths.append(resident_bytes() - start)
            if growths[-1] < 1 << 20:
                break
        assert growths[-1] < 1 << 20, f"the memory grew by {growths} bytes"
    assert all((array == old).all() for array, old in zip(arrays, before))


def test_tensors_that_differ_are_named():
    axes = "outer block token head dim"
    arrays = arrays_of(axes)
    other = numpy.zeros((2, BLOCKS, PAGE, 2 * HEADS, DIM // 2), dtype=numpy.uint16)
    with pytest.raises(terrane_kv.StoreError, match=r"layer 1, axis 3 \(heads\): 2 expected, 4 found"):
        terrane_kv.KvCache([arrays[0], other], axes)
    with pytest.raises(terrane_kv.StoreError, match=r"axis 1 \(blocks\): 6 expected, 5 found"):
        terrane_kv.KvCache([arrays[0], arrays[1][:, :5].copy()], axes)
    arrays[1].flags.writeable = False
    with pytest.raises(terrane_kv.StoreError, match="layer 1 cannot be adopted; .* read-only"):
        terrane_kv.KvCache(arrays, axes)


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


def test_a_block_that_a_failed_get_wrote_in_part_is_read_after_it_was_written(opened, directory):
    axes = "block outer token head dim"
    arrays = arrays_of(axes)
    cache = adopted(axes, arrays)
    store = opened(groups=[("kv", cache)])
    assert store.put(["a"], cache.blocks([1])).wait(10).ok
    content = block_of(axes, arrays[0], 1).tobytes()
    store.close()
    damage(directory, content)
    store = opened(groups=[("kv", cache)])
    assert store.get(["a"], cache.blocks([3])).wait(10).results == ["corrupt"]
    refused = store.put(["b"], cache.blocks([3])).wait(10)
    assert not refused.ok and "in part" in refused.error
    cache.mark_written([3])
    assert store.put(["b"], cache.blocks([3])).wait(10).ok
    with pytest.raises(terrane_kv.StoreError):
        cache.mark_written([BLOCKS])
