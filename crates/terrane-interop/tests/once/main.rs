//! A deleter that is called twice. The test runs in its own process, so that no other tensor gets
//! the same address.

use std::sync::Arc;

use terrane_core::{Alignment, Allocate, ByteCount, Region, RegionRequest};
use terrane_interop::dlpack::{ElementType, TensorExport, TensorShape};
use terrane_testkit::memory::HeapAllocator;

#[test]
fn a_second_call_of_the_deleter_does_nothing() {
    let allocator = HeapAllocator::system();
    let guard = Arc::new(());
    let export = || {
        let request = RegionRequest::new(ByteCount::new(64)).aligned_to(Alignment::of(64));
        let memory = allocator.allocate(&request).unwrap();
        let shape = TensorShape::compact(ElementType::F32, &[16]).unwrap();
        // SAFETY: no code uses the bytes.
        let export = unsafe { TensorExport::new(Region::new(memory), shape) }.unwrap();
        export.guarded_by(Arc::clone(&guard))
    };
    let versioned = export().into_versioned().unwrap().into_raw().as_ptr();
    // SAFETY: the structure is alive.
    let delete = unsafe { (*versioned).deleter }.unwrap();
    let legacy = export().into_legacy().unwrap().into_raw().as_ptr();
    // SAFETY: the structure is alive.
    let delete_legacy = unsafe { (*legacy).deleter }.unwrap();
    assert_eq!((allocator.live(), Arc::strong_count(&guard)), (2, 3));
    for _ in 0..2 {
        // SAFETY: the tensor is alive at the first call. At the second call, the deleter finds no
        // entry.
        unsafe { delete(versioned) };
        assert_eq!((allocator.live(), Arc::strong_count(&guard)), (1, 2));
    }
    for _ in 0..2 {
        // SAFETY: as above.
        unsafe { delete_legacy(legacy) };
        allocator.assert_all_freed();
    }
    // SAFETY: null is harmless.
    unsafe { delete(std::ptr::null_mut()) };
    assert_eq!(Arc::strong_count(&guard), 1);
}
