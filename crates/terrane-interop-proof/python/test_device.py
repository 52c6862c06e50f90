"""Tensors of a device's memory: a real one, or the simulated one of the gate."""

import os

import numpy

from dlpack import CUDA, CUDA_HOST, UINT, Exported, Imported, handshake, probe
from proof import ProofError, ProofTest, live


class Devices(ProofTest):
    def setUp(self):
        super().setUp()
        # If a device was requested, it must exist.
        if "TERRANE_SIMULATED_CUDA" in os.environ:
            return
        try:
            probe()
        except ProofError as error:
            self.skipTest(str(error))

    def test_tensors_of_a_device_come_back(self):
        with Imported(Exported(UINT, [4, 8], device=0), max_version=(1, 3), device=0) as tensor:
            facts = tensor.facts()
            self.assertEqual((facts.device_type, facts.device_id, facts.bytes), (CUDA, 0, 32))
            self.assertEqual(live(), (1, 1))
            with self.assertRaisesRegex(ProofError, "not in host memory"):
                tensor.reverse()

    def test_pinned_memory_is_the_host_s_for_who_asks(self):
        pinned = Exported(UINT, [4, 8], device=0, pinned=True)
        with Imported(pinned, max_version=(1, 3)) as tensor:
            self.assertEqual(tensor.facts().device_type, CUDA_HOST)
        array = numpy.from_dlpack(pinned, device="cpu")
        self.assertEqual(array.ravel()[:4].tolist(), [3, 10, 17, 24])
        self.assertEqual(live(), (1, 0))
        del array
        with self.assertRaises(BufferError):
            pinned.__dlpack__(dl_device=(CUDA, 0))

    def test_a_device_has_to_be_known(self):
        for device, text in ((-1, "no context of it"),):
            with self.assertRaisesRegex(ProofError, text):
                Imported(Exported(UINT, [8], device=0), max_version=(1, 3), device=device)

    def test_streams_of_the_standard(self):
        for stream in (-1, 1, 2):
            handshake(0, stream, True)
        handshake(0, 0, False)
        for stream, text in ((0, "ambiguous"), (-2, "does not exist")):
            with self.assertRaisesRegex(ProofError, text):
                handshake(0, stream, True)
