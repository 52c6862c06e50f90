//! What Python calls when a capsule goes that nobody took the tensor from.
//!
//! It is here, and not in Python, as it may be called while an exception is on its way, when no
//! Python may run.

use std::ffi::{CStr, c_char, c_int, c_void};

use terrane_interop::dlpack::Structure;
use terrane_interop::dlpack::ffi::{DLManagedTensor, DLManagedTensorVersioned};

// SAFETY: these are functions of Python's stable interface, with their signatures. They are there
// when Python has loaded this library, and nothing else loads it.
unsafe extern "C" {
    fn PyCapsule_IsValid(capsule: *mut c_void, name: *const c_char) -> c_int;
    fn PyCapsule_GetPointer(capsule: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Calls the deleter of the tensor in a capsule, unless its name says that it was taken.
///
/// # Safety
///
/// Only Python calls it, with a capsule that it was given for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_destroy_capsule(capsule: *mut c_void) {
    // SAFETY: the caller's promise.
    let versioned = unsafe { content(capsule, DLManagedTensorVersioned::CAPSULE) };
    if let Some(tensor) = versioned {
        let tensor: *mut DLManagedTensorVersioned = tensor.cast();
        // SAFETY: the capsule has the tensor, by its name.
        if let Some(deleter) = unsafe { (*tensor).deleter } {
            // SAFETY: nobody has taken it, so that nobody else calls it.
            unsafe { deleter(tensor) };
        }
    }
    // SAFETY: the caller's promise.
    let legacy = unsafe { content(capsule, DLManagedTensor::CAPSULE) };
    if let Some(tensor) = legacy {
        let tensor: *mut DLManagedTensor = tensor.cast();
        // SAFETY: the capsule has the tensor, by its name.
        if let Some(deleter) = unsafe { (*tensor).deleter } {
            // SAFETY: nobody has taken it, so that nobody else calls it.
            unsafe { deleter(tensor) };
        }
    }
}

/// What is in the capsule, if that is its name.
///
/// # Safety
///
/// It is a capsule.
unsafe fn content(capsule: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a capsule, and a text that ends with a zero.
    if unsafe { PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return None;
    }
    // SAFETY: as above, and the name is its name.
    Some(unsafe { PyCapsule_GetPointer(capsule, name.as_ptr()) })
}
