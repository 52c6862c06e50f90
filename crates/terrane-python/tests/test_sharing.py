"""A store that several processes use: its server, and its clients in the same and in other processes."""

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

import terrane_kv
from adapters import BLOCK, content
from terrane_kv.folders import RateLimitedWarning
from terrane_kv.sharing import Client, RefusedError, Server, UnfinishedError, protocol, run


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
    monkeypatch.setattr("terrane_kv.sharing.window.WINDOW_BYTES", 2 * BLOCK)
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


def test_received_memory_is_closed_in_a_program_that_another_thread_starts():
    memory = os.memfd_create("test")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        protocol.send(ours, {}, [memory])
        _, (received,), _ = protocol.receive(theirs, 10.0, descriptors=1)
        assert not os.get_inheritable(received)
    os.close(received)
    os.close(memory)


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
    monkeypatch.setattr("terrane_kv.sharing.protocol.ANSWER_TIMEOUT_S", 0.2)
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

    def is_due(seldom, original=RateLimitedWarning.is_due):
        asked.append(original(seldom))
        return asked[-1]

    monkeypatch.setattr(RateLimitedWarning, "is_due", is_due)
    monkeypatch.setattr("terrane_kv.sharing.server.ACCEPT_RETRY_DELAY_S", 0.001)
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


class SlowClear:
    """A store that is empty once the test allows it."""

    def __init__(self):
        self.begun, self.may_end, self.error = threading.Event(), threading.Event(), None

    def clear(self):
        self.begun.set()
        assert self.may_end.wait(60)
        if self.error is not None:
            raise self.error

    def presences(self, keys, group):
        return bytes(len(keys))


@pytest.fixture
def clearing(directory, monkeypatch):
    """A client whose server empties its store slowly."""
    monkeypatch.setattr("terrane_kv.sharing.protocol.WORKING_INTERVAL_S", 0.01, raising=False)
    store, path = SlowClear(), os.path.join(directory, "a.socket")
    server, client = Server(store, path, {}), Client(path, {}, BLOCK)
    yield store, client
    store.may_end.set()
    client.close()
    server.close()


def test_a_clear_ends_when_the_server_has_ended_it(clearing, monkeypatch):
    store, client = clearing
    told, is_told, send = [], threading.Event(), protocol.send

    def sent(connection, message, *descriptors):
        send(connection, message, *descriptors)
        if "working" in message:
            told.append(message)
            if len(told) == 3:
                is_told.set()

    monkeypatch.setattr(protocol, "send", sent)
    answers = []

    def clear():
        try:
            answers.append(client.clear())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=clear)
    thread.start()
    assert store.begun.wait(30)
    assert is_told.wait(5), "the server tells the client that it works"
    assert answers == []
    assert client.presences(["k"], 0) == b"\0", "other calls do not wait for it"
    store.may_end.set()
    thread.join(30)
    assert answers == [None]


def test_a_clear_has_a_deadline_if_its_caller_wants_one(clearing):
    store, client = clearing
    for limit in (0.0, 0.05, 1.0):
        started = time.monotonic()
        with pytest.raises(UnfinishedError, match=f"within {limit:g} seconds"):
            client.clear(timeout=limit)
        assert time.monotonic() - started >= limit
    assert client.presences(["k"], 0) == b"\0", "the server is not left alone"
    store.may_end.set()
    assert client.clear(timeout=60.0) is None


def test_a_clear_that_fails_is_an_error_and_one_without_a_server_too(clearing):
    store, client = clearing
    store.may_end.set()
    for error in (terrane_kv.StoreError("read-only"), KeyboardInterrupt("a panic")):
        store.error = error
        with pytest.raises(terrane_kv.StoreError, match=str(error)):
            client.clear()
    # Old blocks would stay if it was not sent.
    store.error, client._retry_at = None, time.monotonic() + 1000
    client.clear()


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


# Forks on another thread when a socket has just been created, if forks do not wait for its record.
FORK_DURING = """
import socket, threading
created, forked, told = threading.Event(), threading.Event(), []

def during(name):
    original = getattr(socket.socket, name)
    def call(self, *arguments, **options):
        answer = original(self, *arguments, **options)
        setattr(socket.socket, name, original)
        created.set()
        forked.wait(1.0)
        return answer
    setattr(socket.socket, name, call)

def fork():
    created.wait(30)
    child = os.fork()
    if child == 0:
        numbers = os.listdir("/proc/self/fd")
        links = [os.readlink(f"/proc/self/fd/{it}") for it in numbers if os.path.lexists(f"/proc/self/fd/{it}")]
        os._exit(sum(link.startswith("socket:") for link in links))
    forked.set()
    told.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

forking = threading.Thread(target=fork)
"""


@pytest.mark.parametrize("name", ["accept", "__init__"])
def test_a_child_that_is_forked_during_the_creation_of_a_socket_has_none(directory, name):
    text = f"""{FORK_DURING}
forking.start()
during({name!r})
# The server may already wait in the first call of `accept`.
for _ in range(2):
    assert Client(path, {{"model": "m"}}, {BLOCK}).presences(["k"], 0) == b"\\0"
forking.join()
print(told, flush=True)
"""
    with owner(directory, text) as process:
        expect(process, "[0]", "ready")
        process.stdin.close()


def test_a_signal_handler_may_fork_during_the_creation_of_a_socket(directory):
    text = """
import signal
from terrane_kv.sharing import protocol

def fork(*_):
    child = os.fork()
    if child == 0:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

signal.signal(signal.SIGUSR1, fork)
protocol.tracked(lambda: signal.raise_signal(signal.SIGUSR1) or protocol.socket.socket(protocol.socket.AF_UNIX))
"""
    with owner(directory, text) as process:
        expect(process, "7", "ready")
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
                short.setattr("terrane_kv.sharing.protocol.ANSWER_TIMEOUT_S", 0.2)
                with pytest.raises(TimeoutError):
                    client.presences(["k"], 0)
                # The next calls send nothing.
                short.setattr("terrane_kv.sharing.protocol.send", lambda *_: pytest.fail("a request was sent"))
                for _ in range(3):
                    with pytest.raises(TimeoutError, match="after 30 seconds"):
                        client.presences(["k"], 0)
                    with pytest.raises(TimeoutError, match="after 30 seconds"):
                        client.run("get", ["k"], spans(content(1)), 0, 30.0)
            # Later, one call tries again. The others still miss at once.
            client._retry_at = 0.0
            calls = []

            def late(*_):
                with pytest.raises(TimeoutError, match="after 30 seconds"):
                    client.presences(["k"], 0)
                calls.append(1)
                raise TimeoutError("late")

            with monkeypatch.context() as short:
                short.setattr("terrane_kv.sharing.protocol.send", late)
                with pytest.raises(TimeoutError, match="late"):
                    client.presences(["k"], 0)
            assert calls == [1]
        finally:
            process.send_signal(signal.SIGCONT)
        client._retry_at = 0.0
        assert client.presences(["k"], 0) == b"\0" and client._retry_at is None
        client.close()
        client._retry_at = time.monotonic() + 1000
        with pytest.raises(terrane_kv.ClosedError):
            client.presences(["k"], 0)
        process.stdin.close()


def test_a_closed_server_leaves_no_thread_and_no_descriptor(opened_store, directory):
    path = os.path.join(directory, "b.socket")
    threads, before = set(threading.enumerate()), descriptors()
    server = Server(opened_store, path, {})
    started = set(threading.enumerate()) - threads
    client = Client(path, {}, BLOCK)
    assert started and client.presences(["k"], 0) == b"\0"
    client.close()
    server.close()
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()
    assert becomes(before)


def test_only_the_same_user_may_connect(served):
    assert os.stat(served[1]).st_mode & 0o777 == 0o600
