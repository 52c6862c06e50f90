//! Exported managed tensors: the C structure, and the values that it keeps alive until its deleter
//! runs.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use dlpack_rs::ffi as raw;
use smallvec::SmallVec;
use terrane_core::Region;

use super::ffi::{DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor};
use super::live_tensors::EXPORTED;
use crate::release_order::{ConsumerWork, catch_panic};

/// The version of exported tensors. Its minor version guarantees that strides are never null.
const VERSION: DLPackVersion =
    DLPackVersion { major: raw::DLPACK_MAJOR_VERSION, minor: raw::DLPACK_MINOR_VERSION };

mod sealed {
    use std::ffi::c_void;
    use std::ptr::NonNull;

    use super::DLTensor;

    /// The common part of the two structures. No other type implements it.
    pub trait Sealed: Sized {
        fn around(tensor: DLTensor, flags: u64, context: *mut c_void) -> Self;

        /// # Safety
        ///
        /// `ManagedTensor::new` created the structure, and its deleter was not called yet.
        unsafe fn release(tensor: NonNull<Self>);
    }
}

/// One of the two structures with which DLPack passes tensors. It is implemented only for these
/// two.
pub trait Structure: sealed::Sealed + 'static {
    /// The name of a Python capsule that holds such a structure.
    const CAPSULE: &'static CStr;
    /// The capsule's name once a consumer has taken the structure.
    const USED_CAPSULE: &'static CStr;
}

impl Structure for DLManagedTensor {
    const CAPSULE: &'static CStr = c"dltensor";
    const USED_CAPSULE: &'static CStr = c"used_dltensor";
}

impl Structure for DLManagedTensorVersioned {
    const CAPSULE: &'static CStr = c"dltensor_versioned";
    const USED_CAPSULE: &'static CStr = c"used_dltensor_versioned";
}

impl sealed::Sealed for DLManagedTensor {
    fn around(tensor: DLTensor, _: u64, context: *mut c_void) -> Self {
        Self { dl_tensor: tensor, manager_ctx: context, deleter: Some(delete_legacy) }
    }

    unsafe fn release(tensor: NonNull<Self>) {
        // SAFETY: the caller's promise.
        unsafe { delete_legacy(tensor.as_ptr()) }
    }
}

impl sealed::Sealed for DLManagedTensorVersioned {
    fn around(tensor: DLTensor, flags: u64, context: *mut c_void) -> Self {
        let deleter = Some(delete_versioned as unsafe extern "C" fn(*mut Self));
        Self { version: VERSION, manager_ctx: context, deleter, flags, dl_tensor: tensor }
    }

    unsafe fn release(tensor: NonNull<Self>) {
        // SAFETY: the caller's promise.
        unsafe { delete_versioned(tensor.as_ptr()) }
    }
}

/// A tensor that is ready for export. If it drops instead, it is released as by its consumer.
pub struct ManagedTensor<S: Structure>(NonNull<S>);

// SAFETY: everything that the structure owns is `Send`, and a shared reference gives no access to
// it.
unsafe impl<S: Structure> Send for ManagedTensor<S> {}

impl<S: Structure> ManagedTensor<S> {
    /// Allocates the structure together with the values that it keeps.
    pub(super) fn new(owners: TensorOwners, fields: TensorFields) -> Self {
        let TensorFields { data, device, dtype, byte_offset, flags } = fields;
        let context = Box::into_raw(Box::new(Context::<S> { tensor: None, owners }));
        // SAFETY: it was allocated above, and no other code has it.
        let context_ref = unsafe { &mut *context };
        let axes = context_ref.owners.sizes.len();
        let tensor = DLTensor {
            data,
            device,
            // At most 64.
            ndim: i32::try_from(axes).unwrap_or(i32::MAX),
            dtype,
            shape: context_ref.owners.sizes.as_mut_ptr(),
            strides: context_ref.owners.strides.as_mut_ptr(),
            byte_offset,
        };
        let structure = context_ref.tensor.insert(S::around(tensor, flags, context.cast()));
        let structure = NonNull::from(structure);
        EXPORTED.enter(structure.addr());
        Self(structure)
    }

    /// A pointer for reading the structure.
    #[must_use]
    pub fn as_ptr(&self) -> *const S {
        self.0.as_ptr()
    }

    /// Exports the structure. The owner of the pointer must call its deleter once, when it has
    /// finished.
    #[must_use = "without a call of its deleter, the memory is leaked"]
    pub fn into_raw(self) -> NonNull<S> {
        ManuallyDrop::new(self).0
    }

    /// Takes back a structure that no consumer has taken.
    ///
    /// # Safety
    ///
    /// [`into_raw`](Self::into_raw) returned the pointer. No other code calls its deleter.
    #[must_use]
    pub unsafe fn from_raw(tensor: NonNull<S>) -> Self {
        Self(tensor)
    }
}

impl<S: Structure> Drop for ManagedTensor<S> {
    fn drop(&mut self) {
        // SAFETY: `new` created it, and this value alone owns it: `into_raw` gives it away.
        unsafe { S::release(self.0) };
    }
}

impl<S: Structure> fmt::Debug for ManagedTensor<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ManagedTensor").field(&self.0).finish()
    }
}

/// The structure's contents besides its axes.
pub(super) struct TensorFields {
    pub(super) data: *mut c_void,
    pub(super) device: raw::DLDevice,
    pub(super) dtype: raw::DLDataType,
    pub(super) byte_offset: u64,
    pub(super) flags: u64,
}

/// The values kept until the deleter has run.
pub(super) struct TensorOwners {
    pub(super) sizes: Box<[i64]>,
    pub(super) strides: Box<[i64]>,
    /// Dropped before the memory.
    pub(super) guards: Guards,
    pub(super) region: Region,
    /// The work that must complete before the other values drop.
    pub(super) consumer: ConsumerWork,
}

/// Guards of the caller. They drop in the order in which they were added. Each drops separately,
/// because a second panic during an unwind would abort the process.
pub(super) struct Guards(pub(super) SmallVec<[Box<dyn Any + Send>; 2]>);

impl Drop for Guards {
    fn drop(&mut self) {
        for guard in self.0.drain(..) {
            catch_panic(|| drop(guard));
        }
    }
}

struct Context<S> {
    /// The structure that the consumer sees. It is set once the context has an address.
    tensor: Option<S>,
    owners: TensorOwners,
}

/// Releases the context of an exported structure. A guard's panic is caught here, because the
/// consumer's code is not Rust.
///
/// # Safety
///
/// `context` belongs to a structure that [`ManagedTensor::new`] created, and no code uses it any
/// more.
unsafe fn release<S>(context: *mut c_void) {
    // SAFETY: it came from `Box::into_raw` of this type, and is converted back only here.
    let context = unsafe { Box::from_raw(context.cast::<Context<S>>()) };
    catch_panic(|| {
        let TensorOwners { guards, region, consumer, .. } = context.owners;
        // A tuple drops its fields in order.
        consumer.release((guards, region));
    });
}

/// The structure, if its deleter was not called yet. It is then marked as called.
fn take_exported<S>(tensor: *mut S) -> Option<NonNull<S>> {
    NonNull::new(tensor).filter(|tensor| EXPORTED.leave(tensor.addr()))
}

/// # Safety
///
/// `tensor` is null, or a structure of this crate whose deleter was not called yet.
unsafe extern "C" fn delete_legacy(tensor: *mut DLManagedTensor) {
    let Some(tensor) = take_exported(tensor) else { return };
    // SAFETY: it is a structure of this crate, as the caller promises, and was not released yet.
    let context = unsafe { (*tensor.as_ptr()).manager_ctx };
    // SAFETY: the context of that structure, whose deleter is called once.
    unsafe { release::<DLManagedTensor>(context) }
}

/// # Safety
///
/// `tensor` is null, or a structure of this crate whose deleter was not called yet.
unsafe extern "C" fn delete_versioned(tensor: *mut DLManagedTensorVersioned) {
    let Some(tensor) = take_exported(tensor) else { return };
    // SAFETY: it is a structure of this crate, as the caller promises, and was not released yet.
    let context = unsafe { (*tensor.as_ptr()).manager_ctx };
    // SAFETY: the context of that structure, whose deleter is called once.
    unsafe { release::<DLManagedTensorVersioned>(context) }
}
