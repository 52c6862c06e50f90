"""DLPack between Python and Terrane: structures, capsules, and functions of the library."""

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32
from ctypes import c_uint64, c_void_p

from proof import function, library

CPU, CUDA, CUDA_HOST = 1, 2, 3
UINT, FLOAT, BFLOAT, FP8_E4M3FN = (1, 8), (2, 32), (4, 16), (10, 8)

LEGACY_NAME, USED_LEGACY_NAME = b"dltensor", b"used_dltensor"
NAME, USED_NAME = b"dltensor_versioned", b"used_dltensor_versioned"


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


DELETER = ctypes.CFUNCTYPE(None, c_void_p)


class Legacy(Structure):
    _fields_ = [("tensor", Tensor), ("context", c_void_p), ("deleter", DELETER)]


class Versioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", DELETER),
        ("flags", c_uint64),
        ("tensor", Tensor),
    ]


python = ctypes.pythonapi
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_New.argtypes = [c_void_p, ctypes.c_char_p, c_void_p]


def capsule_function(name, restype, *argtypes):
    return ctypes.PYFUNCTYPE(restype, *argtypes)((name, python))


is_valid = capsule_function("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
pointer_of = capsule_function("PyCapsule_GetPointer", c_void_p, ctypes.py_object, ctypes.c_char_p)
rename = capsule_function("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)


def capsule(pointer, is_legacy=False):
    """A tensor in a capsule, in the form of the standard."""
    name = LEGACY_NAME if is_legacy else NAME
    return python.PyCapsule_New(pointer, name, ctypes.cast(library.terrane_proof_destroy_capsule, c_void_p))


def take(handed_over):
    """Takes the pointer out of a capsule. Returns it, and whether it is legacy."""
    if is_valid(handed_over, NAME):
        pointer = pointer_of(handed_over, NAME)
        rename(handed_over, USED_NAME)
        return pointer, False
    pointer = pointer_of(handed_over, LEGACY_NAME)
    rename(handed_over, USED_LEGACY_NAME)
    return pointer, True


def hand_over(array, **arguments):
    """The capsule of an array's tensor, with the newest structure that its library supports."""
    try:
        return array.__dlpack__(max_version=(1, 3), **arguments)
    except TypeError:
        # Libraries older than DLPack 1.0 do not support the argument.
        return array.__dlpack__(**arguments)


class Request(Structure):
    _fields_ = [
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("options", c_uint32),
        ("axes", c_size_t),
        ("sizes", POINTER(c_uint64)),
        ("strides", POINTER(c_uint64)),
        ("device", c_int32),
        ("is_stated", c_int32),
        ("stream", c_int64),
    ]


class Facts(Structure):
    _fields_ = [
        ("address", c_uint64),
        ("bytes", c_uint64),
        ("elements", c_uint64),
        ("axes", c_uint64),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("device_type", c_uint32),
        ("device_id", c_int32),
        ("is_read_only", c_uint32),
        ("is_copied", c_uint32),
        ("is_dense", c_uint32),
    ]


_export = function("terrane_proof_export", POINTER(Request), POINTER(c_void_p))
_import = function("terrane_proof_import", c_void_p, c_int32, c_int32, POINTER(c_void_p))
_facts = function("terrane_proof_facts", c_void_p, POINTER(Facts))
_reverse = function("terrane_proof_reverse", c_void_p)
_release = function("terrane_proof_release", c_void_p, c_int32)
probe = function("terrane_proof_probe")
handshake = function("terrane_proof_handshake", c_int32, c_int64, c_int32)


def numbers(values, kind=c_uint64):
    return (kind * len(values))(*values)


class Exported:
    """A tensor of Terrane's memory, with the interface that array libraries expect."""

    def __init__(
        self, dtype, sizes, strides=None, read_only=False, by_offset=False, device=-1, pinned=False
    ):
        self.dtype, self.sizes, self.strides, self.device = dtype, sizes, strides, device
        self.options = read_only * 1 + by_offset * 4 + pinned * 8
        self.pinned = pinned

    def __dlpack_device__(self):
        if self.pinned:
            return CUDA_HOST, 0
        return (CPU, 0) if self.device < 0 else (CUDA, self.device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        # Pinned memory is also host memory, without a copy.
        is_host = self.pinned and dl_device == (CPU, 0)
        if not is_host and dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(f"the tensor is not on {dl_device}")
        handshake(-1 if self.pinned else self.device, stream or 0, stream is not None)
        # A consumer that requests no version accepts only the legacy structure.
        is_legacy = max_version is None or max_version < (1, 0)
        strides = self.strides and numbers(self.strides)
        options = self.options + is_legacy * 2 + is_host * 16
        sizes = numbers(self.sizes)
        request = Request(
            *self.dtype, 1, options, len(sizes), sizes, strides, self.device,
            stream is not None, stream or 0,
        )
        pointer = c_void_p()
        _export(request, pointer)
        return capsule(pointer.value, is_legacy)


class Imported:
    """An imported tensor of another library, until it is released."""

    def __init__(self, array=None, pointer=None, is_legacy=False, device=-1, **arguments):
        if pointer is None:
            pointer, is_legacy = take(array.__dlpack__(**arguments))
        self.handle = c_void_p()
        _import(pointer, is_legacy, device, self.handle)

    def facts(self):
        facts = Facts()
        _facts(self.handle, facts)
        return facts

    def reverse(self):
        _reverse(self.handle)

    def release(self, elsewhere=False):
        _release(self.handle, elsewhere)
        self.handle = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.handle is not None:
            self.release()
