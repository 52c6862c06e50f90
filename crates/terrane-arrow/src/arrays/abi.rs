//! The C structures of the Arrow C Data and C Device Data interfaces, as plain data, and their
//! owner.
//!
//! arrow-rs has those of the data interface, with private fields and accessors that trust what they
//! read; of the device interface it has none. The structures here hold the same fields in the same
//! order as the specification.

use std::ffi::{c_char, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr;

/// `ArrowSchema`: a type, by its format string.
///
/// Plain data, of the layout of [`FFI_ArrowSchema`](arrow_schema::ffi::FFI_ArrowSchema), which owns
/// what this only shows.
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

/// `ArrowDeviceType`: a sort of device, by the numbers of DLPack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct DeviceType(pub i32);

impl DeviceType {
    /// Memory of the host.
    pub const CPU: Self = Self(1);
    /// Memory of a CUDA device.
    pub const CUDA: Self = Self(2);
    /// Host memory locked for CUDA devices.
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
    /// What keeps others from having their structures taken to any thread.
    pub trait Sealed {}
    impl Sealed for super::ArrowSchema {}
    impl Sealed for super::ArrowArray {}
    impl Sealed for super::ArrowDeviceArray {}
}

/// A structure with a release callback, which may be called on any thread. It is implemented for
/// the three of Arrow's, and for nothing else.
pub trait Released: sealed::Sealed + Sized {
    /// A structure that has been released.
    const EMPTY: Self;

    /// Whether the callback is null.
    fn is_released(&self) -> bool;

    /// Calls the callback, unless it is null.
    ///
    /// # Safety
    ///
    /// The structure is its producer's, or a copy of that which was moved here, and was not
    /// released before.
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
        // SAFETY: the caller's promise; the callback is to be called with the array within.
        unsafe { self.array.release() };
    }
}

/// A structure that is owned: it is released once, when this drops, on any thread.
///
/// The producer of a structure ensures that its callback may be called on any thread, as the
/// specification says.
pub struct Owned<T: Released>(T);

// SAFETY: the three structures that there are have callbacks that work on any thread, by the
// specification, and the maker of this value vouched for it; everything else is numbers.
unsafe impl<T: Released> Send for Owned<T> {}
// SAFETY: a shared reference gives the plain fields, and does nothing with them.
unsafe impl<T: Released> Sync for Owned<T> {}

impl<T: Released> Owned<T> {
    /// Moves a structure here, as the specification has it: the source counts as released
    /// afterwards, so that its callback is called once. `None` if the pointer is null or the
    /// structure has been released already.
    ///
    /// # Safety
    ///
    /// The pointer is null, or aligned and valid for reads and writes of a structure that no code
    /// else uses meanwhile. Unless it is released, its callback is one that may be called with the
    /// structure, once, wherever it has been moved to and on any thread.
    pub unsafe fn take(source: *mut T) -> Option<Self> {
        if source.is_null() {
            return None;
        }
        // SAFETY: valid and aligned, as the caller promised; a released structure takes its place.
        let taken = Self(unsafe { ptr::replace(source, T::EMPTY) });
        (!taken.0.is_released()).then_some(taken)
    }

    /// A structure that is held by value.
    ///
    /// # Safety
    ///
    /// As for [`take`](Self::take); and it is not released through a copy.
    pub unsafe fn new(structure: T) -> Self {
        Self(structure)
    }

    /// Moves the structure out, to a place of the consumer's that holds no structure, or one that has
    /// been released. Releasing it is the consumer's from now on.
    ///
    /// # Safety
    ///
    /// The pointer is aligned and valid for a write.
    pub unsafe fn give(self, destination: *mut T) {
        // SAFETY: the caller's promise.
        unsafe { destination.write(self.into_inner()) };
    }

    /// The structure, whose release is the caller's from now on; it is leaked otherwise.
    pub fn into_inner(self) -> T {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used again, nor dropped.
        unsafe { ptr::read(&raw const this.0) }
    }

    /// The structure, to be looked at.
    #[must_use]
    pub const fn get(&self) -> &T {
        &self.0
    }
}

impl<T: Released> Drop for Owned<T> {
    fn drop(&mut self) {
        if !self.0.is_released() {
            // SAFETY: the structure is this value's, and has not been released.
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
    /// The array without its device; what stands for the device is plain data.
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
        /// The array is the caller's, and its private data are a counter.
        unsafe extern "C" fn count(array: *mut ArrowArray) {
            // SAFETY: the caller of a release hands over the structure.
            let array = unsafe { &mut *array };
            // SAFETY: the test keeps the counter.
            unsafe { *array.private_data.cast::<u32>() += 1 };
            array.release = None;
        }
        let mut released = 0_u32;
        let private_data = (&raw mut released).cast();
        let mut theirs = ArrowArray { release: Some(count), private_data, ..ArrowArray::EMPTY };
        // SAFETY: a structure with a callback that may be called with it.
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
