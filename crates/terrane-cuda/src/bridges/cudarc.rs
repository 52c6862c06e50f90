//! Managed memory as an argument of `cudarc`'s kernels and copies: slices, and regions of blocks (a
//! column's buffers, for example).
//!
//! Only this module has the types of `cudarc` in its public signatures.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, SyncOnDrop};
use terrane_core::convert::to_u64;
use terrane_core::{Alignment, ByteCount, Location, Memory, Region};
use terrane_pool::managed::{ManagedBlock, ManagedError, TrackedSlice};
use terrane_pool::{Access, StreamId};

use crate::bridges::pool_streams::CudaStreams;
use crate::error::CudaError;
use crate::runtime::event::{Event, Timing};
use crate::runtime::stream::Stream;

/// A `cudarc` stream with a number in [`CudaStreams`]. [`TrackedSlice`]s can be used on it: as
/// arguments of kernels that `cudarc` launches, and as source or destination of its copies.
///
/// ```no_run
/// use std::sync::Arc;
/// use cudarc::driver::{CudaContext, CudaFunction, LaunchConfig, PushKernelArg};
/// use terrane_core::{ByteCount, DeviceId};
/// use terrane_cuda::cudarc::CudarcStream;
/// use terrane_cuda::{Context, CudaStreams, DeviceAllocator};
/// use terrane_pool::adaptors::Budget;
/// use terrane_pool::managed::{ManagerOptions, MemoryManager};
///
/// # fn scaled(kernel: &CudaFunction) -> Result<(), Box<dyn std::error::Error>> {
/// let context = Context::primary(DeviceId::new(0))?;
/// let streams = CudaStreams::new(&context);
/// let theirs = CudaContext::new(0)?.new_stream()?;
/// let stream = CudarcStream::new(&streams, &theirs)?;
/// let options =
///     ManagerOptions { fences: Some(Arc::new(streams.clone())), ..ManagerOptions::default() };
/// let budget = Budget::new("device", ByteCount::gib(1));
/// let manager = MemoryManager::new(DeviceAllocator::new(&context), budget, options);
///
/// let mut scores = manager.allocate_slice::<f32>(1024)?;
/// theirs.memcpy_htod(&[1.0; 1024], &mut stream.write(&mut scores)?)?;
/// let (argument, length) = (stream.write(&mut scores)?, 1024_u32);
/// // SAFETY: the kernel takes a pointer to that many floats, and their number.
/// unsafe {
///     theirs
///         .launch_builder(kernel)
///         .arg(&argument)
///         .arg(&length)
///         .launch(LaunchConfig::for_num_elems(length))
/// }?;
/// // The block returns to the manager when the kernel has completed.
/// drop(scores);
/// # Ok(())
/// # }
/// ```
///
/// # Cost
///
/// A use costs no event and no reference count per slice. It adds one entry, by stream, to the
/// slice's block. An event of the context is recorded only when a slice moves from one stream to
/// another, and when a slice drops after streams have used it. Both events come from the context's
/// idle events.
#[derive(Clone)]
pub struct CudarcStream {
    streams: CudaStreams,
    id: StreamId,
    /// The same stream, as it is registered in `streams`.
    stream_of_context: Stream,
    cudarc_stream: Arc<CudaStream>,
}

impl CudarcStream {
    /// Gives a `cudarc` stream a number in `streams`, which keep a reference to it until the number
    /// is [removed](CudaStreams::remove).
    ///
    /// # Errors
    ///
    /// [`CudaError::WrongContext`] if it does not belong to the primary context of their device,
    /// [`CudaError::PerThreadStream`] for the per-thread default stream, [`CudaError::Driver`],
    /// [`CudaError::ContextLost`].
    pub fn new(streams: &CudaStreams, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let (handle, owner) = (stream.cu_stream().cast(), Arc::clone(stream));
        // SAFETY: `cudarc` destroys its own stream with the last owner, and this value is one
        // owner. It never destroys the default stream. For a stream of another library, the caller
        // that wrapped it guarantees the lifetime.
        let stream_of_context = unsafe { Stream::borrow(streams.context(), handle, owner) }?;
        let id = streams.add(stream_of_context.clone())?;
        Ok(Self {
            streams: streams.clone(),
            id,
            stream_of_context,
            cudarc_stream: Arc::clone(stream),
        })
    }

    /// The number.
    #[must_use]
    pub const fn id(&self) -> StreamId {
        self.id
    }

    /// The stream.
    #[must_use]
    pub const fn stream(&self) -> &Arc<CudaStream> {
        &self.cudarc_stream
    }

    /// Returns the slice for work on this stream that reads it. The work runs after earlier writes
    /// of other streams, and before the slice's memory is freed.
    ///
    /// The work must be submitted while the argument lives.
    ///
    /// # Errors
    ///
    /// [`CudaError::Unreachable`] for memory that the device cannot access, [`CudaError::Managed`]
    /// if the slice's manager has no streams, [`CudaError::UnknownStream`] if the slice was used on
    /// a removed stream or a stream of other `CudaStreams`, [`CudaError::Forked`],
    /// [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub fn read<'a, T: Pod, M: Memory>(
        &'a self,
        slice: &'a TrackedSlice<T, M>,
    ) -> Result<CudaArgument<'a, T>, CudaError> {
        let block = slice.block();
        Ok(CudaArgument(self.used(block, block.block(), slice.len(), Access::Read)?))
    }

    /// Returns the slice for work on this stream that writes it, or reads and writes it. The work
    /// runs after all earlier uses by other streams, and before the slice's memory is freed.
    ///
    /// # Errors
    ///
    /// As for [`read`](Self::read).
    pub fn write<'a, T: Pod, M: Memory>(
        &'a self,
        slice: &'a mut TrackedSlice<T, M>,
    ) -> Result<CudaArgumentMut<'a, T>, CudaError> {
        let block = slice.block();
        Ok(CudaArgumentMut(self.used(block, block.block(), slice.len(), Access::Write)?))
    }

    /// Returns `len` elements of a managed block's memory, starting at `offset` bytes of the
    /// region, for work on this stream that reads them. See [`read`](Self::read) for slices.
    ///
    /// # Errors
    ///
    /// As for [`read`](Self::read). [`CudaError::Unmanaged`] if the region does not belong to a
    /// managed block, [`CudaError::View`] if it has fewer bytes, and [`CudaError::Managed`] if the
    /// elements are misaligned there.
    pub fn read_region<'a, T: Pod>(
        &'a self,
        region: &'a Region,
        offset: ByteCount,
        len: usize,
    ) -> Result<CudaArgument<'a, T>, CudaError> {
        Ok(CudaArgument(self.used_region(region, offset, len, Access::Read)?))
    }

    /// Like [`read_region`](Self::read_region), for work that writes the elements, or reads and
    /// writes them. The block waits for all of its uses, including uses of its other parts.
    ///
    /// # Errors
    ///
    /// As for [`read_region`](Self::read_region).
    pub fn write_region<'a, T: Pod>(
        &'a self,
        region: &'a Region,
        offset: ByteCount,
        len: usize,
    ) -> Result<CudaArgumentMut<'a, T>, CudaError> {
        Ok(CudaArgumentMut(self.used_region(region, offset, len, Access::Write)?))
    }

    /// Returns `len` elements of memory without a manager, starting at `offset` bytes of the
    /// region, for work on this stream that reads them. An example is memory of another library.
    ///
    /// # Errors
    ///
    /// As for [`read_region`](Self::read_region), except for the manager's errors.
    ///
    /// # Safety
    ///
    /// Until the stream has run the work, the memory stays valid, and nothing writes it.
    pub unsafe fn read_unmanaged<'a, T: Pod>(
        &'a self,
        region: &'a Region,
        offset: ByteCount,
        len: usize,
    ) -> Result<CudaArgument<'a, T>, CudaError> {
        let part = part::<T>(region, offset, len)?;
        let address = self.address(&part)?;
        Ok(CudaArgument(Used { address, len, on: self, element: PhantomData }))
    }

    /// Like [`read_unmanaged`](Self::read_unmanaged), for work that writes the elements, or reads
    /// and writes them.
    ///
    /// # Errors
    ///
    /// As for [`read_unmanaged`](Self::read_unmanaged).
    ///
    /// # Safety
    ///
    /// Until the stream has run the work, the memory stays valid and writable, and nothing else
    /// uses it.
    pub unsafe fn write_unmanaged<'a, T: Pod>(
        &'a self,
        region: &'a Region,
        offset: ByteCount,
        len: usize,
    ) -> Result<CudaArgumentMut<'a, T>, CudaError> {
        // SAFETY: the caller's guarantee is the stronger one.
        let CudaArgument(used) = unsafe { self.read_unmanaged(region, offset, len) }?;
        Ok(CudaArgumentMut(used))
    }

    fn used_region<'a, T: Pod>(
        &'a self,
        region: &'a Region,
        offset: ByteCount,
        len: usize,
        access: Access,
    ) -> Result<Used<'a, T>, CudaError> {
        let part = part::<T>(region, offset, len)?;
        let location = part.location();
        let block = ManagedBlock::of(region).ok_or(CudaError::Unmanaged { location })?;
        self.used(&part, block, len, access)
    }

    /// The address at which this context's device accesses the memory.
    fn address(&self, memory: &impl Memory) -> Result<CUdeviceptr, CudaError> {
        let own = self.streams.context().device().id;
        match memory.location() {
            Location::Device { device, address } if device == own => Ok(address.get()),
            location => {
                let alias = memory.device_alias().ok_or(CudaError::Unreachable { location })?;
                Ok(alias.get())
            }
        }
    }

    /// Records the use of a block; `memory` is all or a part of it.
    fn used<'a, T: Pod>(
        &'a self,
        memory: &impl Memory,
        block: &ManagedBlock,
        len: usize,
        access: Access,
    ) -> Result<Used<'a, T>, CudaError> {
        let address = self.address(memory)?;
        // Recorded before any submission: if a later step fails, the memory still waits for the
        // work.
        block
            .record_use(self.id, access)
            .map_err(|error| CudaError::Managed { source: Arc::new(error) })?;
        for (other, what) in block.uses() {
            if other != self.id && (access == Access::Write || what == Access::Write) {
                self.wait_for(other)?;
            }
        }
        Ok(Used { address, len, on: self, element: PhantomData })
    }

    /// Makes later work of this stream run after all work that has been submitted to `other`.
    fn wait_for(&self, other: StreamId) -> Result<(), CudaError> {
        let event = Event::new(self.streams.context(), Timing::Off)?;
        event.record(&self.streams.get(other)?)?;
        self.stream_of_context.wait_for(&event)
    }
}

impl fmt::Debug for CudarcStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudarcStream")
            .field("id", &self.id)
            .field("stream", &self.stream_of_context)
            .finish()
    }
}

/// The bytes of `len` elements, starting at `offset` bytes of a region.
fn part<T: Pod>(region: &Region, offset: ByteCount, len: usize) -> Result<Region, CudaError> {
    let managed = |source: ManagedError| CudaError::Managed { source: Arc::new(source) };
    let length = ByteCount::from_usize(size_of::<T>())
        .checked_mul("elements", to_u64(len))
        .map_err(|source| managed(source.into()))?;
    let part = region.view(offset, length)?;
    let needed = Alignment::of(to_u64(align_of::<T>()));
    let (location, available) = (part.location(), part.location().alignment());
    if available < needed {
        return Err(managed(ManagedError::Misaligned { location, available, needed }));
    }
    Ok(part)
}

/// A slice or region whose use on a stream is recorded, or ensured by the caller. The address is
/// the first field: a launch gets a pointer to this value, and reads as many bytes as the kernel's
/// parameter has.
#[derive(Clone, Copy)]
#[repr(C)]
struct Used<'a, T> {
    address: CUdeviceptr,
    len: usize,
    on: &'a CudarcStream,
    element: PhantomData<&'a [T]>,
}

impl<'a, T> Used<'a, T> {
    /// The address for work on `stream`, and the guard that records the use after the submission.
    fn pointer(&self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        let recorded_stream = &self.on.cudarc_stream;
        if stream.cu_stream() == recorded_stream.cu_stream()
            && stream.context() == recorded_stream.context()
        {
            return (self.address, SyncOnDrop::Record(None));
        }
        // `stream` is not the stream that the use was recorded for, and has no number. The returned
        // guard therefore synchronises.
        stream.context().record_err(stream.join(&self.on.cudarc_stream));
        (self.address, SyncOnDrop::sync_stream(stream))
    }
}

/// Memory that work on a stream reads, from [`CudarcStream::read`] or
/// [`CudarcStream::read_region`].
/// A reference to it is an argument of a kernel launch and represents the address of the first
/// element. It is also a source of `cudarc`'s copies.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct CudaArgument<'a, T>(Used<'a, T>);

/// Memory that work on a stream writes, from [`CudarcStream::write`] or
/// [`CudarcStream::write_region`].
/// A reference to it is an argument of a kernel launch and represents the address of the first
/// element. It is also a source or destination of `cudarc`'s copies.
#[repr(transparent)]
pub struct CudaArgumentMut<'a, T>(Used<'a, T>);

macro_rules! launch_argument {
    ($argument:ident) => {
        // SAFETY: a launch copies a pointer-sized parameter from this value, whose first field is
        // the address. The launch's `unsafe` covers a kernel with a larger parameter.
        unsafe impl<T> DeviceRepr for $argument<'_, T> {}

        impl<T> DeviceSlice<T> for $argument<'_, T> {
            fn len(&self) -> usize {
                self.0.len
            }

            fn stream(&self) -> &Arc<CudaStream> {
                &self.0.on.cudarc_stream
            }
        }

        impl<T> DevicePtr<T> for $argument<'_, T> {
            fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
                self.0.pointer(stream)
            }
        }

        impl<T> fmt::Debug for $argument<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

launch_argument!(CudaArgument);
launch_argument!(CudaArgumentMut);

impl<T> DevicePtrMut<T> for CudaArgumentMut<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.0.pointer(stream)
    }
}

impl<T> fmt::Debug for Used<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaArgument")
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .field("stream", &self.on.id)
            .finish()
    }
}
