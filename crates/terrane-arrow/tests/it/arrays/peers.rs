//! Arrays of arrow-rs, with its own types and its implementation of the C interface.

use std::mem;
use std::sync::Arc;

use arrow_array::builder::{Int32Builder, ListBuilder, MapBuilder, StringBuilder};
use arrow_array::types::{Int8Type, Int32Type};
use arrow_array::{
    Array, ArrayRef, BinaryArray, BooleanArray, Decimal128Array, DictionaryArray,
    FixedSizeBinaryArray, Float64Array, Int32Array, LargeStringArray, NullArray, RecordBatch,
    RunArray, StringArray, StringViewArray, StructArray, TimestampMicrosecondArray, UInt8Array,
    UnionArray, make_array,
};
use arrow_buffer::ScalarBuffer;
use arrow_schema::{DataType, Field, Schema};
use terrane_arrow::arrays::abi::{ArrowArray, ArrowSchema, Owned};
use terrane_arrow::arrays::{
    ExportError, export_field, from_arrow, import_array, import_field, to_arrow,
};
use terrane_arrow::columns::{Column, ColumnParts, Origin};
use terrane_core::{Allocate, ByteCount, ForeignMemory, Location, Region, RegionRequest};
use terrane_testkit::memory::HeapAllocator;

use super::exported;

/// Arrays of every shape, with nulls where the type permits them.
fn arrays() -> Vec<ArrayRef> {
    let mut lists = ListBuilder::new(Int32Builder::new());
    lists.append_value([Some(1), None, Some(3)]);
    lists.append_null();
    lists.append_value([]);
    let mut maps = MapBuilder::new(None, StringBuilder::new(), Int32Builder::new());
    maps.keys().append_value("a");
    maps.values().append_value(1);
    maps.append(true).unwrap();
    maps.append(false).unwrap();
    let number: ArrayRef = Arc::new(Int32Array::from(vec![Some(1), None, Some(3)]));
    let text: ArrayRef = Arc::new(StringArray::from(vec![Some("one"), Some(""), None]));
    let fields =
        vec![Field::new("n", DataType::Int32, true), Field::new("t", DataType::Utf8, true)];
    let columns = vec![Arc::clone(&number), Arc::clone(&text)];
    let nulls = Some(vec![true, false, true].into());
    let union = arrow_schema::UnionFields::try_new([0, 1], fields.clone()).unwrap();
    let types: ScalarBuffer<i8> = vec![0_i8, 1, 1].into();
    let offsets: ScalarBuffer<i32> = vec![0, 0, 1].into();
    let fixed = arrow_array::FixedSizeListArray::from_iter_primitive::<Int32Type, _, _>(
        vec![Some(vec![Some(1), None]), None, Some(vec![Some(3), Some(4)])],
        2,
    );
    vec![
        Arc::clone(&number),
        Arc::clone(&text),
        Arc::new(NullArray::new(3)),
        Arc::new(BooleanArray::from(vec![Some(true), None, Some(false)])),
        Arc::new(UInt8Array::from(vec![1, 2, 3])),
        Arc::new(Float64Array::from(Vec::<f64>::new())),
        Arc::new(StringArray::from(Vec::<&str>::new())),
        Arc::new(Decimal128Array::from(vec![Some(1), None])),
        Arc::new(TimestampMicrosecondArray::from(vec![1, 2]).with_timezone("Europe/Berlin")),
        Arc::new(LargeStringArray::from(vec!["x", "yz"])),
        Arc::new(BinaryArray::from(vec![&b"\xff"[..], b""])),
        Arc::new(FixedSizeBinaryArray::try_from_iter([[1, 2, 3], [4, 5, 6]].into_iter()).unwrap()),
        Arc::new(StringViewArray::from(vec!["short", "longer than twelve bytes", "three"])),
        Arc::new(lists.finish()),
        Arc::new(maps.finish()),
        Arc::new(fixed),
        Arc::new(StructArray::new(fields.into(), columns.clone(), nulls)),
        Arc::new(vec!["a", "b", "a"].into_iter().collect::<DictionaryArray<Int8Type>>()),
        Arc::new(vec!["a", "a", "b"].into_iter().collect::<RunArray<Int32Type>>()),
        Arc::new(UnionArray::try_new(union.clone(), types.clone(), None, columns.clone()).unwrap()),
        Arc::new(UnionArray::try_new(union, types, Some(offsets), columns).unwrap()),
    ]
}

#[test]
fn arrays_become_columns_and_arrays_again_without_a_copy() {
    for array in arrays() {
        let slices = (0..=array.len()).flat_map(|end| (0..=end).map(move |start| (start, end)));
        for (start, end) in slices {
            let part = array.slice(start, end - start);
            let data = part.to_data();
            let column = from_arrow(&data).unwrap();
            assert_eq!(column.origin(), Origin::Arrow);
            assert!(column.buffers().iter().flatten().all(|buffer| buffer.region().is_err()));
            // SAFETY: arrow-rs's buffers are immutable.
            let back = unsafe { to_arrow(&column) }.unwrap();
            for (buffer, theirs) in back.buffers().iter().zip(data.buffers()) {
                let same = buffer.as_ptr() == theirs.as_ptr();
                assert!(same || theirs.is_empty() || part.is_empty(), "{}", array.data_type());
            }
            assert_eq!(&make_array(back), &part, "{} {start}..{end}", array.data_type());
        }
    }
}

/// Converts this crate's structures to arrow-rs's, which have the same layout.
fn theirs(array: Owned<ArrowArray>, schema: Owned<ArrowSchema>) -> ArrayRef {
    // SAFETY: both types have the same fields in the same order, as the specification requires.
    let array = unsafe {
        mem::transmute::<ArrowArray, arrow_array::ffi::FFI_ArrowArray>(array.into_inner())
    };
    // SAFETY: as above.
    let schema = unsafe {
        mem::transmute::<ArrowSchema, arrow_array::ffi::FFI_ArrowSchema>(schema.into_inner())
    };
    // SAFETY: this crate's exports created them, over memory that no code writes.
    make_array(unsafe { arrow_array::ffi::from_ffi(array, &schema) }.unwrap())
}

#[test]
fn arrow_rs_imports_exports_and_exports_imports() {
    for array in arrays() {
        let (mut out, mut schema) = arrow_array::ffi::to_ffi(&array.to_data()).unwrap();
        // SAFETY: arrow-rs created it.
        let field = unsafe { import_field((&raw mut schema).cast()) }.unwrap();
        assert_eq!(field.data_type(), array.data_type());
        // SAFETY: arrow-rs created it, and no other code releases it.
        let taken = unsafe { Owned::<ArrowArray>::take((&raw mut out).cast()) }.unwrap();
        // SAFETY: arrow-rs created it.
        let column = unsafe { import_array(field.data_type(), taken) }.unwrap();
        let back = theirs(exported(&column).unwrap(), export_field(&field).unwrap());
        assert_eq!(&back, &array, "{}", array.data_type());
    }
}

#[test]
fn our_memory_is_an_array_of_arrow_rs_until_that_drops() {
    let allocator = HeapAllocator::system();
    let request = RegionRequest::new(ByteCount::new(40)).aligned_to(terrane_core::Alignment::of(8));
    let region = Region::new(allocator.allocate(&request).unwrap());
    let Location::Host(address) = terrane_core::Memory::location(&region) else { unreachable!() };
    for number in 0..10_u8 {
        let at = address.as_ptr().wrapping_add(4 * usize::from(number)).cast::<i32>();
        // SAFETY: the memory has 40 bytes, is aligned, and no other code uses it.
        unsafe { at.write(i32::from(number)) };
    }
    let column = Column::new(DataType::Int32, 10, region).unwrap();
    // SAFETY: no code writes the memory from now on.
    let array = make_array(unsafe { to_arrow(&column.slice(2, 3).unwrap()) }.unwrap());
    let schema = Schema::new(vec![Field::new("n", DataType::Int32, false)]);
    let batch = RecordBatch::try_new(Arc::new(schema), vec![array]).unwrap();
    drop(column);
    assert_eq!(allocator.live(), 1);
    let expected: ArrayRef = Arc::new(Int32Array::from(vec![2, 3, 4]));
    assert_eq!(batch.column(0), &expected);
    let values = batch.column(0).to_data().buffers()[0].as_ptr().addr();
    assert_eq!(values, address.as_ptr().addr() + 2 * 4);
    // Converted to a column, which is over the original memory.
    let data = StructArray::from(batch).into_data();
    let column = from_arrow(&data).unwrap();
    assert_eq!(column.children()[0].origin(), Origin::Owned, "recognised");
    let values = column.children()[0].buffers()[1].as_ref().unwrap();
    assert!(values.region().is_err(), "arrow-rs has the same bytes as a slice");
    drop(data);
    assert_eq!((allocator.live(), column.children()[0].len()), (1, 3));
    drop(column);
    allocator.assert_all_freed();
}

#[test]
fn memory_of_ours_that_another_library_hands_over_is_ours() {
    let allocator = HeapAllocator::system();
    let request = RegionRequest::new(ByteCount::new(40)).aligned_to(terrane_core::Alignment::of(8));
    let region = Region::new(allocator.allocate(&request).unwrap());
    let column = Column::new(DataType::Int32, 10, region).unwrap();
    let field = Field::new("n", DataType::Int32, false);
    let array = theirs(exported(&column).unwrap(), export_field(&field).unwrap());
    let (part, _) = arrow_array::ffi::to_ffi(&array.slice(3, 4).to_data()).unwrap();
    let mut part = mem::ManuallyDrop::new(part);
    // SAFETY: arrow-rs created it, and no other code releases it.
    let part = unsafe { Owned::<ArrowArray>::take((&raw mut *part).cast()) }.unwrap();
    // SAFETY: arrow-rs created it.
    let back = unsafe { import_array(&DataType::Int32, part) }.unwrap();
    let values = |column: &Column| column.buffers()[1].clone().unwrap();
    assert_eq!((back.origin(), back.len()), (Origin::Owned, 4));
    assert!(values(&back).same_memory(&values(&column)));
    assert!(
        values(&back).region().is_err(),
        "arrow-rs still uses it, and expects it not to change"
    );
    drop((column, array));
    assert_eq!(allocator.live(), 1);
    // SAFETY: no other code uses it any more.
    let back = unsafe { back.into_writable() };
    assert!(values(&back).region().is_ok() && back.origin() == Origin::Owned);
    // No memory is exported any more, so other memory may get the address.
    drop(back);
    allocator.assert_all_freed();
}

#[test]
fn values_that_break_the_rules_of_their_type_are_no_array() {
    let allocator = HeapAllocator::system();
    let filled = |bytes: &[u8]| {
        let count = ByteCount::from_usize(bytes.len());
        let request = RegionRequest::new(count).aligned_to(terrane_core::Alignment::of(8));
        let region = Region::new(allocator.allocate(&request).unwrap());
        let Location::Host(to) = terrane_core::Memory::location(&region) else { unreachable!() };
        // SAFETY: the memory has as many bytes, and no other code uses it.
        unsafe { to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Some(region.into())
    };
    let texts = |offsets: [i32; 3], data: &[u8]| {
        let offsets = offsets.map(i32::to_ne_bytes).concat();
        let parts = ColumnParts {
            data_type: DataType::Utf8,
            length: 2,
            offset: 0,
            null_count: Some(0),
            buffers: vec![None, filled(&offsets), filled(data)],
            children: vec![],
            dictionary: None,
        };
        // SAFETY: no code writes the memory.
        unsafe { to_arrow(&Column::from_parts(parts).unwrap()) }
    };
    assert!(texts([0, 1, 3], b"abc").is_ok());
    for (offsets, data) in [
        ([0, 2, 1], &b"abc"[..]),
        ([0, 1, 9], b"abc"),
        ([0, 1, 3], b"a\xff\xff"),
        ([-1, 0, 1], b"a"),
    ] {
        let error = texts(offsets, data).unwrap_err();
        assert!(matches!(error, ExportError::Arrow { .. }), "{error}");
    }
    let device = HeapAllocator::simulated_device(0);
    let request = RegionRequest::new(ByteCount::new(8));
    let column = Column::new(DataType::Int8, 8, Region::new(device.allocate(&request).unwrap()));
    // SAFETY: no code writes the memory.
    let error = unsafe { to_arrow(&column.unwrap()) }.unwrap_err();
    assert!(matches!(error, ExportError::NotHost { .. }), "{error}");
}

#[test]
fn memory_at_the_place_of_one_that_has_gone_is_recognised_when_it_goes_out_again() {
    let allocator = HeapAllocator::system();
    let request = RegionRequest::new(ByteCount::new(40)).aligned_to(terrane_core::Alignment::of(8));
    let memory = Region::new(allocator.allocate(&request).unwrap());
    let column = || {
        // SAFETY: the allocation is kept alive, and no code uses its bytes.
        let same = unsafe { ForeignMemory::new(memory.span(), memory.clone()) };
        Column::new(DataType::Int32, 10, Region::new(same)).unwrap()
    };
    let (first, second) = (column(), column());
    let (gone, _out) = (exported(&first).unwrap(), exported(&second).unwrap());
    drop((gone, first));
    let field = Field::new("n", DataType::Int32, false);
    let array = theirs(exported(&second).unwrap(), export_field(&field).unwrap());
    let back = from_arrow(&array.to_data()).unwrap();
    assert_eq!(back.origin(), Origin::Owned);
    let values = |column: &Column| column.buffers()[1].clone().unwrap();
    assert!(values(&back).same_memory(&values(&second)));
}
