"""The end of a shared store in each process that does not own it."""

import fcntl
import math
import os
import socket
import threading
import time

from terrane_kv._native import ClosedError, ForkedError, StoreError
from terrane_kv.sharing import protocol, window
from terrane_kv.sharing.protocol import SocketPath
from terrane_kv.sharing.window import Window, aligned, copy

# After a request without an answer, a client sends no other for this time, and its pages are misses.
RETRY_DELAY_S = 30.0


class _Connection:
    """A connection to a server, used by one thread at a time."""

    def __init__(self, path, identity, window_bytes):
        self.window = None
        self.socket = protocol.tracked(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            self.socket.settimeout(protocol.ANSWER_TIMEOUT_S)
            with SocketPath(path) as place:
                self.socket.connect(place)
            descriptors = []
            if window_bytes:
                descriptors.append(os.memfd_create("terrane-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            try:
                if descriptors:
                    os.ftruncate(descriptors[0], window_bytes)
                    # The server reads and writes the memory, so it must not shrink.
                    fcntl.fcntl(descriptors[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
                    self.window = Window(descriptors[0], window_bytes)
                protocol.send(self.socket, {"identity": identity, "memory": bool(descriptors)}, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            answer = protocol.receive(self.socket, protocol.ANSWER_TIMEOUT_S)[0]
            if "refused" in answer:
                raise protocol.RefusedError(answer["refused"])
            if "failed" in answer:
                raise OSError(answer["failed"])
        except BaseException:
            self.socket.close()
            raise

    def ask(self, request, timeout, limit=math.inf):
        """The server's answer. Raises `StoreError` if the request has failed.

        Raises `TimeoutError` if no message arrives for `timeout` seconds, and `UnfinishedError` if there is no answer
        within `limit` seconds.
        """
        end = time.monotonic() + limit
        self.socket.settimeout(timeout)
        protocol.send(self.socket, request)
        answer = {"working": True}
        while "working" in answer:
            left = max(end - time.monotonic(), 0.0)
            try:
                answer = protocol.receive(self.socket, min(timeout, left))[0]
            except TimeoutError:
                if left >= timeout:
                    raise
                raise protocol.UnfinishedError(
                    f"the server has not ended the request {request['verb']!r} within {limit:g} seconds, and may "
                    "continue; allow more time, or ask again later"
                ) from None
        if "failed" in answer:
            raise StoreError(answer["failed"])
        return answer


class Client:
    """The store of another process. Threads may call it concurrently: each call uses its own connection.

    Calls raise `OSError` if no server answers, and `RefusedError` if the identities differ. The next call tries again.
    After a `TimeoutError`, calls raise it at once for `RETRY_DELAY_S` seconds. Then one call tries again.
    In a forked child, calls raise `ForkedError`.
    """

    def __init__(self, path, identity, block_bytes):
        self._path, self._identity = path, identity
        self._window_bytes = max(window.WINDOW_BYTES, aligned(block_bytes))
        self._lock, self._is_closed, self._process = threading.Lock(), False, os.getpid()
        # The time at which a call tries again after a `TimeoutError`.
        self._retry_at = None
        # Connections that no call uses: without memory, and with memory.
        self._idle = {False: [], True: []}

    def _check_process(self):
        # Another thread may have held the lock at the fork.
        if os.getpid() != self._process:
            raise ForkedError("the client belongs to the parent of this process; create a client after the fork")

    def _ask(self, needs_window, use):
        """Calls `use` with a connection, unless the server has not answered a short time ago."""
        self._check_process()
        with self._lock:
            if self._retry_at is not None and not self._is_closed:
                now = time.monotonic()
                if now < self._retry_at:
                    raise TimeoutError(
                        f"the server did not answer; requests are sent again after {RETRY_DELAY_S:g} seconds"
                    )
                # Only this call tries again. The others wait for its result as misses.
                self._retry_at = now + RETRY_DELAY_S
        try:
            answer = self._ask_now(needs_window, use)
        except TimeoutError:
            with self._lock:
                self._retry_at = time.monotonic() + RETRY_DELAY_S
            raise
        except BaseException:
            # Without a delay: a client sees at once that its server has ended.
            self._retry_at = None
            raise
        self._retry_at = None
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
        return bytes(self._ask(False, lambda it: it.ask(request, protocol.ANSWER_TIMEOUT_S))["presences"])

    def clear(self, timeout=None):
        """Removes all blocks, and waits until the removal survives a restart. It waits as long as the server works.

        It is also sent within `RETRY_DELAY_S` seconds after a `TimeoutError`, because old blocks would stay otherwise.

        Raises `UnfinishedError` if it has not ended within `timeout` seconds. The server then continues. Raises
        `TimeoutError` if the server does not answer.
        """
        self._check_process()
        limit = math.inf if timeout is None else timeout
        self._ask_now(False, lambda it: it.ask({"verb": "clear"}, protocol.ANSWER_TIMEOUT_S, limit))

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
            size = aligned(sum(size for _, size in spans))
            if used and used + size > self._window_bytes:
                yield keys[start:at], memory[start:at]
                start, used = at, 0
            used += size
        yield keys[start:], memory[start:]

    @staticmethod
    def _move(connection, verb, keys, memory, group, timeout):
        sizes = [sum(size for _, size in spans) for spans in memory]
        places = connection.window.addresses(sizes)
        if verb == "put":
            for place, spans in zip(places, memory):
                for address, size in spans:
                    copy(place, address, size)
                    place += size
        priority = "low" if verb == "put" else "high"
        request = {"verb": verb, "keys": keys, "group": group, "sizes": sizes, "priority": priority, "timeout": timeout}
        answer = connection.ask(request, timeout + protocol.ANSWER_TIMEOUT_S)
        if verb == "get":
            for place, spans, is_done in zip(places, memory, answer.get("done", ())):
                for address, size in spans if is_done else ():
                    copy(address, place, size)
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
