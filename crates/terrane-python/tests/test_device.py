"""Caches on a CUDA device, real or simulated: to pinned memory, to disk, and back, in the order of streams.

The simulated device runs a stream's work as late as possible, so a job that does not wait for it copies zeros.
"""

import contextlib
import gc
import os
import subprocess
import sys
import types

import pytest

import terrane_kv

numpy = pytest.importorskip("numpy")
cuda = pytest.importorskip("cuda_driver", reason="cuda_driver.py is not in the folder of these tests")

BLOCKS, LAYERS, PAGE, HEADS, DIM = 8, 3, 4, 2, 8
AXES = "outer block token head dim"
SHAPE = (2, BLOCKS, PAGE, HEADS, DIM)

try:
    DRIVER, REASON = cuda.Driver(), ""
except cuda.CudaMissing as missing:
    DRIVER, REASON = None, str(missing)
needs_device = pytest.mark.skipif(DRIVER is None, reason=REASON)
holds_streams = pytest.mark.skipif(
    DRIVER is None or not DRIVER.is_simulated, reason=REASON or "only a simulated device holds a stream"
)


def arrays(seed=0):
    random = numpy.random.default_rng(seed)
    return [random.integers(1, 1 << 16, SHAPE, dtype=numpy.uint16) for _ in range(LAYERS)]


@pytest.fixture
def tensors():
    with cuda.tensors(DRIVER, LAYERS, SHAPE) as made:
        yield made
        gc.collect()
    assert cuda.handed_out == {}, "a tensor was not returned to its library"


@pytest.fixture
def stream():
    return cuda.Stream(DRIVER)


def with_pinned(opened, cache, **options):
    return opened(
        groups=[("kv", cache)], tiers=[terrane_kv.Tier.pinned(1 << 20)], capacity=1 << 20, **options
    )


def fill(tensors, stream, seed=0):
    """Simulates the engine's computation: it writes the cache as work of its stream."""
    content = arrays(seed)
    for tensor, array in zip(tensors, content):
        tensor.stream = stream
        tensor.fill(array, stream)
    return content


def equal(tensors, content, pairs):
    for tensor, array in zip(tensors, content):
        now = tensor.content()
        for there, before in pairs:
            assert (now[:, there] == array[:, before]).all(), (there, before)


@needs_device
def test_blocks_are_stored_on_disk_and_loaded_after_a_restart(opened, tensors, stream):
    cache = terrane_kv.KvCache(tensors, AXES)
    assert (cache.device, len(cache)) == (0, BLOCKS)
    store = with_pinned(opened, cache)
    content = fill(tensors, stream)
    assert store.put(["a", "b", "c"], cache.blocks([1, 4, 7])).wait(30).ok
    # The adoption requested no order. The job requested the order of the stream.
    assert tensors[0].asked[0] == -1 and tensors[0].asked[-1] not in (None, -1)
    equal(tensors, content, [(1, 1), (4, 4)])
    store.close()
    for tensor in tensors:
        tensor.clear()
    store = with_pinned(opened, cache)
    assert store.recovery["found"] == 3
    assert store.get(["c", "a", "b"], cache.blocks([0, 2, 3])).wait(30).ok
    equal(tensors, content, [(0, 7), (2, 1), (3, 4)])
    disk = [tier for tier in store.snapshot()["tiers"] if tier["name"] == "disk"]
    assert disk[0]["read_bytes"] > 0
    store.close()


@needs_device
@pytest.mark.parametrize("is_stated", [False, True])
def test_a_put_waits_for_the_stream_that_writes_its_blocks(opened, tensors, stream, is_stated):
    cache = terrane_kv.KvCache(tensors, AXES)
    store = with_pinned(opened, cache)
    for turn in range(8):
        content = fill(tensors, stream, turn)
        for tensor in tensors:
            tensor.stream = None if is_stated else stream
        order = {"stream": stream.handle.value} if is_stated else {}
        assert store.put([f"{turn}"], cache.blocks([3]), **order).wait(30).ok
        DRIVER.synchronize()
        for tensor in tensors:
            tensor.clear()
        assert store.get([f"{turn}"], cache.blocks([5]), stream=-1).wait(30).ok
        equal(tensors, content, [(5, 3)])
    store.close()


@needs_device
def test_a_put_without_an_order_stores_what_is_there_before(opened, tensors, stream):
    """The tests above detect a missing order. Here it is missing, and the device is late."""
    if "policy=lazy" not in os.environ.get("TERRANE_SIMULATED_CUDA", ""):
        pytest.skip("only a simulated device is late for certain")
    cache = terrane_kv.KvCache(tensors, AXES)
    store = with_pinned(opened, cache)
    content = fill(tensors, stream)
    assert store.put(["a"], cache.blocks([3]), stream=-1).wait(30).ok
    DRIVER.synchronize()
    assert store.get(["a"], cache.blocks([5]), stream=-1).wait(30).ok
    for tensor, array in zip(tensors, content):
        now = tensor.content()
        assert (now[:, 3] == array[:, 3]).all() and (now[:, 5] == 0).all()
    store.close()


@needs_device
def test_tensors_are_adopted_by_their_addresses(opened, tensors, stream):
    class Owner:
        pass

    owner = Owner()
    before = sys.getrefcount(owner)
    cache = terrane_kv.KvCache.at(
        [tensor.data_ptr() for tensor in tensors], AXES, SHAPE, element_bytes=2, memory=0, keep=owner
    )
    store = with_pinned(opened, cache)
    content = fill(tensors, stream)
    with pytest.raises(ValueError, match="pass stream="):
        store.put(["a"], cache.blocks([1]))
    assert store.put(["a"], cache.blocks([1]), stream=stream.handle.value).wait(30).ok
    # 0 and 1 are the legacy default stream, and 2 is the default stream of this thread.
    for handle in (0, 1, 2):
        assert store.get(["a"], cache.blocks([6]), stream=handle).wait(30).ok
    equal(tensors, content, [(6, 1)])
    store.close()
    assert sys.getrefcount(owner) > before
    del cache, store
    opened.stores.clear()
    gc.collect()
    assert sys.getrefcount(owner) == before


@needs_device
def test_addresses_that_the_driver_does_not_know_are_refused():
    with pytest.raises(terrane_kv.StoreError, match="memory"):
        terrane_kv.KvCache.at([1 << 40], AXES, SHAPE, element_bytes=2, memory=0, keep=None)
    with pytest.raises(ValueError, match="pointer is 0"):
        terrane_kv.KvCache.at([0], AXES, SHAPE, element_bytes=2, memory=0, keep=None)


@needs_device
def test_a_store_of_device_blocks_needs_a_tier_in_host_memory(opened, tensors):
    cache = terrane_kv.KvCache(tensors, AXES)
    with pytest.raises(ValueError, match="Tier.pinned"):
        opened(groups=[("kv", cache)])


@needs_device
def test_a_manager_copies_to_pinned_memory_and_back(tensors, stream):
    cache = terrane_kv.KvCache(tensors, AXES)
    pinned = cache.allocate_like(16, "pinned")
    assert (len(pinned), pinned.device, pinned.block_bytes) == (16, None, cache.block_bytes)
    manager = terrane_kv.Manager([0])
    content = fill(tensors, stream)
    copied = manager.copy(cache.blocks([1, 4]), pinned.blocks([15, 0])).wait(30)
    assert copied.bytes == 2 * cache.block_bytes and copied.engine
    for tensor in tensors:
        tensor.clear()
    assert manager.copy(pinned.blocks([0, 15]), cache.blocks([7, 2]), stream=stream.handle.value).wait(30)
    equal(tensors, content, [(7, 4), (2, 1)])


@needs_device
def test_a_copy_within_the_device_runs_after_the_work_of_both_libraries(tensors, stream):
    with cuda.tensors(DRIVER, LAYERS, SHAPE) as others:
        source, there = terrane_kv.KvCache(tensors, AXES), terrane_kv.KvCache(others, AXES)
        manager = terrane_kv.Manager([0])
        late = cuda.Stream(DRIVER)
        content, overwritten = fill(tensors, stream), fill(others, late, 1)
        manager.copy(source.blocks([1]), there.blocks([6])).wait(30)
        DRIVER.synchronize()
        equal(others, content, [(6, 1)])
        equal(others, overwritten, [(5, 5)])
        del source, there, manager
        gc.collect()


@holds_streams
def test_a_copy_does_not_wait_for_the_stream_of_another_copy(tensors, stream):
    cache, idle = terrane_kv.KvCache(tensors, AXES), cuda.Stream(DRIVER)
    pinned, manager = cache.allocate_like(4, "pinned"), terrane_kv.Manager([0])
    stream.hold()
    try:
        content = fill(tensors, stream)
        blocked = manager.copy(cache.blocks([1]), pinned.blocks([1]))
        for tensor in tensors:
            tensor.stream = idle
        for _ in range(40):
            assert manager.copy(cache.blocks([2]), pinned.blocks([2])).wait(30)
        assert not blocked.has_ended()
    finally:
        stream.let_go()
    assert blocked.wait(30)
    manager.copy(pinned.blocks([1]), cache.blocks([6])).wait(30)
    equal(tensors, content, [(6, 1)])


class Torch(types.ModuleType):
    """The parts of PyTorch that a cache uses, with two devices. Device 1 is current."""

    class Tensor(cuda.DeviceTensor):
        @property
        def device(self):
            return f"cuda:{self.driver.number}"

        def __dlpack__(self, *, stream=None, **versions):
            if sys.modules["torch"].current != self.device:
                raise BufferError("Can't export tensors on a different CUDA device index")
            return super().__dlpack__(stream=stream, **versions)

    def __init__(self):
        super().__init__("torch")
        self.cuda, self.current, self.streams = self, "cuda:1", {}

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device
        yield
        self.current = before

    def current_stream(self, device=None):
        return types.SimpleNamespace(cuda_stream=self.streams[device or self.current].handle.value)


@pytest.fixture
def torch(monkeypatch):
    module = Torch()
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr(cuda, "DeviceTensor", module.Tensor)
    return module


@needs_device
def test_tensors_of_pytorch_need_not_be_on_its_current_device(opened, torch, tensors, stream):
    torch.streams = {"cuda:0": stream, "cuda:1": cuda.Stream(DRIVER)}
    cache = terrane_kv.KvCache(tensors, AXES)
    assert torch.current == "cuda:1" and tensors[0].asked == [-1]
    store = with_pinned(opened, cache)
    for turn in range(8):
        content = fill(tensors, stream, turn)
        assert store.put([f"{turn}"], cache.blocks([3])).wait(30).ok
        DRIVER.synchronize()
        for tensor in tensors:
            tensor.clear()
        assert store.get([f"{turn}"], cache.blocks([5])).wait(30).ok
        equal(tensors, content, [(5, 3)])
    # The cache requested the stream from PyTorch, not from the tensor.
    assert tensors[0].asked == [-1]
    store.close()


@needs_device
@pytest.mark.parametrize("is_pytorch", [False, True])
def test_a_copy_between_two_devices_runs_after_the_work_on_both(request, stream, is_pytorch):
    try:
        second = cuda.Driver(1)
    except cuda.CudaMissing as missing:
        pytest.skip(str(missing))
    torch = request.getfixturevalue("torch") if is_pytorch else None
    with cuda.tensors(DRIVER, LAYERS, SHAPE) as ours, cuda.tensors(second, LAYERS, SHAPE) as others:
        late = cuda.Stream(second)
        if is_pytorch:
            torch.streams = {"cuda:0": stream, "cuda:1": late}
        source, there = terrane_kv.KvCache(ours, AXES), terrane_kv.KvCache(others, AXES)
        assert (source.device, there.device) == (0, 1)
        manager = terrane_kv.Manager([0, 1])
        for turn in range(4):
            content, overwritten = fill(ours, stream, turn), fill(others, late, turn + 10)
            manager.copy(source.blocks([1]), there.blocks([6])).wait(30)
            second.synchronize()
            equal(others, content, [(6, 1)])
            equal(others, overwritten, [(5, 5)])
        del source, there, manager
        gc.collect()


HELD = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
import cuda_driver, numpy, terrane_kv
driver = cuda_driver.Driver()
stream = cuda_driver.Stream(driver)
tensors = [cuda_driver.DeviceTensor(driver, (2, 8, 4, 2, 8)) for _ in range(3)]
for tensor in tensors:
    tensor.stream = stream
cache = terrane_kv.KvCache(tensors, "outer block token head dim")
pinned = cache.allocate_like(8, "pinned")
array = numpy.ones((2, 8, 4, 2, 8), dtype=numpy.uint16)
stream.hold()
for tensor in tensors:
    tensor.fill(array, stream)
"""


def held(text, *arguments):
    """Runs a program with a suspended stream. It would never end if it waited for the stream with the GIL."""
    command = [sys.executable, "-c", HELD + text, os.path.dirname(__file__), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@holds_streams
def test_other_threads_run_while_a_manager_waits_for_its_copy_as_it_is_freed():
    text = """
def count():
    global counted
    for counted in range(1, 101):
        time.sleep(0.001)
    stream.let_go()
def offload():
    manager = terrane_kv.Manager([0])
    return manager.copy(cache.blocks([1]), pinned.blocks([1]))
counted, counter = 0, threading.Thread(target=count)
counter.start()
transfer = offload()
print(transfer.wait(30).bytes == cache.block_bytes)
counter.join()
print(counted)
"""
    assert held(text) == ["True", "100"]


@holds_streams
def test_the_interpreter_exits_though_a_stream_never_ends(directory):
    text = """
tiers = [terrane_kv.Tier.pinned(1 << 20)]
store = terrane_kv.Store(sys.argv[2], 1 << 20, groups=[("kv", cache)], namespace="n", tiers=tiers)
other = terrane_kv.Store(sys.argv[2], 1 << 20, groups=[("kv", 4096)], namespace="other")
manager = terrane_kv.Manager([0])
transfer = manager.copy(cache.blocks([1]), pinned.blocks([1]), timeout=1)
job = store.put(["a"], cache.blocks([2]), timeout=1)
assert other.put(["a"], [bytes(4096)]).wait(30).ok
try: transfer.wait(1)
except TimeoutError: print("waits", flush=True)
"""
    assert held(text, directory) == ["waits"]
    with terrane_kv.Store(directory, 1 << 20, groups=[("kv", 4096)], namespace="other") as store:
        assert store.recovery["found"] == 1


@needs_device
def test_a_forked_child_gets_an_error(tensors):
    cache, manager = terrane_kv.KvCache(tensors, AXES), terrane_kv.Manager([0])
    pinned = cache.allocate_like(4, "pinned")
    child = os.fork()
    if child == 0:
        told = 0
        for call in (
            lambda: manager.copy(cache.blocks([1]), pinned.blocks([1])),
            lambda: terrane_kv.KvCache(tensors, AXES),
            lambda: cache.allocate_like(4, "pinned"),
            lambda: terrane_kv.Manager([0]),
        ):
            try:
                call()
            except terrane_kv.ForkedError:
                told += 1
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert manager.copy(cache.blocks([1]), pinned.blocks([1])).wait(30).bytes


@needs_device
def test_rounds_without_growth_of_device_memory(opened, tensors, stream):
    cache = terrane_kv.KvCache(tensors, AXES)
    store = with_pinned(opened, cache)
    fill(tensors, stream)

    def rounds(count):
        for number in range(count):
            assert store.put([f"{number % 8}"], cache.blocks([1])).wait(30).ok
            assert store.get([f"{number % 8}"], cache.blocks([2])).wait(30).ok

    rounds(50)
    free, handed_out = DRIVER.free_bytes(), len(cuda.handed_out)
    rounds(500)
    assert free - DRIVER.free_bytes() < 1 << 20
    assert len(cuda.handed_out) == handed_out
    store.close()


def test_a_store_in_host_memory_does_not_load_the_driver(directory):
    text = (
        "import sys, terrane_kv\n"
        "store = terrane_kv.Store(sys.argv[1], 1 << 20, groups=[('kv', 4096)], namespace='n', host_bytes=1 << 16)\n"
        "store.put(['a'], [bytes(4096)]).wait(); store.close(); terrane_kv.doctor()\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-c", text, directory], check=True)
