//! The C structures of the Arrow C Data and C Device Data interfaces as plain data, and their
//! owner.
//!
//! arrow-rs defines the structures of the data interface, with private fields and accessors that
//! trust their values. It defines none for the device interface. The structures here have the
//! specification's fields in its order.

use std::ffi::{c_char, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr;

/// `ArrowSchema`: a type, by its format string.
///
/// Plain data with the layout of [`FFI_ArrowSchema`](arrow_schema::ffi::FFI_ArrowSchema), which
/// owns the structure that this only describes.
#[derive(Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "the specification's own names and meanings")]
pub struct ArrowSchema {
    pub format: *const c_char,
    pub name: *const c_char,
    pub metadata: *const c_char,
    pub flags: i64,
    pub n_children: i64,
    pub children: *mut *mut ArrowSchema,
    pub dictionary: *mut ArrowSchema,
    pub release: Option<unsafe extern "C" fn(*mut ArrowSchema)>,
    pub private_data: *mut c_void,
}

/// `ArrowArray`: the values of one array.
#[derive(Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "the specification's own names and meanings")]
pub struct ArrowArray {
    pub length: i64,
    pub null_count: i64,
    pub offset: i64,
    pub n_buffers: i64,
    pub n_children: i64,
    pub buffers: *mut *const c_void,
    pub children: *mut *mut ArrowArray,
    pub dictionary: *mut ArrowArray,
    pub release: Option<unsafe extern "C" fn(*mut ArrowArray)>,
    pub private_data: *mut c_void,
}

/// `ArrowDeviceArray`: an array, and the device that its buffers are on.
#[derive(Debug)]
#[repr(C)]
#[allow(missing_docs, reason = "the specification's own names and meanings")]
pub struct ArrowDeviceArray {
    pub array: ArrowArray,
    pub device_id: i64,
    pub device_type: DeviceType,
    pub sync_event: *mut c_void,
    pub reserved: [i64; 3],
}

/// `ArrowDeviceType`: a kind of device, with DLPack's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DeviceType(pub i32);

impl DeviceType {
    /// Memory of the host.
    pub const CPU: Self = Self(1);
    /// Memory of a CUDA device.
    pub const CUDA: Self = Self(2);
    /// Host memory that is page-locked for CUDA devices.
    pub const CUDA_HOST: Self = Self(3);
    /// Memory that CUDA moves between host and devices.
    pub const CUDA_MANAGED: Self = Self(13);
}

impl fmt::Display for DeviceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::CPU => f.write_str("CPU"),
            Self::CUDA => f.write_str("CUDA"),
            Self::CUDA_HOST => f.write_str("CUDA host"),
            Self::CUDA_MANAGED => f.write_str("CUDA managed"),
            Self(other) => write!(f, "number {other}"),
        }
    }
}

mod sealed {
    /// Prevents implementations in other crates, whose callbacks might not work on any thread.
    pub trait Sealed {}
    impl Sealed for super::ArrowSchema {}
    impl Sealed for super::ArrowArray {}
    impl Sealed for super::ArrowDeviceArray {}
}

/// A structure with a release callback that may be called on any thread. Only Arrow's three
/// structures implement it.
pub trait Released: sealed::Sealed + Sized {
    /// A structure that has been released.
    const EMPTY: Self;

    /// Whether the callback is null.
    fn is_released(&self) -> bool;

    /// Calls the callback, unless it is null.
    ///
    /// # Safety
    ///
    /// The structure belongs to its producer, or was moved here from the producer, and has not been
    /// released.
    unsafe fn release(&mut self);
}

impl Released for ArrowSchema {
    const EMPTY: Self = Self {
        format: ptr::null(),
        name: ptr::null(),
        metadata: ptr::null(),
        flags: 0,
        n_children: 0,
        children: ptr::null_mut(),
        dictionary: ptr::null_mut(),
        release: None,
        private_data: ptr::null_mut(),
    };

    fn is_released(&self) -> bool {
        self.release.is_none()
    }

    unsafe fn release(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: the caller's promise.
            unsafe { release(self) };
        }
    }
}

impl Released for ArrowArray {
    const EMPTY: Self = Self {
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

    fn is_released(&self) -> bool {
        self.release.is_none()
    }

    unsafe fn release(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: the caller's promise.
            unsafe { release(self) };
        }
    }
}

impl Released for ArrowDeviceArray {
    const EMPTY: Self = Self {
        array: ArrowArray::EMPTY,
        device_id: -1,
        device_type: DeviceType::CPU,
        sync_event: ptr::null_mut(),
        reserved: [0; 3],
    };

    fn is_released(&self) -> bool {
        self.array.is_released()
    }

    unsafe fn release(&mut self) {
        // SAFETY: the caller's promise; the callback belongs to the inner array.
        unsafe { self.array.release() };
    }
}

/// An owned structure. It is released once, on drop, on any thread.
///
/// The specification requires that the callback may be called on any thread. The producer is
/// responsible for that.
pub struct Owned<T: Released>(T);

// SAFETY: by the specification, the callbacks of Arrow's three structures work on any thread, and
// the creator of this value guaranteed it. All other fields are numbers.
unsafe impl<T: Released> Send for Owned<T> {}
// SAFETY: a shared reference only returns the plain fields.
unsafe impl<T: Released> Sync for Owned<T> {}

impl<T: Released> Owned<T> {
    /// Moves a structure out of `source`, by the rules of the specification: the source is then
    /// marked as released, so the callback is called once. `None` if the pointer is null or the
    /// structure has been released.
    ///
    /// # Safety
    ///
    /// The pointer is null, or aligned and valid for reads and writes of a structure that no other
    /// code uses during the call. Unless the structure is released, its callback may be called once
    /// with it, after any move and on any thread.
    pub unsafe fn take(source: *mut T) -> Option<Self> {
        if source.is_null() {
            return None;
        }
        // SAFETY: valid and aligned, as the caller promised. A released structure replaces it.
        let taken = Self(unsafe { ptr::replace(source, T::EMPTY) });
        (!taken.0.is_released()).then_some(taken)
    }

    /// Takes ownership of a structure by value.
    ///
    /// # Safety
    ///
    /// As for [`take`](Self::take). In addition, no copy of the structure is released.
    pub unsafe fn new(structure: T) -> Self {
        Self(structure)
    }

    /// Moves the structure to memory of the consumer, which contains no structure or a released
    /// one. The consumer then releases it.
    ///
    /// # Safety
    ///
    /// The pointer is aligned and valid for a write.
    pub unsafe fn give(self, destination: *mut T) {
        // SAFETY: the caller's promise.
        unsafe { destination.write(self.into_inner()) };
    }

    /// The structure. The caller must release it, or it is leaked.
    pub fn into_inner(self) -> T {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used again nor dropped.
        unsafe { ptr::read(&raw const this.0) }
    }

    /// The structure, for reading.
    #[must_use]
    pub const fn get(&self) -> &T {
        &self.0
    }
}

impl<T: Released> Drop for Owned<T> {
    fn drop(&mut self) {
        if !self.0.is_released() {
            // SAFETY: this value owns the structure, which has not been released.
            unsafe { self.0.release() };
        }
    }
}

impl<T: Released + fmt::Debug> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<Owned<ArrowDeviceArray>> for Owned<ArrowArray> {
    /// The array without its device, whose description is plain data.
    fn from(array: Owned<ArrowDeviceArray>) -> Self {
        Self(array.into_inner().array)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_data::ffi::FFI_ArrowArray;
    use arrow_schema::ffi::FFI_ArrowSchema;
    use std::mem::{align_of, offset_of};

    #[test]
    fn structures_are_laid_out_as_the_specification_and_arrow_rs_have_them() {
        assert_eq!(size_of::<ArrowSchema>(), size_of::<FFI_ArrowSchema>());
        assert_eq!(align_of::<ArrowSchema>(), align_of::<FFI_ArrowSchema>());
        assert_eq!(size_of::<ArrowArray>(), size_of::<FFI_ArrowArray>());
        assert_eq!(size_of::<ArrowArray>(), 80);
        assert_eq!(offset_of!(ArrowDeviceArray, device_id), 80);
        assert_eq!(offset_of!(ArrowDeviceArray, device_type), 88);
        assert_eq!(offset_of!(ArrowDeviceArray, sync_event), 96);
        assert_eq!(offset_of!(ArrowDeviceArray, reserved), 104);
        assert_eq!(size_of::<ArrowDeviceArray>(), 128);
    }

    #[test]
    fn a_structure_is_released_once_however_it_is_moved() {
        /// # Safety
        ///
        /// The array belongs to the caller, and its private data is a counter.
        unsafe extern "C" fn count(array: *mut ArrowArray) {
            // SAFETY: the caller of a release owns the structure.
            let array = unsafe { &mut *array };
            // SAFETY: the test keeps the counter.
            unsafe { *array.private_data.cast::<u32>() += 1 };
            array.release = None;
        }
        let mut released = 0_u32;
        let private_data = (&raw mut released).cast();
        let mut theirs = ArrowArray { release: Some(count), private_data, ..ArrowArray::EMPTY };
        // SAFETY: the structure's callback may be called with it.
        let taken = unsafe { Owned::take(&raw mut theirs) }.unwrap();
        assert!(theirs.is_released());
        // SAFETY: as above; it has been released.
        assert!(unsafe { Owned::take(&raw mut theirs) }.is_none());
        // SAFETY: null is allowed.
        assert!(unsafe { Owned::<ArrowArray>::take(ptr::null_mut()) }.is_none());
        let mut place = ArrowArray::EMPTY;
        // SAFETY: the place is writable.
        unsafe { taken.give(&raw mut place) };
        assert_eq!(released, 0);
        // SAFETY: as above.
        drop(unsafe { Owned::take(&raw mut place) });
        assert_eq!(released, 1);
    }
}
