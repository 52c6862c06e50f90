//! Valid and invalid parts of columns.

use arrow_schema::{DataType, Field};
use terrane_arrow::columns::{Column, ColumnBuffer, ColumnError, ColumnParts};
use terrane_core::{Alignment, Allocate, ByteCount, Memory, Region, RegionRequest};
use terrane_testkit::memory::HeapAllocator;

fn region(bytes: u64) -> Region {
    let request = RegionRequest::new(ByteCount::new(bytes)).aligned_to(Alignment::of(8));
    Region::new(HeapAllocator::system().allocate(&request).unwrap())
}

fn parts(data_type: DataType, length: u64, buffers: &[Option<u64>]) -> ColumnParts {
    let buffer = |bytes: &Option<u64>| bytes.map(|bytes| region(bytes).into());
    ColumnParts {
        data_type,
        length,
        offset: 0,
        null_count: None,
        buffers: buffers.iter().map(buffer).collect(),
        children: vec![],
        dictionary: None,
    }
}

#[track_caller]
fn refusal(parts: ColumnParts) -> ColumnError {
    Column::from_parts(parts).unwrap_err()
}

#[test]
fn buffers_have_to_be_there_long_enough_and_aligned() {
    let int = || DataType::Int64;
    assert!(Column::from_parts(parts(int(), 9, &[Some(2), Some(72)])).is_ok());
    assert!(Column::from_parts(parts(int(), 0, &[None, None])).is_ok());
    let error = refusal(parts(int(), 9, &[Some(72)]));
    assert!(matches!(error, ColumnError::BufferCount { expected: 2, found: 1, .. }), "{error}");
    let error = refusal(parts(int(), 9, &[Some(2), None]));
    assert!(matches!(error, ColumnError::MissingBuffer { buffer: "values", .. }), "{error}");
    let error = refusal(parts(int(), 9, &[Some(1), Some(72)]));
    assert!(matches!(error, ColumnError::ShortBuffer { buffer: "validity", .. }), "{error}");
    let error = refusal(ColumnParts { offset: 1, ..parts(int(), 9, &[None, Some(72)]) });
    assert!(matches!(error, ColumnError::ShortBuffer { rows: 10, .. }), "{error}");
    let error = refusal(ColumnParts { offset: u64::MAX, ..parts(int(), 9, &[None, Some(72)]) });
    assert!(matches!(error, ColumnError::Overflow(_)), "{error}");
    let error = refusal(ColumnParts { null_count: Some(10), ..parts(int(), 9, &[None, Some(72)]) });
    assert!(matches!(error, ColumnError::NullCount { null_count: 10, rows: 9 }), "{error}");
    let error = refusal(ColumnParts { null_count: Some(1), ..parts(int(), 9, &[None, Some(72)]) });
    assert!(matches!(error, ColumnError::MissingBuffer { buffer: "validity", .. }), "{error}");
    let askew = region(80).view(ByteCount::new(4), ByteCount::new(72)).unwrap();
    let error = Column::new(int(), 9, askew).unwrap_err();
    assert!(matches!(error, ColumnError::Misaligned { .. }), "{error}");
    let error = refusal(parts(DataType::FixedSizeBinary(-1), 9, &[None, Some(72)]));
    assert!(matches!(error, ColumnError::NegativeWidth { .. }), "{error}");
    assert!(refusal(parts(int(), u64::MAX / 4, &[None, None])).to_string().contains("memory"));
}

#[test]
fn children_have_to_be_of_their_type_and_long_enough() {
    let list = DataType::new_fixed_size_list(DataType::Int16, 3, false);
    let child = |length| Column::new(DataType::Int16, length, region(2 * length)).unwrap();
    let with = |children| ColumnParts { children, ..parts(list.clone(), 4, &[None]) };
    assert!(Column::from_parts(with(vec![child(12)])).is_ok());
    let error = refusal(with(vec![child(11)]));
    assert!(matches!(error, ColumnError::ShortChild { needed: 12, found: 11, .. }), "{error}");
    let error = refusal(with(vec![]));
    assert!(matches!(error, ColumnError::ChildCount { expected: 1, found: 0, .. }), "{error}");
    let other = Column::new(DataType::Int8, 12, region(12)).unwrap();
    let error = refusal(with(vec![other]));
    assert!(matches!(error, ColumnError::WrongType { .. }), "{error}");
    let pinned = HeapAllocator::pinned();
    let request = RegionRequest::new(ByteCount::new(24)).aligned_to(Alignment::of(8));
    let pinned = Region::new(pinned.allocate(&request).unwrap());
    let pinned = Column::new(DataType::Int16, 12, pinned).unwrap();
    let structure = DataType::Struct(
        vec![Field::new("a", DataType::Int16, true), Field::new("b", DataType::Int16, true)].into(),
    );
    let both = ColumnParts { children: vec![child(4), pinned], ..parts(structure, 4, &[None]) };
    let error = refusal(both);
    assert!(matches!(error, ColumnError::MixedMemory { .. }), "{error}");
    let keys = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Int16));
    let error = refusal(parts(keys.clone(), 4, &[None, Some(4)]));
    assert!(matches!(error, ColumnError::MissingBuffer { .. }), "{error}");
    let keyed = ColumnParts { dictionary: Some(child(3)), ..parts(keys, 4, &[None, Some(4)]) };
    assert!(Column::from_parts(keyed).is_ok());
    let extra =
        ColumnParts { dictionary: Some(child(3)), ..parts(DataType::Int8, 4, &[None, Some(4)]) };
    assert!(matches!(refusal(extra), ColumnError::ChildCount { .. }));
}

#[test]
fn slices_share_the_memory_and_stay_within() {
    let column = Column::new(DataType::Int32, 10, region(40)).unwrap();
    let part = column.slice(2, 6).unwrap().slice(1, 5).unwrap();
    assert_eq!((part.offset(), part.len(), part.null_count()), (3, 5, Some(0)));
    let buffer = |column: &Column| column.buffers()[1].clone().unwrap();
    assert!(buffer(&part).same_memory(&buffer(&column)) && !part.is_same(&column));
    for (offset, length) in [(0, 6), (6, 0), (u64::MAX, 2)] {
        assert!(matches!(part.slice(offset, length), Err(ColumnError::OutOfBounds { .. })));
    }
}

#[test]
fn read_only_tensors_have_no_safe_region() {
    let region = region(8);
    let buffer = ColumnBuffer::read_only(region.clone());
    let error = buffer.region().unwrap_err();
    assert!(matches!(error, ColumnError::ReadOnly { .. }), "{error}");
    // SAFETY: nothing is written through it.
    assert!(unsafe { buffer.region_to_read() }.same_memory(&region));
    let part = buffer.view(ByteCount::new(4), ByteCount::new(4)).unwrap();
    assert!(part.is_read_only() && part.length() == ByteCount::new(4));
    assert_eq!(ColumnBuffer::from(region.clone()).region().unwrap().length(), region.length());
}
