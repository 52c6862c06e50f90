//! Users' deleters and guards that call the library, or panic.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use terrane_core::{Alignment, Allocate, ByteCount, Region, RegionRequest};
use terrane_interop::dlpack::ffi::{
    DLDataType, DLDevice, DLManagedTensorVersioned, DLPackVersion, DLTensor,
};
use terrane_interop::dlpack::{ElementType, Importer, TensorExport, TensorShape};
use terrane_testkit::memory::HeapAllocator;

fn region() -> Region {
    let request = RegionRequest::new(ByteCount::new(64)).aligned_to(Alignment::of(64));
    Region::new(HeapAllocator::system().allocate(&request).unwrap())
}

/// Takes every lock: exports a tensor, imports it, and releases it.
fn exchange() {
    let shape = TensorShape::compact(ElementType::F32, &[16]).unwrap();
    // SAFETY: no code uses the bytes.
    let tensor = unsafe { TensorExport::new(region(), shape) }.unwrap().into_versioned().unwrap();
    // SAFETY: the tensor was created above, and is passed on once.
    let tensor = unsafe { Importer::new().versioned(tensor.into_raw().as_ptr()) }.unwrap();
    assert!(tensor.memory().is_ok());
}

/// # Safety
///
/// The tensor came from [`foreign_tensor`], and is not used any more.
unsafe extern "C" fn delete(tensor: *mut DLManagedTensorVersioned) {
    exchange();
    // SAFETY: it was boxed when it was created, as the caller promises.
    let tensor = unsafe { Box::from_raw(tensor) };
    // SAFETY: the shape was boxed with it.
    drop(unsafe { Box::from_raw(tensor.dl_tensor.shape) });
    // SAFETY: the tensor owns a reference.
    let count = unsafe { Arc::from_raw(tensor.manager_ctx.cast::<AtomicU32>()) };
    count.fetch_add(1, Ordering::SeqCst);
}

/// A tensor of sixteen numbers at `data`, with this version. Its deleter uses the library.
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
            let memory = tensor.memory().unwrap();
            drop(tensor);
            assert_eq!(count.load(Ordering::SeqCst), times - 1);
            // The last owner of the bytes releases the tensor.
            drop(memory);
        }
        assert_eq!(count.load(Ordering::SeqCst), times);
    }
}

/// Uses the library and panics on drop. The panic's payload does the same.
struct Panics(Arc<AtomicU32>);

impl Drop for Panics {
    fn drop(&mut self) {
        exchange();
        self.0.fetch_add(1, Ordering::SeqCst);
        std::panic::panic_any(Carried);
    }
}

struct Carried;

impl Drop for Carried {
    fn drop(&mut self) {
        panic!("the payload of a panic drops");
    }
}

#[test]
fn panics_of_guards_are_contained_and_the_memory_is_released() {
    let count = Arc::new(AtomicU32::new(0));
    let allocator = HeapAllocator::system();
    let request = RegionRequest::new(ByteCount::new(64)).aligned_to(Alignment::of(64));
    let region = Region::new(allocator.allocate(&request).unwrap());
    let shape = TensorShape::compact(ElementType::F32, &[16]).unwrap();
    // SAFETY: no code uses the bytes.
    let export = unsafe { TensorExport::new(region, shape) }.unwrap();
    let export =
        export.guarded_by(Panics(Arc::clone(&count))).guarded_by(Panics(Arc::clone(&count)));
    drop(export.into_versioned().unwrap());
    assert_eq!(count.load(Ordering::SeqCst), 2);
    allocator.assert_all_freed();
}
