"""The memory of a connection. It has the blocks of one request."""

import ctypes
import mmap

from terrane_kv._native import Blocks

# The size of a window, unless one block needs more. Larger jobs are split into several requests.
WINDOW_BYTES = 64 << 20
# Direct I/O needs blocks at multiples of this.
ALIGNMENT = 4096

copy = ctypes.CDLL(None).memcpy
copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
copy.restype = ctypes.c_void_p


def aligned(size):
    return -(-size // ALIGNMENT) * ALIGNMENT


class Window:
    """Memory that both processes map. It is unmapped once no job uses it."""

    def __init__(self, descriptor, size):
        self.memory = mmap.mmap(descriptor, size)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def addresses(self, sizes):
        """The addresses of blocks of these sizes, each at the next aligned offset."""
        pointers, at = [], self.start
        for size in sizes:
            pointers.append(at)
            at += aligned(size)
        if min(sizes, default=0) < 0 or at > self.start + len(self.memory):
            raise ValueError(f"blocks of {at - self.start} bytes in a window of {len(self.memory)}")
        return pointers

    def blocks(self, sizes):
        """A function that returns the blocks from one number to another one."""
        pointers = self.addresses(sizes)
        return lambda start, end: Blocks.at(pointers[start:end], sizes[start:end], end - start, keep=self)
