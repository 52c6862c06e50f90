//! Exported memory lives until it is released, and is recognised when it is imported again.

use std::sync::Arc;
use std::thread;

use arrow_schema::{DataType, Field};
use terrane_arrow::arrays::abi::{ArrowArray, Owned, Released};
use terrane_arrow::arrays::{ExportError, ImportError, import_array, to_arrow};
use terrane_arrow::columns::{Column, ColumnParts, Origin};
use terrane_core::{
    Allocate, ByteCount, DeviceId, ForeignMemory, Location, Memory, Region, RegionRequest,
    StorageKind,
};
use terrane_testkit::memory::HeapAllocator;

use super::{exported, exported_with_device};

fn region(allocator: &HeapAllocator, bytes: u64) -> Region {
    let alignment = terrane_core::Alignment::of(64);
    let request = RegionRequest::new(ByteCount::new(bytes)).aligned_to(alignment);
    Region::new(allocator.allocate(&request).unwrap())
}

/// A struct of numbers and of dictionary keys, with an allocation for each buffer.
fn nested(allocator: &HeapAllocator) -> Column {
    let parts = |data_type, buffers, children, dictionary| ColumnParts {
        data_type,
        length: 10,
        offset: 0,
        null_count: Some(0),
        buffers,
        children,
        dictionary,
    };
    let buffer = |bytes| Some(region(allocator, bytes).into());
    let texts = parts(DataType::Utf8, vec![None, buffer(44), buffer(100)], vec![], None);
    let texts = Column::from_parts(texts).unwrap();
    let keys = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8));
    let keyed = parts(keys.clone(), vec![None, buffer(10)], vec![], Some(texts));
    let keyed = Column::from_parts(keyed).unwrap();
    let numbers = Column::new(DataType::Int64, 10, region(allocator, 80)).unwrap();
    let fields = vec![Field::new("number", DataType::Int64, false), Field::new("key", keys, false)];
    let both = parts(DataType::Struct(fields.into()), vec![None], vec![numbers, keyed], None);
    Column::from_parts(both).unwrap()
}

#[test]
fn memory_lives_until_the_array_is_released_on_whatever_thread() {
    let allocator = HeapAllocator::system();
    let array = exported(&nested(&allocator)).unwrap();
    assert_eq!(allocator.live(), 4, "numbers, keys, offsets, texts");
    let thread = thread::Builder::new().name("consumer".into()).spawn(move || drop(array));
    thread.unwrap().join().unwrap();
    allocator.assert_all_freed();
}

#[test]
fn a_panic_of_an_owner_ends_at_the_release_and_keeps_nothing() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("expected: an owner that panics");
        }
    }
    let allocator = HeapAllocator::system();
    let bytes = region(&allocator, 80);
    let span = bytes.span();
    // SAFETY: the allocation is kept alive, and no code uses its bytes.
    let memory = unsafe { ForeignMemory::new(span, (Panics, bytes)) };
    let panics = Column::new(DataType::Int64, 10, Region::new(memory)).unwrap();
    let other = Column::new(DataType::Int64, 10, region(&allocator, 80)).unwrap();
    let field = |name| Field::new(name, DataType::Int64, false);
    let parts = ColumnParts {
        data_type: DataType::Struct(vec![field("one"), field("two")].into()),
        length: 10,
        offset: 0,
        null_count: Some(0),
        buffers: vec![None],
        children: vec![panics, other],
        dictionary: None,
    };
    let array = exported(&Column::from_parts(parts).unwrap()).unwrap();
    assert_eq!(allocator.live(), 2);
    drop(array);
    allocator.assert_all_freed();
}

#[test]
fn a_second_release_is_harmless() {
    let allocator = HeapAllocator::system();
    let mut array = exported(&nested(&allocator)).unwrap().into_inner();
    let release = array.release.unwrap();
    for _ in 0..2 {
        // SAFETY: the array is alive, and the callback accepts a released array.
        unsafe { release(&raw mut array) };
        assert!(array.is_released());
        allocator.assert_all_freed();
    }
    // SAFETY: null is harmless.
    unsafe { release(std::ptr::null_mut()) };
}

#[test]
fn children_that_were_moved_away_outlive_their_parent() {
    let allocator = HeapAllocator::system();
    let array = exported(&nested(&allocator)).unwrap();
    // SAFETY: there are two children.
    let second = unsafe { *array.get().children.wrapping_add(1) };
    // SAFETY: a child may be moved, as the specification permits.
    let child = unsafe { Owned::<ArrowArray>::take(second) }.unwrap();
    drop(array);
    assert_eq!(allocator.live(), 3, "the keys and the texts of the dictionary, below the child");
    drop(child);
    allocator.assert_all_freed();
}

#[test]
fn a_structure_that_was_moved_is_released_where_it_is() {
    let allocator = HeapAllocator::system();
    let mut source = exported(&nested(&allocator)).unwrap().into_inner();
    let mut destination = ArrowArray::EMPTY;
    // SAFETY: a structure of this crate, moved as the specification permits.
    let moved = unsafe { Owned::take(&raw mut source) }.unwrap();
    // SAFETY: the destination is writable.
    unsafe { moved.give(&raw mut destination) };
    assert!(source.is_released() && !destination.is_released());
    // SAFETY: as above.
    drop(unsafe { Owned::take(&raw mut destination) });
    allocator.assert_all_freed();
}

#[test]
fn a_reimported_array_is_the_same_column() {
    let allocator = HeapAllocator::system();
    come_back(&nested(&allocator));
    allocator.assert_all_freed();
}

fn come_back(column: &Column) {
    let array = exported(column).unwrap();
    // SAFETY: this crate created the array.
    let back = unsafe { import_array(column.data_type(), array) }.unwrap();
    assert!(back.is_same(column) && back.origin() == Origin::Owned);
    let array = exported_with_device(column).unwrap();
    // SAFETY: as above.
    let back = unsafe { terrane_arrow::arrays::import_device_array(column.data_type(), array) };
    let back = back.unwrap().into_host().unwrap();
    assert!(back.is_same(column));
    // A child that is moved out.
    let array = exported(column).unwrap();
    // SAFETY: there are two children.
    let first = unsafe { *array.get().children };
    // SAFETY: a child may be moved.
    let child = unsafe { Owned::take(first) }.unwrap();
    // SAFETY: this crate created the array.
    let back = unsafe { import_array(&DataType::Int64, child) }.unwrap();
    assert!(back.is_same(&column.children()[0]));
}

#[test]
fn a_reimported_array_is_read_only_while_its_memory_is_shared() {
    let allocator = HeapAllocator::system();
    let column = nested(&allocator);
    let is_writable = |column: &Column| {
        let numbers = column.children()[0].buffers()[1].as_ref().unwrap().region().is_ok();
        let keys = column.children()[1].buffers()[1].as_ref().unwrap().region().is_ok();
        (numbers, keys)
    };
    let back = |array| {
        // SAFETY: this crate created the array.
        let back = unsafe { import_array(column.data_type(), array) }.unwrap();
        assert!(back.is_same(&column) && back.origin() == Origin::Owned);
        back
    };
    let (first, second) = (exported(&column).unwrap(), exported(&column).unwrap());
    assert_eq!(is_writable(&back(first)), (false, false));
    let numbers = exported(&column.children()[0]).unwrap();
    assert_eq!(is_writable(&back(second)), (false, true), "the numbers are still exported");
    drop(numbers);
    assert_eq!(is_writable(&back(exported(&column).unwrap())), (true, true));
    let (with_device, other) = (exported_with_device(&column).unwrap(), exported(&column).unwrap());
    let import = terrane_arrow::arrays::import_device_array;
    // SAFETY: this crate created the array.
    let imported = unsafe { import(column.data_type(), with_device) }.unwrap();
    assert_eq!(is_writable(&imported.into_host().unwrap()), (false, false));
    drop(other);
}

#[test]
fn changed_arrays_and_other_types_are_refused() {
    let allocator = HeapAllocator::system();
    let column = nested(&allocator);
    for spoil in [
        |array: &mut ArrowArray| array.length -= 1,
        |array: &mut ArrowArray| array.offset = 1,
        |array: &mut ArrowArray| array.n_children = 1,
        |array: &mut ArrowArray| array.buffers = std::ptr::null_mut(),
        |array: &mut ArrowArray| array.null_count = -1,
        |array: &mut ArrowArray| array.dictionary = array,
        |array: &mut ArrowArray| {
            // SAFETY: there are two children.
            let second = unsafe { *array.children.wrapping_add(1) };
            // SAFETY: a child may be moved.
            drop(unsafe { Owned::take(second) });
        },
    ] {
        let mut array = exported(&column).unwrap().into_inner();
        spoil(&mut array);
        // SAFETY: its callback reads no changed field.
        let array = unsafe { Owned::new(array) };
        // SAFETY: this crate created the array.
        let error = unsafe { import_array(column.data_type(), array) }.unwrap_err();
        assert!(matches!(error, ImportError::Changed { .. }), "{error}");
    }
    let array = exported(&column).unwrap();
    // SAFETY: this crate created the array.
    let error = unsafe { import_array(&DataType::Int64, array) }.unwrap_err();
    assert!(matches!(error, ImportError::WrongType { .. }), "{error}");
    drop(column);
    allocator.assert_all_freed();
}

#[test]
fn memory_goes_out_as_what_it_is_or_not_at_all() {
    let device = HeapAllocator::simulated_device(3);
    let column = Column::new(DataType::Int64, 4, region(&device, 32)).unwrap();
    let error = exported(&column).unwrap_err();
    let kind = StorageKind::Device(DeviceId::new(3));
    assert!(matches!(error, ExportError::NotHost { kind: k } if k == kind), "{error}");
    let array = exported_with_device(&column).unwrap();
    assert_eq!((array.get().device_type.0, array.get().device_id), (2, 3));
    let pinned = HeapAllocator::pinned();
    let column = Column::new(DataType::Int64, 4, region(&pinned, 32)).unwrap();
    assert!(exported(&column).is_ok());
    let array = exported_with_device(&column).unwrap();
    assert_eq!((array.get().device_type.0, array.get().device_id), (3, 0));
}

#[test]
fn ten_thousand_rounds_on_four_threads_leave_nothing() {
    let allocator = HeapAllocator::system();
    let column = Arc::new(nested(&allocator));
    thread::scope(|scope| {
        for number in 0..4 {
            let column = Arc::clone(&column);
            let body = move || {
                for _ in 0..2500 {
                    let array = exported(&column).unwrap();
                    // SAFETY: this crate created the array.
                    let back = unsafe { import_array(column.data_type(), array) }.unwrap();
                    assert!(back.is_same(&column));
                    drop(exported(&back).unwrap());
                }
            };
            let thread = thread::Builder::new().name(format!("round {number}"));
            thread.spawn_scoped(scope, body).unwrap();
        }
    });
    drop(column);
    allocator.assert_all_freed();
}

/// Memory that exports another column whenever its span is read.
#[derive(Debug)]
struct Talkative {
    memory: Region,
    other: Column,
}

// SAFETY: all methods delegate to the inner memory.
unsafe impl Memory for Talkative {
    fn kind(&self) -> StorageKind {
        self.memory.kind()
    }
    fn location(&self) -> Location {
        drop(exported(&self.other).unwrap());
        self.memory.location()
    }
    fn length(&self) -> ByteCount {
        drop(exported(&self.other).unwrap());
        self.memory.length()
    }
}

#[test]
fn memory_is_not_called_under_a_lock() {
    let allocator = HeapAllocator::system();
    let other = Column::new(DataType::Int64, 4, region(&allocator, 32)).unwrap();
    let memory = Talkative { memory: region(&allocator, 32), other };
    let column = Column::new(DataType::Int64, 4, Region::new(memory)).unwrap();
    let array = exported(&column).unwrap();
    // SAFETY: no code writes the column.
    drop(unsafe { to_arrow(&column) }.unwrap());
    // SAFETY: this crate created the array.
    let back = unsafe { import_array(&DataType::Int64, array) }.unwrap();
    assert!(back.is_same(&column));
    drop((back, column));
    allocator.assert_all_freed();
}
