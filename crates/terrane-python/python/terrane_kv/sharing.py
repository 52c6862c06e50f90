"""One store for several processes of a machine: its owner serves the others over a Unix socket.

One process owns a store. `Server` runs in the owner's process, and `Client` in each other process. Blocks pass through
memory that the client shares with the server (a `memfd`): the server's jobs read from disk directly into it.

A message is a length in 4 bytes, big-endian, and a JSON object. A client first sends its identity, and the memory if it
moves blocks. If the identities differ or the memory is lost, the server refuses the client. Then it answers each
request. If either process ends, the other sees the end of the connection, and the client's pages are misses.

Servers and clients belong to the process that created them. A forked child closes its copies of their sockets.
"""

import ctypes
import fcntl
import json
import logging
import mmap
import os
import socket
import struct
import threading
import time
import weakref

from terrane_kv._native import Blocks, ClosedError, ForkedError, StoreError
from terrane_kv.folders import Seldom

logger = logging.getLogger("terrane_kv")

# The memory of a connection: the blocks of one request. Larger jobs are split into several requests.
WINDOW = 64 << 20
# Direct I/O needs blocks at multiples of this.
ALIGNMENT = 4096
# The maximum length of a message. 128 keys of 64 bytes take 9 KiB.
LONGEST = 16 << 20
# A server must answer within the timeout of the job plus this time. A message that has begun must end within it.
PATIENCE_S = 10.0
# After a request without an answer, a client sends no other for this time, and its pages are misses.
REST_S = 30.0
# The pause after a connection that could not be accepted, for example without free descriptors.
PAUSE_S = 0.1

# The sockets of this process. A forked child closes its copies. Otherwise the parent's end would not be seen.
_sockets = weakref.WeakSet()


def _close_inherited():
    for one in list(_sockets):
        try:
            one.close()
        except OSError:
            pass


os.register_at_fork(after_in_child=_close_inherited)

_copy = ctypes.CDLL(None).memcpy
_copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy.restype = ctypes.c_void_p


def run(store, verb, keys, blocks, options):
    """Runs a job of a shared store, and waits for it. `blocks(start, end)` returns the blocks of these keys.

    Several processes get the same blocks. So a get first copies the blocks to the store's memory tier, if it has one,
    and the drive reads each block once. A part of the keys takes at most half of the tier. Otherwise a block could leave
    the tier before the get reads it.

    Returns for each key whether it succeeded, and the first error or None.
    """
    tiers = store.snapshot()["tiers"]
    slots = tiers[0]["group_slots"][options["group"]] if verb == "get" and len(tiers) > 1 else 0
    if slots == 0:
        outcome = (store.put if verb == "put" else store.get)(keys, blocks(0, len(keys)), **options).wait()
        return outcome.done, outcome.error
    done, error = [], None
    part = max(1, slots // 2)
    end = time.monotonic() + options["timeout"]
    # If the memory tier is full, the gets read the disk, and need time for it.
    copying = options["timeout"] / 2
    for start in range(0, len(keys), part):
        some = keys[start : start + part]
        if copying > 0:
            before = time.monotonic()
            store.promote(some, **{**options, "timeout": copying}).wait()
            copying -= time.monotonic() - before
        left = max(end - time.monotonic(), 0.0)
        outcome = store.get(some, blocks(start, start + len(some)), **{**options, "timeout": left}).wait()
        done += outcome.done
        error = error or outcome.error
    return done, error


class RefusedError(StoreError):
    """The server's identity differs from the client's."""


def _aligned(size):
    return -(-size // ALIGNMENT) * ALIGNMENT


def _send(connection, message, descriptors=()):
    content = json.dumps(message).encode()
    content = struct.pack(">I", len(content)) + content
    sent = socket.send_fds(connection, [content], descriptors) if descriptors else 0
    # The other process may have answered and closed the connection. Even a send of no bytes would then fail.
    if sent < len(content):
        connection.sendall(content[sent:])


def _receive(connection, patience, descriptors=0, may_wait=False):
    """Receives a message and its descriptors within `patience` seconds. With `may_wait`, the time starts at the first byte.

    Descriptors are lost if the other process sends more, or if this process may have no more. The third value states it.

    Raises `ConnectionError` at the end of the connection and for an invalid message, and `TimeoutError`.
    """
    end = None if may_wait else time.monotonic() + patience
    found, is_cut = [], False

    def part_of(length):
        nonlocal end, is_cut
        connection.settimeout(None if end is None else max(end - time.monotonic(), 0.001))
        part, received, flags, _ = socket.recv_fds(connection, length, descriptors)
        found.extend(received)
        is_cut = is_cut or bool(flags & socket.MSG_CTRUNC)
        if not part:
            raise ConnectionError("the other process has closed the connection")
        end = time.monotonic() + patience if end is None else end
        return part

    try:
        head = b""
        while len(head) < 4:
            head += part_of(4 - len(head))
        length = struct.unpack(">I", head)[0]
        if length > LONGEST:
            raise ConnectionError(f"a message of {length} bytes; {LONGEST} is the limit")
        content = bytearray()
        while len(content) < length:
            content += part_of(min(length - len(content), 1 << 20))
        # Later sends wait for the other process for as long.
        connection.settimeout(patience)
        try:
            message = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ConnectionError(f"a message that is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise ConnectionError(f"a message of type {type(message).__name__}; an object is needed")
        return message, found, is_cut
    except BaseException:
        for descriptor in found:
            os.close(descriptor)
        raise


class _Place:
    """The path of a socket in a folder. It is within the kernel's limit even if the folder's path is not."""

    def __init__(self, path):
        folder, self.name = os.path.split(os.path.abspath(path))
        self.folder = os.open(folder, os.O_PATH | os.O_DIRECTORY)

    def __enter__(self):
        return f"/proc/self/fd/{self.folder}/{self.name}"

    def __exit__(self, *_):
        os.close(self.folder)


class _Window:
    """Memory that both processes map. It is unmapped once no job uses it."""

    def __init__(self, descriptor, size):
        self.memory = mmap.mmap(descriptor, size)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def places(self, sizes):
        """The addresses of blocks of these sizes, each at the next aligned offset."""
        pointers, at = [], self.start
        for size in sizes:
            pointers.append(at)
            at += _aligned(size)
        if min(sizes, default=0) < 0 or at > self.start + len(self.memory):
            raise ValueError(f"blocks of {at - self.start} bytes in a window of {len(self.memory)}")
        return pointers

    def blocks(self, sizes):
        """A function that returns the blocks from one number to another one."""
        pointers = self.places(sizes)
        return lambda start, end: Blocks.at(pointers[start:end], sizes[start:end], end - start, keep=self)


class Server:
    """Serves a store to the processes that connect to `path` with an equal `identity`, on daemon threads.

    The owner of the store creates it, so an old socket at `path` belongs to a process that has ended.
    """

    def __init__(self, store, path, identity):
        self._store, self._path, self._identity = store, path, json.dumps(identity, sort_keys=True)
        self._lock, self._connections, self._is_closed = threading.Lock(), set(), False
        self._process = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _sockets.add(self._socket)
        try:
            with _Place(path) as place:
                if os.path.lexists(place):
                    os.unlink(place)
                # Nothing listens until the mode is set.
                self._socket.bind(place)
                os.chmod(place, 0o600)
            self._socket.listen(64)
        except OSError:
            self._socket.close()
            raise
        threading.Thread(target=self._accept, name="terrane-share", daemon=True).start()

    def _accept(self):
        warnings = Seldom()
        while True:
            connection = None
            try:
                connection, _ = self._socket.accept()
                _sockets.add(connection)
                with self._lock:
                    if self._is_closed:
                        connection.close()
                        return
                    self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), name="terrane-share", daemon=True).start()
            except (OSError, RuntimeError) as error:
                # A thread that does not start raises `RuntimeError`. A later connection may succeed.
                with self._lock:
                    if self._is_closed:
                        return
                    self._connections.discard(connection)
                if connection is not None:
                    connection.close()
                if warnings.is_due():
                    logger.warning("a connection to %s cannot be accepted: %s", self._path, error)
                time.sleep(PAUSE_S)

    def _serve(self, connection):
        try:
            hello, descriptors, is_cut = _receive(connection, PATIENCE_S, descriptors=1)
            try:
                theirs = json.dumps(hello.get("identity"), sort_keys=True)
                if theirs != self._identity:
                    _send(connection, {"refused": f"the server's identity is {self._identity}, and the client's is {theirs}"})
                    return
                if is_cut or (hello.get("memory") and not descriptors):
                    _send(connection, {"failed": "the client's memory did not arrive; raise the server's limit of open files"})
                    return
                window = None
                if descriptors:
                    # A job that copies to memory that has become shorter would end this process.
                    if not fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                        _send(connection, {"refused": "the client's memory needs the seal F_SEAL_SHRINK"})
                        return
                    window = _Window(descriptors[0], os.fstat(descriptors[0]).st_size)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            _send(connection, {"accepted": os.getpid()})
            while True:
                request = _receive(connection, PATIENCE_S, may_wait=True)[0]
                try:
                    answer = self._answer(request, window)
                except Exception as error:
                    # Numbers and keys in a request may be of any size and type.
                    answer = {"failed": repr(error)}
                _send(connection, answer)
        except Exception as error:
            logger.debug("a client of %s has disconnected: %r", self._path, error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, request, window):
        verb, keys, group = request["verb"], request.get("keys", []), request.get("group", 0)
        if verb == "presences":
            return {"presences": list(self._store.presences(keys, group=group))}
        if verb == "clear":
            self._store.clear()
            return {}
        if verb not in ("get", "put"):
            raise ValueError(f"there is no request {verb!r}")
        if window is None:
            raise ValueError(f"a {verb} over a connection without memory")
        sizes = request["sizes"]
        if len(sizes) != len(keys):
            raise ValueError(f"{len(sizes)} sizes for {len(keys)} keys")
        options = {"group": group, "priority": request["priority"], "timeout": request["timeout"]}
        done, error = run(self._store, verb, keys, window.blocks(sizes), options)
        return {"done": done, "error": error}

    def close(self):
        """Closes all connections. Call it while this process still owns the store. In a forked child it does nothing."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            connections = list(self._connections)
        try:
            os.unlink(self._path)
        except OSError:
            pass
        for one in (self._socket, *connections):
            try:
                # Wakes the thread that waits on the connection.
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._socket.close()


class _Connection:
    """A connection to a server, used by one thread at a time."""

    def __init__(self, path, identity, window_bytes):
        self.window = None
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _sockets.add(self.socket)
        try:
            self.socket.settimeout(PATIENCE_S)
            with _Place(path) as place:
                self.socket.connect(place)
            descriptors = []
            if window_bytes:
                descriptors.append(os.memfd_create("terrane-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            try:
                if descriptors:
                    os.ftruncate(descriptors[0], window_bytes)
                    # The server reads and writes the memory, so it must not shrink.
                    fcntl.fcntl(descriptors[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
                    self.window = _Window(descriptors[0], window_bytes)
                _send(self.socket, {"identity": identity, "memory": bool(descriptors)}, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            answer = _receive(self.socket, PATIENCE_S)[0]
            if "refused" in answer:
                raise RefusedError(answer["refused"])
            if "failed" in answer:
                raise OSError(answer["failed"])
        except BaseException:
            self.socket.close()
            raise

    def ask(self, request, patience):
        """The server's answer. Raises `StoreError` if the request has failed."""
        self.socket.settimeout(patience)
        _send(self.socket, request)
        answer = _receive(self.socket, patience)[0]
        if "failed" in answer:
            raise StoreError(answer["failed"])
        return answer


class Client:
    """The store of another process. Threads may call it concurrently: each call uses its own connection.

    Calls raise `OSError` if no server answers, and `RefusedError` if the identities differ. The next call tries again.
    After a `TimeoutError`, calls raise it at once for `REST_S` seconds. Then one call tries again.
    In a forked child, calls raise `ForkedError`.
    """

    def __init__(self, path, identity, block_bytes):
        self._path, self._identity = path, identity
        self._window_bytes = max(WINDOW, _aligned(block_bytes))
        self._lock, self._is_closed, self._process = threading.Lock(), False, os.getpid()
        # The time at which a call tries again after a `TimeoutError`.
        self._rests_until = None
        # Connections that no call uses: without memory, and with memory.
        self._idle = {False: [], True: []}

    def _ask(self, needs_window, use):
        """Calls `use` with a connection, unless the server has not answered a short time ago."""
        # Another thread may have held the lock at the fork.
        if os.getpid() != self._process:
            raise ForkedError("the client belongs to the parent of this process; create a client after the fork")
        with self._lock:
            if self._rests_until is not None and not self._is_closed:
                now = time.monotonic()
                if now < self._rests_until:
                    raise TimeoutError(f"the server did not answer; requests are sent again after {REST_S:g} seconds")
                # Only this call tries again. The others wait for its result as misses.
                self._rests_until = now + REST_S
        try:
            answer = self._ask_now(needs_window, use)
        except TimeoutError:
            with self._lock:
                self._rests_until = time.monotonic() + REST_S
            raise
        except BaseException:
            # A server that has ended needs no rest, because its clients see that at once.
            self._rests_until = None
            raise
        self._rests_until = None
        return answer

    def _ask_now(self, needs_window, use):
        """Calls `use` with a connection, which is reused unless the call fails."""
        while True:
            with self._lock:
                if self._is_closed:
                    raise ClosedError("the shared store is closed")
                idle = self._idle[needs_window]
                was_idle = bool(idle)
                connection = idle.pop() if idle else None
            if connection is None:
                connection = _Connection(self._path, self._identity, self._window_bytes if needs_window else 0)
            try:
                answer = use(connection)
            except BaseException as error:
                # A late answer, or a job that still writes the memory, must not affect the next request.
                connection.socket.close()
                if was_idle and isinstance(error, ConnectionError):
                    # The server has ended meanwhile. Another one may have started.
                    continue
                raise
            break
        with self._lock:
            if self._is_closed:
                connection.socket.close()
            else:
                self._idle[needs_window].append(connection)
        return answer

    def presences(self, keys, group):
        request = {"verb": "presences", "keys": keys, "group": group}
        return bytes(self._ask(False, lambda it: it.ask(request, PATIENCE_S))["presences"])

    def clear(self):
        self._ask(False, lambda it: it.ask({"verb": "clear"}, PATIENCE_S))

    def run(self, verb, keys, memory, group, timeout):
        """Gets or puts blocks. For each key, `memory` has a list of spans, which are pairs of address and size.

        All requests together have `timeout` seconds. Returns for each key whether it succeeded, and the first error or
        None.
        """
        done, error = [], None
        end = time.monotonic() + timeout
        for keys, memory in self._parts(keys, memory):
            left = max(end - time.monotonic(), 0.0)
            answer = self._ask(True, lambda it: self._move(it, verb, keys, memory, group, left))
            done += answer["done"]
            error = error or answer["error"]
        return done, error

    def _parts(self, keys, memory):
        """Splits keys and memory into parts that fit in a window."""
        start, used = 0, 0
        for at, spans in enumerate(memory):
            size = _aligned(sum(size for _, size in spans))
            if used and used + size > self._window_bytes:
                yield keys[start:at], memory[start:at]
                start, used = at, 0
            used += size
        yield keys[start:], memory[start:]

    @staticmethod
    def _move(connection, verb, keys, memory, group, timeout):
        sizes = [sum(size for _, size in spans) for spans in memory]
        places = connection.window.places(sizes)
        if verb == "put":
            for place, spans in zip(places, memory):
                for address, size in spans:
                    _copy(place, address, size)
                    place += size
        priority = "low" if verb == "put" else "high"
        request = {"verb": verb, "keys": keys, "group": group, "sizes": sizes, "priority": priority, "timeout": timeout}
        answer = connection.ask(request, timeout + PATIENCE_S)
        if verb == "get":
            for place, spans, is_done in zip(places, memory, answer.get("done", ())):
                for address, size in spans if is_done else ():
                    _copy(address, place, size)
                    place += size
        return answer

    def close(self):
        """Closes the connections that no call uses. In a forked child it does nothing."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._is_closed = True
            idle = self._idle[False] + self._idle[True]
            self._idle = {False: [], True: []}
        for connection in idle:
            connection.socket.close()
