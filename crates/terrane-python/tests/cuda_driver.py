"""Uses CUDA's driver through ctypes, like another library of the process: memory, streams, tensors with
`__dlpack__`."""

import contextlib
import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p

import numpy

CUDA = 2
PINNED = 3


class CudaMissing(Exception):
    """There is no driver, or no device."""


class Driver:
    """A device of the driver, and its primary context, which each call makes current on its thread."""

    def __init__(self, number=0):
        self.number, self.context = number, None
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaMissing(f"no CUDA driver: {error}") from error
        device, context = c_int(), c_void_p()
        try:
            self.call("cuInit", c_uint32(0))
            self.call("cuDeviceGet", byref(device), c_int(number))
        except RuntimeError as error:
            raise CudaMissing(f"no CUDA device {number}: {error}") from error
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.context = context

    def call(self, name, *arguments):
        if self.context is not None:
            self.library.cuCtxSetCurrent(self.context)
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} returned {code}")

    def free_bytes(self):
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def synchronize(self):
        self.call("cuCtxSynchronize")

    @contextlib.contextmanager
    def limited(self):
        """Holds all work back. The function that it returns lets further operations run. Only a simulated device supports
        this."""
        limit = lambda most: self.call("terraneSimulatedLimit", c_uint64(most))
        limit(0)
        try:
            yield limit
        finally:
            limit((1 << 64) - 1)

    @property
    def is_simulated(self):
        return hasattr(self.library, "terraneSimulatedHold")


class Stream:
    """A stream that does not wait for the default stream."""

    def __init__(self, driver):
        self.driver, self.handle = driver, c_void_p()
        driver.call("cuStreamCreate", byref(self.handle), c_uint32(1))

    def hold(self):
        """Suspends the stream's work until `let_go`. Only a simulated device supports this."""
        self.driver.call("terraneSimulatedHold", self.handle)

    def let_go(self):
        self.driver.call("terraneSimulatedRelease", self.handle)

    def wait_for(self, other):
        """Makes later work of this stream wait for the work of `other`, a stream handle."""
        event = c_void_p()
        self.driver.call("cuEventCreate", byref(event), c_uint32(2))
        self.driver.call("cuEventRecord", event, c_void_p(other))
        self.driver.call("cuStreamWaitEvent", self.handle, event, c_uint32(0))
        self.driver.call("cuEventDestroy_v2", event)


class _Device(ctypes.Structure):
    _fields_ = [("device_type", c_uint32), ("device_id", c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", _Device),
        ("ndim", c_int32),
        ("dtype", _DataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", c_void_p), ("deleter", _DELETER)]

_DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.py_object)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))

# Structures that a consumer has not returned yet, by address.
handed_out = {}


@_DELETER
def _returned(managed):
    handed_out.pop(ctypes.addressof(managed.contents))


class DeviceTensor:
    """An array of 16-bit integers on the device, with the interface that DLPack's consumers expect."""

    def __init__(self, driver, shape):
        self.driver, self.shape, self.address = driver, shape, c_uint64()
        self.nbytes = 2 * int(numpy.prod(shape))
        self.stream = None
        self.asked = []
        driver.call("cuMemAlloc_v2", byref(self.address), c_size_t(self.nbytes))
        driver.call("cuMemsetD8_v2", self.address, c_uint8(0), c_size_t(self.nbytes))
        driver.synchronize()

    def data_ptr(self):
        return self.address.value

    def fill(self, array, stream):
        """Copies the array to the device as work of a stream. The array must live until the copy has completed."""
        source = c_void_p(array.ctypes.data)
        self.driver.call("cuMemcpyHtoDAsync_v2", self.address, source, c_size_t(self.nbytes), stream.handle)

    def content(self):
        array = numpy.empty(self.shape, dtype=numpy.uint16)
        self.driver.call("cuMemcpyDtoH_v2", c_void_p(array.ctypes.data), self.address, c_size_t(self.nbytes))
        return array

    def clear(self):
        self.driver.call("cuMemsetD8_v2", self.address, c_uint8(0), c_size_t(self.nbytes))
        self.driver.synchronize()

    def free(self):
        self.driver.call("cuMemFree_v2", self.address)

    def __dlpack_device__(self):
        return CUDA, self.driver.number

    def __dlpack__(self, *, stream=None):
        """Supports no version, like libraries before DLPack 1.0. The producer's work is on `self.stream`."""
        self.asked.append(stream)
        if stream not in (None, -1) and self.stream is not None:
            consumer = Stream.__new__(Stream)
            consumer.driver, consumer.handle = self.driver, c_void_p(stream)
            consumer.wait_for(self.stream.handle.value)
        axes = len(self.shape)
        sizes = (c_int64 * axes)(*self.shape)
        managed = _Managed()
        managed.tensor = _Tensor(self.address.value, _Device(CUDA, self.driver.number), axes, _DataType(1, 16, 1), sizes, None, 0)
        managed.deleter = _returned
        address = ctypes.addressof(managed)
        handed_out[address] = (managed, sizes, self)
        return _new(address, b"dltensor", ctypes.cast(_destroy, c_void_p))


_is_valid = ctypes.PYFUNCTYPE(c_int, ctypes.c_void_p, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(c_void_p, ctypes.c_void_p, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


@ctypes.PYFUNCTYPE(None, c_void_p)
def _destroy(capsule):
    """Returns the tensor of a capsule that no consumer took."""
    if _is_valid(capsule, b"dltensor"):
        handed_out.pop(_pointer(capsule, b"dltensor"))


@contextlib.contextmanager
def tensors(driver, count, shape):
    """This number of tensors on the device, freed at the end."""
    made = [DeviceTensor(driver, shape) for _ in range(count)]
    try:
        yield made
    finally:
        driver.synchronize()
        for tensor in made:
            tensor.free()
