"""The owner's end of a shared store."""

import errno
import fcntl
import json
import logging
import os
import select
import socket
import threading
import time

from terrane_kv.folders import RateLimitedWarning
from terrane_kv.sharing import protocol
from terrane_kv.sharing.jobs import run
from terrane_kv.sharing.protocol import SocketPath
from terrane_kv.sharing.window import Window

logger = logging.getLogger("terrane_kv")

# The pause after a connection that could not be accepted, for example without free descriptors.
ACCEPT_RETRY_DELAY_S = 0.1


class Server:
    """Serves a store to the processes that connect to `path` with an equal `identity`, on daemon threads.

    The owner of the store creates it, so an old socket at `path` belongs to a process that has ended. Raises `OSError`
    if it cannot listen, or cannot start its thread.
    """

    def __init__(self, store, path, identity):
        self._store, self._path, self._identity = store, path, json.dumps(identity, sort_keys=True)
        self._lock, self._connections, self._is_closed = threading.Lock(), set(), False
        self._process = os.getpid()
        self._socket = protocol.tracked(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            with SocketPath(path) as place:
                if os.path.lexists(place):
                    os.unlink(place)
                # Nothing listens until the mode is set.
                self._socket.bind(place)
                os.chmod(place, 0o600)
            self._socket.listen(64)
            self._socket.setblocking(False)
            threading.Thread(target=self._accept, name="terrane-share", daemon=True).start()
        except RuntimeError as error:
            self._socket.close()
            text = f"cannot start a thread that serves {path}: {error}; raise the limit of threads (ulimit -u)"
            raise OSError(errno.EAGAIN, text) from error
        except BaseException:
            # Clients of a socket that listens would wait for an answer.
            self._socket.close()
            raise

    def _accept(self):
        try:
            self._accept_until_closed()
        finally:
            # Not in `close`: another file could get the number while this thread waits for it.
            self._socket.close()

    def _accept_until_closed(self):
        warnings = RateLimitedWarning()
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        while True:
            connection = None
            try:
                waiting.poll()
                connection = protocol.tracked(lambda: self._socket.accept()[0])
                with self._lock:
                    if self._is_closed:
                        connection.close()
                        return
                    self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), name="terrane-share", daemon=True).start()
            except BlockingIOError:
                # Also after a shutdown.
                with self._lock:
                    if self._is_closed:
                        return
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
                time.sleep(ACCEPT_RETRY_DELAY_S)

    def _serve(self, connection):
        try:
            hello, descriptors, is_cut = protocol.receive(connection, protocol.ANSWER_TIMEOUT_S, descriptors=1)
            try:
                theirs = json.dumps(hello.get("identity"), sort_keys=True)
                if theirs != self._identity:
                    protocol.send(connection, {"refused": f"the server's identity is {self._identity}, and the client's is {theirs}"})
                    return
                if is_cut or (hello.get("memory") and not descriptors):
                    protocol.send(connection, {"failed": "the client's memory did not arrive; raise the server's limit of open files"})
                    return
                window = None
                if descriptors:
                    # A job that copies to memory that has become shorter would end this process.
                    if not fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                        protocol.send(connection, {"refused": "the client's memory needs the seal F_SEAL_SHRINK"})
                        return
                    window = Window(descriptors[0], os.fstat(descriptors[0]).st_size)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            protocol.send(connection, {"accepted": os.getpid()})
            while True:
                request = protocol.receive(connection, protocol.ANSWER_TIMEOUT_S, may_wait=True)[0]
                try:
                    answer = self._clear(connection) if request["verb"] == "clear" else self._answer(request, window)
                except Exception as error:
                    # Numbers and keys in a request may be of any size and type.
                    answer = {"failed": repr(error)}
                protocol.send(connection, answer)
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

    def _clear(self, connection):
        """Empties the store, and tells the client meanwhile that this takes longer."""
        outcome = []

        def clear():
            try:
                self._store.clear()
                outcome.append({})
            # A panic of the library is no `Exception`, and the client still needs an answer.
            except BaseException as error:
                outcome.append({"failed": repr(error)})

        thread = threading.Thread(target=clear, name="terrane-share", daemon=True)
        thread.start()
        while True:
            thread.join(protocol.WORKING_INTERVAL_S)
            if outcome:
                return outcome[0]
            protocol.send(connection, {"working": True})

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
                # Wakes the thread that waits on the socket, which then closes it.
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
