//! Arrays of a producer in the test, which counts its releases.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use arrow_schema::{DataType, Field, Fields, UnionFields, UnionMode};
use terrane_arrow::arrays::abi::{ArrowArray, Owned, Released};

/// Counts the releases of the producer's arrays.
#[derive(Clone, Debug, Default)]
pub struct Releases(Arc<AtomicU32>);

impl Releases {
    pub fn count(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }
}

/// The array's private data.
struct Private {
    releases: Releases,
    is_top: bool,
    /// Stored as numbers of 64 bits, so that all are aligned.
    _values: Vec<Vec<u64>>,
    buffers: Vec<*const c_void>,
    children: Vec<*mut ArrowArray>,
    dictionary: *mut ArrowArray,
}

/// The bytes of each buffer: more than the rows of any test need.
pub const BYTES: usize = 1 << 16;
/// The number of rows of the arrays.
pub const ROWS: i64 = 100;

/// An array of `data_type` with [`ROWS`] rows; all bytes are zero.
pub fn array(data_type: &DataType, releases: &Releases) -> ArrowArray {
    made(data_type, releases, true)
}

/// Like [`array`], owned.
pub fn owned(array: ArrowArray) -> Owned<ArrowArray> {
    // SAFETY: `release` may be called once, after any move and on any thread.
    unsafe { Owned::new(array) }
}

fn made(data_type: &DataType, releases: &Releases, is_top: bool) -> ArrowArray {
    let (buffers, children, dictionary): (usize, Vec<&DataType>, Option<&DataType>) =
        match data_type {
            DataType::Null => (0, vec![], None),
            DataType::Struct(fields) => (1, fields.iter().map(|f| f.data_type()).collect(), None),
            DataType::FixedSizeList(field, _) => (1, vec![field.data_type()], None),
            DataType::List(field) | DataType::LargeList(field) | DataType::Map(field, _) => {
                (2, vec![field.data_type()], None)
            }
            DataType::Utf8
            | DataType::LargeUtf8
            | DataType::Binary
            | DataType::LargeBinary
            | DataType::Utf8View
            | DataType::BinaryView => (3, vec![], None),
            DataType::ListView(field) | DataType::LargeListView(field) => {
                (3, vec![field.data_type()], None)
            }
            DataType::Union(fields, mode) => {
                let buffers = if *mode == UnionMode::Dense { 2 } else { 1 };
                (buffers, fields.iter().map(|(_, field)| field.data_type()).collect(), None)
            }
            DataType::RunEndEncoded(ends, values) => {
                (0, vec![ends.data_type(), values.data_type()], None)
            }
            DataType::Dictionary(_, values) => (2, vec![], Some(values)),
            _ => (2, vec![], None),
        };
    let values: Vec<_> = (0..buffers).map(|_| vec![0_u64; BYTES / 8]).collect();
    let boxed = |data_type: &&DataType| Box::into_raw(Box::new(made(data_type, releases, false)));
    let mut private = Box::new(Private {
        releases: releases.clone(),
        is_top,
        buffers: values.iter().map(|values| values.as_ptr().cast()).collect(),
        _values: values,
        children: children.iter().map(boxed).collect(),
        dictionary: dictionary.as_ref().map_or(ptr::null_mut(), boxed),
    });
    ArrowArray {
        // Enough for lists of three values.
        length: if is_top { ROWS } else { 5 * ROWS },
        null_count: 0,
        offset: 0,
        n_buffers: i64::try_from(private.buffers.len()).unwrap(),
        n_children: i64::try_from(private.children.len()).unwrap(),
        buffers: private.buffers.as_mut_ptr(),
        children: private.children.as_mut_ptr(),
        dictionary: private.dictionary,
        release: Some(release),
        private_data: Box::into_raw(private).cast(),
    }
}

/// # Safety
///
/// The array was created here, or moved from such an array.
unsafe extern "C" fn release(array: *mut ArrowArray) {
    // SAFETY: the caller owns the array during its release.
    let array = unsafe { &mut *array };
    assert!(array.release.take().is_some(), "released once");
    // SAFETY: boxed in `made`, and the released structure drops its pointer.
    let private = unsafe { Box::from_raw(array.private_data.cast::<Private>()) };
    if private.is_top {
        private.releases.0.fetch_add(1, Ordering::SeqCst);
    }
    for child in private.children.iter().copied().chain([private.dictionary]) {
        if child.is_null() {
            continue;
        }
        // SAFETY: boxed in `made`.
        let mut child = unsafe { Box::from_raw(child) };
        if !child.is_released() {
            // SAFETY: it has neither been moved nor released.
            unsafe { child.release() };
        }
    }
}

/// A child of an array of this module.
pub fn child(array: &mut ArrowArray, index: usize) -> &mut ArrowArray {
    // SAFETY: the array has that many children.
    let child = unsafe { *array.children.wrapping_add(index) };
    // SAFETY: alive as long as its parent, which is borrowed exclusively.
    unsafe { &mut *child }
}

/// Sets a buffer's pointer.
pub fn set_buffer(array: &mut ArrowArray, index: usize, pointer: *const c_void) {
    // SAFETY: the array has that many buffers.
    unsafe { *array.buffers.wrapping_add(index) = pointer };
}

/// A buffer's pointer.
pub fn get_buffer(array: &ArrowArray, index: usize) -> *const c_void {
    // SAFETY: the array has that many buffers.
    unsafe { *array.buffers.wrapping_add(index) }
}

/// One type of each shape.
pub fn types() -> Vec<DataType> {
    let field = |name, data_type| Field::new(name, data_type, true);
    let structure = DataType::Struct(
        vec![field("number", DataType::Int32), field("text", DataType::Utf8)].into(),
    );
    let entries = DataType::Struct(
        vec![Field::new("key", DataType::Int64, false), field("value", DataType::Float64)].into(),
    );
    let either = vec![field("number", DataType::Int32), field("text", DataType::Utf8)];
    let either = UnionFields::try_new([0, 1], either).unwrap();
    let ends = Field::new("run_ends", DataType::Int32, false).into();
    vec![
        DataType::Union(either.clone(), UnionMode::Sparse),
        DataType::Union(either, UnionMode::Dense),
        DataType::RunEndEncoded(ends, field("values", DataType::Int64).into()),
        DataType::Null,
        DataType::Boolean,
        DataType::UInt8,
        DataType::Int64,
        DataType::Decimal128(20, 2),
        DataType::FixedSizeBinary(5),
        // For these, any number of rows takes no bytes.
        DataType::FixedSizeBinary(0),
        DataType::new_fixed_size_list(DataType::Int8, 0, true),
        DataType::Struct(Fields::empty()),
        DataType::ListView(field("item", DataType::Int16).into()),
        DataType::Dictionary(
            Box::new(DataType::Int8),
            Box::new(DataType::Dictionary(Box::new(DataType::Int16), Box::new(DataType::Utf8))),
        ),
        DataType::Utf8,
        DataType::LargeBinary,
        DataType::Utf8View,
        DataType::new_list(structure.clone(), true),
        DataType::new_large_list(DataType::Int16, true),
        DataType::new_fixed_size_list(DataType::Float32, 3, true),
        DataType::Map(Field::new("entries", entries, false).into(), false),
        DataType::Dictionary(Box::new(DataType::Int16), Box::new(DataType::Utf8)),
        structure,
    ]
}
