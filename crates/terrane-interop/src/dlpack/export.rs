//! Memory of ours as a tensor.

use std::any::Any;
use std::fmt;
use std::ptr::{null_mut, without_provenance_mut};

use dlpack_rs::ffi as raw;
use smallvec::SmallVec;
use terrane_core::{ByteCount, Location, Memory, Region};
use terrane_cuda::Stream;

use super::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use super::managed::{Kept, Parts};
use super::{ExportError, ManagedTensor, TensorDevice, TensorShape};

/// A strided view of memory that is about to be handed to another library.
///
/// The memory lives until the consumer calls the tensor's deleter, and so do the guards that it was
/// given, such as holds of blocks. They drop on the thread that calls the deleter.
pub struct TensorExport {
    region: Region,
    shape: TensorShape,
    device: TensorDevice,
    read_only: bool,
    by_offset: bool,
    guards: SmallVec<[Box<dyn Any + Send>; 2]>,
}

impl TensorExport {
    /// The tensor of this shape whose first element is at the beginning of `region`. It may be
    /// written, unless it is made [`read_only`](Self::read_only).
    ///
    /// # Errors
    ///
    /// [`ExportError::NoDevice`] for memory in files, [`ExportError::OutOfBounds`] if the shape
    /// takes more bytes than the region has, [`ExportError::Misaligned`] if no element may begin
    /// where the region does.
    ///
    /// # Safety
    ///
    /// From when the tensor is handed over until its deleter is called, the caller sees to it that
    /// nobody writes bytes of the region that the consumer reads, nor reads or writes those that it
    /// writes; and for a read-only tensor, that the consumer keeps to it.
    pub unsafe fn new(region: Region, shape: TensorShape) -> Result<Self, ExportError> {
        Self::build(region, shape)
    }

    pub(crate) fn build(region: Region, shape: TensorShape) -> Result<Self, ExportError> {
        let kind = region.kind();
        let device = TensorDevice::of(kind).ok_or(ExportError::NoDevice { kind })?;
        let region = region.view(ByteCount::ZERO, shape.bytes())?;
        let address = address(region.location()).ok_or(ExportError::NoDevice { kind })?;
        let (element, alignment) = (shape.element(), shape.element().alignment());
        if shape.elements() > 0 && !address.is_multiple_of(alignment.get()) {
            return Err(ExportError::Misaligned { address, element, alignment });
        }
        let guards = SmallVec::new();
        Ok(Self { region, shape, device, read_only: false, by_offset: false, guards })
    }

    /// Says to the consumer that the tensor may only be read.
    #[must_use]
    pub fn read_only(self) -> Self {
        Self { read_only: true, ..self }
    }

    /// Says where the tensor is by the beginning of its memory and an offset from there, instead of
    /// by the place of its first element.
    ///
    /// It is what the standard means: the beginning is as aligned as the allocation was. But not
    /// every consumer adds the offset, so that it is not done unless asked for.
    #[must_use]
    pub fn by_offset(self) -> Self {
        Self { by_offset: true, ..self }
    }

    /// Keeps `guard` until the deleter has been called. Guards drop in the order in which they
    /// were given, before the memory is let go of.
    #[must_use]
    pub fn guarded_by(mut self, guard: impl Send + 'static) -> Self {
        self.guards.push(Box::new(guard));
        self
    }

    /// Has the deleter wait for all that `consumer` was given until then, before holds end and
    /// memory is let go of.
    ///
    /// Libraries call the deleter when they have dropped a tensor, which may be before their
    /// kernels have read it. Where the consumer does not wait by itself, it has to be waited for
    /// here: the thread that drops the tensor blocks until its stream has run.
    #[must_use]
    pub fn released_after(mut self, consumer: Stream) -> Self {
        // In front of holds.
        self.guards.insert(0, Box::new(Drained(consumer)));
        self
    }

    /// What the tensor is.
    #[must_use]
    pub const fn shape(&self) -> &TensorShape {
        &self.shape
    }

    /// Where it is: what `__dlpack_device__` answers.
    #[must_use]
    pub const fn device(&self) -> TensorDevice {
        self.device
    }

    /// Whether the consumer is told only to read it.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// As the structure of DLPack 1.x.
    #[must_use]
    pub fn into_versioned(self) -> ManagedTensor<DLManagedTensorVersioned> {
        let mut flags = if self.read_only { raw::DLPACK_FLAG_BITMASK_READ_ONLY } else { 0 };
        if self.shape.is_padded() {
            flags |= u64::from(raw::DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED);
        }
        let (kept, parts) = self.into_parts(flags);
        ManagedTensor::new(kept, parts)
    }

    /// As the structure before DLPack 1.0, for consumers that ask for no version.
    ///
    /// # Errors
    ///
    /// [`ExportError::LegacyReadOnly`] and [`ExportError::LegacyPadded`], as it cannot say that a
    /// tensor may only be read, nor that elements below eight bits take a byte each.
    pub fn into_legacy(self) -> Result<ManagedTensor<DLManagedTensor>, ExportError> {
        if self.read_only {
            return Err(ExportError::LegacyReadOnly);
        }
        if self.shape.is_padded() && !self.shape.element().fills_bytes() {
            return Err(ExportError::LegacyPadded { element: self.shape.element() });
        }
        let (kept, parts) = self.into_parts(0);
        Ok(ManagedTensor::new(kept, parts))
    }

    fn into_parts(self, flags: u64) -> (Kept, Parts) {
        let Self { region, shape, device, by_offset, guards, .. } = self;
        let whole = Region::from_arc(std::sync::Arc::clone(region.memory()));
        let (first, byte_offset) = match by_offset {
            true => (whole.location(), region.offset().get()),
            false => (region.location(), 0),
        };
        let is_empty = shape.elements() == 0;
        let data = match first {
            // As the standard has it.
            _ if is_empty => null_mut(),
            Location::Host(address) => address.as_ptr().cast(),
            Location::Device { address, .. } => {
                without_provenance_mut(ByteCount::new(address.get()).to_usize())
            }
            // `build` has refused it.
            _ => null_mut(),
        };
        let byte_offset = if is_empty { 0 } else { byte_offset };
        let parts = Parts {
            data,
            device: device.to_raw(),
            dtype: shape.element().to_raw(),
            byte_offset,
            flags,
        };
        let (sizes, strides) = (shape.sizes().into(), shape.strides().into());
        (Kept { sizes, strides, guards, region: Some(region) }, parts)
    }
}

fn address(location: Location) -> Option<u64> {
    match location {
        Location::Host(address) => Some(address.get()),
        Location::Device { address, .. } => Some(address.get()),
        _ => None,
    }
}

/// A stream that has run when this has dropped.
struct Drained(Stream);

impl Drop for Drained {
    fn drop(&mut self) {
        // A context that is lost runs nothing any more, so that there is nothing to wait for.
        let _ = self.0.synchronize();
    }
}

impl fmt::Debug for TensorExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorExport")
            .field("region", &self.region)
            .field("shape", &self.shape)
            .field("read_only", &self.read_only)
            .finish_non_exhaustive()
    }
}
