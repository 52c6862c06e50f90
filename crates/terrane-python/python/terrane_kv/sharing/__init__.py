"""One store for several processes of a machine: its owner serves the others over a Unix socket.

One process owns a store. `Server` runs in the owner's process, and `Client` in each other process. Blocks pass through
memory that the client shares with the server (a `memfd`): the server's jobs read from disk directly into it. If either
process ends, the other sees the end of the connection, and the client's pages are misses.

Servers and clients belong to the process that created them. A forked child closes its copies of their sockets.
"""

from terrane_kv.sharing.client import Client
from terrane_kv.sharing.jobs import run
from terrane_kv.sharing.protocol import RefusedError, UnfinishedError
from terrane_kv.sharing.server import Server

__all__ = ["Client", "RefusedError", "Server", "UnfinishedError", "run"]
