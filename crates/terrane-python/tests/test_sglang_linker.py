"""SGLang's linker over device pools in host memory, and on a device, real or simulated. All bytes of all pools are
compared."""

import logging
import os
import sys
import threading
import types
from ctypes import c_size_t

import numpy
import pytest

import cuda_driver
import terrane_kv
from conftest import damage
from engines import installed, releases
from linker_pools import LAYERS, PAGE, PAGES, Arrays, DriverMemory, Linker, Pools, key

try:
    DRIVER, REASON = cuda_driver.Driver(), ""
except cuda_driver.CudaMissing as missing:
    DRIVER, REASON = None, str(missing)


@pytest.fixture(params=["host", "device"])
def memory(request, monkeypatch):
    if request.param == "host":
        yield Arrays()
        return
    if DRIVER is None:
        pytest.skip(REASON)
    made = DriverMemory(DRIVER)
    monkeypatch.setitem(sys.modules, "torch", made.torch)
    yield made
    made.release()


@pytest.fixture
def module(memory):
    with installed("sglang", releases("sglang")[0]) as adapter:
        yield adapter


@pytest.fixture
def linker(module, memory, directory):
    """Makes linkers, which are closed at the end."""
    made = []

    def make(**options):
        made.append(Linker(module, memory, directory, **options))
        return made[-1]

    yield make
    for each in made:
        each.own.close()


kinds = pytest.mark.parametrize("kind", ["plain", "equal", "hybrid"])


def window_pages(pools, name, pages):
    """The pages of a pool that are stored with a node."""
    state, window = (getattr(pools, it, None) for it in ("MAMBA", "SWA"))
    return pages[-1:] if name == state else pages[-2:] if name == window else pages


@kinds
def test_loads_restore_the_bytes_of_offloads_in_other_pages_and_after_a_restart(linker, kind):
    first = linker(kind=kind)
    pages, others = [3, 17, 9, 1], [20, 2, 11, 8]
    assert first.lookup([1, 2, 3, 4]) == []
    assert first.offload([1, 2, 3, 4], pages, session_id="s")
    expected = {name: {page: first.pools.pages(name, page) for page in range(PAGES)} for name in first.pools.buffers}
    first.pools.zero()
    assert first.lookup([1, 2, 3, 4])[-1] == 4 and first.load([1, 2, 3, 4], others)
    first.own.close()
    second = linker(kind=kind)
    second.pools.zero()
    assert second.lookup([1, 2, 3, 4])[-1] == 4 and second.load([1, 2, 3, 4], others)
    zeros = {name: [bytes(len(part)) for part in parts[0]] for name, parts in expected.items()}
    for made in (first, second):
        for name in made.pools.buffers:
            stored = window_pages(made.types.PoolName, name, pages)
            loaded = window_pages(made.types.PoolName, name, others)
            for page in range(PAGES):
                source = stored[loaded.index(page)] if page in loaded else None
                right = expected[name][source] if source is not None else zeros[name]
                assert made.pools.pages(name, page) == right, (name, page)


def test_a_lookup_returns_each_length_at_which_all_pools_can_be_restored(linker):
    made = linker(kind="hybrid")
    # Nodes of three pages and of two: windows and states exist at their ends only.
    assert made.offload([1, 2, 3], [0, 1, 2]) and made.offload([4, 5], [3, 4])
    assert made.lookup([1, 2, 3, 4, 5, 6]) == [3, 5] and made.lookup([1, 2]) == []
    assert made.lookup([4, 5, 6]) == [2]
    # Without the state of its end, a prefix cannot be restored.
    assert made.own.offload([made.transfer("KV", [key(6)], [5])]) and made.finished(1) == [True]
    assert made.lookup([1, 2, 3, 4, 5, 6]) == [3, 5]
    assert made.own.lookup("r", [made.transfer("KV", [key(1)])]) == []
    assert made.own.lookup("r", []) == [] and made.own.lookup("r", made.transfers([])) == []


def test_a_plain_lookup_returns_each_length_up_to_the_first_miss(linker):
    made = linker()
    assert made.offload([1, 2, 4], [0, 1, 2])
    assert made.lookup([1, 2, 3, 4]) == [1, 2] and made.lookup([3, 1]) == []


def test_requests_of_one_batch_load_together_and_may_share_pages(linker):
    made = linker()
    assert made.offload([1, 2, 3], [0, 1, 2])
    expected = [made.pools.pages(made.types.PoolName.KV, page) for page in (0, 1, 2)]
    assert made.own.load("a", made.transfers([1, 2], [10, 11])) and made.own.load("b", made.transfers([1, 3], [12, 13]))
    assert made.forward(made.own.start_layer_wise_loading())
    loaded = [made.pools.pages(made.types.PoolName.KV, page) for page in (10, 11, 12, 13)]
    assert loaded == [expected[0], expected[1], expected[0], expected[2]]


def test_a_load_of_absent_pages_fails_alone_and_its_pages_can_be_stored_later(linker, caplog):
    made = linker(kind="hybrid")
    assert made.offload([1, 2], [0, 1])
    with caplog.at_level(logging.WARNING, logger="terrane_kv"):
        assert not made.load([1, 9], [5, 6])
    assert "a load failed" in caplog.text and "absent" in caplog.text
    assert made.load([1, 2], [7, 8], rid="other") and made.offload([3, 4], [5, 6])
    assert made.lookup([3, 4]) == [2]


def test_a_load_of_a_damaged_page_fails_and_its_pages_can_be_stored_later(linker, directory):
    first = linker()
    assert first.offload([1, 2], [0, 1])
    content = first.pools.pages(first.types.PoolName.KV, 1)[0]
    first.own.close()
    damage(directory, content)
    made = linker()
    assert made.lookup([1, 2]) == [1, 2] and not made.load([1, 2], [5, 6])
    # The damaged page is absent from now on, and the other one is not.
    assert made.lookup([1, 2]) == [1] and made.load([1], [7])
    assert made.offload([3, 4], [5, 6]) and made.lookup([3, 4]) == [1, 2]


def test_the_pages_of_a_failed_load_may_be_read_again(linker):
    made = linker()
    assert made.offload([1], [0])
    written = []
    (pool,) = made.own._device_pools.values()
    cache = pool.cache
    pool.cache = types.SimpleNamespace(blocks=cache.blocks, mark_written=written.append)
    assert not made.load([9, 8], [6, 5]) and written == [[5, 6]]
    assert made.load([1], [6]) and written == [[5, 6]]
    # A page that a transfer uses is only logged.
    pool.cache = types.SimpleNamespace(blocks=cache.blocks, mark_written=lambda pages: 1 / 0)
    assert not made.load([9], [6]) and made.load([1], [6])


def test_a_load_whose_pages_do_not_match_its_keys_fails_without_an_exception(linker):
    made = linker()
    assert made.offload([1, 2], [0, 1])
    (transfer,) = made.transfers([1, 2], [4])
    assert made.own.load("r", [transfer])
    assert not made.forward(made.own.start_layer_wise_loading())
    # A part of a page, and a page that the pool does not have.
    transfer.device_indices = transfer.device_indices[:3]
    assert made.own.offload([transfer]) and made.finished(1) == [False]
    assert made.own.offload(made.transfers([3], [PAGES])) and made.finished(1) == [False]


def test_a_queued_load_is_cancelled(linker):
    made = linker()
    assert made.offload([1], [0])
    made.pools.zero()
    assert made.own.load("a", made.transfers([1], [3])) and made.own.load("b", made.transfers([1], [4]))
    assert made.own.cancel_queued_load("a") and not made.own.cancel_queued_load("a")
    assert made.forward(made.own.start_layer_wise_loading())
    name = made.types.PoolName.KV
    assert made.pools.pages(name, 3) == made.pools.pages(name, 5) != made.pools.pages(name, 4)
    assert not made.own.cancel_queued_load("b") and made.own.start_layer_wise_loading() == -1


def test_without_a_batch_no_wait_blocks(linker):
    made = linker()
    counter = made.own.layer_done_counter
    assert counter.consumer_index == -1 and counter.num_layers == LAYERS
    counter.wait_until(0)
    counter.set_consumer(7)
    counter.wait_until(LAYERS - 1)
    assert made.own.finish_layer_wise_loading(7) and made.own.finish_layer_wise_loading(-1)
    assert made.own.num_completed_offloads() == 0 and not made.own.pop_completed_offload()
    assert not made.own.load("r", []) and not made.own.offload([])


def held(made, worker):
    """Holds a thread of the linker until the event is set."""
    event = threading.Event()
    getattr(made.own, worker).call(event.wait, 20)
    return event


def test_a_layer_waits_for_the_layers_of_each_pool_that_it_needs(linker, monkeypatch):
    made = linker(kind="hybrid")
    assert made.offload([1, 2], [0, 1])
    # The counter is that of the pool of states, too.
    assert made.pools.counters == [made.own.layer_done_counter]
    loads = __import__("terrane_kv.sglang.loads", fromlist=["it"])
    waited, wait = [], loads.Moves.wait_layers

    def record(self, layers, stream=None):
        waited.append(dict(layers))
        return wait(self, layers, stream)

    monkeypatch.setattr(loads.Moves, "wait_layers", record)
    assert made.load([1, 2], [4, 5])
    # The first layer of latents has two buffers: its own, and that of a draft.
    assert waited == [
        {"mamba": 0, "kv": -1, "indexer": -1, "swa": -1},
        {"mamba": 0, "kv": 1, "indexer": 0, "swa": -1},
        {"mamba": 0, "kv": 2, "indexer": 1, "swa": 0},
    ]


def test_a_page_has_the_bytes_of_the_layers_in_the_order_of_the_forward_pass(linker, directory):
    made = linker(kind="equal")
    (pool,) = made.own._device_pools.values()
    assert [numbers for _, numbers in pool.form] == [[0, 3, 1, 4, 2, 5]]
    assert [pool.layers.last(layer) for layer in range(-1, 4)] == [-1, 1, 3, 5, 5]
    assert made.offload([1, 2], [0, 1])
    content = made.pools.pages(made.types.PoolName.KV, 1)
    made.own.close()
    # The damage is found in the page's bytes on disk.
    damage(directory, b"".join(content[at] for at in [0, 3, 1, 4, 2, 5]))
    assert not linker(kind="equal").load([1, 2], [5, 6])


def test_a_stream_waits_for_each_layer_of_a_job_once(linker, monkeypatch):
    made = linker(kind="hybrid")
    assert made.offload([1, 2], [0, 1])
    loads = __import__("terrane_kv.sglang.loads", fromlist=["it"])
    asked, wait = [], loads.Moves._wait_for_layers

    def record(self, job, layers, stream):
        asked.append(layers)
        return wait(self, job, layers, stream)

    monkeypatch.setattr(loads.Moves, "_wait_for_layers", record)
    assert made.own.load("r", made.transfers([1, 2], [4, 5]))
    index = made.own.start_layer_wise_loading()
    counter = made.own.layer_done_counter
    counter.set_consumer(index)
    for layer in [0, 0, 1, 1, 0, 2, 2]:
        counter.wait_until(layer)
    assert asked == [(0, 0), (0, 1), (0, 0), (2, 2), (1, 1), (0, 0)] and made.own.finish_layer_wise_loading(index)


def test_a_wait_blocks_until_its_layer_is_loaded(linker, memory):
    made = linker()
    assert made.offload([1], [0])
    expected = made.pools.pages(made.types.PoolName.KV, 0)
    event = held(made, "_load_worker")
    assert made.own.load("r", made.transfers([1], [6]))
    index, seen = made.own.start_layer_wise_loading(), []

    def forward():
        counter = made.own.layer_done_counter
        counter.set_consumer(index)
        for layer in range(LAYERS):
            counter.wait_until(layer)
            memory.settle()
            seen.append(made.pools.pages(made.types.PoolName.KV, 6)[layer::LAYERS])

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and seen == []
    event.set()
    thread.join(20)
    assert seen == [expected[layer::LAYERS] for layer in range(LAYERS)]
    assert made.own.finish_layer_wise_loading(index)


def test_an_offload_reads_its_pages_after_the_events_of_its_streams(linker, memory, monkeypatch):
    made = linker()
    event = threading.Event()
    monkeypatch.setattr(made.own, "record_offload_ready", lambda: [memory.is_ready(event)])
    made.pools.zero()
    assert made.own.offload(made.transfers([1], [0])) and made.own.num_completed_offloads() == 0
    fresh = Pools(memory, "plain", seed=5)
    for ours, theirs in zip(made.pools.buffers.values(), fresh.buffers.values()):
        for buffer, other in zip(ours, theirs):
            memory.overwrite(buffer, memory.array(other))
    event.set()
    assert made.finished(1) == [True] and made.load([1], [7])
    name = made.types.PoolName.KV
    assert made.pools.pages(name, 7) == fresh.pages(name, 0)


@pytest.mark.parametrize("memory", ["device"], indirect=True)
def test_transfers_run_after_the_work_of_the_streams(linker, memory):
    forward = memory.stream()
    made = linker(kind="hybrid", forward_stream=forward)
    fresh = Pools(Arrays(), "hybrid", seed=5)
    zeros = []
    for ours, theirs in zip(made.pools.buffers.values(), fresh.buffers.values()):
        for buffer, other in zip(ours, theirs):
            # The simulated device runs this work as late as possible.
            buffer.held.fill(other.array, forward.stream)
    assert made.offload([1, 2], [0, 1])
    for ours in made.pools.buffers.values():
        for buffer in ours:
            zeros.append(numpy.zeros(buffer.shape, dtype=numpy.uint16))
            buffer.held.fill(zeros[-1], memory.current.stream)
    assert made.load([1, 2], [7, 8])
    memory.driver.synchronize()
    for name in made.pools.buffers:
        pages = window_pages(made.types.PoolName, name, [0, 1]), window_pages(made.types.PoolName, name, [7, 8])
        for source, loaded in zip(*pages):
            assert made.pools.pages(name, loaded) == fresh.pages(name, source)


@pytest.fixture
def wide(linker, memory):
    """A linker whose layers travel one by one, because they are large, and its first half of pages offloaded."""
    if not memory.driver.is_simulated:
        pytest.skip("the work of a real device cannot be held back")
    made = linker(kind="wide", capacity="64MiB", memory="64MiB")
    half = PAGES // 2
    assert made.offload(range(half), list(range(half)))
    # The engine has its buffers afterwards.
    assert made.load(range(half), list(range(half, PAGES)))
    for buffer in made.pools.buffers[made.types.PoolName.KV]:
        assert (memory.array(buffer)[: half * PAGE] == memory.array(buffer)[half * PAGE :]).all()
    made.pools.zero()
    # The events of the streams, which the load waits for, would be held back, too.
    made.own._indices_ready = list
    return made


def started(made):
    """Starts a load of the pages, and returns its index and its job."""
    half = PAGES // 2
    assert made.own.load("r", made.transfers(range(half), list(range(half, PAGES))))
    index, counter = made.own.start_layer_wise_loading(), made.own.layer_done_counter
    counter.set_consumer(index)
    counter._batches[index]._is_submitted.wait(20)
    (job,) = counter._batches[index]._jobs.values()
    return index, job


@pytest.mark.parametrize("memory", ["device"], indirect=True)
def test_a_wait_for_the_first_layer_returns_before_the_last_one_has_arrived(wide, memory):
    wide.own.layer_done_counter._current_stream = lambda: None
    with memory.driver.limited() as limit:
        index, job = started(wide)
        thread = threading.Thread(target=wide.own.layer_done_counter.wait_until, args=(0,))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        while thread.is_alive():
            limit(1)
            thread.join(0.02)
        with pytest.raises(TimeoutError, match="layer 5 has not arrived"):
            job.wait_layer(2 * LAYERS - 1, 0.02)
        assert not job.has_ended()
    assert wide.own.finish_layer_wise_loading(index)


@pytest.mark.parametrize("memory", ["device"], indirect=True)
def test_the_stream_of_the_forward_pass_waits_for_a_layer_and_the_thread_does_not(wide, memory):
    buffers = wide.pools.buffers[wide.types.PoolName.KV]
    copies = [memory.tensor(memory.array(buffer)) for buffer in buffers]
    with memory.driver.limited():
        index, job = started(wide)
        for layer in range(LAYERS):
            thread = threading.Thread(target=wide.own.layer_done_counter.wait_until, args=(layer,))
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
            for buffer, copy in list(zip(buffers, copies))[layer::LAYERS]:
                # The forward pass reads the layer.
                memory.driver.call(
                    "cuMemcpyDtoDAsync_v2", copy.held.address, buffer.held.address, c_size_t(buffer.nbytes),
                    memory.current.stream.handle,
                )
        with pytest.raises(TimeoutError, match="layer 0 has not arrived"):
            job.wait_layer(0, 0.02)
    # The lazy device runs the stream's work first, unless it has to wait.
    memory.settle()
    fresh = Pools(Arrays(), "wide")
    for copy, buffer in zip(copies, fresh.buffers[wide.types.PoolName.KV]):
        half = PAGES // 2 * PAGE
        assert (memory.array(copy)[half:] == buffer.array[:half]).all()
    assert wide.own.finish_layer_wise_loading(index)


@pytest.mark.parametrize("memory", ["device"], indirect=True)
def test_the_thread_waits_for_the_whole_load_if_the_stream_cannot_wait(linker):
    made = linker()
    assert made.offload([1], [0])
    # The per-thread default stream, which the store refuses.
    made.own.layer_done_counter._current_stream = lambda: 2
    assert made.own.load("r", made.transfers([1], [6]))
    index, counter = made.own.start_layer_wise_loading(), made.own.layer_done_counter
    counter.set_consumer(index)
    counter.wait_until(0)
    assert counter._batches[index].has_ended() and made.own.finish_layer_wise_loading(index)
    name = made.types.PoolName.KV
    assert made.pools.pages(name, 6) == made.pools.pages(name, 0)


@pytest.mark.parametrize("memory", ["device"], indirect=True)
def test_a_load_overwrites_pages_after_the_forward_pass_that_still_writes_them(linker, memory):
    forward = memory.stream()
    made = linker(kind="hybrid", forward_stream=forward)
    assert made.offload([1, 2], [0, 1])

    def contents(pages):
        return [
            made.pools.pages(name, page)
            for name in made.pools.buffers
            for page in window_pages(made.types.PoolName, name, pages)
        ]

    stored = contents([0, 1])
    late = [numpy.full(buffer.shape, 7, dtype=numpy.uint16) for ours in made.pools.buffers.values() for buffer in ours]
    for buffer, content in zip((it for ours in made.pools.buffers.values() for it in ours), late):
        # An aborted request: SGLang has freed its pages, and the simulated device runs its forward pass late.
        buffer.held.fill(content, forward.stream)
    assert made.load([1, 2], [7, 8])
    memory.driver.synchronize()
    assert contents([7, 8]) == stored


def test_offloads_complete_in_their_order(linker):
    made = linker()
    # The second one fails at once, and the first one has not begun.
    event = held(made, "_offload_worker")
    assert made.own.offload(made.transfers([1], [0])) and made.own.offload(made.transfers([2], [PAGES]))
    assert made.own.num_completed_offloads() == 0
    event.set()
    assert made.finished(2) == [True, False]
    # A page that is stored already is a success.
    assert made.offload([1], [0])


@kinds
def test_a_reset_while_jobs_run_ends_them_and_keeps_the_store(linker, kind):
    made = linker(kind=kind)
    assert made.offload([1, 2], [0, 1])
    for number in range(10):
        assert made.own.offload(made.transfers([10 + number, 30 + number], [2 + number, 12 + number]))
    made.own.load("started", made.transfers([1, 2], [22, 23]))
    index = made.own.start_layer_wise_loading()
    made.own.load("queued", made.transfers([1, 2], [20, 21]))
    made.own.reset()
    assert made.own.num_completed_offloads() == 0 and made.own.finish_layer_wise_loading(index)
    assert made.own.start_layer_wise_loading() == -1 and made.own.layer_done_counter.consumer_index == -1
    before = {name: made.pools.pages(name, 20) for name in made.pools.buffers}
    assert made.lookup([1, 2])[-1] == 2 and made.load([1, 2], [22, 23])
    assert before == {name: made.pools.pages(name, 20) for name in made.pools.buffers}


def test_a_reset_cancels_what_has_not_begun_at_its_deadline(linker, monkeypatch):
    made = linker()
    assert made.offload([1], [0])
    events = [held(made, "_load_worker"), held(made, "_offload_worker")]
    module = sys.modules["terrane_kv.sglang.linker"]
    monkeypatch.setattr(module, "END_TIMEOUT_S", 0.05)
    made.pools.zero()
    assert made.own.offload(made.transfers([2], [1])) and made.own.load("r", made.transfers([1], [4]))
    made.own.start_layer_wise_loading()
    made.own.reset()
    for event in events:
        event.set()
    # The threads have passed the cancelled transfers when these have ended.
    assert made.offload([3], [2]) and made.load([3], [6])
    name = made.types.PoolName.KV
    assert made.lookup([2]) == [] and made.pools.pages(name, 4) == made.pools.pages(name, 5)


def test_a_reset_empties_the_store_if_the_option_says_so(linker, monkeypatch, caplog):
    made = linker(clear_on_reset=True)
    assert made.offload([1], [0]) and made.lookup([1]) == [1]
    made.own.reset()
    assert made.lookup([1]) == []
    assert made.offload([1], [0])
    store = made.own._store

    class Failing:
        def clear(self):
            raise terrane_kv.StoreError("the drive is gone")

    made.own._store = Failing()
    made.own.reset()
    made.own._store = store
    # Pages of the old weights are not read.
    assert "could not be emptied" in caplog.text and made.lookup([1]) == []
    made.own.reset()
    assert made.offload([1], [0]) and made.lookup([1]) == [1]


def test_a_closed_linker_releases_the_pools_while_sglang_keeps_its_counter(linker):
    first = linker()
    counter = first.own.layer_done_counter
    first.own.close()
    # Memory that the first linker still used would be refused.
    second = linker(pools=first.pools)
    assert second.offload([1], [3]) and counter.finish(0)


def test_a_close_with_jobs_in_flight_ends_and_later_calls_are_misses(linker):
    made = linker()
    for number in range(16):
        assert made.own.offload(made.transfers([number], [number]))
    made.own.load("r", made.transfers([1], [20]))
    made.own.start_layer_wise_loading()
    threads = {thread.name for thread in threading.enumerate()}
    assert {"terrane-load", "terrane-offload"} <= threads
    made.own.close()
    made.own.close()
    assert not {"terrane-load", "terrane-offload"} & {thread.name for thread in threading.enumerate()}
    assert made.lookup([1]) == []
    assert made.own.offload(made.transfers([1], [0])) and made.finished(1) == [False]
    assert not made.load([1], [20])
    made.own.reset()


def test_a_forked_child_has_misses_and_failures(linker):
    made = linker()
    assert made.offload([1], [0])
    event = held(made, "_load_worker")
    assert made.own.load("r", made.transfers([1], [6]))
    index = made.own.start_layer_wise_loading()
    # A library may refuse to make these in a child.
    offload, load = made.transfers([2], [1]), made.transfers([1], [7])
    child = os.fork()
    if child == 0:
        told = [
            made.lookup([1]) == [],
            not made.forward(index),
            made.own.offload(offload) and made.finished(1) == [False],
            made.own.load("c", load) and not made.forward(made.own.start_layer_wise_loading()),
        ]
        made.own.reset()
        made.own.close()
        os._exit(sum(told))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    event.set()
    assert made.forward(index) and made.lookup([1]) == [1]


def test_a_store_that_fails_is_a_miss(linker, caplog):
    made = linker()
    assert made.offload([1], [0])
    made.own._store.close()
    assert made.lookup([1]) == [] and not made.load([1], [5])
    assert made.own.offload(made.transfers([2], [1])) and made.finished(1) == [False]
    made.own._pool_group = None
    assert made.lookup([1]) == [] and not made.own.load("r", []) and not made.own.offload([])
    assert "failed" in caplog.text


def test_other_pools_and_other_ranks_do_not_share_pages(linker, directory):
    def ranks(**numbers):
        module = types.ModuleType("sglang.srt.runtime_context")
        module.get_parallel = lambda: types.SimpleNamespace(**numbers)
        module.get_model = lambda: types.SimpleNamespace(model_path="m", revision=None)
        sys.modules[module.__name__] = sys.modules["sglang.srt"].runtime_context = module

    ranks(attn_tp_rank=0, attn_tp_size=2)
    first = linker()
    ranks(attn_tp_rank=1, attn_tp_size=2)
    second = linker()
    assert first.offload([1], [0]) and second.lookup([1]) == [] and first.lookup([1]) == [1]
    assert sorted(os.listdir(directory)) == ["rank-0-of-2", "rank-1-of-2"]
    second.own.close()
    # The same folder with other pools is refused at the start.
    with pytest.raises(terrane_kv.NamespaceError, match="pools"):
        linker(kind="hybrid")
    with pytest.raises(ValueError, match="group 3"):
        ranks(attn_dp_rank=3, attn_dp_size=2)
        linker()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": "8 apples"}, "is not a size"),
        ({"memory": 0}, "must be positive"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"clear_on_reset": "yes"}, "clear_on_reset is 'yes'"),
        ({"engines": 0}, "engines is 0"),
    ],
)
def test_wrong_options_are_errors_at_the_start(linker, options, message):
    with pytest.raises(ValueError, match=message):
        linker(**options)


def test_missing_and_misspelled_options_are_named(module, caplog):
    with pytest.raises(ValueError, match="linker_extra_config lacks root_dir and capacity"):
        module.TerraneCacheLinker(None, None, components=[], extra_config=None)
    with pytest.raises(ValueError, match="lacks capacity"):
        module.TerraneCacheLinker(None, None, components=[], extra_config={"root_dir": "/x", "capcity": 1})


def broken(pools, how):
    cache = pools.kvcache
    if how == "scales":
        cache.k_scale_buffer = [1]
    elif how == "buffers":
        cache.v_buffer = None
    elif how == "gaps":
        # The rows are views of wider ones.
        cache.k_buffer = [buffer[:, :, :4] for buffer in cache.k_buffer]
    elif how == "overlap":
        cache.v_buffer = list(cache.k_buffer)
    return pools


@pytest.mark.parametrize(
    ("how", "message"),
    [("scales", "scales"), ("buffers", "3 buffers for 3 layers"), ("gaps", "has gaps"), ("overlap", "cannot describe")],
)
def test_pools_that_terrane_cannot_describe_are_errors_at_the_start(linker, how, message):
    with pytest.raises(ValueError, match=message):
        linker(pools=broken(Pools(Arrays(), "plain"), how))
