//! Columns from tensors and tensors from columns.

use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema};
use terrane_arrow::columns::{
    Column, ColumnError, ColumnarBuffer, HostOrder, Origin, RowCountWidth,
};
use terrane_core::{Alignment, Allocate, ByteCount, Region, RegionRequest};
use terrane_interop::dlpack::{
    ElementType, ImportedTensor, Importer, TensorExport, TensorShape, TypeCode,
};
use terrane_testkit::memory::HeapAllocator;

fn region(allocator: &HeapAllocator, bytes: u64) -> Region {
    let request = RegionRequest::new(ByteCount::new(bytes)).aligned_to(Alignment::of(8));
    Region::new(allocator.allocate(&request).unwrap())
}

/// Imports the tensor as a consumer does.
fn taken(export: TensorExport) -> ImportedTensor {
    let pointer = export.into_versioned().unwrap().into_raw();
    // SAFETY: this crate created the tensor, and it is passed on once.
    unsafe { Importer::new().versioned(pointer.as_ptr()) }.unwrap()
}

/// A tensor over memory that no column has exported.
fn foreign(shape: TensorShape, read_only: bool) -> ImportedTensor {
    let region = region(&HeapAllocator::system(), shape.bytes().get());
    // SAFETY: no code uses the memory.
    let export = unsafe { TensorExport::new(region, shape) }.unwrap();
    taken(if read_only { export.read_only() } else { export })
}

fn compact(element: ElementType, sizes: &[u64]) -> TensorShape {
    TensorShape::compact(element, sizes).unwrap()
}

#[test]
fn a_column_reimported_as_a_tensor_is_the_same_memory() {
    let allocator = HeapAllocator::system();
    let column = Column::new(DataType::Int32, 10, region(&allocator, 40)).unwrap();
    let part = column.slice(2, 5).unwrap();
    // SAFETY: no code uses the memory.
    let tensor = taken(unsafe { part.to_tensor() }.unwrap());
    assert_eq!((tensor.shape().sizes(), tensor.is_read_only()), (&[5][..], false));
    let back = Column::from_tensor(&tensor).unwrap();
    let values = |column: &Column| column.buffers()[1].clone().unwrap();
    assert_eq!((back.origin(), back.len()), (Origin::Owned, 5));
    assert!(values(&back).same_memory(&values(&column)));
    assert!(values(&back).region().is_err(), "its former owner may still have it");
    let from = values(&column).location().checked_add(ByteCount::new(8)).unwrap();
    assert_eq!(back.values(), Some(from));
    drop((column, part, tensor));
    assert_eq!(allocator.live(), 1);
    drop(back);
    allocator.assert_all_freed();
}

#[test]
fn foreign_tensors_are_kept_and_written_only_if_they_may_be() {
    for read_only in [false, true] {
        let tensor = foreign(compact(ElementType::F32, &[6]), read_only);
        let column = Column::from_tensor(&tensor).unwrap();
        assert_eq!((column.origin(), column.data_type()), (Origin::DlPack, &DataType::Float32));
        assert_eq!(column.values(), Some(tensor.location()));
        drop(tensor);
        let buffer = column.buffers()[1].as_ref().unwrap();
        assert_eq!(buffer.region().is_err(), read_only);
        // SAFETY: no code uses the memory.
        let again = unsafe { column.to_tensor() }.unwrap();
        assert_eq!(again.is_read_only(), read_only);
    }
}

#[test]
fn reimported_columns_keep_their_origin_and_are_read_only() {
    for read_only in [false, true] {
        let theirs = Column::from_tensor(&foreign(compact(ElementType::F32, &[6]), read_only));
        let theirs = theirs.unwrap();
        // SAFETY: no code uses the memory.
        let tensor = taken(unsafe { theirs.to_tensor() }.unwrap());
        let back = Column::from_tensor(&tensor).unwrap();
        assert_eq!(back.origin(), Origin::DlPack, "a round trip does not make it Terrane's");
        assert!(back.buffers()[1].as_ref().unwrap().region().is_err());
    }
    let allocator = HeapAllocator::system();
    let ours = Column::new(DataType::Int32, 10, region(&allocator, 40)).unwrap();
    // SAFETY: no code uses the memory.
    let tensor = taken(unsafe { ours.to_tensor() }.unwrap().read_only());
    let back = Column::from_tensor(&tensor).unwrap();
    let values = back.buffers()[1].as_ref().unwrap();
    assert!(values.region().is_err() && values.origin() == Origin::Owned);
    // SAFETY: no code uses the memory.
    let again = taken(unsafe { back.to_tensor() }.unwrap());
    assert!(again.is_read_only());
    assert_eq!(Column::from_tensor(&again).unwrap().origin(), Origin::Owned);
}

#[test]
fn record_batches_are_whose_their_columns_are() {
    let allocator = HeapAllocator::system();
    let schema = || Arc::new(Schema::new(vec![Field::new("n", DataType::Float32, false)]));
    let batch = |column: Column| {
        let count = region(&allocator, 8);
        let width = RowCountWidth::U64;
        let buffer = ColumnarBuffer::from_columns(schema(), vec![column], 6, count, width);
        let mut buffer = buffer.unwrap();
        // SAFETY: no other code uses the buffer.
        unsafe { buffer.set_rows(6, &HostOrder) }.unwrap();
        buffer.record_batch().unwrap()
    };
    let theirs = Column::from_tensor(&foreign(compact(ElementType::F32, &[6]), false)).unwrap();
    assert_eq!(batch(theirs).origin(), Origin::DlPack);
    let ours = Column::new(DataType::Float32, 6, region(&allocator, 24)).unwrap();
    assert_eq!(batch(ours).origin(), Origin::Owned);
}

#[test]
fn axes_are_lists_of_fixed_size() {
    let column = Column::from_tensor(&foreign(compact(ElementType::F16, &[4, 3, 2]), false));
    let column = column.unwrap();
    let inner = DataType::new_fixed_size_list(DataType::Float16, 2, false);
    assert_eq!(column.data_type(), &DataType::new_fixed_size_list(inner, 3, false));
    assert_eq!((column.len(), column.children()[0].children()[0].len()), (4, 24));
    let scalar = Column::from_tensor(&foreign(compact(ElementType::I64, &[]), false)).unwrap();
    assert_eq!((scalar.len(), scalar.data_type()), (1, &DataType::Int64));
    let empty = Column::from_tensor(&foreign(compact(ElementType::I64, &[3, 0]), false)).unwrap();
    assert_eq!((empty.len(), empty.children()[0].len()), (3, 0));
}

#[test]
fn elements_without_a_type_are_bytes_and_what_cannot_be_is_refused() {
    let of = |element| Column::from_tensor(&foreign(compact(element, &[4]), false));
    assert_eq!(of(ElementType::BF16).unwrap().data_type(), &DataType::FixedSizeBinary(2));
    assert_eq!(of(ElementType::F8_E4M3FN).unwrap().data_type(), &DataType::FixedSizeBinary(1));
    let error = of(ElementType::new(TypeCode::Bool, 8, 1).unwrap()).unwrap_err();
    assert!(matches!(error, ColumnError::Tensor { .. }), "{error}");
    for (sizes, strides) in [([3, 4], [8, 1]), ([3, 4], [1, 3])] {
        let shape = TensorShape::strided(ElementType::F32, &sizes, &strides).unwrap();
        let error = Column::from_tensor(&foreign(shape, false)).unwrap_err();
        assert!(matches!(error, ColumnError::Tensor { .. }), "{error}");
    }
    let one = TensorShape::strided(ElementType::F32, &[1, 4], &[77, 1]).unwrap();
    assert!(Column::from_tensor(&foreign(one, false)).is_ok(), "an axis of one has any stride");
    let wide = Arc::new(HeapAllocator::system());
    let booleans = Column::new(DataType::Boolean, 8, region(&wide, 1)).unwrap();
    // SAFETY: no code uses the memory.
    let error = unsafe { booleans.to_tensor() }.map(|_| ()).unwrap_err();
    assert!(matches!(error, ColumnError::NoTensor { .. }), "{error}");
}
