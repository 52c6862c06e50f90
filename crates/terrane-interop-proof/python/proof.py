"""What the tests share: the library with its C interface, errors, accounts, and measured memory."""

import ctypes
import os
import unittest

library = ctypes.CDLL(os.environ["TERRANE_PROOF_LIBRARY"])
library.terrane_proof_error.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
library.terrane_proof_error.restype = ctypes.c_size_t
library.terrane_proof_live_memory.restype = ctypes.c_int64
library.terrane_proof_live_imports.restype = ctypes.c_int64


class ProofError(Exception):
    """What Terrane refused, in its words."""


def function(name, *argument_types):
    """A function of the library that answers 0 or -1; calling it raises what it says."""
    raw = getattr(library, name)
    raw.argtypes = argument_types
    raw.restype = ctypes.c_int32

    def call(*arguments):
        if raw(*arguments) != 0:
            text = ctypes.create_string_buffer(4096)
            library.terrane_proof_error(text, len(text))
            raise ProofError(text.value.decode())

    return call


def live():
    """How many pieces of Terrane's memory, and how many foreign things, are alive."""
    return library.terrane_proof_live_memory(), library.terrane_proof_live_imports()


def resident_bytes():
    """The memory of this process that is in use now."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class ProofTest(unittest.TestCase):
    """A test after which nothing may be alive that was not before it."""

    def setUp(self):
        self.live_before = live()

    def tearDown(self):
        self.assertEqual(live(), self.live_before, "memory or imports are still alive")

    def assert_no_growth(self, rounds, body):
        """Runs `body` so many times, after a tenth of them: the process must not grow.

        What leaks a hundred bytes a round leaks a MiB every ten thousand. What the allocators take
        once, whenever that is, does not come again, so that one batch without growth is enough.
        """
        for _ in range(rounds // 10):
            body()
        growths = []
        for _ in range(3):
            before = resident_bytes()
            for _ in range(rounds):
                body()
            growths.append(resident_bytes() - before)
            if growths[-1] < 1 << 20:
                return
        self.fail(f"{growths} bytes more after {rounds} rounds each")
