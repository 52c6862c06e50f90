//! Calls the deleter of a foreign tensor: once, on the thread that drops the last user.

use std::num::NonZeroUsize;
use std::ptr::NonNull;

use super::ImportError;
use super::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use super::live_tensors::IMPORTED;

/// A structure that this crate must release once. Its deleter was read at import. A structure
/// without a deleter is not accessed again.
pub(super) struct OwnedTensor(Structure);

enum Structure {
    Versioned(NonNull<DLManagedTensorVersioned>, Deleter<DLManagedTensorVersioned>),
    Legacy(NonNull<DLManagedTensor>, Deleter<DLManagedTensor>),
    /// No deleter has to be called.
    WithoutDeleter,
}

type Deleter<S> = unsafe extern "C" fn(*mut S);

// SAFETY: the importer of the structure promised that its deleter may be called on any thread. The
// rest of the structure is not accessed after the checks.
unsafe impl Send for OwnedTensor {}
// SAFETY: as for `Send`; a shared reference gives no access.
unsafe impl Sync for OwnedTensor {}

impl OwnedTensor {
    /// The owner of a structure of DLPack 1.x.
    ///
    /// # Errors
    ///
    /// [`ImportError::AlreadyImported`] if it has another owner.
    ///
    /// # Safety
    ///
    /// The structure begins as every version does, and the caller owns it. Its deleter may be
    /// called on any thread.
    pub(super) unsafe fn versioned(
        tensor: NonNull<DLManagedTensorVersioned>,
    ) -> Result<Self, ImportError> {
        // Entered before its deleter is read: the owner of the entry keeps the structure alive.
        enter(tensor.addr())?;
        // SAFETY: in every version of the structure, its deleter has the same offset.
        let deleter = unsafe { (*tensor.as_ptr()).deleter };
        Ok(Self(match deleter {
            Some(deleter) => Structure::Versioned(tensor, deleter),
            None => without_deleter(tensor.addr()),
        }))
    }

    /// The owner of a structure before DLPack 1.0.
    ///
    /// # Errors
    ///
    /// As for [`versioned`](Self::versioned).
    ///
    /// # Safety
    ///
    /// As for [`versioned`](Self::versioned), of this structure.
    pub(super) unsafe fn legacy(tensor: NonNull<DLManagedTensor>) -> Result<Self, ImportError> {
        enter(tensor.addr())?;
        // SAFETY: the structure is there, by the caller's promise.
        let deleter = unsafe { (*tensor.as_ptr()).deleter };
        Ok(Self(match deleter {
            Some(deleter) => Structure::Legacy(tensor, deleter),
            None => without_deleter(tensor.addr()),
        }))
    }
}

fn enter(address: NonZeroUsize) -> Result<(), ImportError> {
    match IMPORTED.enter(address) {
        true => Ok(()),
        false => Err(ImportError::AlreadyImported { address: address.get() }),
    }
}

/// A structure without a deleter. Its lifetime is unknown, so it is not entered in the table.
fn without_deleter(address: NonZeroUsize) -> Structure {
    IMPORTED.leave(address);
    Structure::WithoutDeleter
}

impl Drop for OwnedTensor {
    fn drop(&mut self) {
        // Each entry is removed before its deleter is called, because afterwards another structure
        // may have its address.
        match self.0 {
            Structure::Versioned(tensor, deleter) => {
                IMPORTED.leave(tensor.addr());
                // SAFETY: this is the only call, because an owner drops once. The caller of the
                // import transferred the structure to this owner.
                unsafe { deleter(tensor.as_ptr()) }
            }
            Structure::Legacy(tensor, deleter) => {
                IMPORTED.leave(tensor.addr());
                // SAFETY: as above.
                unsafe { deleter(tensor.as_ptr()) }
            }
            Structure::WithoutDeleter => {}
        }
    }
}
