"""Ten thousand rounds through each adapter leak no memory, descriptor or thread."""

import gc
import os
import threading

import pytest

import adapters
from adapters import BLOCK, Sglang
from engines import installed
from test_store import resident_bytes

# More keys than fit in the store, so blocks are evicted and some are misses.
KEYS = 100


def vllm(adapter):
    def round_of(number):
        keys = [number.to_bytes(4, "big") * 8 + bytes(4)]
        adapter.run("store", keys, [number % 16])
        adapter.tier.lookup(keys[0], adapter.context())
        adapter.run("load", keys, [(number + 1) % 16])
        list(adapter.tier.take_events())

    return round_of


def lmcache(adapter):
    source, memory = memoryview(bytearray(BLOCK)), memoryview(bytearray(BLOCK))

    def round_of(number):
        keys = [adapter.key(number % 250)]
        adapter.wait(adapter.connector.submit_batch_set(keys, [source]))
        adapter.wait(adapter.connector.submit_batch_exists(keys))
        adapter.wait(adapter.connector.submit_batch_get(keys, [memory]))

    return round_of


def sglang(adapter):
    pages = [adapter.pool.indices([page]) for page in range(16)]

    def round_of(number):
        keys = [adapter.key(number)]
        adapter.storage.batch_set_v1(keys, pages[number % 16])
        adapter.storage.batch_exists(keys)
        adapter.storage.batch_get_v1(keys, pages[(number + 1) % 16])

    return round_of


def no_growth(round_of):
    """One batch of rounds without growth is sufficient: the allocators reserve some memory only once."""

    def batch(count):
        for turn in range(count):
            round_of(turn % KEYS)
        gc.collect()

    batch(1000)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    growths = []
    for _ in range(3):
        before = resident_bytes()
        batch(3000)
        growths.append(resident_bytes() - before)
    assert min(growths) < 1 << 20, f"the memory grew by {growths} bytes"
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)


@pytest.mark.parametrize(("engine", "rounds"), [("vllm", vllm), ("lmcache", lmcache), ("sglang", sglang)])
def test_ten_thousand_rounds_through_an_adapter_leave_nothing(engine, rounds, directory):
    with installed(engine, adapters.newest(engine)) as module:
        adapter = adapters.ADAPTERS[engine](module, directory)
        no_growth(rounds(adapter))
        adapter.close()


def test_ten_thousand_rounds_through_a_shared_store_leave_nothing(directory):
    with installed("sglang", adapters.newest("sglang")) as module:
        ranks = [Sglang(module, directory, tp=(rank, 2), mla=True, memory=8 * BLOCK) for rank in (0, 1)]
        ranks[0].storage._rank.open()
        assert ranks[0].store([1]) and ranks[1].load([1]) == [True]
        no_growth(sglang(ranks[1]))
        for rank in ranks:
            rank.close()
