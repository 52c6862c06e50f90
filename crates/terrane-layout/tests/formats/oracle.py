"""Computes the position of each element of each format with NumPy, from the tensors' shapes alone.

    python3 oracle.py BLOCKS LAYERS HEADS TOKENS ELEMENTS ELEMENT_BYTES

prints one paragraph for each format: its name, the bytes of its regions, and for each section its
name, its shape (layers, heads, tokens, elements, bytes of an element) and the position of every element.
Elements have the order block, layer, head, token, element. A position is 1,000,000 times the region
plus the bytes from its start.

The script does not use Terrane's strides. It numbers the bytes of a tensor, and views the tensor in
the shape that its engine uses.
"""

import math
import sys

import numpy as np
from numpy.lib.stride_tricks import as_strided

REGION = 1_000_000
B, L, H, N, D, W = (int(text) for text in sys.argv[1:7])
# Elements of a group in paged attention, blocks of a chunk, elements of an unequal V row, and a latent.
X, CHUNK, UNEQUAL, LATENT = 2, 2, D // 2, D + 3


class Case:
    def __init__(self):
        self.regions = []
        self.sections = []

    def tensor(self, *shape, item=None, size=None):
        """A contiguous tensor in its own region: the position of each element."""
        return self.strided(shape, contiguous(shape, item or W), item or W, size=size)

    def strided(self, shape, strides, item, size=None, offset=0, region=None):
        """A view, by strides in bytes, of a region."""
        if region is None:
            region = len(self.regions)
            self.regions.append(size or math.prod(shape) * item)
        numbered = np.arange(self.regions[region], dtype=np.int64) + REGION * region
        view = as_strided(numbered[offset:], shape, [8 * stride for stride in strides])
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides)) + item
        assert last <= self.regions[region], "the view leaves its tensor"
        return view

    def section(self, name, places, letters, item=None, heads=True):
        """Adds a section; `letters` are the dimensions of `places`, in its order."""
        absent = [letter for letter in "BLHND" if letter not in letters]
        places = places.reshape(places.shape + (1,) * len(absent))
        letters += "".join(absent)
        places = places.transpose([letters.index(letter) for letter in "BLHND"])
        self.sections.append((name, places, item or W, heads))


def contiguous(shape, item):
    strides = []
    for count in reversed(shape):
        strides.insert(0, item)
        item *= count
    return strides


CASES = {}


def case(function):
    CASES[function.__name__.replace("__", ".")] = function
    return function


def kv(case, places, letters):
    """K and V, whose dimension is written as 2."""
    at = letters.index("2")
    for number, name in enumerate("kv"):
        case.section(name, places.take(number, axis=at), letters.replace("2", ""))


# vLLM


@case
def vllm__nhd(c):
    kv(c, np.stack([c.tensor(2, B, N, H, D) for _ in range(L)]), "L2BNHD")


@case
def vllm__hnd(c):
    kv(c, np.stack([c.tensor(2, B, H, N, D) for _ in range(L)]), "L2BHND")


@case
def vllm__cross_layer(c):
    kv(c, c.tensor(B, L, 2, N, H, D), "BL2NHD")


@case
def vllm__cross_layer_hnd(c):
    kv(c, c.tensor(B, H, L, 2, N, D), "BHL2ND")


@case
def vllm__mla(c):
    places = np.stack([c.tensor(B, N, LATENT) for _ in range(L)])
    c.section("latent", places, "LBND", heads=False)


@case
def vllm__mla_cross_layer(c):
    c.section("latent", c.tensor(B, L, N, LATENT), "BLND", heads=False)


@case
def vllm__fp8_ds_mla(c):
    # A row is 656 bytes and never split, so it is one element.
    places = np.stack([c.tensor(B, N, 656, item=1) for _ in range(L)])
    c.section("latent", places[..., :1], "LBND", item=656, heads=False)


def packed(c, order, values, page=None):
    """K and V as slices of the last dimension of a tensor [L, B, H, N, C] in a physical order."""
    counts = {"L": L, "B": B, "H": H, "N": N, "C": D + values}
    shape = [counts[letter] for letter in order]
    strides = contiguous(shape, W)
    if page is not None:
        # The inner one of layers and blocks steps by whole pages.
        strides[1], strides[0] = page, page * shape[1]
    size = strides[0] * shape[0]
    places = c.strided(shape, strides, W, size=size)
    c.section("k", places[..., :D], order.replace("C", "D"))
    c.section("v", places[..., D:], order.replace("C", "D"))


@case
def vllm__lbnhc(c):
    packed(c, "LBNHC", D)


@case
def vllm__lbhnc(c):
    packed(c, "LBHNC", D)


@case
def vllm__lhbnc(c):
    packed(c, "LHBNC", D)


@case
def vllm__blnhc(c):
    packed(c, "BLNHC", D)


@case
def vllm__blhnc(c):
    packed(c, "BLHNC", D)


@case
def vllm__bhlnc(c):
    packed(c, "BHLNC", D)


@case
def vllm__packed_unequal_nhd(c):
    packed(c, "LBNHC", UNEQUAL)


@case
def vllm__packed_unequal_hnd(c):
    packed(c, "BLHNC", UNEQUAL)


@case
def vllm__packed_with_scales(c):
    # A row: D values of K, a scale of 4 bytes, D values of V, a scale of 4 bytes.
    half = D * W + 4
    c.regions.append(L * B * N * H * 2 * half)
    outside = contiguous((L, B, N, H), 2 * half)
    for offset, count, item, name in [
        (0, D, W, "k"),
        (D * W, 1, 4, "k-scales"),
        (half, D, W, "v"),
        (half + D * W, 1, 4, "v-scales"),
    ]:
        shape, strides = (L, B, N, H, count), [*outside, item]
        c.section(name, c.strided(shape, strides, item, offset=offset, region=0), "LBNHD", item=item)


def padded():
    return N * H * 2 * D * W + 12


@case
def vllm__page_padded_lb(c):
    packed(c, "LBNHC", D, padded())


@case
def vllm__page_padded_bl(c):
    packed(c, "BLHNC", D, padded())


def rows(c, page, letters, row):
    # A worker's cell of a row. The cells of other workers follow, except in the last row.
    cell = L * CHUNK * math.prod(page) * W
    row = row or cell
    shape = (B // CHUNK, L, CHUNK, *page)
    strides = [row, *contiguous(shape[1:], W)]
    places = c.strided(shape, strides, W, size=row * (B // CHUNK - 1) + cell)
    # Blocks of a chunk and chunks are one axis.
    places = np.moveaxis(places, 2, 1).reshape((B, L, *page))
    c.section("k", places[..., :D], "BL" + letters)
    c.section("v", places[..., D:], "BL" + letters)


@case
def vllm__offload_rows(c):
    rows(c, (N, H, 2 * D), "NHD", None)


@case
def vllm__offload_rows_padded(c):
    rows(c, (H, N, 2 * D), "HND", L * CHUNK * N * H * 2 * D * W + 32)


# FlashInfer


@case
def flashinfer__nhd(c):
    kv(c, np.stack([c.tensor(B, 2, N, H, D) for _ in range(L)]), "LB2NHD")


@case
def flashinfer__hnd(c):
    kv(c, np.stack([c.tensor(B, 2, H, N, D) for _ in range(L)]), "LB2HND")


# SGLang counts tokens: a pool of `size` tokens has pages of N.


@case
def sglang__device(c):
    for name in "kv":
        buffers = np.stack([c.tensor(B * N, H, D) for _ in range(L)])
        c.section(name, buffers.reshape(L, B, N, H, D), "LBNHD")


@case
def sglang__layer_first(c):
    kv(c, c.tensor(2, L, B * N, H, D).reshape(2, L, B, N, H, D), "2LBNHD")


@case
def sglang__page_first(c):
    kv(c, c.tensor(2, B * N, L, H, D).reshape(2, B, N, L, H, D), "2BNLHD")


@case
def sglang__page_first_direct(c):
    kv(c, c.tensor(2, B, L, N, H, D), "2BLNHD")


@case
def sglang__page_head(c):
    kv(c, c.tensor(2, B, H, N, L, D), "2BHNLD")


@case
def sglang__page_unified(c):
    places = c.tensor(B, H, L, 2, N, 1, D).transpose(0, 2, 3, 4, 1, 5, 6)
    kv(c, places.reshape(B, L, 2, N, H, D), "BL2NHD")


@case
def sglang__page_first_direct_unequal(c):
    c.section("k", c.tensor(B, L, N, H, D), "BLNHD")
    c.section("v", c.tensor(B, L, N, H, UNEQUAL), "BLNHD")


@case
def sglang__mla_layer_first(c):
    places = c.tensor(L, B * N, 1, LATENT).reshape(L, B, N, LATENT)
    c.section("latent", places, "LBND", heads=False)


@case
def sglang__mla_page_first(c):
    places = c.tensor(B * N, L, 1, LATENT).reshape(B, N, L, LATENT)
    c.section("latent", places, "BNLD", heads=False)


@case
def sglang__mla_page_first_direct(c):
    places = c.tensor(B, L, N, 1, LATENT).reshape(B, L, N, LATENT)
    c.section("latent", places, "BLND", heads=False)


@case
def sglang__mla_page_unified(c):
    c.section("latent", c.tensor(B, L, N, LATENT), "BLND", heads=False)


# TensorRT-LLM


@case
def tensorrt_llm__pool(c):
    kv(c, c.tensor(B, L, 2, H * N * D).reshape(B, L, 2, H, N, D), "BL2HND")


@case
def tensorrt_llm__latent_pool(c):
    places = c.tensor(B, L, 1, N * LATENT).reshape(B, L, N, LATENT)
    c.section("latent", places, "BLND", heads=False)


# LMCache: T tokens of a chunk, H · D elements of its hidden dimension.


@case
def lmcache__kv_2ltd(c):
    places = c.tensor(B // CHUNK, 2, L, CHUNK * N, H * D)
    places = places.reshape(B // CHUNK, 2, L, CHUNK, N, H, D)
    kv(c, np.moveaxis(places, 3, 1).reshape(B, 2, L, N, H, D), "B2LNHD")


@case
def lmcache__kv_2td(c):
    places = np.stack([c.tensor(B // CHUNK, 2, CHUNK * N, H * D) for _ in range(L)])
    places = places.reshape(L, B // CHUNK, 2, CHUNK, N, H, D)
    kv(c, np.moveaxis(places, 3, 2).reshape(L, B, 2, N, H, D), "LB2NHD")


@case
def lmcache__kv_t2d(c):
    places = np.stack([c.tensor(B // CHUNK, CHUNK * N, 2, H * D) for _ in range(L)])
    kv(c, places.reshape(L, B, N, 2, H, D), "LBN2HD")


@case
def lmcache__mla(c):
    places = c.tensor(B // CHUNK, 1, L, CHUNK * N, LATENT)
    places = places.reshape(B // CHUNK, L, CHUNK, N, LATENT)
    c.section("latent", np.moveaxis(places, 2, 1).reshape(B, L, N, LATENT), "BLND", heads=False)


# FlexKV, Dynamo


@case
def flexkv__layer_first(c):
    kv(c, c.tensor(L, 2, B, N, H, D), "L2BNHD")


@case
def flexkv__block_first(c):
    kv(c, c.tensor(B, L, 2, N, H, D), "BL2NHD")


@case
def flexkv__layer_block(c):
    kv(c, c.tensor(L, B, 2, N, H, D), "LB2NHD")


@case
def dynamo__fully_contiguous(c):
    kv(c, c.tensor(B, L, 2, N, H * D).reshape(B, L, 2, N, H, D), "BL2NHD")


@case
def dynamo__layer_separate_block_first(c):
    places = np.stack([c.tensor(B, 2, N, H * D) for _ in range(L)])
    kv(c, places.reshape(L, B, 2, N, H, D), "LB2NHD")


@case
def dynamo__layer_separate_outer_first(c):
    places = np.stack([c.tensor(2, B, N, H * D) for _ in range(L)])
    kv(c, places.reshape(L, 2, B, N, H, D), "L2BNHD")


# Paged attention


def split_keys(places):
    """[..., B, H, D/x, N, x] with x inside D."""
    return np.moveaxis(places, -3, -2).reshape((-1, B, H, N, D))


@case
def paged__vllm_v0(c):
    # One tensor of two flat halves, each viewed in its own shape.
    halves = np.stack([c.tensor(2, B, N * H * D) for _ in range(L)])
    c.section("k", split_keys(halves[:, 0].reshape(L, B, H, D // X, N, X)), "LBHND")
    c.section("v", halves[:, 1].reshape(L, B, H, D, N), "LBHDN")


def pairs(c, values):
    tensors = [(c.tensor(B, H, D // X, N, X), c.tensor(*values)) for _ in range(L)]
    c.section("k", split_keys(np.stack([key for key, _ in tensors])), "LBHND")
    return np.stack([value for _, value in tensors])


@case
def paged__pairs_of_tensors(c):
    c.section("v", pairs(c, (B, H, D, N)), "LBHDN")


@case
def paged__aiter_shuffled(c):
    places = np.moveaxis(pairs(c, (B, H, N // X, D, X)), -1, -2)
    c.section("v", places.reshape(L, B, H, N, D), "LBHND")


# Models


@case
def model__indexer(c):
    # For each layer [B, N · (8 + 4)] bytes: all values of a page, then all its scales.
    pages = [c.tensor(B, N * 12, item=1) for _ in range(L)]
    values = np.stack([page[:, : N * 8].reshape(B, N, 8) for page in pages])
    scales = np.stack([page[:, N * 8 :: 4].reshape(B, N, 1) for page in pages])
    c.section("values", values, "LBND", item=1, heads=False)
    c.section("scales", scales, "LBND", item=4, heads=False)


@case
def model__scales_beside(c):
    kv(c, np.stack([c.tensor(2, B, N, H, D) for _ in range(L)]), "L2BNHD")
    scales = np.stack([c.tensor(2, B, N, H, D // X, item=1) for _ in range(L)])
    c.section("k-scales", scales[:, 0], "LBNHD", item=1)
    c.section("v-scales", scales[:, 1], "LBNHD", item=1)


@case
def model__state_pages(c):
    page = padded()
    pages = c.tensor(L, B, page, item=1)
    c.section("conv", pages[:, :, : 5 * 2 : 2], "LBD", item=2, heads=False)
    c.section("state", pages[:, :, 10 : 10 + 7 * 4 : 4], "LBD", item=4, heads=False)


def main():
    for name, function in CASES.items():
        built = Case()
        function(built)
        print("format", name)
        print("regions", *built.regions)
        for section, places, item, heads in built.sections:
            _, layers, head_count, tokens, elements = places.shape
            stated = head_count if heads else 0
            print("section", section, layers, stated, tokens, elements, item)
            print(*places.reshape(-1))


main()
