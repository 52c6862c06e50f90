//! Users' deleters and release callbacks that call the library.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use arrow_schema::DataType;
use terrane_arrow::arrays::abi::{ArrowArray, Owned};
use terrane_arrow::arrays::{export_array, import_array, to_arrow};
use terrane_arrow::columns::Column;
use terrane_core::{Alignment, Allocate, ByteCount, Region, RegionRequest};
use terrane_interop::dlpack::Importer;
use terrane_interop::dlpack::ffi::{
    DLDataType, DLDevice, DLManagedTensorVersioned, DLPackVersion, DLTensor,
};
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
    // SAFETY: this crate made the array.
    assert!(unsafe { import_array(&DataType::Int32, array) }.unwrap().is_same(&column));
    // SAFETY: as above.
    let tensor = unsafe { column.to_tensor() }.unwrap().into_versioned().unwrap().into_raw();
    // SAFETY: the tensor was created above, and is passed on once.
    let tensor = unsafe { Importer::new().versioned(tensor.as_ptr()) }.unwrap();
    assert!(Column::from_tensor(&tensor).unwrap().buffers()[1].is_some());
}

/// # Safety
///
/// The tensor is one of [`foreign_tensor`]'s, and is not used any more.
unsafe extern "C" fn delete(tensor: *mut DLManagedTensorVersioned) {
    exchange();
    // SAFETY: it was boxed when it was created, as the caller promises.
    let tensor = unsafe { Box::from_raw(tensor) };
    // SAFETY: the shape was boxed with it.
    drop(unsafe { Box::from_raw(tensor.dl_tensor.shape) });
    // SAFETY: a reference was given with it.
    let count = unsafe { Arc::from_raw(tensor.manager_ctx.cast::<AtomicU32>()) };
    count.fetch_add(1, Ordering::SeqCst);
}

/// A tensor of sixteen numbers at `data`, of a version, whose deleter uses the library.
fn foreign_tensor(
    data: *mut c_void,
    major: u32,
    count: &Arc<AtomicU32>,
) -> *mut DLManagedTensorVersioned {
    let shape = Box::into_raw(Box::new(16_i64));
    Box::into_raw(Box::new(DLManagedTensorVersioned {
        version: DLPackVersion { major, minor: 0 },
        manager_ctx: Arc::into_raw(Arc::clone(count)).cast_mut().cast(),
        deleter: Some(delete),
        flags: 0,
        dl_tensor: DLTensor {
            data,
            device: DLDevice { device_type: 1, device_id: 0 },
            ndim: 1,
            dtype: DLDataType { code: 0, bits: 32, lanes: 1 },
            shape,
            strides: ptr::null_mut(),
            byte_offset: 0,
        },
    }))
}

#[test]
fn a_deleter_may_use_the_library_whether_its_tensor_is_taken_or_refused() {
    let count = Arc::new(AtomicU32::new(0));
    let mut data = [0_i32; 16];
    for (major, times) in [(1, 1), (2, 2)] {
        let tensor = foreign_tensor(data.as_mut_ptr().cast(), major, &count);
        // SAFETY: the tensor was created above, and its numbers outlive it.
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
    // SAFETY: the array's private data, which is taken back once.
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
            ..EMPTY
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

const EMPTY: ArrowArray = ArrowArray {
    length: 0,
    null_count: 0,
    offset: 0,
    n_buffers: 0,
    n_children: 0,
    buffers: ptr::null_mut(),
    children: ptr::null_mut(),
    dictionary: ptr::null_mut(),
    release: None,
    private_data: ptr::null_mut(),
};
