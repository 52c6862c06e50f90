"""KV caches of NumPy in the axis orders of serving engines, offloaded and restored."""

import numpy

from cache import (
    FLASHINFER_HND, FLASHINFER_NHD, HEAD_MAJOR, SGLANG, SGLANG_LATENT, TOKEN_MAJOR, VLLM,
    VLLM_LATENT, Cache,
)
from proof import ProofError, ProofTest

BLOCKS, LAYERS, PAGE, HEADS, DIM = 6, 3, 4, 2, 8
SHAPES = {
    VLLM: (2, BLOCKS, PAGE, HEADS, DIM),
    FLASHINFER_NHD: (BLOCKS, 2, PAGE, HEADS, DIM),
    FLASHINFER_HND: (BLOCKS, 2, HEADS, PAGE, DIM),
    SGLANG: (BLOCKS * PAGE, HEADS, DIM),
    VLLM_LATENT: (BLOCKS, PAGE, HEADS * DIM),
    SGLANG_LATENT: (BLOCKS * PAGE, 1, HEADS * DIM),
}


def block_of(form, array, block):
    """The bytes of one block in a tensor with this axis order."""
    if form == VLLM:
        return array[:, block]
    if form in (SGLANG, SGLANG_LATENT):
        return array[block * PAGE : (block + 1) * PAGE]
    return array[block]


class Caches(ProofTest):
    def arrays(self, form):
        random = numpy.random.default_rng(form)
        count = LAYERS * (2 if form == SGLANG else 1)
        return [
            random.integers(0, 1 << 16, SHAPES[form], dtype=numpy.uint16) for _ in range(count)
        ]

    def cache(self, form, arrays, **changes):
        dimensions = {
            "form": form,
            "num_blocks": BLOCKS,
            "num_layers": LAYERS,
            "outer_dim": 1 if form in (VLLM_LATENT, SGLANG_LATENT) else 2,
            "page_size": PAGE,
            "num_heads": HEADS,
            "head_dim": DIM,
            "element_bytes": 2,
            "token_order": HEAD_MAJOR if form == FLASHINFER_HND else TOKEN_MAJOR,
            "tier_blocks": 9,
        }
        return Cache(arrays, **{**dimensions, **changes})

    def test_blocks_come_back_as_they_were_in_every_form(self):
        for form in SHAPES:
            with self.subTest(form=form):
                arrays = self.arrays(form)
                before = [array.copy() for array in arrays]
                with self.cache(form, arrays) as cache:
                    cache.offload([1, 3, 4], [8, 0, 5])
                    for array in arrays:
                        for block in (1, 3, 4):
                            block_of(form, array, block)[:] = 0
                    # Restored to other blocks.
                    cache.restore([4, 1, 3], [8, 0, 5])
                for array, old in zip(arrays, before):
                    for now, then in ((4, 1), (1, 3), (3, 4), (0, 0), (2, 2), (5, 5)):
                        same = block_of(form, array, now) == block_of(form, old, then)
                        self.assertTrue(same.all(), (form, now))

    def test_the_tier_is_seen_in_the_same_form(self):
        for form in (VLLM, FLASHINFER_NHD, FLASHINFER_HND, VLLM_LATENT):
            with self.subTest(form=form):
                arrays = self.arrays(form)
                with self.cache(form, arrays) as cache:
                    cache.offload([2, 5], [0, 7])
                    seen = [numpy.from_dlpack(it) for it in cache.tier((1, 16), LAYERS)]
                    for array, tier in zip(arrays, seen):
                        self.assertFalse(tier.flags.writeable)
                        for mine, theirs in ((2, 0), (5, 7)):
                            same = block_of(form, array, mine) == block_of(form, tier, theirs)
                            self.assertTrue(same.all())
                    # While they are exported, nothing is written there.
                    with self.assertRaisesRegex(ProofError, "conflict|read"):
                        cache.offload([1], [0])
                    cache.restore([0], [7])
                    del seen, tier
                    cache.offload([1], [0])

    def test_head_major_by_strides(self):
        # As in vLLM: the shape stays, and the memory is head-major.
        arrays = [
            numpy.arange(2 * BLOCKS * PAGE * HEADS * DIM, dtype=numpy.uint16)
            .reshape(2, BLOCKS, HEADS, PAGE, DIM)
            .transpose(0, 1, 3, 2, 4)
            for _ in range(LAYERS)
        ]
        before = [array.copy() for array in arrays]
        # The tensors' own strides are used; the order of the configuration is the tier's.
        for changes in ({}, {"token_order": HEAD_MAJOR}):
            with self.subTest(changes=changes), self.cache(VLLM, arrays, **changes) as cache:
                cache.offload([0], [3])
                for array in arrays:
                    array[:, 0] = 0
                cache.restore([0], [3])
                same = (a == b for a, b in zip(arrays, before))
                self.assertTrue(all(each.all() for each in same))

    def test_one_tensor_of_all_layers(self):
        whole = numpy.arange(BLOCKS * LAYERS * 2 * PAGE * HEADS * DIM, dtype=numpy.uint16)
        whole = whole.reshape(BLOCKS, LAYERS, 2, PAGE, HEADS, DIM)
        before = whole.copy()
        layers = [whole[:, layer] for layer in range(LAYERS)]
        with self.cache(FLASHINFER_NHD, layers) as cache:
            cache.offload([5], [3])
            whole[5] = 0
            cache.restore([5], [3])
        self.assertTrue((whole == before).all())

    def test_what_does_not_fit_is_named(self):
        arrays = self.arrays(VLLM)
        for changes, text in (
            ({"num_heads": 4, "head_dim": 4}, r"layer 0, axis 3 \(heads\): 4 expected, 2 found"),
            ({"num_blocks": 7}, r"axis 1 \(blocks\): 7 expected, 6 found"),
            ({"num_layers": 4}, "there are 3 tensors, and the configuration has 4 layers"),
            ({"element_bytes": 4}, "the layout has elements of 4 B"),
            ({"outer_dim": 1}, r"axis 0 \(outer \(K, V\)\): 1 expected, 2 found"),
        ):
            with self.assertRaisesRegex(ProofError, text):
                self.cache(VLLM, arrays, **changes)
        arrays[1].flags.writeable = False
        with self.assertRaisesRegex(ProofError, "layer 1 cannot be adopted: .* read-only"):
            self.cache(VLLM, arrays)

    def test_rounds_without_growth(self):
        arrays = self.arrays(VLLM)
        before = [array.copy() for array in arrays]
        with self.cache(VLLM, arrays) as cache:

            def body():
                cache.offload([1, 3], [8, 0])
                cache.restore([1, 3], [8, 0])

            self.assert_no_growth(10_000, body)
        self.assertTrue(all((a == b).all() for a, b in zip(arrays, before)))

        def whole():
            with self.cache(VLLM, arrays):
                pass

        self.assert_no_growth(100, whole)
