"""The times of the linker's loads on a GPU: until layer 0 is there, and until the last layer is."""

import statistics
import time
import types

import pytest

import test_torch
from linker_pools import PAGE, Pools
from test_sglang_linker import linker, module  # noqa: F401
from test_torch_linker import memory  # noqa: F401

torch = getattr(test_torch, "torch", None)
pytestmark = test_torch.pytestmark

LAYERS, PAGES, ROUNDS = 32, 512, 12
# Each page has 64 KiB of keys, and as much of values, in each layer.
ROW = (8, 1024)


class LargePools(Pools):
    """The pool of a model with 32 layers of plain attention."""

    def __init__(self, tensors):
        self.memory, self.group, self.counters = tensors, None, []
        generator = torch.Generator(device="cuda").manual_seed(1)
        shape = (PAGES * PAGE, *ROW)
        made = [
            torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda", generator=generator)
            for _ in range(2 * LAYERS)
        ]
        self.kvcache = type("MHATokenToKVPool", (), {})()
        self.kvcache.dtype, self.kvcache.layer_num = "bfloat16", LAYERS
        self.kvcache.k_buffer, self.kvcache.v_buffer = made[:LAYERS], made[LAYERS:]
        self.req_pool = types.SimpleNamespace(register_layer_transfer_counter=self.counters.append)
        self.components = [types.SimpleNamespace(name="FULL")]
        name = __import__("sglang.srt.mem_cache.hicache_storage", fromlist=["it"]).PoolName.KV
        self.buffers = {name: made}


class Whole:
    """A store whose gets are not layer by layer, as before."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get(self, keys, blocks, layer_by_layer, **options):
        return self._store.get(keys, blocks, **options)


def load(made, numbers, pages):
    """The seconds until the stream has passed the first layer, the last one, and until the end; and of all waits."""
    torch.cuda.synchronize()
    started, *events = (torch.cuda.Event(enable_timing=True) for _ in range(1 + LAYERS))
    assert made.own.load("r", made.transfers(numbers, pages))
    begun, counter = time.perf_counter(), made.own.layer_done_counter
    started.record()
    index = made.own.start_layer_wise_loading()
    counter.set_consumer(index)
    for layer, event in enumerate(events):
        counter.wait_until(layer)
        event.record()
    waited = time.perf_counter() - begun
    events[-1].synchronize()
    times = [started.elapsed_time(event) / 1e3 for event in (events[0], events[-1])]
    assert made.own.finish_layer_wise_loading(index)
    return [*times, time.perf_counter() - begun, waited]


@pytest.mark.parametrize("pages", [16, 256])
def test_the_first_layer_of_a_load_is_there_long_before_the_last_one(linker, memory, capsys, pages):  # noqa: F811
    half = PAGES // 2
    made = linker(pools=LargePools(memory), capacity="4GiB", memory="3GiB")
    numbers, targets = list(range(pages)), list(range(half, half + pages))
    assert made.offload(numbers, numbers)
    (buffers,) = made.pools.buffers.values()
    (pool,) = made.own._device_pools.values()
    stored = made.own._store
    lines = []
    for store, name in ((Whole(stored), "as a whole"), (stored, "layer by layer")):
        made.own._store = store
        if name == "as a whole":
            # The end of the job is the only one that can be waited for.
            made.own.layer_done_counter._current_stream = lambda: None
            made.own.layer_done_counter._pools = {}
        else:
            made.own.layer_done_counter._current_stream = made.own._current_stream
            made.own.layer_done_counter._pools = {pool.name: pool.layers.last}
        for buffer in buffers:
            buffer[half * PAGE :].zero_()
        rounds = [load(made, numbers, targets) for _ in range(ROUNDS)]
        for buffer in buffers:
            assert torch.equal(buffer[half * PAGE : (half + pages) * PAGE], buffer[: pages * PAGE])
        first, last, end, waited = (1e3 * statistics.median(times) for times in zip(*rounds[2:]))
        lines.append((name, first, last, end, waited))
    with capsys.disabled():
        size = pages * pool.cache.block_bytes / (1 << 30)
        for name, first, last, end, waited in lines:
            parts = "" if name == "as a whole" else f"layer 0 after {first:.2f} ms, layer {LAYERS - 1} after {last:.2f} ms, "
            print(f"{size:.2f} GiB {name}: {parts}end after {end:.2f} ms; the thread waited {waited:.2f} ms", flush=True)
    _, first, last, _, _ = lines[1]
    # The submission of the job is most of the time of a short load.
    assert first < (last / 2 if pages > 16 else last)
