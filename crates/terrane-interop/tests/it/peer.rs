//! The other library, which exports tensors and counts the calls of their deleters.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use terrane_interop::dlpack::ffi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
};

/// Counts the calls of the deleters of its tensors.
#[derive(Clone, Debug, Default)]
pub struct Deleted(Arc<AtomicUsize>);

impl Deleted {
    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// Every field of a managed tensor.
#[derive(Clone, Debug)]
pub struct Fields {
    pub version: (u32, u32),
    pub flags: u64,
    pub data: usize,
    pub device: (u32, i32),
    pub ndim: i32,
    pub dtype: (u8, u8, u16),
    pub shape: Axes,
    pub strides: Axes,
    pub byte_offset: u64,
    pub has_deleter: bool,
}

/// The target of a pointer to sizes or strides.
#[derive(Clone, Debug)]
pub enum Axes {
    Null,
    /// These numbers, but at an odd address.
    Misaligned(Vec<i64>),
    /// These numbers, followed by others up to the most that a tensor may have.
    There(Vec<i64>),
}

/// The most numbers that may be read.
const MOST: usize = 64;

impl Fields {
    /// A compact host tensor over `bytes`, with two bytes for each element.
    pub fn over(bytes: &mut [u8], sizes: &[i64]) -> Self {
        Self {
            version: (1, 3),
            flags: 0,
            data: bytes.as_mut_ptr().expose_provenance(),
            device: (1, 0),
            ndim: i32::try_from(sizes.len()).unwrap(),
            dtype: (4, 16, 1),
            shape: Axes::There(sizes.to_vec()),
            strides: Axes::Null,
            byte_offset: 0,
            has_deleter: true,
        }
    }

    pub fn versioned(&self, deleted: &Deleted) -> *mut DLManagedTensorVersioned {
        let (kept, dl_tensor) = self.tensor(deleted);
        Box::into_raw(Box::new(DLManagedTensorVersioned {
            version: DLPackVersion { major: self.version.0, minor: self.version.1 },
            manager_ctx: kept,
            deleter: self.has_deleter.then_some(delete_versioned as _),
            flags: self.flags,
            dl_tensor,
        }))
    }

    pub fn legacy(&self, deleted: &Deleted) -> *mut DLManagedTensor {
        let (kept, dl_tensor) = self.tensor(deleted);
        Box::into_raw(Box::new(DLManagedTensor {
            dl_tensor,
            manager_ctx: kept,
            deleter: self.has_deleter.then_some(delete_legacy as _),
        }))
    }

    fn tensor(&self, deleted: &Deleted) -> (*mut c_void, DLTensor) {
        let kept = Box::new(Kept {
            deleted: deleted.clone(),
            shape: numbers(&self.shape),
            strides: numbers(&self.strides),
        });
        let tensor = DLTensor {
            data: std::ptr::with_exposed_provenance_mut(self.data),
            device: DLDevice { device_type: self.device.0, device_id: self.device.1 },
            ndim: self.ndim,
            dtype: DLDataType { code: self.dtype.0, bits: self.dtype.1, lanes: self.dtype.2 },
            shape: pointer(&self.shape, &kept.shape),
            strides: pointer(&self.strides, &kept.strides),
            byte_offset: self.byte_offset,
        };
        (Box::into_raw(kept).cast(), tensor)
    }
}

/// Frees a tensor without a deleter, or one that was never read.
///
/// # Safety
///
/// The tensor was created by this module, and is not used any more.
pub unsafe fn reclaim(tensor: *mut DLManagedTensorVersioned) {
    // SAFETY: the caller's promise.
    unsafe { delete_versioned(tensor) }
}

/// As [`reclaim`].
///
/// # Safety
///
/// As for [`reclaim`].
pub unsafe fn reclaim_legacy(tensor: *mut DLManagedTensor) {
    // SAFETY: the caller's promise.
    unsafe { delete_legacy(tensor) }
}

struct Kept {
    deleted: Deleted,
    shape: Box<[i64; MOST + 1]>,
    strides: Box<[i64; MOST + 1]>,
}

fn numbers(axes: &Axes) -> Box<[i64; MOST + 1]> {
    let mut numbers = Box::new([1; MOST + 1]);
    if let Axes::There(given) | Axes::Misaligned(given) = axes {
        numbers.iter_mut().zip(given).for_each(|(to, from)| *to = *from);
    }
    numbers
}

fn pointer(axes: &Axes, numbers: &[i64; MOST + 1]) -> *mut i64 {
    match axes {
        Axes::Null => std::ptr::null_mut(),
        Axes::Misaligned(_) => numbers.as_ptr().wrapping_byte_add(3).cast_mut(),
        Axes::There(_) => numbers.as_ptr().cast_mut(),
    }
}

/// # Safety
///
/// The tensor was created by this module, and is not used any more.
unsafe extern "C" fn delete_versioned(tensor: *mut DLManagedTensorVersioned) {
    // SAFETY: it was created here and is deleted once. The sanitizer would detect a second
    // deletion.
    let tensor = unsafe { Box::from_raw(tensor) };
    // SAFETY: as for the tensor.
    let kept = unsafe { Box::from_raw(tensor.manager_ctx.cast::<Kept>()) };
    kept.deleted.0.fetch_add(1, Ordering::SeqCst);
}

/// # Safety
///
/// The tensor was created by this module, and is not used any more.
unsafe extern "C" fn delete_legacy(tensor: *mut DLManagedTensor) {
    // SAFETY: it was created here and is deleted once. The sanitizer would detect a second
    // deletion.
    let tensor = unsafe { Box::from_raw(tensor) };
    // SAFETY: as for the tensor.
    let kept = unsafe { Box::from_raw(tensor.manager_ctx.cast::<Kept>()) };
    kept.deleted.0.fetch_add(1, Ordering::SeqCst);
}
