//! Exports of Terrane's memory as tensors.

use std::any::Any;
use std::fmt;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::Arc;

use dlpack_rs::ffi as raw;
use smallvec::SmallVec;
use terrane_core::{ByteCount, Location, Memory, Region, StorageKind};
#[cfg(feature = "cuda")]
use terrane_cuda::Stream;
use terrane_transfer::Ticket;

use super::blocks::HeldBlocks;
use super::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use super::managed::{Guards, TensorFields, TensorOwners};
use super::{ExportError, ManagedTensor, TensorDevice, TensorShape};
use crate::release_order::ConsumerWork;

/// A strided view of memory that is about to be exported to another library.
///
/// The memory lives until the consumer calls the tensor's deleter. So do its guards, such as holds
/// of blocks. They drop on the thread that calls the deleter.
///
/// For memory that devices access, including pinned memory, that may be too early. Libraries call
/// the deleter when they drop a tensor, possibly before their kernels and copies have completed. An
/// export of such memory must therefore state how the end of this work is detected. Either the
/// deleter waits for the consumer's stream (`released_after`, feature `cuda`), or the consumer
/// guarantees it ([`released_when_done`](Self::released_when_done)).
pub struct TensorExport {
    region: Region,
    shape: TensorShape,
    device: TensorDevice,
    read_only: bool,
    by_offset: bool,
    /// The consumer's work that must complete before the release; `None` if it was not stated.
    consumer: Option<ConsumerWork>,
    ticket: Option<Ticket>,
    guards: SmallVec<[Box<dyn Any + Send>; 2]>,
}

impl TensorExport {
    /// Creates the tensor of this shape whose first element is at the start of `region`. It is
    /// writable unless [`read_only`](Self::read_only) is called.
    ///
    /// # Errors
    ///
    /// [`ExportError::NoDevice`] for memory in files. [`ExportError::OutOfBounds`] if the shape
    /// needs more bytes than the region has. [`ExportError::Misaligned`] if the start of the region
    /// is not aligned for an element.
    ///
    /// # Safety
    ///
    /// From the export of the tensor until the call of its deleter, the caller ensures the
    /// following. No code writes bytes of the region that the consumer reads. No code reads or
    /// writes bytes that the consumer writes. The consumer does not write to a read-only tensor.
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
        Ok(Self {
            region,
            shape,
            device,
            read_only: false,
            by_offset: false,
            consumer: None,
            ticket: None,
            guards: SmallVec::new(),
        })
    }

    /// Marks the tensor as read-only for the consumer.
    #[must_use]
    pub fn read_only(self) -> Self {
        Self { read_only: true, ..self }
    }

    /// Passes the tensor's location as the start of its memory and an offset, instead of as the
    /// address of its first element.
    ///
    /// The standard intends this, because the start has the alignment of the allocation. But some
    /// consumers ignore the offset, so it is optional.
    #[must_use]
    pub fn by_offset(self) -> Self {
        Self { by_offset: true, ..self }
    }

    /// Declares pinned memory as host memory. A consumer requests this with `dl_device=(1, 0)`.
    /// Nothing is copied, because pinned memory is also host memory. PyTorch refuses memory that is
    /// declared as pinned. It accepts memory that is declared as host memory, and detects that it
    /// is pinned.
    ///
    /// # Errors
    ///
    /// [`ExportError::NotHost`] for memory of a device.
    pub fn as_host(self) -> Result<Self, ExportError> {
        let kind = self.region.kind();
        if !kind.is_host() {
            return Err(ExportError::NotHost { kind });
        }
        Ok(Self { device: TensorDevice::Host, ..self })
    }

    /// Keeps `guard` until the deleter has been called. Guards drop in the order in which they were
    /// added, before the memory is freed.
    #[must_use]
    pub fn guarded_by(mut self, guard: impl Send + 'static) -> Self {
        self.guards.push(Box::new(guard));
        self
    }

    /// Holds blocks while the tensor is exported.
    pub(crate) fn held_by(self, held: &Arc<HeldBlocks>) -> Self {
        let ticket = Some(held.ticket());
        Self { ticket, ..self.guarded_by(Arc::clone(held)) }
    }

    /// Makes the deleter wait for all work that has been submitted to `consumer` by then. After
    /// that, holds end and memory is freed. The thread that drops the tensor blocks until the
    /// stream has completed.
    ///
    /// Some streams cannot be waited for, for example while they are captured. Holds and memory
    /// are then kept until the process ends, and the stream's context counts one of its
    /// [`failed_drops`](terrane_cuda::Context::failed_drops). If the context is lost, they are
    /// released.
    ///
    /// ```no_run
    /// use terrane_cuda::Context;
    /// use terrane_interop::dlpack::ffi::DLManagedTensorVersioned;
    /// use terrane_interop::dlpack::{
    ///     ConsumerStream, ElementType, ManagedTensor, ProducerStream, TensorExport, handshake,
    /// };
    /// use terrane_transfer::{Access, Endpoint};
    ///
    /// /// A block of a device for `__dlpack__(stream=…)`.
    /// ///
    /// /// # Safety
    /// ///
    /// /// `stream` is the number of a stream that lives for as long as the tensor.
    /// unsafe fn block(
    ///     (context, cache): (&Context, &Endpoint),
    ///     stream: Option<i64>,
    /// ) -> Result<ManagedTensor<DLManagedTensorVersioned>, Box<dyn std::error::Error>> {
    ///     let (element, access) = (ElementType::BF16, Access::Read);
    ///     let export = TensorExport::of_piece(cache, (7, 0, 0), element, access)?;
    ///     let consumer = ConsumerStream::from_python(export.device(), stream)?;
    ///     // SAFETY: the caller's promise of the stream.
    ///     unsafe { handshake(context, ProducerStream::Complete, consumer) }?;
    ///     // SAFETY: the caller's promise of the stream.
    ///     let Some(stream) = (unsafe { consumer.to_stream(context, ()) })? else {
    ///         return Err("without the consumer's stream, the end of its work is unknown".into());
    ///     };
    ///     Ok(export.released_after(stream).into_versioned()?)
    /// }
    /// ```
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn released_after(self, consumer: Stream) -> Self {
        Self { consumer: Some(ConsumerWork::On(consumer)), ..self }
    }

    /// States that the consumer has finished with the memory when it calls the deleter.
    ///
    /// # Safety
    ///
    /// When the consumer calls the deleter, all device work that it submitted on the tensor's
    /// memory must have completed.
    #[must_use]
    pub unsafe fn released_when_done(self) -> Self {
        Self { consumer: Some(ConsumerWork::Finished), ..self }
    }

    /// The shape of the tensor, with its element type.
    #[must_use]
    pub const fn shape(&self) -> &TensorShape {
        &self.shape
    }

    /// The device of the tensor, as `__dlpack_device__` returns it.
    #[must_use]
    pub const fn device(&self) -> TensorDevice {
        self.device
    }

    /// Whether it is marked read-only.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// A ticket for the hold of its blocks. A transfer that names the ticket runs after the tensor
    /// has been released ([`Transfer::after`](terrane_transfer::Transfer::after)). `None` for
    /// memory that does not belong to an endpoint.
    #[must_use]
    pub fn ticket(&self) -> Option<Ticket> {
        self.ticket.clone()
    }

    /// Converts it to the structure of DLPack 1.x.
    ///
    /// # Errors
    ///
    /// [`ExportError::ReleaseNotStated`] for memory that devices access, if the end of the
    /// consumer's use was not stated.
    pub fn into_versioned(self) -> Result<ManagedTensor<DLManagedTensorVersioned>, ExportError> {
        let mut flags = if self.read_only { raw::DLPACK_FLAG_BITMASK_READ_ONLY } else { 0 };
        if self.shape.is_padded() {
            flags |= u64::from(raw::DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED);
        }
        let (owners, fields) = self.into_fields(flags)?;
        Ok(ManagedTensor::new(owners, fields))
    }

    /// Converts it to the structure before DLPack 1.0, for consumers that request no version.
    ///
    /// # Errors
    ///
    /// [`ExportError::LegacyReadOnly`] for a read-only tensor, and [`ExportError::LegacyPadded`]
    /// for elements below eight bits that are padded to a byte each, because the structure cannot
    /// express these. Otherwise as for [`into_versioned`](Self::into_versioned).
    pub fn into_legacy(self) -> Result<ManagedTensor<DLManagedTensor>, ExportError> {
        if self.read_only {
            return Err(ExportError::LegacyReadOnly);
        }
        if self.shape.is_padded() && !self.shape.element().fills_bytes() {
            return Err(ExportError::LegacyPadded { element: self.shape.element() });
        }
        let (owners, fields) = self.into_fields(0)?;
        Ok(ManagedTensor::new(owners, fields))
    }

    fn into_fields(self, flags: u64) -> Result<(TensorOwners, TensorFields), ExportError> {
        let Self { region, shape, device, by_offset, consumer, guards, .. } = self;
        let consumer = match (consumer, region.kind()) {
            (Some(stated), _) => stated,
            (None, StorageKind::System) => ConsumerWork::Finished,
            (None, kind) => return Err(ExportError::ReleaseNotStated { kind }),
        };
        let whole = Region::from_arc(Arc::clone(region.memory()));
        let (first, byte_offset) = match by_offset {
            true => (whole.location(), region.offset().get()),
            false => (region.location(), 0),
        };
        let is_empty = shape.elements() == 0;
        let data = match first {
            // The standard requires null.
            _ if is_empty => null_mut(),
            Location::Host(address) => address.as_ptr().cast(),
            Location::Device { address, .. } => {
                without_provenance_mut(ByteCount::new(address.get()).to_usize())
            }
            // `build` has refused such memory.
            _ => null_mut(),
        };
        let byte_offset = if is_empty { 0 } else { byte_offset };
        let fields = TensorFields {
            data,
            device: device.to_raw(),
            dtype: shape.element().to_raw(),
            byte_offset,
            flags,
        };
        let (sizes, strides) = (shape.sizes().into(), shape.strides().into());
        let guards = Guards(guards);
        Ok((TensorOwners { sizes, strides, guards, region, consumer }, fields))
    }
}

fn address(location: Location) -> Option<u64> {
    match location {
        Location::Host(address) => Some(address.get()),
        Location::Device { address, .. } => Some(address.get()),
        _ => None,
    }
}

impl fmt::Debug for TensorExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorExport")
            .field("region", &self.region)
            .field("shape", &self.shape)
            .field("read_only", &self.read_only)
            .field("consumer", &self.consumer)
            .finish_non_exhaustive()
    }
}
