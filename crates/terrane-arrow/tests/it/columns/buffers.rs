//! Columnar buffers: their size, row count and growth.

use std::num::NonZeroU64;
use std::sync::Arc;

use arrow_array::{Array, RecordBatch, StructArray, UInt32Array};
use arrow_schema::{DataType, Field, Schema, SchemaRef, TimeUnit};
use proptest::prelude::*;
use terrane_arrow::arrays::to_arrow;
use terrane_arrow::columns::{
    AccessOrder, CachedRows, Column, ColumnError, ColumnarBuffer, ColumnarOptions, ColumnarPlan,
    Growth, HostOrder, RowCountWidth,
};
use terrane_core::{Alignment, Allocate, ByteCount, Location, Memory, Region, RegionRequest};
use terrane_pool::adaptors::{Budget, Counters, Limit, Statistics};
use terrane_pool::{Pool, PoolOptions};
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_testkit::memory::HeapAllocator;

fn schema() -> SchemaRef {
    let inner =
        vec![Field::new("x", DataType::Float32, true), Field::new("y", DataType::Int8, false)];
    Arc::new(Schema::new(vec![
        Field::new("token", DataType::UInt32, false),
        Field::new("kept", DataType::Boolean, true),
        Field::new("text", DataType::Utf8, false),
        Field::new("hash", DataType::FixedSizeBinary(16), false),
        Field::new("at", DataType::Timestamp(TimeUnit::Nanosecond, None), true),
        Field::new("place", DataType::Struct(inner.into()), true),
        Field::new("key", DataType::new_fixed_size_list(DataType::Float16, 8, false), false),
    ]))
}

fn tokens(growth: Growth) -> ColumnarOptions {
    ColumnarOptions { growth, ..ColumnarOptions::default() }
}

fn token_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("token", DataType::UInt32, false)]))
}

/// Checks all guarantees of a buffer over one allocator of host memory.
fn over<A: Allocate>(allocator: &A) {
    for capacity in [0, 1, 7, 1000] {
        let plan = ColumnarPlan::new(schema(), capacity, ColumnarOptions::default()).unwrap();
        let mut buffer = plan.allocate(allocator, &HostOrder).unwrap();
        let memory = buffer.memory().unwrap().length();
        assert!(memory >= plan.size());
        let expected = plan.size_under(allocator.limits()).unwrap();
        assert!(memory >= expected || allocator.limits().granule == Alignment::BYTE);
        assert_eq!(buffer.kind(), allocator.kind());
        assert_eq!((buffer.rows().unwrap(), buffer.columns().len()), (0, 7));
        buffer.validate().unwrap();
        assert_apart(&buffer);
        // SAFETY: no other code has the buffer.
        unsafe { buffer.set_rows(capacity, &HostOrder) }.unwrap();
        let batch = buffer.record_batch().unwrap();
        assert_eq!(batch.len(), capacity);
        // SAFETY: as above.
        let error = unsafe { buffer.set_rows(capacity + 1, &HostOrder) }.unwrap_err();
        assert!(matches!(error, ColumnError::OverCapacity { .. }), "{error}");
        assert_eq!(buffer.rows().unwrap(), capacity);
    }
}

/// Checks that no two buffers of any column share a byte, and that all have Arrow's alignment.
fn assert_apart(buffer: &ColumnarBuffer) {
    fn spans(column: &Column, into: &mut Vec<terrane_core::Span>) {
        into.extend(column.buffers().iter().flatten().map(|buffer| buffer.span()));
        column.children().iter().for_each(|child| spans(child, into));
    }
    let mut all = vec![buffer.row_count().span()];
    buffer.columns().iter().for_each(|column| spans(column, &mut all));
    let memory = buffer.memory().unwrap().span();
    for (index, span) in all.iter().enumerate() {
        assert!(memory.covers(span));
        assert!(span.location.alignment() >= Alignment::of(64));
        assert!(all[..index].iter().all(|other| !other.overlaps(span)));
    }
}

#[test]
fn buffers_use_any_allocator() {
    let system = SystemAllocator::new(SystemOptions::default());
    over(&system);
    over(&Pool::new(&system, PoolOptions::default()).unwrap());
    let budget = Budget::new("columns", ByteCount::mib(1));
    over(&Limit::new(&system, budget.clone()));
    assert_eq!(budget.live(), ByteCount::ZERO);
    let heap = HeapAllocator::pinned();
    over(&heap);
    heap.assert_all_freed();
}

#[test]
fn a_budget_that_is_too_small_refuses_and_keeps_nothing() {
    let budget = Budget::new("columns", ByteCount::kib(4));
    let limited = Limit::new(HeapAllocator::system(), budget.clone());
    let plan = ColumnarPlan::new(schema(), 1000, ColumnarOptions::default()).unwrap();
    let error = plan.allocate(&limited, &HostOrder).unwrap_err();
    assert!(matches!(error, ColumnError::Allocate(ref error) if error.is_exhaustion()), "{error}");
    assert_eq!(budget.live(), ByteCount::ZERO);
}

proptest! {
    #[test]
    fn the_estimate_is_the_allocated_size(
        capacity in 0_u64..100_000,
        text in 0_u64..100,
        alignment in 0_u32..12,
        which in any::<[bool; 7]>(),
    ) {
        let fields = schema();
        let fields = fields.fields().iter().zip(which).filter(|(_, which)| *which);
        let schema = Arc::new(Schema::new(fields.map(|(f, _)| Arc::clone(f)).collect::<Vec<_>>()));
        let options = ColumnarOptions {
            variable_bytes_per_row: ByteCount::new(text),
            alignment: Alignment::new(1 << alignment).unwrap(),
            ..ColumnarOptions::default()
        };
        let plan = ColumnarPlan::new(schema, capacity, options).unwrap();
        let counters = Counters::new();
        let counted = Statistics::new(HeapAllocator::system(), counters.clone());
        let buffer = plan.allocate(&counted, &HostOrder).unwrap();
        prop_assert_eq!(buffer.memory().unwrap().length(), plan.size());
        buffer.validate().unwrap();
        let most = buffer.columns().iter().map(Column::len).max().unwrap_or(capacity);
        prop_assert_eq!(most, capacity);
    }
}

#[test]
fn a_count_is_stale_until_it_is_read_again() {
    for width in [RowCountWidth::U32, RowCountWidth::U64] {
        let options = ColumnarOptions { row_count: width, ..ColumnarOptions::default() };
        let plan = ColumnarPlan::new(token_schema(), 100, options).unwrap();
        let mut buffer = plan.allocate(&HeapAllocator::system(), &HostOrder).unwrap();
        assert_eq!(buffer.row_count().length(), width.bytes());
        let kernel = |rows: u64| {
            let bytes = rows.to_le_bytes();
            let bytes = bytes.get(..width.bytes().to_usize()).unwrap();
            // SAFETY: no other code uses the count. A kernel would do the same.
            unsafe { HostOrder.write(bytes, buffer.row_count().location()) }.unwrap();
        };
        kernel(60);
        assert_eq!(buffer.cached_rows(), CachedRows::Known(0), "the count was not marked as stale");
        buffer.mark_stale();
        assert!(matches!(buffer.rows(), Err(ColumnError::StaleRowCount)));
        assert!(matches!(buffer.record_batch(), Err(ColumnError::StaleRowCount)));
        // SAFETY: the writer of the count has completed.
        assert_eq!(unsafe { buffer.refresh(&HostOrder) }.unwrap(), 60);
        assert_eq!(buffer.record_batch().unwrap().len(), 60);
        let location = buffer.row_count().location();
        // SAFETY: no other code uses the count.
        unsafe { HostOrder.write(&101_u32.to_le_bytes(), location) }.unwrap();
        // SAFETY: the writer of the count has completed.
        let error = unsafe { buffer.refresh(&HostOrder) }.unwrap_err();
        assert!(matches!(error, ColumnError::OverCapacity { rows: 101, capacity: 100 }), "{error}");
        assert_eq!(buffer.cached_rows(), CachedRows::Stale, "an impossible count is not stored");
    }
}

fn fill(buffer: &mut ColumnarBuffer, values: std::ops::Range<u32>) {
    let location = buffer.columns()[0].values().unwrap();
    let bytes: Vec<u8> = values.clone().flat_map(u32::to_ne_bytes).collect();
    // SAFETY: no other code has the buffer.
    unsafe { HostOrder.write(&bytes, location) }.unwrap();
    // SAFETY: as above.
    unsafe { buffer.set_rows(u64::from(values.end), &HostOrder) }.unwrap();
}

#[test]
fn growable_columns_keep_their_rows_and_fixed_ones_refuse_growth() {
    let allocator = HeapAllocator::system();
    let step = NonZeroU64::new(64).unwrap();
    for (growth, capacity) in
        [(Growth::Exact, 101), (Growth::Doubling, 200), (Growth::Steps(step), 128)]
    {
        let plan = ColumnarPlan::new(token_schema(), 100, tokens(growth)).unwrap();
        let mut buffer = plan.allocate(&allocator, &HostOrder).unwrap();
        fill(&mut buffer, 0..77);
        // SAFETY: no code writes the buffer.
        let same = unsafe { buffer.grown(100, &allocator, &HostOrder) }.unwrap();
        assert_eq!((same.capacity(), same.rows().unwrap()), (100, 77));
        // SAFETY: as above.
        let mut larger = unsafe { buffer.grown(101, &allocator, &HostOrder) }.unwrap();
        drop((buffer, same));
        assert_eq!((larger.capacity(), larger.rows().unwrap()), (capacity, 77));
        larger.mark_stale();
        // SAFETY: no code writes the count.
        assert_eq!(unsafe { larger.refresh(&HostOrder) }.unwrap(), 77);
        larger.validate().unwrap();
        // SAFETY: no code writes the columns.
        let batch = unsafe { to_arrow(&larger.record_batch().unwrap()) }.unwrap();
        let batch = RecordBatch::from(StructArray::from(batch));
        let expected = UInt32Array::from_iter_values(0..77);
        assert_eq!(batch.column(0).as_any().downcast_ref::<UInt32Array>(), Some(&expected));
    }
    let plan = ColumnarPlan::new(token_schema(), 100, tokens(Growth::Fixed)).unwrap();
    let buffer = plan.allocate(&allocator, &HostOrder).unwrap();
    // SAFETY: no code writes the buffer.
    let error = unsafe { buffer.grown(101, &allocator, &HostOrder) }.unwrap_err();
    assert!(matches!(error, ColumnError::FixedCapacity { capacity: 100, needed: 101 }), "{error}");
    drop(buffer);
    allocator.assert_all_freed();
}

#[test]
fn nested_columns_grow_with_all_that_is_below_them() {
    let allocator = HeapAllocator::system();
    let options = ColumnarOptions { growth: Growth::Doubling, ..ColumnarOptions::default() };
    let plan = ColumnarPlan::new(schema(), 10, options).unwrap();
    let buffer = plan.allocate(&allocator, &HostOrder).unwrap();
    let x =
        |buffer: &ColumnarBuffer| buffer.column("place").unwrap().children()[0].values().unwrap();
    // SAFETY: no other code has the buffer.
    unsafe { HostOrder.write(&[7; 40], x(&buffer)) }.unwrap();
    // SAFETY: no code writes the buffer.
    let larger = unsafe { buffer.grown(11, &allocator, &HostOrder) }.unwrap();
    let mut read = [0; 40];
    // SAFETY: as above.
    unsafe { HostOrder.read(x(&larger), &mut read) }.unwrap();
    assert_eq!(read, [7; 40]);
}

#[test]
fn columns_that_there_are_make_a_buffer_if_they_fit_the_schema() {
    let allocator = HeapAllocator::system();
    let region = |allocator: &HeapAllocator, bytes| {
        let request = RegionRequest::new(ByteCount::new(bytes)).aligned_to(Alignment::of(8));
        Region::new(allocator.allocate(&request).unwrap())
    };
    let column = || Column::new(DataType::UInt32, 10, region(&allocator, 40)).unwrap();
    let make = |columns, capacity, count| {
        ColumnarBuffer::from_columns(token_schema(), columns, capacity, count, RowCountWidth::U64)
    };
    let count = || region(&allocator, 8);
    let buffer = make(vec![column()], 10, count()).unwrap();
    assert_eq!(buffer.cached_rows(), CachedRows::Stale, "the count in memory is unknown");
    // SAFETY: no code writes the buffer.
    assert!(unsafe { buffer.grown(11, &allocator, &HostOrder) }.is_err());
    let error = make(vec![], 10, count()).unwrap_err();
    assert!(matches!(error, ColumnError::ColumnCount { expected: 1, found: 0 }), "{error}");
    let error = make(vec![column()], 11, count()).unwrap_err();
    assert!(matches!(error, ColumnError::ShortColumn { capacity: 11, found: 10, .. }), "{error}");
    let other = Column::new(DataType::Int32, 10, region(&allocator, 40)).unwrap();
    let error = make(vec![other], 10, count()).unwrap_err();
    assert!(matches!(error, ColumnError::WrongType { .. }), "{error}");
    let error = make(vec![column()], 10, region(&HeapAllocator::pinned(), 8)).unwrap_err();
    assert!(matches!(error, ColumnError::MixedMemory { .. }), "{error}");
    let error = make(vec![column()], 10, region(&allocator, 7)).unwrap_err();
    assert!(matches!(error, ColumnError::ShortMemory { .. }), "{error}");
    let askew = region(&allocator, 16).view(ByteCount::new(4), ByteCount::new(8)).unwrap();
    let error = make(vec![column()], 10, askew).unwrap_err();
    assert!(matches!(error, ColumnError::Misaligned { .. }), "{error}");
}

#[test]
fn invalid_plans_are_refused_before_allocation() {
    let plan = |data_type, capacity| {
        let schema = Arc::new(Schema::new(vec![Field::new("a", data_type, false)]));
        ColumnarPlan::new(schema, capacity, ColumnarOptions::default())
    };
    let error = plan(DataType::new_list(DataType::Int8, true), 10).unwrap_err();
    assert!(matches!(error, ColumnError::Unsupported { .. }), "{error}");
    let error = plan(DataType::Int64, u64::MAX / 8).unwrap_err();
    assert!(matches!(error, ColumnError::Overflow(_)), "{error}");
    let plan = plan(DataType::Int64, 10).unwrap();
    let device = HeapAllocator::simulated_device(1);
    let error = plan.allocate(&device, &HostOrder).unwrap_err();
    assert!(matches!(error, ColumnError::Unreachable { .. }), "{error}");
    device.assert_all_freed();
    let request = RegionRequest::new(ByteCount::new(64)).aligned_to(Alignment::of(64));
    let short = Region::new(HeapAllocator::system().allocate(&request).unwrap());
    // SAFETY: no other code uses the memory.
    let error = unsafe { plan.over(short, &HostOrder) }.unwrap_err();
    assert!(matches!(error, ColumnError::ShortMemory { .. }), "{error}");
}

/// An order that can access no memory.
#[derive(Debug)]
struct Nowhere;

// SAFETY: nothing is copied, and `Ok` is never returned.
unsafe impl AccessOrder for Nowhere {
    unsafe fn copy(&self, _: Location, to: Location, _: ByteCount) -> Result<(), ColumnError> {
        Err(ColumnError::Unreachable { location: to })
    }
}

#[test]
fn a_count_that_the_host_knows_is_stated_without_a_write() {
    let plan = ColumnarPlan::new(token_schema(), 100, ColumnarOptions::default()).unwrap();
    let device = HeapAllocator::simulated_device(0);
    let memory = |bytes: u64| {
        let request = RegionRequest::new(ByteCount::new(bytes)).aligned_to(Alignment::of(64));
        Region::new(device.allocate(&request).unwrap())
    };
    let column = Column::new(DataType::UInt32, 100, memory(400)).unwrap();
    let mut buffer = ColumnarBuffer::from_columns(
        SchemaRef::clone(plan.schema()),
        vec![column],
        100,
        memory(8),
        RowCountWidth::U64,
    )
    .unwrap();
    assert_eq!(buffer.cached_rows(), CachedRows::Stale);
    // SAFETY: nothing is accessed.
    unsafe { buffer.set_rows(60, &Nowhere) }.unwrap_err();
    assert_eq!(buffer.cached_rows(), CachedRows::Stale);
    buffer.state_rows(60).unwrap();
    assert_eq!((buffer.rows().unwrap(), buffer.record_batch().unwrap().len()), (60, 60));
    let error = buffer.state_rows(101).unwrap_err();
    assert!(matches!(error, ColumnError::OverCapacity { rows: 101, capacity: 100 }), "{error}");
    assert_eq!(buffer.rows().unwrap(), 60);
}
