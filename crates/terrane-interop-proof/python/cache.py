"""KV caches of other libraries, offloaded to a tier of Terrane and restored."""

import ctypes
from ctypes import POINTER, Structure, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p

from dlpack import capsule, hand_over, numbers, take
from proof import function

VLLM, FLASHINFER_NHD, FLASHINFER_HND, SGLANG, VLLM_LATENT, SGLANG_LATENT = range(6)
TOKEN_MAJOR, HEAD_MAJOR = 0, 1


class Request(Structure):
    _fields_ = [
        (name, c_uint32)
        for name in "form num_blocks num_layers outer_dim page_size num_heads head_dim "
        "element_bytes token_order tier_blocks".split()
    ] + [("device", c_int32), ("plain_tier", c_uint32)]


_cache = function(
    "terrane_proof_cache",
    POINTER(Request), POINTER(c_void_p), POINTER(c_uint8), c_size_t, POINTER(c_void_p),
)
_copy = function(
    "terrane_proof_copy", c_void_p, c_int32, POINTER(c_uint32), POINTER(c_uint32), c_size_t, c_uint64
)
_tier = function(
    "terrane_proof_tier_tensors", c_void_p, c_uint8, c_uint8, POINTER(c_void_p), c_size_t
)
_release = function("terrane_proof_cache_release", c_void_p)


class Handed:
    """A tensor that is passed on once."""

    def __init__(self, pointer):
        self.capsule = capsule(pointer)

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        given, self.capsule = self.capsule, None
        return given


class Cache:
    """Imported tensors of a cache, and a tier for them."""

    def __init__(self, tensors, **dimensions):
        dimensions = {"device": -1, "outer_dim": 2, **dimensions}
        stream = dimensions.pop("stream", None)
        request = Request(**dimensions)
        arguments = {} if stream is None else {"stream": stream}
        taken = [take(hand_over(tensor, **arguments)) for tensor in tensors]
        pointers = numbers([pointer for pointer, _ in taken], c_void_p)
        are_legacy = numbers([is_legacy for _, is_legacy in taken], c_uint8)
        self.handle = c_void_p()
        _cache(request, pointers, are_legacy, len(taken), self.handle)

    def offload(self, cache_blocks, tier_blocks, stream=0):
        self._copy(0, cache_blocks, tier_blocks, stream)

    def restore(self, cache_blocks, tier_blocks, stream=0):
        self._copy(1, cache_blocks, tier_blocks, stream)

    def _copy(self, direction, cache_blocks, tier_blocks, stream):
        assert len(cache_blocks) == len(tier_blocks)
        ours, theirs = numbers(cache_blocks, c_uint32), numbers(tier_blocks, c_uint32)
        _copy(self.handle, direction, ours, theirs, len(ours), stream)

    def tier(self, dtype, count):
        """The tier as read-only tensors in the axis order of the cache."""
        pointers = (c_void_p * count)()
        _tier(self.handle, *dtype, pointers, count)
        return [Handed(pointer) for pointer in pointers]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        _release(self.handle)
