"""Arrays and record batches between Terrane and pyarrow, with both of Arrow's C interfaces."""

import ctypes
import decimal
import gc
import threading

import pyarrow

from arrow import ARRAY, ARROW, DEVICE_ARRAY, OWNED, SCHEMA, Column, OnDevice, Place, pointer_of
from proof import ProofError, ProofTest, live


def expected(rows):
    """The contents of Terrane's record batches."""
    schema = pyarrow.schema(
        [
            pyarrow.field("token", pyarrow.uint32(), nullable=False),
            pyarrow.field("score", pyarrow.float64()),
            pyarrow.field("odd", pyarrow.bool_(), nullable=False),
        ]
    )
    columns = {
        "token": range(rows),
        "score": [None if row % 3 == 0 else row / 2 for row in range(rows)],
        "odd": [row % 2 == 1 for row in range(rows)],
    }
    return pyarrow.record_batch(columns, schema)


def arrays():
    """Arrays of every shape, with nulls if the type permits them, and slices of them."""
    number = pyarrow.array([1, None, 3, 4])
    text = pyarrow.array(["one", "", None, "four"])
    whole = [
        number,
        text,
        pyarrow.nulls(4),
        pyarrow.array([True, None, False, True]),
        pyarrow.array([], pyarrow.float32()),
        pyarrow.array([1.5, 2.5], pyarrow.float16()),
        pyarrow.array([decimal.Decimal("1.25"), None]),
        pyarrow.array([b"abc", b"def"], pyarrow.binary(3)),
        pyarrow.array([b"\xff", None], pyarrow.large_binary()),
        pyarrow.array(["short", "longer than twelve bytes", None], pyarrow.string_view()),
        pyarrow.array([1, None], pyarrow.timestamp("us", "Europe/Berlin")),
        pyarrow.array([[1, None], None, [], [3]]),
        pyarrow.array([[1, 2], None, [3, 4]], pyarrow.list_(pyarrow.int16(), 2)),
        pyarrow.array([[("a", 1)], None, []], pyarrow.map_(pyarrow.string(), pyarrow.int32())),
        pyarrow.array(["a", "b", None, "a"]).dictionary_encode(),
        pyarrow.StructArray.from_arrays([number, text], ["number", "text"]),
        pyarrow.UnionArray.from_sparse(
            pyarrow.array([0, 1, 1, 0], pyarrow.int8()), [number, text]
        ),
        pyarrow.UnionArray.from_dense(
            pyarrow.array([0, 1, 1], pyarrow.int8()),
            pyarrow.array([0, 0, 2], pyarrow.int32()),
            [number, text],
        ),
        pyarrow.RunEndEncodedArray.from_arrays(
            pyarrow.array([2, 4], pyarrow.int32()), pyarrow.array(["a", "b"])
        ),
    ]
    for array in whole:
        yield array
        yield from (array.slice(start, 2) for start in range(len(array)))


class Outward(ProofTest):
    def test_pyarrow_sees_a_record_batch_in_its_place(self):
        with Column.made(1000) as column:
            batch = pyarrow.record_batch(column)
            facts = column.facts(child=0)
        batch.validate(full=True)
        self.assertTrue(batch.equals(expected(1000)))
        self.assertEqual(batch.column(0).buffers()[1].address, facts.address)
        self.assertEqual(live(), (1, 0), "one allocation, which pyarrow keeps")
        part = batch.column(1).slice(500, 3)
        del batch
        self.assertEqual(part.to_pylist(), [250.0, None, 251.0])
        self.assertEqual(live(), (1, 0))
        del part
        self.assertEqual(live(), (0, 0))

    def test_by_pointers_and_with_the_device(self):
        with Column.made(100) as column:
            schema, array = Place(SCHEMA), Place(ARRAY)
            column.export_to(schema.pointer, array.pointer)
            batch = pyarrow.RecordBatch._import_from_c(array.pointer, schema.pointer)
            self.assertTrue(schema.is_released() and array.is_released(), "moved")
            self.assertTrue(batch.equals(expected(100)))
            schema, array = Place(SCHEMA), Place(DEVICE_ARRAY)
            column.export_to(schema.pointer, array.pointer, on_device=True)
            batch = pyarrow.RecordBatch._import_from_c_device(array.pointer, schema.pointer)
            self.assertTrue(batch.equals(expected(100)))
            batch = pyarrow.record_batch(OnDevice(column))
            self.assertTrue(batch.equals(expected(100)) and batch.is_cpu)

    def test_what_nobody_takes_is_released(self):
        with Column.made(100) as column:
            capsules = column.__arrow_c_array__(), OnDevice(column).__arrow_c_device_array__()
            places = Place(SCHEMA), Place(ARRAY)
            column.export_to(*(place.pointer for place in places))
        self.assertEqual(live(), (1, 0))
        del capsules
        self.assertEqual(live(), (1, 0))
        del places
        self.assertEqual(live(), (0, 0))

    def test_batches_of_nothing(self):
        with Column.made(0) as column:
            batch = pyarrow.record_batch(column)
        batch.validate(full=True)
        self.assertEqual((batch.num_rows, batch.num_columns), (0, 3))

    def test_released_on_another_thread(self):
        with Column.made(100) as column:
            batches = [pyarrow.record_batch(column)]
        thread = threading.Thread(target=batches.clear)
        thread.start()
        thread.join()
        self.assertEqual(live(), (0, 0))


class Inward(ProofTest):
    def setUp(self):
        super().setUp()
        gc.collect()
        self.allocated = pyarrow.total_allocated_bytes()

    def tearDown(self):
        super().tearDown()
        gc.collect()
        self.assertEqual(pyarrow.total_allocated_bytes(), self.allocated, "pyarrow's own memory")

    def test_arrays_of_every_shape_there_and_back(self):
        for array in arrays():
            with self.subTest(type=str(array.type), offset=array.offset):
                for take in (Column.of, Column.of_device):
                    # An array without buffers keeps no memory alive.
                    kept = (0, int(not pyarrow.types.is_null(array.type)))
                    with take(array) as column:
                        self.assertEqual(live(), kept)
                        self.assertEqual(column.facts().rows, len(array))
                        back = pyarrow.array(column)
                    back.validate(full=True)
                    self.assertTrue(back.equals(array), f"{back} is not {array}")
                    self.assertEqual(live(), kept, "pyarrow keeps its memory, through Terrane")
                    del back
                    self.assertEqual(live(), (0, 0))

    def test_it_is_the_same_memory(self):
        array = pyarrow.array(range(1000))
        with Column.of(array) as column:
            facts = column.facts()
            self.assertEqual(facts.address, array.buffers()[1].address)
            self.assertEqual((facts.origin, facts.null_count), (ARROW, 0))
            back = pyarrow.array(column)
            self.assertEqual(back.buffers()[1].address, facts.address)

    def test_record_batches_and_values_in_the_eyes_of_arrow_rs(self):
        with Column.of(expected(500)) as theirs, Column.made(500) as ours:
            self.assertTrue(theirs.equals(ours))
            with Column.of(expected(500).slice(1)) as shorter:
                self.assertFalse(theirs.equals(shorter))
        with Column.of_device(expected(500)) as theirs:
            self.assertEqual((theirs.facts().rows, theirs.facts().children), (500, 3))

    def test_memory_outlives_what_it_came_from_and_ends_on_any_thread(self):
        array = pyarrow.array([1, 2, 3])
        column = Column.of(array)
        del array
        gc.collect()
        self.assertEqual(pyarrow.array(column).to_pylist(), [1, 2, 3])
        column.drop(elsewhere=True)
        self.assertEqual(live(), (0, 0))

    def test_capsules_are_taken_once(self):
        schema, array = pyarrow.array([1]).__arrow_c_array__()
        pointers = pointer_of(schema, SCHEMA), pointer_of(array, ARRAY)
        with Column.of_pointers(*pointers):
            with self.assertRaisesRegex(ProofError, "released"):
                Column.of_pointers(*pointers)

    def test_spoiled_structures_are_refused_and_released(self):
        # Except n_children, which pyarrow's callback trusts.
        for offset, value, reason in (
            (0, -1, "length is -1"),
            (8, 9, "9 nulls among 3 values"),
            (16, -5, "offset is -5"),
            (24, 7, "n_buffers is 7"),
            (0, 2**62, "larger than any memory"),
        ):
            schema, array = Place(SCHEMA), Place(ARRAY)
            pyarrow.array([1, 2, 3])._export_to_c(array.pointer, schema.pointer)
            ctypes.c_int64.from_address(array.pointer + offset).value = value
            with self.assertRaisesRegex(ProofError, reason):
                Column.of_pointers(schema.pointer, array.pointer)
            self.assertEqual(live(), (0, 0))


class Around(ProofTest):
    def test_what_comes_straight_back_is_the_very_same(self):
        with Column.made(100) as column:
            with Column.of(column) as back, Column.of_device(OnDevice(column)) as device:
                for same in (back, device):
                    self.assertEqual(same.facts().origin, OWNED)
                    self.assertEqual(same.facts(0).address, column.facts(0).address)
                self.assertEqual(live(), (1, 0), "no import: it is Terrane's own memory")

    def test_what_comes_back_through_pyarrow_is_the_same_memory(self):
        with Column.made(100) as column:
            batch = pyarrow.record_batch(column)
            for take in (Column.of, Column.of_device):
                with take(batch.slice(10, 50)) as back:
                    self.assertEqual((back.facts().origin, back.facts().rows), (OWNED, 50))
                    for child in range(3):
                        address = column.facts(child).address
                        self.assertEqual(back.facts(child).address, address)
                    self.assertEqual(live(), (1, 0), "pyarrow's array has been released")
            del batch
        self.assertEqual(live(), (0, 0))

    def test_ten_thousand_rounds_leave_nothing(self):
        batch = expected(64)
        allocated = pyarrow.total_allocated_bytes()

        def both_ways():
            with Column.made(64) as column:
                received = pyarrow.record_batch(column)
            assert received.num_rows == 64
            with Column.of(batch) as column:
                returned = pyarrow.record_batch(column)
            assert returned.num_rows == 64
            with Column.of_device(batch) as column:
                returned = pyarrow.record_batch(OnDevice(column))
            assert returned.num_rows == 64

        self.assert_no_growth(10_000, both_ways)
        gc.collect()
        self.assertEqual(pyarrow.total_allocated_bytes(), allocated)
        self.assertEqual(live(), (0, 0))
