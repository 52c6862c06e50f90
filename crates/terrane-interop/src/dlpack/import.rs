//! Foreign tensors, checked field by field.

use std::fmt;
use std::mem::align_of;
use std::ptr::NonNull;
use std::sync::Arc;

use dlpack_rs::ffi as raw;
use terrane_core::convert::to_u64;
use terrane_core::{
    ByteCount, DeviceAddress, DeviceId, ForeignMemory, HostAddress, Location, Span, StorageKind,
};
#[cfg(feature = "cuda")]
use terrane_cuda::Context;

use super::deleter::OwnedTensor;
use super::ffi::{DLManagedTensor, DLManagedTensorVersioned, DLTensor};
use super::{ElementType, ImportError, MOST_AXES, ShapeError, TensorDevice, TensorShape};

/// Imports foreign tensors. It accepts host tensors. With a context of a CUDA device (feature
/// `cuda`), it also accepts tensors of that device, and the driver checks their memory.
#[derive(Clone, Debug, Default)]
pub struct Importer {
    #[cfg(feature = "cuda")]
    contexts: Vec<Context>,
}

impl Importer {
    /// Creates an importer of host tensors, pageable and pinned.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Also accepts tensors of this context's device.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn with_device(mut self, context: Context) -> Self {
        self.contexts.push(context);
        self
    }

    /// Imports a tensor in the structure of DLPack 1.x.
    ///
    /// The importer owns the tensor from then on, even after an error. If the tensor is refused,
    /// its deleter has been called when this returns.
    ///
    /// # Errors
    ///
    /// [`ImportError`] names the field. Only [`NullTensor`](ImportError::NullTensor) and
    /// [`MisalignedTensor`](ImportError::MisalignedTensor) leave the structure untouched.
    /// [`AlreadyImported`](ImportError::AlreadyImported) leaves the tensor with its importer.
    ///
    /// # Safety
    ///
    /// If `tensor` is neither null nor misaligned, it is a managed tensor of DLPack that the caller
    /// owns. It begins with its version, its context and its deleter. If the version is 1, the
    /// other fields follow. `shape` and `strides`, if they are neither null nor misaligned, have
    /// `ndim` numbers each. The deleter may be called on any thread. The structure exists until the
    /// deleter is called, or without a deleter until this returns.
    ///
    /// Until the deleter is called, the bytes from the first element to the last are in one live
    /// allocation. They are initialised if they are on the host, and writable unless the tensor is
    /// read-only. Pages on the host are not discarded or replaced. Memory that is declared as
    /// pinned is pinned. All other users of the elements synchronise with the users of the imported
    /// tensor.
    pub unsafe fn versioned(
        &self,
        tensor: *mut DLManagedTensorVersioned,
    ) -> Result<ImportedTensor, ImportError> {
        let tensor = checked_pointer(tensor)?;
        // SAFETY: the caller's promise.
        let owner = unsafe { OwnedTensor::versioned(tensor) }?;
        let tensor = tensor.as_ptr();
        // SAFETY: every version of the structure begins with the version.
        let version = unsafe { (*tensor).version };
        let (major, minor) = (version.major, version.minor);
        if major != raw::DLPACK_MAJOR_VERSION {
            return Err(ImportError::UnknownVersion { major, minor });
        }
        // SAFETY: the version is that of this structure, so the field exists.
        let flags = unsafe { (*tensor).flags };
        // SAFETY: as for the flags. The structure is copied, because other code may still write it.
        let described = unsafe { (*tensor).dl_tensor };
        // SAFETY: the axes are those of the tensor, by the caller's promise.
        unsafe { self.take(owner, &described, flags) }
    }

    /// Imports a tensor in the structure before DLPack 1.0. The tensor is treated as writable.
    ///
    /// # Errors
    ///
    /// As for [`versioned`](Self::versioned).
    ///
    /// # Safety
    ///
    /// As for [`versioned`](Self::versioned), except for the version, which this structure does not
    /// have.
    pub unsafe fn legacy(
        &self,
        tensor: *mut DLManagedTensor,
    ) -> Result<ImportedTensor, ImportError> {
        let tensor = checked_pointer(tensor)?;
        // SAFETY: the caller's promise.
        let owner = unsafe { OwnedTensor::legacy(tensor) }?;
        // SAFETY: the structure is there, by the caller's promise.
        let described = unsafe { (*tensor.as_ptr()).dl_tensor };
        // SAFETY: the axes are those of the tensor, by the caller's promise.
        unsafe { self.take(owner, &described, 0) }
    }

    /// Checks a tensor. If it is refused, its owner drops, which calls the deleter.
    ///
    /// # Safety
    ///
    /// As for [`versioned`](Self::versioned), for the tensor that `owner` owns and `tensor`
    /// describes.
    unsafe fn take(
        &self,
        owner: OwnedTensor,
        tensor: &DLTensor,
        flags: u64,
    ) -> Result<ImportedTensor, ImportError> {
        let is = |flag: u64| flags & flag != 0;
        // SAFETY: the caller's promise about the axes.
        let shape = unsafe {
            shape_of(tensor, is(raw::DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED.into()))
        }?;
        let device = TensorDevice::from_raw(tensor.device).ok_or(ImportError::UnknownDevice {
            device_type: tensor.device.device_type,
            device_id: tensor.device.device_id,
        })?;
        let span = self.span_of(tensor, &shape, device)?;
        Ok(ImportedTensor(Arc::new(Imported {
            shape,
            device,
            span,
            read_only: is(raw::DLPACK_FLAG_BITMASK_READ_ONLY),
            copied: is(raw::DLPACK_FLAG_BITMASK_IS_COPIED),
            _owner: owner,
        })))
    }

    /// The location of the tensor's bytes, from the first element to the last.
    fn span_of(
        &self,
        tensor: &DLTensor,
        shape: &TensorShape,
        device: TensorDevice,
    ) -> Result<Span, ImportError> {
        let (kind, length) = (device.kind(), shape.bytes());
        if let TensorDevice::Cuda(device) = device {
            self.check_device(device)?;
        }
        if shape.elements() == 0 {
            // The address of an empty tensor is only a number, and its data pointer is usually
            // null.
            return Ok(Span { kind, location: nowhere(device), length });
        }
        let data = to_u64(tensor.data.addr());
        let byte_offset = tensor.byte_offset;
        if data == 0 {
            return Err(ImportError::NullData { elements: shape.elements() });
        }
        let overflow = || ImportError::AddressOverflow { data, byte_offset, bytes: length };
        let address = data.checked_add(byte_offset).ok_or_else(overflow)?;
        let end = address.checked_add(length.get()).ok_or_else(overflow)?;
        if kind.is_host() && isize::try_from(end).is_err() {
            return Err(overflow());
        }
        let (element, alignment) = (shape.element(), shape.element().alignment());
        if !address.is_multiple_of(alignment.get()) {
            return Err(ImportError::MisalignedData { address, element, alignment });
        }
        match device {
            TensorDevice::Cuda(device) => {
                self.device_span(device, DeviceAddress::new(address), length)
            }
            _ => {
                let offset = ByteCount::new(byte_offset).to_usize();
                let first = tensor.data.cast::<u8>().wrapping_add(offset);
                let address = NonNull::new(first).ok_or_else(overflow)?;
                let location = Location::Host(HostAddress::new(address));
                Ok(Span { kind, location, length })
            }
        }
    }

    /// Whether tensors of the device are accepted.
    #[cfg(feature = "cuda")]
    fn check_device(&self, device: DeviceId) -> Result<(), ImportError> {
        self.context_of(device).map(drop)
    }

    /// Without the driver, no device tensors are accepted.
    #[cfg(not(feature = "cuda"))]
    fn check_device(&self, device: DeviceId) -> Result<(), ImportError> {
        Err(ImportError::NoContext { device })
    }

    /// The driver's result for the bytes.
    #[cfg(feature = "cuda")]
    fn device_span(
        &self,
        device: DeviceId,
        address: DeviceAddress,
        length: ByteCount,
    ) -> Result<Span, ImportError> {
        let context = self.context_of(device)?;
        context.device_span(address, length).map_err(ImportError::NotDeviceMemory)
    }

    /// Without the driver, no device tensor gets here.
    #[cfg(not(feature = "cuda"))]
    fn device_span(
        &self,
        device: DeviceId,
        _: DeviceAddress,
        _: ByteCount,
    ) -> Result<Span, ImportError> {
        Err(ImportError::NoContext { device })
    }

    #[cfg(feature = "cuda")]
    fn context_of(&self, device: DeviceId) -> Result<&Context, ImportError> {
        let mut contexts = self.contexts.iter();
        contexts
            .find(|context| context.device().id == device)
            .ok_or(ImportError::NoContext { device })
    }
}

/// The pointer, if a structure can be at its address.
fn checked_pointer<S>(tensor: *mut S) -> Result<NonNull<S>, ImportError> {
    let tensor = NonNull::new(tensor).ok_or(ImportError::NullTensor)?;
    if !tensor.is_aligned() {
        return Err(ImportError::MisalignedTensor { address: tensor.addr().get() });
    }
    Ok(tensor)
}

/// The shape of a foreign tensor.
///
/// # Safety
///
/// `shape` and `strides`, if they are neither null nor misaligned, have `ndim` numbers each.
unsafe fn shape_of(tensor: &DLTensor, padded: bool) -> Result<TensorShape, ImportError> {
    let ndim = tensor.ndim;
    let axes = usize::try_from(ndim).map_err(|_| ImportError::NegativeRank { ndim })?;
    if axes > MOST_AXES {
        return Err(ShapeError::TooManyAxes { axes }.into());
    }
    let element = ElementType::from_raw(tensor.dtype)?;
    if axes == 0 {
        return Ok(TensorShape::compact(element, &[])?);
    }
    // SAFETY: the caller's promise of `shape`.
    let sizes = unsafe { numbers("shape", tensor.shape, axes) }?;
    let strides = if tensor.strides.is_null() {
        // Before DLPack 1.2, compact tensors were passed in this form, which has no other meaning.
        None
    } else {
        // SAFETY: the caller's promise of `strides`.
        Some(unsafe { numbers("strides", tensor.strides, axes) }?.into())
    };
    Ok(TensorShape::checked(element, sizes.into(), strides, padded)?)
}

/// The numbers at a pointer that may have any value.
///
/// # Safety
///
/// If the pointer is neither null nor misaligned, it points to `axes` numbers. No code writes them
/// while the returned slice is used.
unsafe fn numbers<'a>(
    field: &'static str,
    pointer: *const i64,
    axes: usize,
) -> Result<&'a [i64], ImportError> {
    let address = pointer.addr();
    if pointer.is_null() || !address.is_multiple_of(align_of::<i64>()) {
        return Err(ImportError::UnreadableAxes { field, axes, address });
    }
    // SAFETY: the caller's promise; there are at most 64 numbers.
    Ok(unsafe { std::slice::from_raw_parts(pointer, axes) })
}

/// A location for empty tensors.
fn nowhere(device: TensorDevice) -> Location {
    match device {
        TensorDevice::Cuda(device) => Location::Device { device, address: DeviceAddress::new(0) },
        _ => Location::Host(HostAddress::new(NonNull::<u128>::dangling())),
    }
}

/// A foreign tensor whose fields have been checked. When the last clone and the last
/// [`memory`](Self::memory) of it have dropped, its deleter returns it to its producer.
#[derive(Clone)]
pub struct ImportedTensor(Arc<Imported>);

struct Imported {
    shape: TensorShape,
    device: TensorDevice,
    span: Span,
    read_only: bool,
    copied: bool,
    _owner: OwnedTensor,
}

impl ImportedTensor {
    /// Its shape, with the element type.
    #[must_use]
    pub fn shape(&self) -> &TensorShape {
        &self.0.shape
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> TensorDevice {
        self.0.device
    }

    /// Its kind of memory.
    #[must_use]
    pub fn kind(&self) -> StorageKind {
        self.0.span.kind
    }

    /// The location of its first element.
    #[must_use]
    pub fn location(&self) -> Location {
        self.0.span.location
    }

    /// Its bytes, from the first element to the last, gaps included.
    #[must_use]
    pub fn span(&self) -> Span {
        self.0.span
    }

    /// Whether it is read-only.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.0.read_only
    }

    /// Whether its producer copied it for this exchange, so that no other code uses it.
    #[must_use]
    pub fn is_copied(&self) -> bool {
        self.0.copied
    }

    /// Whether both are the same import.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The tensor's bytes as memory, which keeps the tensor alive.
    ///
    /// # Errors
    ///
    /// [`ImportError::ReadOnly`] if it is read-only: memory must be writable. [`ImportError::Gaps`]
    /// if there are bytes between its elements, or bits after the last one, because other code may
    /// own them.
    pub fn memory(&self) -> Result<ForeignMemory<Self>, ImportError> {
        if !self.0.shape.is_dense() {
            let (elements, bytes) = (self.0.shape.elements(), self.0.shape.bytes());
            return Err(ImportError::Gaps { elements, bytes });
        }
        // SAFETY: there are no gaps.
        unsafe { self.memory_with_gaps() }
    }

    /// Like [`memory`](Self::memory), including the bytes between the elements, and the bits after
    /// the last one.
    ///
    /// # Errors
    ///
    /// [`ImportError::ReadOnly`] if it is read-only.
    ///
    /// # Safety
    ///
    /// While the memory lives, the bytes of the gaps obey the same rules as the elements. All code
    /// that uses them synchronises with the users of the memory.
    pub unsafe fn memory_with_gaps(&self) -> Result<ForeignMemory<Self>, ImportError> {
        if self.0.read_only {
            return Err(ImportError::ReadOnly);
        }
        // SAFETY: the tensor's importer guaranteed the elements, and the caller guarantees the
        // bytes between them, until the tensor is released. The memory owns a clone of the tensor,
        // which prevents that.
        Ok(unsafe { ForeignMemory::new(self.0.span, self.clone()) })
    }
}

impl fmt::Debug for ImportedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportedTensor")
            .field("shape", &self.0.shape)
            .field("span", &self.0.span)
            .field("read_only", &self.0.read_only)
            .finish_non_exhaustive()
    }
}
