//! Valid columns on which arrow-rs would panic, and types that no column may have.

use std::sync::Arc;

use arrow_array::{Array, StringArray, make_array};
use arrow_schema::{DataType, Field, Fields, Schema, UnionFields, UnionMode};
use terrane_arrow::arrays::{ExportError, ImportError, export_field, import_array, to_arrow};
use terrane_arrow::columns::{
    AccessOrder, Column, ColumnError, ColumnParts, ColumnarOptions, ColumnarPlan, HostOrder,
};
use terrane_core::{Alignment, Allocate, ByteCount, Memory, Region, RegionRequest};
use terrane_testkit::memory::HeapAllocator;

use super::foreign::{Releases, array, owned};

fn region(content: &[u8]) -> Region {
    let request = RegionRequest::new(ByteCount::from_usize(content.len()));
    let memory = HeapAllocator::system().allocate(&request.aligned_to(Alignment::of(64))).unwrap();
    // SAFETY: only the test uses the memory.
    unsafe { HostOrder.write(content, memory.location()) }.unwrap();
    Region::new(memory)
}

fn parts(data_type: DataType, length: u64, buffers: Vec<Option<Region>>) -> ColumnParts {
    let buffers = buffers.into_iter().map(|buffer| buffer.map(Into::into)).collect();
    ColumnParts {
        data_type,
        length,
        offset: 0,
        null_count: None,
        buffers,
        children: vec![],
        dictionary: None,
    }
}

fn arrow(column: &Column) -> Result<arrow_data::ArrayData, ExportError> {
    // SAFETY: no test writes a column after its creation.
    unsafe { to_arrow(column) }
}

#[test]
fn regions_of_no_whole_number_of_values_leave() {
    let item = || Arc::new(Field::new("item", DataType::Int8, true));
    let ids = UnionFields::try_new([0], vec![Field::new("a", DataType::Int8, true)]).unwrap();
    let keys = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Int8));
    let child = || Column::new(DataType::Int8, 4, region(&[0; 4])).unwrap();
    // The buffers of fixed-size values, and their sizes for two rows.
    for (data_type, sizes) in [
        (DataType::Utf8, vec![12, 0]),
        (DataType::LargeBinary, vec![24, 0]),
        (DataType::Utf8View, vec![32, 0]),
        (DataType::BinaryView, vec![32, 0]),
        (DataType::List(item()), vec![12]),
        (DataType::ListView(item()), vec![8, 8]),
        (DataType::LargeListView(item()), vec![16, 16]),
        (DataType::Union(ids, UnionMode::Dense), vec![2, 8]),
        (keys, vec![8]),
    ] {
        for more in [0, 1, 3, 7, 15] {
            let has_validity = !matches!(data_type, DataType::Union(..));
            let validity = has_validity.then_some(None);
            let buffers = sizes.iter().map(|size| Some(region(&vec![0; size + more])));
            let mut parts =
                parts(data_type.clone(), 2, validity.into_iter().chain(buffers).collect());
            match data_type {
                DataType::Dictionary(..) => parts.dictionary = Some(child()),
                DataType::Utf8
                | DataType::LargeBinary
                | DataType::Utf8View
                | DataType::BinaryView => {}
                _ => parts.children.push(child()),
            }
            let column = Column::from_parts(parts).unwrap();
            let array = make_array(arrow(&column).unwrap());
            assert_eq!(array.len(), 2, "{data_type} and {more} bytes");
        }
    }
    // Without rows, no offset is needed, for any number of bytes.
    let none = parts(DataType::Utf8, 0, vec![None, Some(region(&[1, 2, 3])), Some(region(b"x"))]);
    let none = make_array(arrow(&Column::from_parts(none).unwrap()).unwrap());
    assert_eq!(none.as_ref(), &StringArray::from(Vec::<&str>::new()) as &dyn Array);
}

#[test]
fn lists_of_values_that_take_no_memory_leave_without_memory() {
    const ROWS: u64 = 1 << 20;
    let values = ROWS * u64::try_from(i32::MAX).unwrap();
    let nothing = DataType::new_fixed_size_list(DataType::Int8, 0, false);
    let empty = Column::new(DataType::Int8, 0, region(&[])).unwrap();
    for (data_type, children) in [
        (nothing, vec![empty]),
        (DataType::Struct(Fields::empty()), vec![]),
        (DataType::FixedSizeBinary(0), vec![]),
    ] {
        let buffers = match data_type {
            DataType::FixedSizeBinary(_) => vec![None, None],
            _ => vec![None],
        };
        let inner = ColumnParts { children, ..parts(data_type.clone(), values, buffers) };
        let inner = Column::from_parts(inner).unwrap();
        let list = DataType::new_fixed_size_list(data_type, i32::MAX, false);
        let validity = region(&vec![0x55; 1 << 17]);
        let lists =
            ColumnParts { children: vec![inner], ..parts(list, ROWS, vec![Some(validity)]) };
        // A bit for each value would need 2^48 bytes, which would abort the process.
        let data = arrow(&Column::from_parts(lists).unwrap()).unwrap();
        assert_eq!(data.null_count(), 1 << 19);
    }
}

#[test]
fn types_that_no_values_can_have_are_refused() {
    let keyed = |key| DataType::Dictionary(Box::new(key), Box::new(DataType::Int8));
    let ends = |data_type| {
        let field = |data_type| Arc::new(Field::new("a", data_type, false));
        DataType::RunEndEncoded(field(data_type), field(DataType::Int8))
    };
    let entries =
        |data_type| DataType::Map(Arc::new(Field::new("entries", data_type, false)), false);
    let child = || Column::new(DataType::Int8, 1, region(&[0])).unwrap();
    for data_type in [
        keyed(DataType::FixedSizeBinary(-1)),
        keyed(DataType::FixedSizeBinary(4)),
        keyed(DataType::Utf8),
        ends(DataType::UInt16),
        entries(DataType::Int8),
        DataType::Decimal128(0, 0),
        DataType::Decimal32(10, 0),
        DataType::FixedSizeBinary(i32::MIN),
        DataType::new_fixed_size_list(DataType::Int8, -1, true),
    ] {
        let dictionary = matches!(data_type, DataType::Dictionary(..)).then(child);
        let buffers = vec![None, Some(region(&[0; 16]))];
        let column = ColumnParts { dictionary, ..parts(data_type.clone(), 1, buffers) };
        let error = Column::from_parts(column).unwrap_err();
        let is_typed = |error: &ColumnError| {
            matches!(error, ColumnError::NegativeWidth { .. } | ColumnError::InvalidType { .. })
        };
        assert!(is_typed(&error), "{data_type}: {error}");
        let schema = Arc::new(Schema::new(vec![Field::new("a", data_type.clone(), true)]));
        let error = ColumnarPlan::new(schema, 1, ColumnarOptions::default()).unwrap_err();
        assert!(is_typed(&error), "{data_type}: {error}");
        let error = export_field(&Field::new("a", data_type, true)).unwrap_err();
        assert!(matches!(error, ExportError::Column { ref source } if is_typed(source)), "{error}");
    }
}

#[test]
fn more_rows_than_arrow_counts_are_refused() {
    let of = |length, offset| {
        let children = vec![];
        let data_type = DataType::Struct(Fields::empty());
        Column::from_parts(ColumnParts { offset, children, ..parts(data_type, length, vec![None]) })
    };
    let most = i64::MAX.cast_unsigned();
    assert_eq!(make_array(arrow(&of(most - 1, 1).unwrap()).unwrap()).len(), usize::MAX / 2 - 1);
    for (length, offset) in [(most + 1, 0), (most, 1), (u64::MAX, 0)] {
        let error = of(length, offset).unwrap_err();
        assert!(matches!(error, ColumnError::TooMany { what: "rows", .. }), "{error}");
    }
    let schema = Arc::new(Schema::empty());
    let error = ColumnarPlan::new(schema, most + 1, ColumnarOptions::default()).unwrap_err();
    assert!(matches!(error, ColumnError::TooMany { what: "rows", .. }), "{error}");
}

/// A struct that contains a field twice.
fn doubled(data_type: &DataType) -> DataType {
    let field = Arc::new(Field::new("a", data_type.clone(), true));
    DataType::Struct(vec![Arc::clone(&field), field].into())
}

#[test]
fn too_deep_or_too_large_types_are_refused() {
    let leaf = Column::new(DataType::Int8, 1, region(&[0])).unwrap();
    for times in [1, 2] {
        let (mut column, mut data_type) = (leaf.clone(), DataType::Int8);
        let error = loop {
            let outer = match times {
                1 => DataType::Struct(vec![Field::new("a", data_type.clone(), true)].into()),
                _ => doubled(&data_type),
            };
            let children = vec![column.clone(); times];
            match Column::from_parts(ColumnParts {
                children,
                ..parts(outer.clone(), 1, vec![None])
            }) {
                Ok(larger) => (column, data_type) = (larger, outer),
                Err(error) => break error,
            }
        };
        let what = if times == 1 { "levels of nesting" } else { "fields" };
        assert!(matches!(error, ColumnError::TooMany { what: is, .. } if is == what), "{error}");
    }
    // Forty levels of two are a tree of 2^40 nodes, which no program can walk.
    let data_type = (0..40).fold(DataType::Int8, |inner, _| doubled(&inner));
    let field = Field::new("a", data_type.clone(), true);
    let schema = Arc::new(Schema::new(vec![field.clone()]));
    let error = ColumnarPlan::new(schema, 1, ColumnarOptions::default()).unwrap_err();
    assert!(matches!(error, ColumnError::TooMany { what: "fields", .. }), "{error}");
    let error = export_field(&field).unwrap_err();
    assert!(matches!(error, ExportError::Column { .. }), "{error}");
    for data_type in [
        data_type.clone(),
        // Its name would be equally long.
        DataType::Map(Arc::new(Field::new("entries", data_type.clone(), false)), false),
        DataType::Dictionary(Box::new(data_type), Box::new(DataType::Int8)),
    ] {
        let releases = Releases::default();
        let array = owned(array(&DataType::Int8, &releases));
        // SAFETY: the array has another type, and is not read.
        let error = unsafe { import_array(&data_type, array) }.unwrap_err();
        assert!(
            matches!(error, ImportError::TooMany { .. } | ImportError::Format { .. }),
            "{error}"
        );
        assert_eq!(releases.count(), 1);
    }
}
