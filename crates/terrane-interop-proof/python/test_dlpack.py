"""Single tensors between Terrane and NumPy, and between Terrane and the FFI of TVM."""

import ctypes
import gc
import threading
import weakref

import numpy
import tvm_ffi

from dlpack import BFLOAT, DELETER, FLOAT, FP8_E4M3FN, UINT, Exported, Imported, Versioned
from dlpack import capsule, handshake
from proof import ProofError, ProofTest, live


def pattern(length):
    """The contents of Terrane's tensors."""
    return (numpy.arange(length, dtype=numpy.uint64) * 7 + 3).astype(numpy.uint8)


class Outward(ProofTest):
    def test_numpy_sees_the_bytes_in_their_place(self):
        array = numpy.from_dlpack(Exported(UINT, [4, 5]))
        self.assertEqual((array.shape, array.strides), ((4, 5), (5, 1)))
        self.assertTrue((array.ravel() == pattern(20)).all())
        self.assertEqual(live(), (1, 0))
        # The array is the memory itself, not a copy.
        array[1, 2] = 99
        with Imported(array) as back:
            self.assertEqual(back.facts().address, array.ctypes.data)
        self.assertEqual(array[1, 2], 99)

    def test_strides_and_offsets(self):
        array = numpy.from_dlpack(Exported(UINT, [3, 4], [1, 3], by_offset=True))
        self.assertEqual(array.strides, (1, 3))
        self.assertTrue((array == pattern(12).reshape(4, 3).T).all())
        gaps = numpy.from_dlpack(Exported(FLOAT, [3, 4], [8, 1]))
        self.assertEqual(gaps.strides, (32, 4))

    def test_read_only_is_said(self):
        array = numpy.from_dlpack(Exported(UINT, [8], read_only=True))
        self.assertFalse(array.flags.writeable)
        self.assertTrue(numpy.from_dlpack(Exported(UINT, [8])).flags.writeable)
        with self.assertRaisesRegex(ProofError, "a legacy tensor cannot be read-only"):
            Exported(UINT, [8], read_only=True).__dlpack__()

    def test_legacy_tensors(self):
        # It requests no version.
        tensor = tvm_ffi.from_dlpack(Exported(UINT, [8]))
        self.assertEqual(live(), (1, 0))
        with Imported(tensor) as back:
            back.reverse()
        self.assertTrue((numpy.from_dlpack(tensor) == pattern(8)[::-1]).all())

    def test_scalars_and_tensors_of_nothing(self):
        self.assertEqual(numpy.from_dlpack(Exported(FLOAT, [])).shape, ())
        self.assertEqual(numpy.from_dlpack(Exported(FLOAT, [3, 0, 2])).shape, (3, 0, 2))

    def test_a_tensor_is_taken_whatever_comes_of_it(self):
        # The device does not exist: the call is wrong, but the tensor is valid.
        with self.assertRaises(ProofError):
            Imported(Exported(UINT, [8]), max_version=(1, 3), device=99)
        self.assertEqual(live(), (0, 0))

    def test_a_tensor_that_nobody_takes_is_released(self):
        for version in (None, (0, 8), (1, 0), (1, 3)):
            unused = Exported(UINT, [8]).__dlpack__(max_version=version)
            self.assertEqual(live(), (1, 0))
            del unused

    def test_memory_lives_as_long_as_the_last_view(self):
        array = numpy.from_dlpack(Exported(UINT, [64]))
        view = array[10:20]
        del array
        gc.collect()
        self.assertEqual(live(), (1, 0))
        self.assertTrue((view == pattern(64)[10:20]).all())

    def test_a_deleter_runs_on_any_thread(self):
        arrays = [numpy.from_dlpack(Exported(UINT, [64])) for _ in range(4)]
        threads = [threading.Thread(target=lambda: arrays.pop()) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(live(), (0, 0))

    def test_types_that_numpy_does_not_have(self):
        for dtype, name in ((BFLOAT, "bfloat16"), (FP8_E4M3FN, "float8_e4m3fn")):
            tensor = tvm_ffi.from_dlpack(Exported(dtype, [4, 8]))
            self.assertEqual((tensor.shape, str(tensor.dtype)), ((4, 8), name))
            with Imported(tensor) as back:
                facts = back.facts()
                self.assertEqual((facts.code, facts.bits, facts.lanes), (*dtype, 1))
            del tensor

    def test_the_host_has_no_streams(self):
        for stream in (-1, 0, 1, 2, 4096):
            with self.assertRaisesRegex(ProofError, "has no streams"):
                Exported(UINT, [8]).__dlpack__(stream=stream)
        for stream, text in ((0, "ambiguous"), (-2, "does not exist")):
            with self.assertRaisesRegex(ProofError, text):
                handshake(0, stream, True)


class Inward(ProofTest):
    def test_an_array_of_numpy_is_memory(self):
        array = numpy.arange(12, dtype=numpy.uint8).reshape(3, 4)
        for arguments in ({}, {"max_version": (1, 3)}):
            with Imported(array, **arguments) as tensor:
                facts = tensor.facts()
                self.assertEqual((facts.address, facts.bytes), (array.ctypes.data, 12))
                self.assertEqual((facts.code, facts.bits), UINT)
                self.assertEqual((facts.is_read_only, facts.is_copied, facts.is_dense), (0, 0, 1))
                tensor.reverse()
        # Reversed twice.
        self.assertTrue((array.ravel() == numpy.arange(12)).all())
        with Imported(array.T, max_version=(1, 3)) as tensor:
            tensor.reverse()
        self.assertTrue((array.ravel() == numpy.arange(12)[::-1]).all())

    def test_the_array_lives_until_terrane_lets_go(self):
        for elsewhere in (False, True):
            array = numpy.ones(1000)
            gone = weakref.ref(array)
            tensor = Imported(array, max_version=(1, 3))
            del array
            gc.collect()
            self.assertIsNotNone(gone())
            tensor.release(elsewhere)
            gc.collect()
            self.assertIsNone(gone())

    def test_read_only_arrays_are_no_memory(self):
        array = numpy.arange(8)
        array.flags.writeable = False
        with Imported(array, max_version=(1, 3)) as tensor:
            self.assertEqual(tensor.facts().is_read_only, 1)
            with self.assertRaisesRegex(ProofError, "the tensor is read-only"):
                tensor.reverse()
        with Imported(array, max_version=(1, 3), copy=True) as tensor:
            self.assertEqual(tensor.facts().is_copied, 1)

    def test_views_that_are_no_memory(self):
        array = numpy.arange(24, dtype=numpy.int32).reshape(4, 6)
        with Imported(array[:, :3], max_version=(1, 3)) as tensor:
            self.assertEqual(tensor.facts().is_dense, 0)
            with self.assertRaisesRegex(ProofError, "do not fill"):
                tensor.reverse()

    def test_tensors_of_tvm(self):
        tensor = tvm_ffi.from_dlpack(numpy.arange(6, dtype=numpy.float32).reshape(2, 3))
        with Imported(tensor) as taken:
            facts = taken.facts()
            self.assertEqual((facts.code, facts.bits, facts.axes), (*FLOAT, 2))
            taken.reverse()
            taken.reverse()


class Pointers(ProofTest):
    """Pointers and capsules. `terrane-python` tests invalid structures."""

    def setUp(self):
        super().setUp()
        self.deleted = 0
        self.bytes = (ctypes.c_uint8 * 256)()

    def structure(self):
        @DELETER
        def deleter(_):
            self.deleted += 1

        axes = (ctypes.c_int64 * 64)(*[2] * 64)
        made = Versioned(major=1, minor=3, deleter=deleter)
        made.tensor.data = ctypes.addressof(self.bytes)
        made.tensor.device.device_type = 1
        made.tensor.ndim = 2
        made.tensor.dtype.code, made.tensor.dtype.bits, made.tensor.dtype.lanes = 1, 8, 1
        made.tensor.shape = ctypes.addressof(axes)
        made.keep = (axes, deleter)
        return made

    def test_pointers_that_are_none(self):
        with self.assertRaisesRegex(ProofError, "is null"):
            Imported(pointer=0)
        with self.assertRaisesRegex(ProofError, "not a multiple of 8"):
            Imported(pointer=0x1001)

    def test_a_capsule_that_nobody_takes_deletes_its_tensor(self):
        made = self.structure()
        unused = capsule(ctypes.addressof(made))
        del unused
        self.assertEqual(self.deleted, 1)


class Rounds(ProofTest):
    def test_ten_thousand_rounds_without_growth(self):
        source = numpy.arange(4096, dtype=numpy.uint8)

        def body():
            array = numpy.from_dlpack(Exported(UINT, [16, 256]))
            with Imported(array, max_version=(1, 3)) as tensor:
                tensor.reverse()
            with Imported(source, max_version=(1, 3)):
                pass
            try:
                Imported(source[::-1], max_version=(1, 3))
            except ProofError:
                pass

        self.assert_no_growth(10_000, body)
