"""Tensors between Terrane and PyTorch's CUDA memory, and a KV cache of PyTorch that Terrane offloads."""

import unittest

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"no PyTorch: {error}") from error
if not torch.cuda.is_available():
    raise unittest.SkipTest("PyTorch sees no CUDA device")

import cache
from cache import Cache
from dlpack import BFLOAT, CPU, CUDA, CUDA_HOST, FLOAT, UINT, Exported, Imported, hand_over, take
from proof import ProofError, ProofTest, live

DEVICE = 0
BLOCKS, LAYERS, PAGE, HEADS, DIM = 256, 8, 16, 8, 128
SHAPES = {
    cache.VLLM: (2, BLOCKS, PAGE, HEADS, DIM),
    cache.FLASHINFER_NHD: (BLOCKS, 2, PAGE, HEADS, DIM),
    cache.FLASHINFER_HND: (BLOCKS, 2, HEADS, PAGE, DIM),
    cache.SGLANG: (BLOCKS * PAGE, HEADS, DIM),
}


def blocks_of(form, tensor, blocks):
    """A copy of these blocks of a tensor with this axis order."""
    if form == cache.VLLM:
        return tensor[:, blocks].clone()
    if form == cache.SGLANG:
        return tensor.view(BLOCKS, PAGE, HEADS, DIM)[blocks].clone()
    return tensor[blocks].clone()


def clear_blocks(form, tensor, blocks):
    if form == cache.VLLM:
        tensor[:, blocks] = 0
    elif form == cache.SGLANG:
        tensor.view(BLOCKS, PAGE, HEADS, DIM)[blocks] = 0
    else:
        tensor[blocks] = 0


def stream_argument(stream):
    """The number of a stream in the standard: the legacy default stream is 1."""
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
        # PyTorch refuses memory declared as pinned, and accepts it as host memory.
        handed = pinned.__dlpack__(max_version=(1, 3), dl_device=(CPU, 0))
        try:
            tensor = torch.from_dlpack(handed)
        except RuntimeError:
            # Releases older than DLPack 1.0 only take capsules of the legacy structure.
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
        # Handles of 20 MiB, mapped beside each other: the driver reports several allocations.
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
        del source, body


class Caches(TorchTest):
    def tensors(self, form):
        count = LAYERS * (2 if form == cache.SGLANG else 1)
        return [
            torch.randint(-(1 << 15), 1 << 15, SHAPES[form], dtype=torch.int16, device="cuda")
            .view(torch.bfloat16)
            for _ in range(count)
        ]

    def cache(self, form, tensors, **changes):
        dimensions = {
            "form": form,
            "num_blocks": BLOCKS,
            "num_layers": LAYERS,
            "page_size": PAGE,
            "num_heads": HEADS,
            "head_dim": DIM,
            "element_bytes": 2,
            "token_order": int(form == cache.FLASHINFER_HND),
            "tier_blocks": BLOCKS,
            "device": DEVICE,
            "stream": stream_argument(torch.cuda.current_stream()),
        }
        return Cache(tensors, **{**dimensions, **changes})

    def there_and_back(self, form, plain_tier):
        """Ordered by the engine's stream alone: nothing here waits for the device."""
        generator = torch.Generator().manual_seed(form)
        chosen = torch.randperm(BLOCKS, generator=generator)[: BLOCKS // 2].tolist()
        back = torch.randperm(BLOCKS, generator=generator)[: BLOCKS // 2].tolist()
        places = torch.randperm(BLOCKS, generator=generator)[: BLOCKS // 2].tolist()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tensors = self.tensors(form)
            before = [blocks_of(form, tensor, chosen) for tensor in tensors]
            with self.cache(form, tensors, plain_tier=plain_tier) as taken:
                taken.offload(chosen, places, stream.cuda_stream)
                for tensor in tensors:
                    clear_blocks(form, tensor, slice(None))
                taken.restore(back, places, stream.cuda_stream)
                after = [blocks_of(form, tensor, back) for tensor in tensors]
            for old, new in zip(before, after):
                # Compared as bits: some random values are NaN.
                self.assertTrue(torch.equal(old.view(torch.int16), new.view(torch.int16)))
            del tensors, before, after, old, new

    def test_a_cache_comes_back_from_pinned_memory(self):
        for form in SHAPES:
            with self.subTest(form=form):
                self.there_and_back(form, plain_tier=0)

    def test_a_cache_comes_back_from_system_memory(self):
        for form in SHAPES:
            with self.subTest(form=form):
                self.there_and_back(form, plain_tier=1)

    def test_the_default_stream(self):
        tensors = self.tensors(cache.VLLM)
        before = [tensor.clone() for tensor in tensors]
        everything = list(range(BLOCKS))
        with self.cache(cache.VLLM, tensors) as taken:
            taken.offload(everything, everything)
            for tensor in tensors:
                tensor.zero_()
            taken.restore(everything, everything)
        for old, new in zip(before, tensors):
            self.assertTrue(torch.equal(old.view(torch.int16), new.view(torch.int16)))
        del tensors, before, tensor, old, new

    def test_what_does_not_fit_is_named(self):
        tensors = self.tensors(cache.VLLM)
        with self.assertRaisesRegex(ProofError, "axis 3 .heads.: 4 expected, 8 found"):
            self.cache(cache.VLLM, tensors, num_heads=4)
        del tensors

    def test_rounds_without_growth(self):
        tensors = self.tensors(cache.VLLM)
        before = [tensor.clone() for tensor in tensors]
        free, _ = torch.cuda.mem_get_info()
        with self.cache(cache.VLLM, tensors) as taken:

            def body():
                taken.offload([1, 3, 200], [8, 0, 100])
                taken.restore([1, 3, 200], [8, 0, 100])

            self.assert_no_growth(10_000, body)
        for old, new in zip(before, tensors):
            self.assertTrue(torch.equal(old.view(torch.int16), new.view(torch.int16)))
        self.assertLess(free - torch.cuda.mem_get_info()[0], 64 << 20)
        del tensors, before, old, new
