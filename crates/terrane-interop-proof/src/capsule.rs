//! The destructor of a capsule whose tensor no consumer took.
//!
//! It is not written in Python, because it may be called during an exception, when Python code must
//! not run.

use std::ffi::{CStr, c_char, c_int, c_void};

use terrane_interop::dlpack::Structure;
use terrane_interop::dlpack::ffi::{DLManagedTensor, DLManagedTensorVersioned};

// SAFETY: these are functions of Python's stable interface, with their signatures. They exist,
// because only Python loads this library.
unsafe extern "C" {
    fn PyCapsule_IsValid(capsule: *mut c_void, name: *const c_char) -> c_int;
    fn PyCapsule_GetPointer(capsule: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Calls the deleter of the tensor in a capsule, unless its name shows that it was taken.
///
/// # Safety
///
/// Only Python may call it, as the destructor of a capsule.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_destroy_capsule(capsule: *mut c_void) {
    // SAFETY: the caller's promise.
    let versioned = unsafe { content(capsule, DLManagedTensorVersioned::CAPSULE) };
    if let Some(tensor) = versioned {
        let tensor: *mut DLManagedTensorVersioned = tensor.cast();
        // SAFETY: by its name, the capsule owns the tensor.
        if let Some(deleter) = unsafe { (*tensor).deleter } {
            // SAFETY: no consumer has taken it, so no other code calls the deleter.
            unsafe { deleter(tensor) };
        }
    }
    // SAFETY: the caller's promise.
    let legacy = unsafe { content(capsule, DLManagedTensor::CAPSULE) };
    if let Some(tensor) = legacy {
        let tensor: *mut DLManagedTensor = tensor.cast();
        // SAFETY: by its name, the capsule owns the tensor.
        if let Some(deleter) = unsafe { (*tensor).deleter } {
            // SAFETY: no consumer has taken it, so no other code calls the deleter.
            unsafe { deleter(tensor) };
        }
    }
}

/// The contents of the capsule, if it has this name.
///
/// # Safety
///
/// It is a capsule.
unsafe fn content(capsule: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a capsule, and a string that ends with a zero byte.
    if unsafe { PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return None;
    }
    // SAFETY: as above, and the capsule has this name.
    Some(unsafe { PyCapsule_GetPointer(capsule, name.as_ptr()) })
}
