//! Users' deleters and release callbacks that call the library.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use arrow_schema::DataType;
use terrane_arrow::arrays::abi::{ArrowArray, Owned, Released};
use terrane_arrow::arrays::{export_array, import_array, to_arrow};
use terrane_arrow::columns::Column;
use terrane_core::{Alignment, Allocate, ByteCount, Region, RegionRequest};
use terrane_interop::dlpack::{ElementType, Importer, TensorExport, TensorShape};
use terrane_testkit::memory::HeapAllocator;

fn region() -> Region {
    let request = RegionRequest::new(ByteCount::new(64)).aligned_to(Alignment::of(64));
    Region::new(HeapAllocator::system().allocate(&request).unwrap())
}

/// Takes every lock: exports tensors and arrays, imports them, and releases them.
fn exchange() {
    let column = Column::new(DataType::Int32, 16, region()).unwrap();
    // SAFETY: no code writes the column.
    let array = unsafe { export_array(&column) }.unwrap();
    // SAFETY: as above.
    drop(unsafe { to_arrow(&column) }.unwrap());
    // SAFETY: this crate created the array.
    assert!(unsafe { import_array(&DataType::Int32, array) }.unwrap().is_same(&column));
    // SAFETY: as above.
    let tensor = unsafe { column.to_tensor() }.unwrap().into_versioned().unwrap().into_raw();
    // SAFETY: the tensor was created above, and is passed on once.
    let tensor = unsafe { Importer::new().versioned(tensor.as_ptr()) }.unwrap();
    assert!(Column::from_tensor(&tensor).unwrap().buffers()[1].is_some());
}

/// Uses the library on drop, and counts the drops.
struct Exchanges(Arc<AtomicU32>);

impl Drop for Exchanges {
    fn drop(&mut self) {
        exchange();
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_deleter_may_use_the_library_whether_its_tensor_is_taken_or_refused() {
    let count = Arc::new(AtomicU32::new(0));
    for (major, times) in [(1, 1), (2, 2)] {
        let shape = TensorShape::compact(ElementType::I32, &[16]).unwrap();
        // SAFETY: no code writes the bytes.
        let export = unsafe { TensorExport::new(region(), shape) }.unwrap();
        let export = export.guarded_by(Exchanges(Arc::clone(&count)));
        let tensor = export.into_versioned().unwrap().into_raw().as_ptr();
        // SAFETY: the structure is alive, and no other code has it.
        unsafe { (*tensor).version.major = major };
        // SAFETY: the tensor was created above, and is passed on once.
        if let Ok(tensor) = unsafe { Importer::new().versioned(tensor) } {
            let column = Column::from_tensor(&tensor).unwrap();
            drop(tensor);
            // SAFETY: no code writes the numbers.
            let array = unsafe { export_array(&column) }.unwrap();
            drop(column);
            assert_eq!(count.load(Ordering::SeqCst), times - 1);
            // The last owner releases the array, and the array releases the tensor.
            drop(array);
        }
        assert_eq!(count.load(Ordering::SeqCst), times);
    }
}

/// # Safety
///
/// The array's private data is a reference to a count.
unsafe extern "C" fn release(array: *mut ArrowArray) {
    exchange();
    // SAFETY: the caller of a release owns the structure.
    let array = unsafe { &mut *array };
    array.release = None;
    // SAFETY: the array's private data, which is converted back once.
    let count = unsafe { Arc::from_raw(array.private_data.cast::<AtomicU32>()) };
    count.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn a_release_callback_may_use_the_library_whether_its_array_is_taken_or_refused() {
    let count = Arc::new(AtomicU32::new(0));
    let values = [0_i32; 16];
    for (length, times) in [(16, 1), (-1, 2)] {
        let mut buffers = [ptr::null(), values.as_ptr().cast::<c_void>()];
        let array = ArrowArray {
            length,
            n_buffers: 2,
            buffers: buffers.as_mut_ptr(),
            release: Some(release),
            private_data: Arc::into_raw(Arc::clone(&count)).cast_mut().cast(),
            ..ArrowArray::EMPTY
        };
        // SAFETY: the callback may be called once, after any move and on any thread.
        let array = unsafe { Owned::new(array) };
        // SAFETY: the numbers outlive the array.
        if let Ok(column) = unsafe { import_array(&DataType::Int32, array) } {
            // SAFETY: no code writes the numbers.
            let data = unsafe { to_arrow(&column) }.unwrap();
            drop(column);
            assert_eq!(count.load(Ordering::SeqCst), times - 1);
            drop(data);
        }
        assert_eq!(count.load(Ordering::SeqCst), times);
    }
}
