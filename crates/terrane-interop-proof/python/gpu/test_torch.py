"""Tensors between Terrane and PyTorch's CUDA memory."""

import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"no PyTorch: {error}") from error
if not torch.cuda.is_available():
    raise unittest.SkipTest("PyTorch sees no CUDA device")

from dlpack import BFLOAT, CPU, CUDA, CUDA_HOST, FLOAT, UINT, Exported, Imported, hand_over, take
from proof import ProofError, ProofTest, live

DEVICE = 0


def stream_argument(stream):
    """The number of a stream in the standard. The legacy default stream is 1."""
    return stream.cuda_stream or 1


class TorchTest(ProofTest):
    def setUp(self):
        super().setUp()
        torch.cuda.synchronize()
        self.allocated = torch.cuda.memory_allocated()

    def tearDown(self):
        torch.cuda.synchronize()
        self.assertEqual(torch.cuda.memory_allocated(), self.allocated, "PyTorch's memory is kept")
        super().tearDown()


class Tensors(TorchTest):
    def test_terrane_s_tensors_are_pytorch_s(self):
        tensor = torch.from_dlpack(Exported(UINT, [64, 256], device=DEVICE))
        expected = (torch.arange(64 * 256) * 7 + 3).to(torch.uint8).view(64, 256)
        self.assertEqual(tensor.device, torch.device("cuda", DEVICE))
        self.assertTrue(torch.equal(tensor.cpu(), expected))
        self.assertEqual(live(), (1, 0))
        tensor.add_(1)
        self.assertTrue(torch.equal(tensor.cpu(), expected + 1))
        torch.cuda.synchronize()
        del tensor
        self.assertEqual(live(), (0, 0))

    def test_types_and_strides(self):
        for dtype, expected in ((BFLOAT, torch.bfloat16), (FLOAT, torch.float32)):
            tensor = torch.from_dlpack(Exported(dtype, [8, 16], [32, 1], device=DEVICE))
            self.assertEqual((tensor.dtype, tensor.stride()), (expected, (32, 1)))
            del tensor

    def test_pytorch_s_tensors_are_memory(self):
        for stream in (None, torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                tensor = torch.arange(4096, dtype=torch.int32, device="cuda").view(64, 64)
                argument = stream_argument(torch.cuda.current_stream())
                pointer, is_legacy = take(hand_over(tensor, stream=argument))
                with Imported(pointer=pointer, is_legacy=is_legacy, device=DEVICE) as taken:
                    facts = taken.facts()
                    self.assertEqual(facts.address, tensor.data_ptr())
                    self.assertEqual((facts.device_type, facts.device_id), (CUDA, DEVICE))
                    self.assertEqual((facts.bytes, facts.is_dense), (16384, 1))
                del tensor

    def test_a_slice_keeps_its_place(self):
        tensor = torch.zeros(16, 64, dtype=torch.bfloat16, device="cuda")
        pointer, is_legacy = take(hand_over(tensor[4:8]))
        with Imported(pointer=pointer, is_legacy=is_legacy, device=DEVICE) as taken:
            self.assertEqual(taken.facts().address, tensor.data_ptr() + 4 * 64 * 2)
        del tensor

    def test_pinned_tensors(self):
        tensor = torch.zeros(4096, dtype=torch.uint8, pin_memory=True)
        pointer, is_legacy = take(hand_over(tensor))
        with Imported(pointer=pointer, is_legacy=is_legacy) as taken:
            # Older releases declare it as host memory.
            self.assertIn(taken.facts().device_type, (1, CUDA_HOST))

    def test_terrane_s_pinned_memory_is_pytorch_s_on_the_processor(self):
        pinned = Exported(UINT, [64, 256], device=DEVICE, pinned=True)
        self.assertEqual(pinned.__dlpack_device__(), (CUDA_HOST, 0))
        # PyTorch refuses memory that is declared as pinned, but accepts it as host memory.
        handed = pinned.__dlpack__(max_version=(1, 3), dl_device=(CPU, 0))
        try:
            tensor = torch.from_dlpack(handed)
        except RuntimeError:
            # Releases older than DLPack 1.0 accept only capsules of the legacy structure.
            tensor = torch.from_dlpack(pinned.__dlpack__(dl_device=(CPU, 0)))
        del handed
        expected = (torch.arange(64 * 256) * 7 + 3).to(torch.uint8).view(64, 256)
        self.assertEqual(tensor.device, torch.device("cpu"))
        self.assertTrue(torch.equal(tensor, expected) and tensor.is_pinned())
        # A source of non-blocking copies on PyTorch's own stream.
        there = tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(there.cpu(), expected))
        self.assertEqual(live(), (1, 0))
        del tensor, there
        self.assertEqual(live(), (0, 0))

    def test_expandable_segments_are_one_allocation(self):
        # Adjacent mappings with handles of 20 MiB. The driver reports several allocations.
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        try:
            tensor = torch.zeros(96 << 20, dtype=torch.uint8, device="cuda")
            argument = stream_argument(torch.cuda.current_stream())
            pointer, is_legacy = take(hand_over(tensor, stream=argument))
            with Imported(pointer=pointer, is_legacy=is_legacy, device=DEVICE) as taken:
                self.assertEqual(taken.facts().address, tensor.data_ptr())
                self.assertEqual(taken.facts().bytes, 96 << 20)
            del tensor
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")

    def test_tensors_of_a_device_need_its_context(self):
        tensor = torch.zeros(16, device="cuda")
        pointer, is_legacy = take(hand_over(tensor))
        with self.assertRaisesRegex(ProofError, "no context of it"):
            Imported(pointer=pointer, is_legacy=is_legacy)
        del tensor

    def test_ten_thousand_rounds_without_growth(self):
        source = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
        argument = stream_argument(torch.cuda.current_stream())
        free, _ = torch.cuda.mem_get_info()

        def body():
            pointer, is_legacy = take(hand_over(source, stream=argument))
            Imported(pointer=pointer, is_legacy=is_legacy, device=DEVICE).release()
            tensor = torch.from_dlpack(Exported(UINT, [256], device=DEVICE))
            del tensor

        self.assert_no_growth(10_000, body)
        self.assertLess(free - torch.cuda.mem_get_info()[0], 64 << 20)
