"""Gets layer by layer: waits of a thread, and waits of a stream of a CUDA device, real or simulated."""

import gc
import os
from ctypes import c_size_t

import numpy
import pytest

import cuda_driver as cuda
import terrane_kv

BLOCKS, LAYERS, PAGE, HEADS, DIM = 8, 3, 4, 2, 8
AXES = "outer block token head dim"
SHAPE = (2, BLOCKS, PAGE, HEADS, DIM)
KEYS = [b"a", b"b", b"c"]

try:
    DRIVER, REASON = cuda.Driver(), ""
except cuda.CudaMissing as missing:
    DRIVER, REASON = None, str(missing)
needs_device = pytest.mark.skipif(DRIVER is None, reason=REASON)
holds_work = pytest.mark.skipif(
    DRIVER is None or not DRIVER.is_simulated, reason=REASON or "the work of a real device cannot be held back"
)


def arrays(seed=0):
    random = numpy.random.default_rng(seed)
    return [random.integers(1, 1 << 16, SHAPE, dtype=numpy.uint16) for _ in range(LAYERS)]


def on_host(opened, **options):
    """A store with a tier of host memory that has three blocks, their content, and the cache's arrays."""
    content = arrays()
    cache = terrane_kv.KvCache(content, AXES)
    store = opened(groups=[("kv", cache)], host_bytes=1 << 20, capacity=1 << 20, **options)
    assert store.put(KEYS, cache.blocks([0, 1, 2])).wait().ok
    return store, cache, content


@pytest.fixture
def tensors():
    with cuda.tensors(DRIVER, LAYERS, SHAPE) as made:
        yield made
        gc.collect()


def on_device(opened, tensors):
    """The same on the device."""
    content, stream = arrays(), cuda.Stream(DRIVER)
    for tensor, array in zip(tensors, content):
        tensor.fill(array, stream)
    cache = terrane_kv.KvCache(tensors, AXES)
    tier = terrane_kv.Tier.pinned(1 << 20)
    store = opened(groups=[("kv", cache)], tiers=[tier], capacity=1 << 20)
    assert store.put(KEYS, cache.blocks([0, 1, 2]), stream=stream.handle.value).wait().ok
    return store, cache, content


def test_each_layer_is_there_after_a_wait_for_it(opened):
    store, cache, content = on_host(opened)
    before = [array[:, :3].copy() for array in content]
    job = store.get(KEYS, cache.blocks([5, 3, 4]), layer_by_layer=True)
    for layer in range(LAYERS):
        job.wait_layer(layer)
        assert (content[layer][:, [5, 3, 4]] == before[layer]).all()
    assert job.wait().ok
    job.wait_layer(LAYERS - 1, 0)
    job.wait_layer(LAYERS - 1, 0, first=2)


def test_a_wait_for_a_layer_of_blocks_on_disk_returns_their_bytes(opened):
    store, cache, content = on_host(opened)
    before = [array[:, :3].copy() for array in content]
    store.close()
    store = opened(groups=[("kv", cache)], host_bytes=1 << 20, capacity=1 << 20)
    assert store.promote([b"b"]).wait().ok
    job = store.get(KEYS, cache.blocks([5, 3, 4]), layer_by_layer=True)
    job.wait_layer(LAYERS - 1, 20)
    assert all((content[layer][:, [5, 3, 4]] == before[layer]).all() for layer in range(LAYERS))
    assert job.wait().ok


def test_wrong_waits_for_layers_are_errors(opened):
    store, cache, _ = on_host(opened)
    job = store.get(KEYS[:1], cache.blocks([3]), layer_by_layer=True)
    with pytest.raises(ValueError, match="layer 3 requested, and the blocks have layers 0 to 2"):
        job.wait_layer(3)
    with pytest.raises(ValueError, match="layer 7 requested"):
        job.wait_layer(8, first=7)
    with pytest.raises(ValueError, match="host memory"):
        job.wait_layer(0, stream=5)
    with pytest.raises(ValueError, match="the timeout is -1"):
        job.wait_layer(0, -1.0)
    assert job.wait().ok
    job = store.get(KEYS[:1], cache.blocks([3]))
    with pytest.raises(ValueError, match="layer_by_layer=True"):
        job.wait_layer(0)
    assert job.wait().ok
    for submit in (
        lambda: store.put(KEYS[:1], cache.blocks([0]), layer_by_layer=True),
        lambda: store.promote(KEYS[:1], layer_by_layer=True),
        lambda: store.remove(KEYS[:1], layer_by_layer=True),
    ):
        with pytest.raises(TypeError, match="only a get"):
            submit()
    queue = terrane_kv.CompletionQueue(1)
    job = store.get(KEYS[:1], cache.blocks([3]), layer_by_layer=True, queue=queue)
    job.wait_layer(2)
    assert queue.wait(20).ok


def test_a_wait_for_a_layer_of_a_failed_job_raises_its_failure(opened):
    store, cache, _ = on_host(opened)
    job = store.get([b"a", b"none"], cache.blocks([3, 4]), layer_by_layer=True)
    with pytest.raises(terrane_kv.StoreError, match="layer 0"):
        job.wait_layer(2)
    assert job.wait().results == ["done", "absent"]
    with pytest.raises(terrane_kv.StoreError, match="the job failed"):
        job.wait_layer(0, 1.0)


def test_a_forked_child_has_no_layers_to_wait_for(opened):
    store, cache, _ = on_host(opened)
    job = store.get(KEYS[:1], cache.blocks([3]), layer_by_layer=True)
    child = os.fork()
    if child == 0:
        try:
            job.wait_layer(0)
        except terrane_kv.ForkedError:
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    job.wait_layer(0)
    assert job.wait().ok


@needs_device
def test_a_stream_or_the_thread_waits_for_a_layer_of_a_device(opened, tensors):
    store, cache, content = on_device(opened, tensors)
    job = store.get(KEYS, cache.blocks([5, 3, 4]), stream=-1, layer_by_layer=True)
    stream = cuda.Stream(DRIVER)
    for layer in range(LAYERS):
        job.wait_layer(layer, stream=stream.handle.value)
    DRIVER.call("cuStreamSynchronize", stream.handle)
    for tensor, array in zip(tensors, content):
        assert (tensor.content()[:, [5, 3, 4]] == array[:, :3]).all()
    job.wait_layer(LAYERS - 1)
    assert job.wait().ok
    with pytest.raises(ValueError, match="stream -3 does not exist; pass a stream's handle$"):
        job.wait_layer(0, stream=-3)
    with pytest.raises(terrane_kv.StoreError, match="per-thread"):
        job.wait_layer(0, stream=2)


@holds_work
def test_work_of_a_stream_runs_after_a_layer_that_is_held_back(opened, tensors):
    store, cache, content = on_device(opened, tensors)
    reader = cuda.Stream(DRIVER)
    blocks = cache.blocks([5, 3, 4])
    # The engine has its buffers afterwards.
    assert store.get(KEYS, blocks, stream=-1, layer_by_layer=True).wait().ok
    for tensor in tensors:
        tensor.clear()
    with cuda.tensors(DRIVER, LAYERS, SHAPE) as copies:
        with DRIVER.limited():
            job = store.get(KEYS, blocks, stream=-1, layer_by_layer=True)
            for layer, (tensor, copy) in enumerate(zip(tensors, copies)):
                job.wait_layer(layer, stream=reader.handle.value)
                size = c_size_t(tensor.nbytes)
                DRIVER.call("cuMemcpyDtoDAsync_v2", copy.address, tensor.address, size, reader.handle)
            with pytest.raises(TimeoutError, match="layer 0 has not arrived"):
                job.wait_layer(0, 0.02)
            assert not job.has_ended()
        DRIVER.call("cuStreamSynchronize", reader.handle)
        for copy, array in zip(copies, content):
            assert (copy.content()[:, [5, 3, 4]] == array[:, :3]).all()
        assert job.wait().ok
