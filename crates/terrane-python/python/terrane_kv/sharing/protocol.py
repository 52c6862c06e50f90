"""The messages between a client and a server, and the sockets that carry them.

A message is a length in 4 bytes, big-endian, and a JSON object. A client first sends its identity, and the memory if it
moves blocks. If the identities differ or the memory is lost, the server refuses the client. Then it answers each
request. While it empties its store, it sends messages that it still works.
"""

import json
import os
import socket
import struct
import threading
import time
import weakref

from terrane_kv._native import StoreError

# The maximum length of a message. 128 keys of 64 bytes take 9 KiB.
MAX_MESSAGE_BYTES = 16 << 20
# A server must answer within the timeout of the job plus this time. A message that has begun must end within it.
ANSWER_TIMEOUT_S = 10.0
# While a server empties its store, it sends a message to the client in each interval of this length.
WORKING_INTERVAL_S = 2.0

# The sockets of this process. A forked child closes its copies. Otherwise the parent's end would not be seen.
_sockets = weakref.WeakSet()
# A fork waits until a new socket is recorded. A signal handler that forks may interrupt the thread that has the lock.
_creation = threading.RLock()


def _close_inherited():
    global _creation
    # Other threads of the parent may have waited for the lock.
    _creation = threading.RLock()
    for one in list(_sockets):
        try:
            one.close()
        except OSError:
            pass


os.register_at_fork(
    before=lambda: _creation.acquire(),
    after_in_parent=lambda: _creation.release(),
    after_in_child=_close_inherited,
)


def tracked(create):
    """Returns the socket that `create` returns, and records it, so that a forked child closes its copy.

    Forks wait for `create`, so it must not block.
    """
    with _creation:
        one = create()
        _sockets.add(one)
    return one


class RefusedError(StoreError):
    """The server's identity differs from the client's."""


class UnfinishedError(StoreError):
    """The server has not ended a request within the time that the caller allows."""


def send(connection, message, descriptors=()):
    content = json.dumps(message).encode()
    content = struct.pack(">I", len(content)) + content
    sent = socket.send_fds(connection, [content], descriptors) if descriptors else 0
    # The other process may have answered and closed the connection. Even a send of no bytes would then fail.
    if sent < len(content):
        connection.sendall(content[sent:])


def receive(connection, timeout, descriptors=0, may_wait=False):
    """Receives a message and its descriptors. It must end within `timeout` seconds.

    With `may_wait`, the time starts at the first byte.

    Descriptors are lost if the other process sends more, or if this process may have no more. The third value states it.

    Raises `ConnectionError` at the end of the connection and for an invalid message, and `TimeoutError`.
    """
    end = None if may_wait else time.monotonic() + timeout
    found, is_cut = [], False

    def part_of(length):
        nonlocal end, is_cut
        connection.settimeout(None if end is None else max(end - time.monotonic(), 0.001))
        # Not `recv_fds`: it ignores the flag, and a program that another thread starts would inherit the descriptors.
        room = socket.CMSG_LEN(descriptors * struct.calcsize("i"))
        part, ancillary, flags, _ = connection.recvmsg(length, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, numbers in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found.extend(number for (number,) in struct.iter_unpack("i", numbers[: len(numbers) & ~3]))
        is_cut = is_cut or bool(flags & socket.MSG_CTRUNC)
        if not part:
            raise ConnectionError("the other process has closed the connection")
        end = time.monotonic() + timeout if end is None else end
        return part

    try:
        head = b""
        while len(head) < 4:
            head += part_of(4 - len(head))
        length = struct.unpack(">I", head)[0]
        if length > MAX_MESSAGE_BYTES:
            raise ConnectionError(f"a message of {length} bytes; {MAX_MESSAGE_BYTES} is the limit")
        content = bytearray()
        while len(content) < length:
            content += part_of(min(length - len(content), 1 << 20))
        # Later sends wait for the other process for as long.
        connection.settimeout(timeout)
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


class SocketPath:
    """The path of a socket in a folder. It is within the kernel's limit even if the folder's path is not."""

    def __init__(self, path):
        folder, self.name = os.path.split(os.path.abspath(path))
        self.folder = os.open(folder, os.O_PATH | os.O_DIRECTORY)

    def __enter__(self):
        return f"/proc/self/fd/{self.folder}/{self.name}"

    def __exit__(self, *_):
        os.close(self.folder)
