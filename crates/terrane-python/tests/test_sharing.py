"""SGLang's ranks with the same cache: rank 0 owns the store, and the other ranks read it by a socket."""

import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy
import pytest

import adapters
import terrane_kv
from adapters import BLOCK, Pool, Sglang, content
from engines import installed, releases
from terrane_kv.sharing import Client, RefusedError, Seldom, Server, run
from test_restarts import child

RANKS = 3


@pytest.fixture(params=releases("sglang"))
def module(request):
    with installed("sglang", request.param) as made:
        yield made


def opened(module, directory, rank, ranks=RANKS, **options):
    made = Sglang(module, directory, tp=(rank, ranks), mla=True, **{"memory": 32 * BLOCK, **options})
    made.storage._open()
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
    disk = ranks[0].storage._store.snapshot()["tiers"][-1]
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
    close([first, late])


def test_moves_that_always_fail_are_logged_although_lookups_succeed(module, directory, caplog, monkeypatch):
    first, other = opened(module, directory, 0), opened(module, directory, 1)
    assert first.store([1]) and other.load([1]) == [True]
    failure = OSError(errno.EMFILE, "too many open files")

    def fail(*_):
        raise failure

    def miss_and_look_up():
        assert other.load([1]) == [None]
        assert other.storage.batch_exists([other.key(1)]) == 1

    monkeypatch.setattr(other.storage._store, "run", fail)
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

    ranks[0].storage._open()
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


# The parts below SGLang.


@pytest.fixture
def served(opened_store, directory):
    path = os.path.join(directory, "a.socket")
    server = Server(opened_store, path, {"model": "m"})
    yield opened_store, path
    server.close()
    server.close()


@pytest.fixture
def opened_store(directory):
    with terrane_kv.Store(directory, 64 * BLOCK, groups=[("kv", BLOCK)], namespace="n") as store:
        yield store


def spans(*arrays):
    return [[(array.ctypes.data, array.nbytes)] for array in arrays]


def test_jobs_larger_than_the_window_take_several_requests(served, monkeypatch):
    _, path = served
    monkeypatch.setattr("terrane_kv.sharing.WINDOW", 2 * BLOCK)
    client = Client(path, {"model": "m"}, BLOCK)
    pages = [content(number) for number in range(7)]
    # The length of the third page is not a multiple of 4 KiB.
    pages[2] = pages[2][:12_345]
    keys = [f"k{number}" for number in range(7)]
    assert client.run("put", keys, spans(*pages), 0, 30.0) == ([True] * 7, None)
    found = [numpy.zeros_like(page) for page in pages]
    # The memory of an absent block does not change.
    absent = numpy.full(BLOCK, 7, dtype=numpy.uint8)
    done, _ = client.run("get", [*keys, "absent"], spans(*found, absent), 0, 30.0)
    assert done == [True] * 7 + [False] and (absent == 7).all()
    assert all((page == copy).all() for page, copy in zip(pages, found))
    assert client.run("get", [], [], 0, 30.0) == ([], None)
    client.close()
    with pytest.raises(terrane_kv.ClosedError):
        client.presences(["k1"], 0)


def test_threads_of_a_client_do_not_wait_for_each_other_and_leave_no_connection(served):
    store, path = served
    client = Client(path, {"model": "m"}, BLOCK)
    before = len(os.listdir("/proc/self/fd"))
    failures = []

    def work(number):
        try:
            page = content(number)
            for turn in range(20):
                key = f"k{number}"
                assert client.run("put", [key], spans(page), 0, 30.0) == ([True], None)
                found = numpy.zeros_like(page)
                assert client.run("get", [key], spans(found), 0, 30.0) == ([True], None)
                assert (found == page).all() and client.presences([key], 0)[0] >= 2
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    client.close()
    # The server closes its connections when it sees that the client has disconnected.
    until = time.monotonic() + 30
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_invalid_request_is_an_error_and_ends_nothing(served, monkeypatch):
    _, path = served
    ended = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    client = Client(path, {"model": "m"}, BLOCK)
    for changes in (
        {"verb": "erase"}, {"group": 9}, {"group": -1}, {"group": 70_000}, {"group": 1 << 70}, {"group": None},
        {"sizes": [1 << 40]}, {"sizes": [-1]}, {"sizes": [1 << 70]}, {"sizes": 7}, {"keys": 7}, {"keys": [None]},
        {"timeout": -1.0}, {"timeout": float("nan")}, {"timeout": "soon"}, {"priority": 7}, {"verb": "presences", "group": -1},
    ):
        request = {"verb": "get", "keys": ["k"], "group": 0, "sizes": [BLOCK], "priority": "high", "timeout": 1.0}
        with pytest.raises(terrane_kv.StoreError):
            client._ask(True, lambda it: it.ask({**request, **changes}, 10.0))
    with pytest.raises(RefusedError, match="other"):
        Client(path, {"model": "other"}, BLOCK).presences(["k"], 0)
    nested = b"[" * 100_000
    contents = [b"\0\0\0\x02{}", b"\xff\xff\xff\xff", b"\0\0\0\x03abc", b"\0\0", b"\0\0\0\x02[]"]
    for message in (*contents, struct.pack(">I", len(nested)) + nested):
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(path)
            other.sendall(message)
            other.shutdown(socket.SHUT_WR)
            other.settimeout(10)
            while other.recv(1000):
                pass
    assert client.presences(["k"], 0) == b"\0"
    client.close()
    assert ended == [], "no thread of the server ends with an exception"


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def becomes(count):
    """Waits until this process has so many descriptors: the server's threads close theirs later."""
    until = time.monotonic() + 30
    while descriptors() != count and time.monotonic() < until:
        time.sleep(0.01)
    return descriptors() == count


def test_descriptors_of_an_invalid_message_are_closed(served):
    _, path = served
    before = descriptors()
    for _ in range(20):
        memory = os.memfd_create("test")
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(path)
            socket.send_fds(other, [b"\xff\xff\xff\xff"], [memory])
            other.settimeout(10)
            assert other.recv(1000) == b""
        os.close(memory)
    assert becomes(before)


def test_memory_that_could_shrink_is_refused(served):
    _, path = served
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, BLOCK)
    hello = json.dumps({"identity": {"model": "m"}}).encode()
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(path)
        socket.send_fds(other, [struct.pack(">I", len(hello)) + hello], [memory])
        other.settimeout(10)
        assert b"F_SEAL_SHRINK" in other.recv(1000)
    os.close(memory)


def test_a_client_that_stops_within_a_message_is_disconnected(served, monkeypatch):
    _, path = served
    monkeypatch.setattr("terrane_kv.sharing.PATIENCE_S", 0.2)
    before = descriptors()
    hello = json.dumps({"identity": {"model": "m"}}).encode()
    for message in (b"", b"\0\0\0", struct.pack(">I", len(hello)) + hello + b"\0\0"):
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(path)
            other.sendall(message)
            other.settimeout(10)
            while other.recv(1000):
                pass
    assert becomes(before)
    # A connection that waits between messages stays open.
    client = Client(path, {"model": "m"}, BLOCK)
    client.presences(["k"], 0)
    with_idle = descriptors()
    time.sleep(0.5)
    assert client.presences(["k"], 0) == b"\0" and descriptors() == with_idle
    client.close()


def test_a_server_without_descriptors_serves_again_once_it_has_some(served, caplog, monkeypatch):
    _, path = served
    asked = []

    def is_due(seldom, original=Seldom.is_due):
        asked.append(original(seldom))
        return asked[-1]

    monkeypatch.setattr(Seldom, "is_due", is_due)
    monkeypatch.setattr("terrane_kv.sharing.PAUSE_S", 0.001)
    client = Client(path, {"model": "m"}, BLOCK)
    assert client.presences(["k"], 0) == b"\0"
    other = socket.socket(socket.AF_UNIX)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # `connect` needs no new descriptor, and `accept` needs one. Files may have left lower numbers free.
    free = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, limits[1]))
    try:
        while True:
            try:
                free.append(os.dup(free[0]))
            except OSError:
                break
        other.connect(path)
        until = time.monotonic() + 30
        while len(asked) < 5 and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in free:
            os.close(descriptor)
    assert asked[:5] == [True, False, False, False, False], "a failure that repeats is logged once a minute"
    assert caplog.text.count("cannot be accepted") == asked.count(True)
    other.close()
    another = Client(path, {"model": "m"}, BLOCK)
    assert another.presences(["k"], 0) == b"\0"
    another.close()
    client.close()


class SlowJob:
    done, error = [True, True], None

    def __init__(self, told, timeout):
        self.told, self.timeout = told, timeout

    def wait(self):
        self.told.append(self.timeout)
        time.sleep(self.timeout)
        return self


class SlowStore:
    """A store with two slots of memory for each part. Each job takes its whole timeout."""

    def __init__(self):
        self.promotes, self.gets = [], []

    def snapshot(self):
        return {"tiers": [{"group_slots": [0, 4]}, {"group_slots": [64, 64]}]}

    def promote(self, keys, group, timeout):
        return SlowJob(self.promotes, timeout)

    def get(self, keys, blocks, group, timeout):
        return SlowJob(self.gets, timeout)


def test_a_get_by_the_memory_tier_ends_by_its_timeout():
    store = SlowStore()
    assert run(store, "get", ["k", "l"], lambda *_: None, {"group": 1, "timeout": 0.4}) == ([True, True], None)
    # The copy to memory leaves half of the time, less the time that this thread did not run.
    assert store.promotes == [0.2] and len(store.gets) == 1 and 0 <= store.gets[0] <= 0.2
    # The copies of all parts together get half of the time.
    store = SlowStore()
    done, _ = run(store, "get", ["k"] * 6, lambda *_: None, {"group": 1, "timeout": 0.4})
    assert done == [True] * 6 and sum(store.promotes) <= 0.2 and len(store.gets) == 3
    assert sum(store.promotes) + sum(store.gets) <= 0.4 + 1e-6
    # A group without slots of memory is read from disk.
    store = SlowStore()
    run(store, "get", ["k", "l"], lambda *_: None, {"group": 0, "timeout": 0.1})
    assert store.promotes == [] and store.gets == [0.1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_with_more_pages_than_the_memory_tier_reads_each_page_once(module, directory, rank):
    numbers = list(range(1, 16))
    first = opened(module, directory, 0)
    assert first.store(numbers)
    first.close()
    ranks = [opened(module, directory, it, memory=4 * BLOCK) for it in range(2)]
    memory = ranks[0].storage._store.snapshot()["tiers"][0]
    assert memory["group_slots"] == [memory["slots"]] and memory["slots"] < len(numbers)
    assert ranks[rank].load(numbers) == [True] * len(numbers)
    disk = ranks[0].storage._store.snapshot()["tiers"][-1]
    assert disk["read_bytes"] == len(numbers) * BLOCK
    close(ranks)


# Servers in other processes.

OWNER = f"""
import os, sys
import terrane_kv
from terrane_kv.sharing import Client, Server
path = sys.argv[1] + "/a.socket"
store = terrane_kv.Store(sys.argv[1], {64 * BLOCK}, groups=[("kv", {BLOCK})], namespace="n")
server = Server(store, path, {{"model": "m"}})
"""


def owner(directory, text):
    """Starts a process with a server. It runs `text`, and then waits for the end of its standard input."""
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    command = [sys.executable, "-c", f"{OWNER}{text}\nprint('ready', flush=True)\nsys.stdin.read()", directory]
    return subprocess.Popen(command, text=True, **pipes)


def expect(process, *lines):
    """Reads these lines. An error in the process is the failure's text."""
    for line in lines:
        found = process.stdout.readline().strip()
        assert found == line, found or process.communicate(timeout=30)[1]


def test_a_forked_child_shares_no_connection(directory):
    text = f"""
import ctypes
client = Client(path, {{"model": "m"}}, {BLOCK})
page = bytearray(b"a" * {BLOCK})
spans = [[(ctypes.addressof(ctypes.c_char.from_buffer(page)), len(page))]]
assert client.run("put", ["k"], spans, 0, 30.0) == ([True], None) and client.presences(["k"], 0)[0] >= 2
child = os.fork()
if child == 0:
    told = 0
    for call in (
        lambda: client.presences(["k"], 0), lambda: client.run("get", ["k"], spans, 0, 30.0), client.clear,
    ):
        try:
            call()
        except terrane_kv.ForkedError:
            told += 1
    client.close()
    server.close()
    numbers = os.listdir("/proc/self/fd")
    links = [os.readlink(f"/proc/self/fd/{{it}}") for it in numbers if os.path.lexists(f"/proc/self/fd/{{it}}")]
    sockets = sum(link.startswith("socket:") for link in links)
    os._exit(told * 10 + sockets)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.path.exists(path), flush=True)
page[:] = bytes(len(page))
print(client.run("get", ["k"], spans, 0, 30.0) == ([True], None) and page == b"a" * {BLOCK}, flush=True)
"""
    with owner(directory, text) as process:
        expect(process, "30 True", "True", "ready")
        process.stdin.close()


def test_the_end_of_an_owner_is_seen_while_its_forked_helper_lives(directory):
    text = """
ready, of_helper = os.pipe()
helper = os.fork()
if helper == 0:
    os.write(of_helper, b"1")
    sys.stdin.read()
    os._exit(0)
os.read(ready, 1)
"""
    process = owner(directory, text)
    try:
        expect(process, "ready")
        client = Client(os.path.join(directory, "a.socket"), {"model": "m"}, BLOCK)
        assert client.presences(["k"], 0) == b"\0"
        process.kill()
        process.wait(30)
        # The helper still reads the standard input. An open socket would be an end without an answer, a `TimeoutError`.
        with pytest.raises(ConnectionError):
            client.presences(["k"], 0)
        client.close()
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_a_server_that_cannot_receive_memory_refuses_the_connection_until_it_can(directory):
    with owner(directory, "") as process:
        expect(process, "ready")
        client = Client(os.path.join(directory, "a.socket"), {"model": "m"}, BLOCK)
        assert client.presences(["k"], 0) == b"\0"
        used = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
        _, second, *_ = (number for number in range(max(used) + 3) if number not in used)
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        page = content(1)
        # The next connection gets the only free number, and the memory gets none.
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (second, limits[1]))
        with pytest.raises(OSError, match="limit of open files"):
            client.run("put", ["k"], spans(page), 0, 30.0)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        assert client.run("put", ["k"], spans(page), 0, 30.0) == ([True], None)
        client.close()
        process.stdin.close()


def test_a_client_reads_the_reason_of_a_server_that_refuses_and_closes_at_once(served, monkeypatch):
    _, path = served
    send = socket.send_fds

    def send_and_wait_for_the_end(connection, *arguments):
        sent = send(connection, *arguments)
        end = select.poll()
        end.register(connection, 0)
        assert end.poll(10_000) == [(connection.fileno(), select.POLLHUP)]
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_wait_for_the_end)
    page = content(1)
    with pytest.raises(RefusedError, match="other"):
        Client(path, {"model": "other"}, BLOCK).run("get", ["k"], spans(page), 0, 30.0)


def test_a_hello_without_its_memory_is_refused(served):
    _, path = served
    hello = json.dumps({"identity": {"model": "m"}, "memory": True}).encode()
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    before = descriptors()
    for sent in ([], [memory, memory]):
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(path)
            socket.send_fds(other, [struct.pack(">I", len(hello)) + hello], sent)
            other.settimeout(10)
            assert b"did not arrive" in other.recv(1000)
            assert other.recv(1000) == b""
    assert becomes(before)
    os.close(memory)


def test_a_connection_whose_request_has_failed_is_not_used_again(served):
    _, path = served
    client = Client(path, {"model": "m"}, BLOCK)
    assert client.presences(["k"], 0) == b"\0" and len(client._idle[False]) == 1
    with pytest.raises(terrane_kv.StoreError):
        client.presences(["k"], -1)
    assert client._idle[False] == []
    assert client.presences(["k"], 0) == b"\0" and len(client._idle[False]) == 1
    client.close()


def test_a_server_that_does_not_answer_is_left_alone_for_a_time(directory, monkeypatch):
    with owner(directory, "") as process:
        expect(process, "ready")
        client = Client(os.path.join(directory, "a.socket"), {"model": "m"}, BLOCK)
        assert client.presences(["k"], 0) == b"\0"
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        try:
            with monkeypatch.context() as short:
                short.setattr("terrane_kv.sharing.PATIENCE_S", 0.2)
                with pytest.raises(TimeoutError):
                    client.presences(["k"], 0)
                # The next calls send nothing.
                short.setattr("terrane_kv.sharing._send", lambda *_: pytest.fail("a request was sent"))
                for _ in range(3):
                    with pytest.raises(TimeoutError, match="after 30 seconds"):
                        client.presences(["k"], 0)
                    with pytest.raises(TimeoutError, match="after 30 seconds"):
                        client.run("get", ["k"], spans(content(1)), 0, 30.0)
            # Later, one call tries again. The others still miss at once.
            client._rests_until = 0.0
            calls = []

            def late(*_):
                with pytest.raises(TimeoutError, match="after 30 seconds"):
                    client.presences(["k"], 0)
                calls.append(1)
                raise TimeoutError("late")

            with monkeypatch.context() as short:
                short.setattr("terrane_kv.sharing._send", late)
                with pytest.raises(TimeoutError, match="late"):
                    client.presences(["k"], 0)
            assert calls == [1]
        finally:
            process.send_signal(signal.SIGCONT)
        client._rests_until = 0.0
        assert client.presences(["k"], 0) == b"\0" and client._rests_until is None
        client.close()
        client._rests_until = time.monotonic() + 1000
        with pytest.raises(terrane_kv.ClosedError):
            client.presences(["k"], 0)
        process.stdin.close()


def test_only_the_same_user_may_connect(served):
    assert os.stat(served[1]).st_mode & 0o777 == 0o600
