"""The shared parts of the tests: the library with its C interface, errors, counters, and measured memory."""

import ctypes
import os
import unittest

library = ctypes.CDLL(os.environ["TERRANE_PROOF_LIBRARY"])
library.terrane_proof_error.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
library.terrane_proof_error.restype = ctypes.c_size_t
library.terrane_proof_live_memory.restype = ctypes.c_int64
library.terrane_proof_live_imports.restype = ctypes.c_int64


class ProofError(Exception):
    """An error of Terrane, with its text."""


def function(name, *argument_types):
    """A function of the library that returns 0 or -1. For -1, the wrapper raises the library's
    error."""
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
    """The numbers of live allocations of Terrane, and of live imports."""
    return library.terrane_proof_live_memory(), library.terrane_proof_live_imports()


def resident_bytes():
    """The resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class ProofTest(unittest.TestCase):
    """A test that must leave no allocation or import alive."""

    def setUp(self):
        self.live_before = live()

    def tearDown(self):
        self.assertEqual(live(), self.live_before, "memory or imports are still alive")

    def assert_no_growth(self, rounds, body):
        """Runs `body` this many times, after a tenth of them as warm-up: the process must not grow.

        A leak of a hundred bytes a round is a MiB in ten thousand rounds. Allocators reserve some
        memory once, at any time. So one batch without growth is sufficient.
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
        self.fail(f"the memory grew by {growths} bytes in batches of {rounds} rounds")
