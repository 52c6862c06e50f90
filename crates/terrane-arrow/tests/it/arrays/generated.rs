//! Columns of random types over regions of random lengths. Each one is a column or a typed error,
//! and each column is exported or refused.

use std::sync::Arc;

use arrow_array::make_array;
use arrow_schema::{DataType, Field, IntervalUnit, Schema, TimeUnit, UnionFields, UnionMode};
use proptest::prelude::*;
use terrane_arrow::arrays::{
    ImportError, export_field, from_arrow, import_array, import_field, to_arrow,
};
use terrane_arrow::columns::{
    AccessOrder, Column, ColumnBuffer, ColumnError, ColumnParts, ColumnarBuffer, ColumnarOptions,
    ColumnarPlan, HostOrder, RowCountWidth,
};
use terrane_core::{Alignment, Allocate, ByteCount, Memory, Region, RegionRequest};
use terrane_testkit::memory::HeapAllocator;

use super::{exported, exported_with_device};

/// A sequence of numbers that determine the generated value. After the last number come zeros,
/// which result in the simplest column.
struct Tape {
    numbers: std::vec::IntoIter<u16>,
}

impl Tape {
    fn below(&mut self, limit: u16) -> u16 {
        self.numbers.next().unwrap_or(0) % limit
    }

    /// True with probability one in `times`.
    fn one_in(&mut self, times: u16) -> bool {
        self.below(times) == times - 1
    }
}

fn leaf() -> impl Strategy<Value = DataType> {
    use DataType as T;
    prop_oneof![
        6 => proptest::sample::select(vec![
            T::Null, T::Boolean, T::Int8, T::UInt16, T::Int32, T::Int64, T::Float16, T::Float32,
            T::Float64, T::Date32, T::Date64, T::Time32(TimeUnit::Second),
            T::Time64(TimeUnit::Nanosecond), T::Duration(TimeUnit::Second),
            T::Timestamp(TimeUnit::Second, Some("nowhere".into())),
            T::Interval(IntervalUnit::YearMonth), T::Interval(IntervalUnit::DayTime),
            T::Interval(IntervalUnit::MonthDayNano),
        ]),
        6 => proptest::sample::select(vec![
            T::Utf8, T::LargeUtf8, T::Binary, T::LargeBinary, T::Utf8View, T::BinaryView,
        ]),
        2 => prop_oneof![Just(-1), Just(i32::MIN), Just(0), 1..9, Just(i32::MAX)]
            .prop_map(T::FixedSizeBinary),
        1 => (0_u8..80, -90_i8..90).prop_map(|(digits, scale)| T::Decimal128(digits, scale)),
        1 => (0_u8..80, -90_i8..90).prop_map(|(digits, scale)| T::Decimal32(digits, scale)),
        1 => (0_u8..80, -90_i8..90).prop_map(|(digits, scale)| T::Decimal256(digits, scale)),
    ]
}

fn field(name: &'static str) -> impl Fn((DataType, bool)) -> Field {
    move |(data_type, is_nullable)| Field::new(name, data_type, is_nullable)
}

/// Types of any kind and nesting, including those that no column can have.
pub fn data_type() -> impl Strategy<Value = DataType> {
    use DataType as T;
    leaf().prop_recursive(4, 16, 3, |inner| {
        let any_field = (inner.clone(), any::<bool>()).prop_map(field("item"));
        let fields = proptest::collection::vec(any_field.clone(), 0..3);
        let size = prop_oneof![Just(-1), Just(i32::MIN), Just(0), 1..5, Just(i32::MAX)];
        let key = prop_oneof![3 => Just(T::Int8), 1 => Just(T::UInt64), 1 => inner.clone()];
        let ends = prop_oneof![3 => Just(T::Int16), 1 => Just(T::Int64), 1 => inner.clone()];
        let entries = prop_oneof![
            3 => (inner.clone(), inner.clone()).prop_map(|(key, value)| {
                let fields = [Field::new("key", key, false), Field::new("value", value, true)];
                T::Struct(fields.to_vec().into())
            }),
            1 => inner.clone(),
        ];
        let ids = Just([0_i8, 5, 127]);
        prop_oneof![
            1 => any_field.clone().prop_map(|item| T::List(Arc::new(item))),
            1 => any_field.clone().prop_map(|item| T::LargeList(Arc::new(item))),
            1 => any_field.clone().prop_map(|item| T::ListView(Arc::new(item))),
            1 => any_field.clone().prop_map(|item| T::LargeListView(Arc::new(item))),
            3 => (any_field, size).prop_map(|(item, size)| T::FixedSizeList(Arc::new(item), size)),
            1 => fields.clone().prop_map(|fields| T::Struct(fields.into())),
            2 => (key, inner.clone())
                .prop_map(|(key, value)| T::Dictionary(Box::new(key), Box::new(value))),
            2 => (ends, inner, any::<bool>()).prop_map(|(ends, values, is_nullable)| {
                let ends = Field::new("run_ends", ends, is_nullable);
                T::RunEndEncoded(Arc::new(ends), Arc::new(Field::new("values", values, true)))
            }),
            1 => (entries, any::<bool>(), any::<bool>()).prop_map(|(entries, is_nullable, sorted)| {
                T::Map(Arc::new(Field::new("entries", entries, is_nullable)), sorted)
            }),
            1 => (fields, ids, any::<bool>()).prop_map(|(fields, ids, is_dense)| {
                let ids = ids.into_iter().take(fields.len());
                let mode = if is_dense { UnionMode::Dense } else { UnionMode::Sparse };
                T::Union(UnionFields::try_new(ids, fields).unwrap(), mode)
            }),
        ]
    })
}

/// Bytes that are zeros, increasing numbers like offsets, or random.
fn region(tape: &mut Tape, bytes: u64) -> Region {
    let alignment = Alignment::of(if tape.one_in(12) { 1 } else { 64 });
    let skipped = u64::from(tape.one_in(12));
    let request = RegionRequest::new(ByteCount::new(bytes + skipped)).aligned_to(alignment);
    let memory = HeapAllocator::system().allocate(&request).unwrap();
    let (sort, step) = (tape.below(4), tape.below(4));
    let content: Vec<u8> = (0..bytes)
        .map(|index| match sort {
            0 => 0,
            // Small numbers of 32 bits that do not decrease.
            1 if index % 4 == 0 => u8::try_from(index / 4 * u64::from(step) % 256).unwrap(),
            // The same with 64 bits.
            2 if index % 8 == 0 => u8::try_from((index / 8 + 1) * u64::from(step) % 256).unwrap(),
            1 | 2 => 0,
            _ => u8::try_from(tape.below(256)).unwrap(),
        })
        .collect();
    let location = memory.location().checked_add(ByteCount::new(skipped)).unwrap();
    // SAFETY: only the test uses the memory.
    unsafe { HostOrder.write(&content, location) }.unwrap();
    Region::new(memory).view(ByteCount::new(skipped), ByteCount::new(bytes)).unwrap()
}

/// The bytes that rows of this width need, or a different number that is not a multiple of the
/// width.
fn bytes(tape: &mut Tape, rows: u64, width: u64) -> u64 {
    let needed = rows.saturating_mul(width).min(4096);
    match tape.below(6) {
        0 | 1 => needed,
        2 => needed + 1,
        3 => needed + 7,
        4 => u64::from(tape.below(40)),
        _ => needed.saturating_sub(1),
    }
}

fn rows(tape: &mut Tape) -> u64 {
    match tape.below(40) {
        39 => u64::MAX,
        38 => i64::MAX.cast_unsigned() + 1,
        37 => 1 << 40,
        few => u64::from(few) % 9,
    }
}

/// The number of buffers of a type, and the largest width of their values. The table is independent
/// of the library's own.
fn widths(data_type: &DataType) -> Vec<u64> {
    use DataType as T;
    match data_type {
        T::Null | T::RunEndEncoded(..) => vec![],
        T::Boolean => vec![1, 1],
        T::Utf8 | T::Binary => vec![1, 5, 8],
        T::LargeUtf8 | T::LargeBinary => vec![1, 9, 8],
        T::List(_) | T::Map(..) => vec![1, 5],
        T::LargeList(_) => vec![1, 9],
        T::ListView(_) => vec![1, 4, 4],
        T::LargeListView(_) => vec![1, 8, 8],
        T::FixedSizeList(..) | T::Struct(_) => vec![1],
        T::Union(_, UnionMode::Sparse) => vec![1],
        T::Union(_, UnionMode::Dense) => vec![1, 4],
        T::Utf8View | T::BinaryView => vec![1, 16, 16, 8],
        T::Dictionary(key, _) => widths(key),
        T::FixedSizeBinary(size) => vec![1, u64::try_from(*size).unwrap_or(4).min(64)],
        other => vec![1, other.primitive_width().map_or(1, |width| width.try_into().unwrap())],
    }
}

fn children(data_type: &DataType) -> Vec<&Field> {
    use DataType as T;
    match data_type {
        T::Struct(fields) => fields.iter().map(|field| &**field).collect(),
        T::Union(fields, _) => fields.iter().map(|(_, field)| &**field).collect(),
        T::RunEndEncoded(ends, values) => vec![ends, values],
        T::List(item)
        | T::LargeList(item)
        | T::ListView(item)
        | T::LargeListView(item)
        | T::FixedSizeList(item, _)
        | T::Map(item, _) => vec![item],
        _ => vec![],
    }
}

/// A column of a type, or the reason for its refusal.
fn column(data_type: &DataType, length: u64, tape: &mut Tape) -> Result<Column, ColumnError> {
    let offset = if tape.one_in(4) { rows(tape) } else { 0 };
    let wanted = length.saturating_add(offset);
    let mut buffers: Vec<Option<ColumnBuffer>> = vec![];
    for (index, width) in widths(data_type).into_iter().enumerate() {
        let is_left_out = if index == 0 { !tape.one_in(3) } else { tape.one_in(10) };
        let length = bytes(tape, wanted, width);
        buffers.push((!is_left_out).then(|| region(tape, length).into()));
    }
    if tape.one_in(30) {
        buffers.pop();
    }
    let repeated = match data_type {
        DataType::FixedSizeList(_, size) => u64::try_from(*size).unwrap_or(1),
        _ => 1,
    };
    let below = wanted.saturating_mul(repeated).saturating_add(u64::from(tape.below(3)));
    let children = children(data_type)
        .into_iter()
        .map(|field| column(field.data_type(), below, tape))
        .collect::<Result<_, _>>()?;
    let dictionary = match data_type {
        DataType::Dictionary(_, values) => Some(column(values, rows(tape), tape)?),
        _ => None,
    };
    let null_count = match tape.below(4) {
        0 => Some(0),
        1 => Some(rows(tape)),
        _ => None,
    };
    let data_type = data_type.clone();
    Column::from_parts(ColumnParts {
        data_type,
        length,
        offset,
        null_count,
        buffers,
        children,
        dictionary,
    })
}

/// Exports a column with every interface.
fn leaves(column: &Column) {
    // SAFETY: no code writes the column.
    if let Ok(data) = unsafe { to_arrow(column) } {
        let back = from_arrow(&data).unwrap();
        assert_eq!((back.len(), back.data_type()), (column.len(), column.data_type()));
        // SAFETY: as above.
        assert_eq!(unsafe { to_arrow(&back) }.unwrap(), data);
        drop(make_array(data));
    }
    if let Ok(array) = exported(column) {
        // SAFETY: it was created above, and is passed on once.
        let back = unsafe { import_array(column.data_type(), array) }.unwrap();
        assert!(back.is_same(column));
    }
    drop(exported_with_device(column));
    // SAFETY: no code writes the column.
    drop(unsafe { column.to_tensor() });
    let field = Field::new("column", column.data_type().clone(), true);
    let mut schema = export_field(&field).unwrap().into_inner();
    // SAFETY: it was created above, and is passed on once.
    match unsafe { import_field(&raw mut schema) } {
        Ok(back) => assert_eq!(back.data_type(), column.data_type()),
        // arrow-rs writes the format of an empty union, but does not read it.
        Err(error) => assert!(matches!(error, ImportError::Arrow { .. }), "{error}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_constructed_leaves_or_is_refused(
        data_type in data_type(),
        numbers in proptest::collection::vec(any::<u16>(), 0..64),
    ) {
        let mut tape = Tape { numbers: numbers.into_iter() };
        let length = rows(&mut tape);
        let Ok(column) = column(&data_type, length, &mut tape) else { return Ok(()) };
        leaves(&column);
        if let Ok(part) = column.slice(rows(&mut tape), rows(&mut tape)) {
            leaves(&part);
        }
        let schema = Arc::new(Schema::new(vec![Field::new("a", data_type, tape.one_in(2))]));
        let (capacity, count) = (rows(&mut tape), region(&mut tape, 8));
        let columns = vec![column];
        let width = RowCountWidth::U64;
        let buffer = ColumnarBuffer::from_columns(schema, columns, capacity, count, width);
        if let Ok(mut buffer) = buffer {
            // SAFETY: no other code has the count.
            if unsafe { buffer.set_rows(capacity / 2, &HostOrder) }.is_ok() {
                leaves(&buffer.record_batch().unwrap());
            }
        }
    }

    #[test]
    fn whatever_is_planned_is_allocated_and_leaves(
        types in proptest::collection::vec((data_type(), any::<bool>()), 0..4),
        numbers in proptest::collection::vec(any::<u16>(), 0..4),
    ) {
        let mut tape = Tape { numbers: numbers.into_iter() };
        let fields = types.into_iter().map(field("a"));
        let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        let capacity = rows(&mut tape);
        let plan = ColumnarPlan::new(schema, capacity, ColumnarOptions::default());
        let Ok(plan) = plan else { return Ok(()) };
        if plan.size() < ByteCount::mib(1) {
            let buffer = plan.allocate(&HeapAllocator::system(), &HostOrder).unwrap();
            buffer.validate().unwrap();
            buffer.columns().iter().for_each(leaves);
            leaves(&buffer.record_batch().unwrap());
        }
    }
}
