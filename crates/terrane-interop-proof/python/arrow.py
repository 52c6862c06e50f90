"""Arrow's C interfaces between Python and Terrane: structures, capsules, and columns."""

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint32, c_uint64, c_void_p

from proof import function

SCHEMA, ARRAY, DEVICE_ARRAY = b"arrow_schema", b"arrow_array", b"arrow_device_array"
# The sizes of the structures, and the offsets of their callbacks.
SIZES = {SCHEMA: 72, ARRAY: 80, DEVICE_ARRAY: 128}
RELEASE = {SCHEMA: 56, ARRAY: 64, DEVICE_ARRAY: 64}

OWNED, ARROW = 0, 2

python = ctypes.pythonapi


def capsule_function(name, restype, *argtypes):
    return ctypes.PYFUNCTYPE(restype, *argtypes)((name, python))


new_capsule = capsule_function(
    "PyCapsule_New", ctypes.py_object, c_void_p, ctypes.c_char_p, c_void_p
)
pointer_of = capsule_function("PyCapsule_GetPointer", c_void_p, ctypes.py_object, ctypes.c_char_p)
pointer_at = capsule_function("PyCapsule_GetPointer", c_void_p, c_void_p, ctypes.c_char_p)
is_valid_at = capsule_function("PyCapsule_IsValid", ctypes.c_int, c_void_p, ctypes.c_char_p)

allocate = python.PyMem_RawCalloc
allocate.restype, allocate.argtypes = c_void_p, (ctypes.c_size_t, ctypes.c_size_t)
free = python.PyMem_RawFree
free.restype, free.argtypes = None, (c_void_p,)


class Facts(Structure):
    _fields_ = [
        ("rows", c_uint64),
        ("offset", c_uint64),
        ("null_count", c_int64),
        ("buffers", c_uint64),
        ("children", c_uint64),
        ("address", c_uint64),
        ("origin", c_uint32),
    ]


_make = function("terrane_proof_arrow_make", c_uint64, POINTER(c_void_p))
_import = function("terrane_proof_arrow_import", c_void_p, c_void_p, POINTER(c_void_p))
_import_device = function(
    "terrane_proof_arrow_import_device", c_void_p, c_void_p, POINTER(c_void_p)
)
_export = function("terrane_proof_arrow_export", c_void_p, c_void_p, c_void_p)
_export_device = function("terrane_proof_arrow_export_device", c_void_p, c_void_p, c_void_p)
_release = function("terrane_proof_arrow_release", c_void_p, c_void_p)
_facts = function("terrane_proof_arrow_facts", c_void_p, c_int64, POINTER(Facts))
_equal = function("terrane_proof_arrow_equal", c_void_p, c_void_p, POINTER(c_int32))
_drop = function("terrane_proof_arrow_drop", c_void_p, c_int32)


class Place:
    """Memory for a structure. If no consumer takes the structure, it is released with the
    memory."""

    def __init__(self, name):
        self.name = name
        self.pointer = allocate(1, SIZES[name])

    def is_released(self):
        return not c_void_p.from_address(self.pointer + RELEASE[self.name]).value

    def __del__(self):
        let_go(self.name, self.pointer)


def let_go(name, pointer):
    if name == SCHEMA:
        _release(pointer, None)
    else:
        # A device array begins with its array.
        _release(None, pointer)
    free(pointer)


@ctypes.PYFUNCTYPE(None, c_void_p)
def destroy(capsule):
    """The destructor of a capsule. It releases the structure unless a consumer has moved it."""
    for name in SIZES:
        if is_valid_at(capsule, name):
            let_go(name, pointer_at(capsule, name))


def capsule(name):
    """A capsule with memory for a structure, and its address."""
    pointer = allocate(1, SIZES[name])
    return new_capsule(pointer, name, ctypes.cast(destroy, c_void_p)), pointer


class Column:
    """A column that Terrane owns: an array, or a record batch as its struct."""

    def __init__(self, handle):
        self.handle = handle

    @classmethod
    def made(cls, rows):
        """A record batch in Terrane's memory."""
        handle = c_void_p()
        _make(rows, handle)
        return cls(handle)

    @classmethod
    def of_pointers(cls, schema, array, on_device=False):
        handle = c_void_p()
        (_import_device if on_device else _import)(schema, array, handle)
        return cls(handle)

    @classmethod
    def of(cls, array):
        """Imports from another library, with the capsules of the data interface."""
        schema, array = array.__arrow_c_array__()
        return cls.of_pointers(pointer_of(schema, SCHEMA), pointer_of(array, ARRAY))

    @classmethod
    def of_device(cls, array):
        """Imports with the device interface."""
        schema, array = array.__arrow_c_device_array__()
        pointers = pointer_of(schema, SCHEMA), pointer_of(array, DEVICE_ARRAY)
        return cls.of_pointers(*pointers, on_device=True)

    def export_to(self, schema, array, on_device=False):
        (_export_device if on_device else _export)(self.handle, schema, array)

    def __arrow_c_array__(self, requested_schema=None):
        (schema, schema_at), (array, array_at) = capsule(SCHEMA), capsule(ARRAY)
        self.export_to(schema_at, array_at)
        return schema, array

    def facts(self, child=-1):
        facts = Facts()
        _facts(self.handle, child, facts)
        return facts

    def equals(self, other):
        equal = c_int32()
        _equal(self.handle, other.handle, equal)
        return bool(equal.value)

    def drop(self, elsewhere=False):
        _drop(self.handle, elsewhere)
        self.handle = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.handle is not None:
            self.drop()


class OnDevice:
    """A column of a library that exports arrays with their device."""

    def __init__(self, column):
        self.column = column

    def __arrow_c_device_array__(self, requested_schema=None, **kwargs):
        (schema, schema_at), (array, array_at) = capsule(SCHEMA), capsule(DEVICE_ARRAY)
        self.column.export_to(schema_at, array_at, on_device=True)
        return schema, array
