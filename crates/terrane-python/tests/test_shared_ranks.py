"""SGLang's ranks with the same cache: rank 0 owns the store, and the other ranks read it by a socket."""

import errno
import json
import os
import signal
import threading
import time

import pytest

import adapters
from adapters import BLOCK, Pool, Sglang
from engines import installed, releases
from test_restarts import child

RANKS = 3


@pytest.fixture(params=releases("sglang"))
def module(request):
    with installed("sglang", request.param) as made:
        yield made


def opened(module, directory, rank, ranks=RANKS, **options):
    made = Sglang(module, directory, tp=(rank, ranks), mla=True, **{"memory": 32 * BLOCK, **options})
    made.storage._rank.open()
    return made


def close(ranks):
    # Other ranks may end later than rank 0.
    for rank in ranks:
        rank.close()


def test_ranks_whose_cache_is_alike_read_what_rank_0_writes(module, directory, caplog):
    ranks = [opened(module, directory, rank) for rank in range(RANKS)]
    assert ranks[0].store([1, 2, 3])
    for rank in ranks:
        assert rank.load([1, 9, 3]) == [True, None, True]
        assert rank.storage.batch_exists([rank.key(number) for number in (1, 2, 9, 3)]) == 2
        assert rank.storage.batch_set([], [])
    assert not caplog.records, "a job without pages is no failure"
    folders = [name for name in os.listdir(directory) if not name.endswith(".socket")]
    assert folders == ["rank-0-of-1"], "one folder has the whole capacity"
    ranks[1].storage.clear()
    assert ranks[2].load([1]) == [None]
    close(ranks)
    assert os.listdir(directory) == folders, "the socket is removed"


def test_ranks_that_load_the_same_pages_read_the_disk_once(module, directory):
    first = opened(module, directory, 0)
    assert first.store([1, 2, 3])
    first.close()
    ranks = [opened(module, directory, rank) for rank in range(RANKS)]
    for rank in (1, 2, 0):
        assert ranks[rank].load([1, 2, 3]) == [True] * 3
    disk = ranks[0].storage._rank.store.snapshot()["tiers"][-1]
    assert disk["read_bytes"] == 3 * BLOCK
    close(ranks)


def test_a_rank_that_starts_before_rank_0_misses_until_it_is_there(module, directory, caplog):
    late = opened(module, directory, 1)
    assert late.load([1]) == [None] and late.storage.batch_exists([late.key(1)]) == 0
    assert not caplog.records, "the start of an engine warns of nothing"
    late.storage._moves.since -= 1000
    assert late.load([1]) == [None] == late.load([1])
    assert caplog.text.count("cannot be used") == 1
    first = opened(module, directory, 0)
    assert first.store([1]) and late.load([1]) == [True]
    first.close()
    # The next outage is logged too.
    late.storage._outage_warnings.next = 0.0
    assert late.load([1]) == [None] and caplog.text.count("cannot be used") == 1
    late.storage._moves.since -= 1000
    assert late.load([1]) == [None] and caplog.text.count("cannot be used") == 2
    close([late])


def test_a_rank_0_without_a_thread_for_its_server_tries_again(module, directory, monkeypatch, caplog):
    first, other = Sglang(module, directory, tp=(0, RANKS), mla=True), opened(module, directory, 1)
    start = threading.Thread.start

    def fail(thread):
        if thread.name == "terrane-share":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", fail)
        assert not first.store([1])
    assert "limit of threads" in caplog.text and "opened again after 30 seconds" in caplog.text
    started = time.monotonic()
    assert other.load([1]) == [None] and time.monotonic() - started < 5, "no process listens"
    first.storage._rank._retry_at = 0.0
    assert first.store([1]) and other.load([1]) == [True]
    close([first, other])


def test_moves_that_always_fail_are_logged_although_lookups_succeed(module, directory, caplog, monkeypatch):
    first, other = opened(module, directory, 0), opened(module, directory, 1)
    assert first.store([1]) and other.load([1]) == [True]
    failure = OSError(errno.EMFILE, "too many open files")

    def fail(*_):
        raise failure

    def miss_and_look_up():
        assert other.load([1]) == [None]
        assert other.storage.batch_exists([other.key(1)]) == 1

    monkeypatch.setattr(other.storage._rank.store, "run", fail)
    for _ in range(3):
        miss_and_look_up()
    assert caplog.text.count("too many open files") == 1, "at once, and once a minute"
    other.storage._moves.warnings.next = 0.0
    miss_and_look_up()
    assert caplog.text.count("too many open files") == 2
    failure = PermissionError("not this user")
    other.storage._moves.warnings.next = 0.0
    miss_and_look_up()
    assert "not this user" in caplog.text and "as one user" in caplog.text
    # An end of the connection is logged after a minute.
    failure = ConnectionResetError("reset")
    miss_and_look_up()
    assert "cannot be used" not in caplog.text
    other.storage._moves.since -= 1000
    miss_and_look_up()
    miss_and_look_up()
    assert caplog.text.count("cannot be used") == 1
    close([first, other])


def test_a_rank_goes_on_after_rank_0_was_started_again(module, directory):
    first, other = opened(module, directory, 0), opened(module, directory, 1)
    assert first.store([1]) and other.load([1]) == [True]
    first.close()
    assert other.load([1]) == [None] and not other.store([2])
    again = opened(module, directory, 0)
    assert other.load([1]) == [True], "an idle connection to the old process is replaced"
    close([again, other])


def test_ranks_of_another_model_or_number_are_not_served(module, directory, caplog):
    first = opened(module, directory, 0)
    assert first.store([1])
    # The same socket, but another page size.
    other = Sglang(module, directory, tp=(1, RANKS), mla=True)
    other.pool = Pool(BLOCK // 2)
    other.storage.registered_pools.clear()
    other.storage.register_mem_pool_host(other.pool)
    assert other.storage.batch_exists([other.key(1)]) == 0
    assert other.storage.batch_get_v1([other.key(1)], other.pool.indices([0])) == [False]
    assert caplog.text.count("cannot be used") == 1 and "pools" in caplog.text
    another = opened(module, directory, 1, model="another")
    assert another.load([1]) == [None]
    close([first, other, another])


def test_pages_that_differ_between_ranks_are_apart_in_the_shared_store(module, directory):
    ranks, pools = [], []
    for rank in range(2):
        made = Sglang(module, directory, tp=(rank, 2), mla=True)
        mamba = Pool(size=8192)
        made.storage.register_mem_host_pool_v2(mamba, made.types.PoolName.MAMBA)
        ranks.append(made)
        pools.append(mamba)
    name, key = ranks[0].types.PoolName.MAMBA, ranks[0].key(1)

    def transfer(rank, page):
        return ranks[rank].types.PoolTransfer(name=name, keys=[key], host_indices=pools[rank].indices([page]))

    ranks[0].storage._rank.open()
    for rank in (0, 1):
        pools[rank].write(0, 70 + rank)
        assert ranks[rank].storage.batch_set_v2([transfer(rank, 0)]) == {name: [True]}
    for rank in (0, 1):
        assert ranks[rank].storage.batch_get_v2([transfer(rank, 3)]) == {name: [True]}
        assert pools[rank].holds(3, 70 + rank)
    close(ranks)


def test_shards_of_context_parallel_decoding_are_apart_and_shared_by_their_replicas(directory):
    # Four ranks in two groups of two shards: SGLang writes shard 0 from rank 0, and shard 1 from rank 1.
    with installed("sglang", adapters.newest("sglang")) as module:
        def shard(rank):
            changes = {"dcp_rank": rank % 2, "dcp_size": 2, "logical_page_size": 8}
            return opened(module, directory, rank, 4, changes=changes)

        ranks = [shard(rank) for rank in range(4)]
        key = ranks[0].key(1)
        for rank, number in ((0, 50), (1, 51)):
            ranks[rank].pool.write(0, number)
            assert ranks[rank].storage.batch_set_v1([key], ranks[rank].pool.indices([0])) == [True]
        for rank, number in ((0, 50), (1, 51), (2, 50), (3, 51)):
            ranks[rank].pool.kv_buffer[:] = 0
            assert ranks[rank].storage.batch_get_v1([key], ranks[rank].pool.indices([2])) == [True]
            assert ranks[rank].pool.holds(2, number)
        close(ranks)


def test_engines_that_share_a_folder_must_be_numbered_if_their_ranks_share_stores(module, directory):
    with pytest.raises(ValueError, match="set `engine`"):
        opened(module, directory, 0, engines=2)
    engines = [[opened(module, directory, rank, engines=2, engine=engine) for rank in (0, 1)] for engine in (0, 1)]
    assert engines[0][0].store([1])
    assert [engine[1].load([1]) for engine in engines] == [[True], [None]]
    close(sum(engines, []))


def test_pages_are_right_in_another_process_and_after_kill_9(directory):
    def tp(rank):
        return {"tp": [rank, 2], "mla": True}

    def started(verb, rank):
        process = child(verb, "sglang", directory, **tp(rank))
        return process, json.loads(process.stdout.readline())

    owner, is_stored = started("store", 0)
    try:
        assert is_stored
        # Two readers, first one after the other and then concurrently.
        readers = [child("load", "sglang", directory, **tp(1)) for _ in range(2)]
        for reader in readers:
            assert json.loads(reader.communicate(timeout=60)[0]) == [True] * 8
        killed, found = started("load-and-stay", 1)
        assert found == [True] * 8
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=30)
        waits, found = started("load-twice", 1)
        assert found == [True] * 8, "the owner serves after a reader was killed"
        owner.send_signal(signal.SIGKILL)
        owner.communicate(timeout=30)
        waits.stdin.write("go\n")
        waits.stdin.flush()
        assert json.loads(waits.communicate(timeout=30)[0]) == [None] * 8, "no process hangs without the owner"
    finally:
        owner.kill()
    # The owner's socket still exists, and the next owner replaces it.
    again, found = started("load-and-stay", 0)
    try:
        assert found == [True] * 8
        reader = child("load", "sglang", directory, **tp(1))
        assert json.loads(reader.communicate(timeout=60)[0]) == [True] * 8
    finally:
        again.kill()
        again.communicate(timeout=30)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_with_more_pages_than_the_memory_tier_reads_each_page_once(module, directory, rank):
    numbers = list(range(1, 16))
    first = opened(module, directory, 0)
    assert first.store(numbers)
    first.close()
    ranks = [opened(module, directory, it, memory=4 * BLOCK) for it in range(2)]
    memory = ranks[0].storage._rank.store.snapshot()["tiers"][0]
    assert memory["group_slots"] == [memory["slots"]] and memory["slots"] < len(numbers)
    assert ranks[rank].load(numbers) == [True] * len(numbers)
    disk = ranks[0].storage._rank.store.snapshot()["tiers"][-1]
    assert disk["read_bytes"] == len(numbers) * BLOCK
    close(ranks)
