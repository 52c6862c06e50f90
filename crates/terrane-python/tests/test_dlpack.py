"""Invalid tensors, which no correct library exports: `KvCache` refuses each with its reason, and deletes it once."""

import ctypes
from ctypes import Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p

import numpy
import pytest

import terrane_kv

DELETER = ctypes.CFUNCTYPE(None, c_void_p)
BLOCKS, TOKENS, ROW = 2, 2, 8


class Device(Structure):
    _fields_ = [("device_type", c_uint32), ("device_id", c_int32)]


class DataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", Device),
        ("ndim", c_int32),
        ("dtype", DataType),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    ]


class Versioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", DELETER),
        ("flags", c_uint64),
        ("tensor", Tensor),
    ]


new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, ctypes.c_char_p, c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Hostile:
    """A tensor of two blocks of two tokens, whose structure a test modifies."""

    def __init__(self):
        self.deleted = 0
        self.memory = (c_uint8 * 4096)()
        # Aligned, so that only the test's modification is wrong.
        start = -(-ctypes.addressof(self.memory) // 64) * 64
        self.sizes = (c_int64 * 64)(BLOCKS, TOKENS, ROW, *[1] * 61)
        self.deleter = DELETER(self.delete)
        self.managed = Versioned(major=1, minor=3, deleter=self.deleter)
        tensor = self.managed.tensor
        tensor.data, tensor.ndim = start, 3
        tensor.device.device_type = 1
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = 1, 16, 1
        tensor.shape = ctypes.addressof(self.sizes)

    def delete(self, _):
        self.deleted += 1

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        return new_capsule(ctypes.addressof(self.managed), b"dltensor_versioned", None)


def adopted(*tensors):
    return terrane_kv.KvCache(tensors, "block token row")


def numbers(*values):
    return (c_int64 * len(values))(*values)


NEGATIVE, LARGE, ZERO = numbers(2, -1, 8), numbers(1 << 62, 1 << 62, 8), numbers(0, 8, 1)
FAR = numbers(2**63 - 1, 8, 1)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("major", 2, "version 1"),
        ("major", 0, "version 1"),
        ("tensor.ndim", -1, "has -1 axes"),
        ("tensor.ndim", 2**31 - 1, "2147483647 axes"),
        ("tensor.shape", None, "cannot be read from the pointer 0x0"),
        ("tensor.strides", ctypes.addressof(ZERO) + 1, "cannot be read"),
        ("tensor.shape", ctypes.addressof(NEGATIVE), "axis 1 has the size -1"),
        ("tensor.shape", ctypes.addressof(LARGE), r"more than 2\^63"),
        ("tensor.strides", ctypes.addressof(NEGATIVE), "axis 1 has the stride -1"),
        ("tensor.strides", ctypes.addressof(ZERO), "before it is broadcast"),
        ("tensor.strides", ctypes.addressof(FAR), "ends past the address space"),
        ("tensor.device.device_type", 77, "device type 77"),
        ("tensor.device.device_id", 4, "device type 1, number 4"),
        ("tensor.dtype.code", 200, "code 200"),
        ("tensor.dtype.bits", 0, "0 bits were requested"),
        ("tensor.dtype.lanes", 0, "0 lanes"),
        ("tensor.data", None, "data pointer is null"),
        ("tensor.byte_offset", 2**64 - 1, "past the end of the address space"),
        ("tensor.byte_offset", 1, "need an alignment"),
    ],
)
def test_a_structure_that_cannot_be_is_refused_and_deleted_once(field, value, text):
    tensor = Hostile()
    *path, name = field.split(".")
    part = tensor.managed
    for step in path:
        part = getattr(part, step)
    setattr(part, name, value)
    with pytest.raises((terrane_kv.StoreError, ValueError, BufferError), match=text):
        adopted(tensor)
    assert tensor.deleted == 1


def test_a_good_structure_is_deleted_once_and_may_have_no_deleter():
    tensor, without = Hostile(), Hostile()
    without.managed.deleter = DELETER()
    cache = adopted(tensor, without)
    assert (len(cache), cache.block_bytes, tensor.deleted) == (BLOCKS, 2 * TOKENS * ROW * 2, 0)
    del cache
    assert (tensor.deleted, without.deleted) == (1, 0)


def test_a_refusal_deletes_the_tensors_before_it():
    first, second = Hostile(), Hostile()
    second.managed.tensor.dtype.lanes = 0
    with pytest.raises(terrane_kv.StoreError, match="0 lanes"):
        adopted(first, second)
    assert (first.deleted, second.deleted) == (1, 1)


def test_views_that_repeat_or_turn_round_are_refused():
    array = numpy.arange(BLOCKS * TOKENS * ROW, dtype=numpy.uint16).reshape(BLOCKS, TOKENS, ROW)
    with pytest.raises(terrane_kv.StoreError, match="axis 0 has the stride -16; strides"):
        adopted(array[::-1])
    with pytest.raises(terrane_kv.StoreError, match="before it is broadcast"):
        adopted(numpy.lib.stride_tricks.as_strided(array, array.shape, (0, 16, 2)))


class Odd:
    """An object whose `__dlpack__` returns something else, or raises an exception."""

    def __init__(self, result):
        self.result = result

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def test_what_is_no_capsule_is_an_error_and_exceptions_pass_through():
    for result in (None, 7, new_capsule(4096, b"another", None)):
        with pytest.raises((terrane_kv.StoreError, TypeError, ValueError, BufferError)):
            adopted(Odd(result))
    with pytest.raises(KeyError, match="theirs"):
        adopted(Odd(KeyError("theirs")))
