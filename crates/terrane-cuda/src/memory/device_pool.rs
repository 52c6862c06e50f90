//! Device memory from a driver pool, which keeps freed memory for reuse.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUmemPool_attribute, CUmemoryPool};
use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, DeviceAddress, Limits, Location, Memory,
    RegionRequest, StorageKind,
};
use terrane_pool::TrimUpstream;

use crate::driver::functions::PoolProperties;
use crate::error::CudaError;
use crate::memory::{DRIVER_ALIGNMENT, aligned, check_request, refusal};
use crate::runtime::context::Context;
use crate::runtime::stream::Stream;

/// A memory pool of the driver (`cuMemPoolCreate`) with its own release threshold. It is separate
/// from the pool that the process's other libraries share.
///
/// Memory is allocated and freed in the order of a stream that belongs to the pool and is otherwise
/// idle. An allocation waits for that stream, which takes microseconds. The memory is therefore
/// usable on every stream and by other libraries at once. A free does not wait.
/// [`allocate_on`](Self::allocate_on) allocates memory for one stream without any wait. Cloning
/// gives another handle to the same pool.
///
/// Memory that another stream frees is reused only after that stream has reached the free. So no
/// allocation waits for that stream. If memory is short before, the allocation fails.
#[derive(Clone, Debug)]
pub struct DevicePool(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    raw: CUmemoryPool,
    context: Context,
    /// The stream of memory that every stream may use.
    stream: Stream,
}

// SAFETY: the driver accepts a pool's handle on any thread, and synchronises its calls.
unsafe impl Send for Pool {}
// SAFETY: as for `Send`.
unsafe impl Sync for Pool {}

impl DevicePool {
    /// Creates a pool that keeps up to `kept` bytes of freed memory. The driver's own default is
    /// zero: all free memory returns to the system at each stream synchronisation.
    ///
    /// # Errors
    ///
    /// [`CudaError::DriverTooOld`] if the driver does not support pools; [`CudaError::Driver`] if
    /// the device does not; [`CudaError::ContextLost`].
    pub fn new(context: &Context, kept: ByteCount) -> Result<Self, CudaError> {
        let stream = Stream::new(context)?;
        let functions = context.driver().functions();
        // Looks up the functions that allocate and that destroy the pool, before the pool exists.
        functions.require(functions.cuMemPoolCreate, "cuMemPoolCreate")?;
        functions.require(functions.cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync")?;
        functions.require(functions.cuMemFreeAsync, "cuMemFreeAsync")?;
        functions.require(functions.cuMemPoolDestroy, "cuMemPoolDestroy")?;
        let properties = PoolProperties {
            // `CU_MEM_ALLOCATION_TYPE_PINNED`: memory that does not migrate; the only type.
            allocation_type: 1,
            handle_types: 0,
            // `CU_MEM_LOCATION_TYPE_DEVICE`.
            location_type: 1,
            location_id: i32::try_from(context.device().id.get()).unwrap_or(i32::MAX),
            security_attributes: ptr::null_mut(),
            rest: [0; 64],
        };
        let mut raw = ptr::null_mut();
        context.bound(|functions| {
            // SAFETY: the properties are read, and one handle is written.
            unsafe { functions.cuMemPoolCreate(&raw mut raw, &raw const properties) }
        })?;
        let pool = Pool { raw, context: context.clone(), stream };
        let attributes = [
            (CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, kept.get()),
            // By default, the pool may reuse memory by letting the allocation's stream wait for the
            // stream of the free. The pool's own stream, which allocations wait for, must not wait
            // for work of callers.
            (CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0),
        ];
        for (attribute, mut value) in attributes {
            let value: *mut c_void = (&raw mut value).cast();
            context.bound(|functions| {
                // SAFETY: the pool is alive, and the attribute has at most the eight bytes of the value.
                // The host is little-endian, so an attribute of four bytes is the same number.
                unsafe { functions.cuMemPoolSetAttribute(raw, attribute, value) }
            })?;
        }
        Ok(Self(Arc::new(pool)))
    }

    /// The bytes of device memory that the pool holds, in use or not.
    ///
    /// # Errors
    ///
    /// [`CudaError::DriverTooOld`], [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub fn held(&self) -> Result<ByteCount, CudaError> {
        self.0.get(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    }

    /// The bytes that are in use.
    ///
    /// # Errors
    ///
    /// As for [`held`](Self::held).
    pub fn in_use(&self) -> Result<ByteCount, CudaError> {
        self.0.get(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    }

    /// Returns unused memory to the driver, until the pool has at most `kept` bytes. Waits for
    /// pending frees.
    ///
    /// # Errors
    ///
    /// As for [`held`](Self::held).
    pub fn trim(&self, kept: ByteCount) -> Result<(), CudaError> {
        self.0.stream.synchronize()?;
        let (pool, kept) = (self.0.raw, kept.to_usize());
        // SAFETY: the pool is alive.
        self.0.context.bound(|functions| unsafe { functions.cuMemPoolTrimTo(pool, kept) })
    }

    /// Allocates one region, like [`allocate`](Allocate::allocate), but returns this crate's error.
    ///
    /// # Errors
    ///
    /// As for [`DeviceAllocator::allocate_memory`](crate::DeviceAllocator::allocate_memory).
    pub fn allocate_memory(&self, request: &RegionRequest) -> Result<DevicePoolMemory, CudaError> {
        let memory = self.take(&self.0.stream, request)?;
        if memory.base.is_some() {
            memory.stream.synchronize()?;
        }
        Ok(memory)
    }

    /// Allocates one region in the order of `stream`, without waiting.
    ///
    /// Work submitted to `stream` from now on may use the memory. Work of another stream may use it
    /// if it runs after an event that is recorded on `stream` from now on. Before that event,
    /// earlier work of other streams may still use these bytes. Call
    /// [`settle`](OrderedMemory::settle) to make the memory usable everywhere.
    ///
    /// ```no_run
    /// # use terrane_core::{ByteCount, DeviceId, RegionRequest};
    /// # use terrane_cuda::{Context, CudaError, DevicePool, Stream};
    /// # fn main() -> Result<(), CudaError> {
    /// let context = Context::primary(DeviceId::new(0))?;
    /// let pool = DevicePool::new(&context, ByteCount::gib(1))?;
    /// let stream = Stream::new(&context)?;
    /// let scratch = pool.allocate_on(&stream, &RegionRequest::new(ByteCount::mib(32)))?;
    /// // SAFETY: the fill runs after the allocation and before the free, which are on its stream.
    /// unsafe { stream.fill(scratch.location(), 0, scratch.length()) }?;
    /// drop(scratch);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`CudaError::WrongContext`] if the stream belongs to another device, and the errors of
    /// [`allocate_memory`](Self::allocate_memory).
    pub fn allocate_on(
        &self,
        stream: &Stream,
        request: &RegionRequest,
    ) -> Result<OrderedMemory, CudaError> {
        self.0.context.check_stream(stream)?;
        self.take(stream, request).map(OrderedMemory)
    }

    /// Allocates one region in the order of a stream of the pool's context.
    fn take(
        &self,
        stream: &Stream,
        request: &RegionRequest,
    ) -> Result<DevicePoolMemory, CudaError> {
        let pool = &self.0;
        check_request(&pool.context, request)?;
        let length = request.bytes;
        let (base, first) = if length.is_zero() {
            (None, request.alignment.max(DRIVER_ALIGNMENT).get())
        } else {
            let allocate = |bytes| pool.allocate(bytes, stream);
            let (base, first) = aligned(request, allocate, |base| pool.free(base, stream))?;
            pool.context.counters().pooled.add(length);
            (Some(base), first)
        };
        let (pool, stream) = (Arc::clone(pool), stream.clone());
        Ok(DevicePoolMemory { pool, stream, base, first: DeviceAddress::new(first), length })
    }
}

impl Pool {
    fn allocate(&self, bytes: ByteCount, stream: &Stream) -> Result<u64, CudaError> {
        let mut address = 0;
        self.context.bound(|functions| {
            let (bytes, stream) = (bytes.to_usize(), stream.raw());
            // SAFETY: pool and stream are alive; one address is written.
            unsafe { functions.cuMemAllocFromPoolAsync(&raw mut address, bytes, self.raw, stream) }
        })?;
        Ok(address)
    }

    fn free(&self, base: u64, stream: &Stream) {
        self.context.bound_in_drop(|functions| {
            // SAFETY: it was allocated here, before all later work of the stream. Only work that
            // was submitted to the stream before this call uses it.
            unsafe { functions.cuMemFreeAsync(base, stream.raw()) }
        });
    }

    /// Reads an attribute that is a number of bytes.
    fn get(&self, attribute: CUmemPool_attribute) -> Result<ByteCount, CudaError> {
        let mut bytes = 0_u64;
        let value: *mut c_void = (&raw mut bytes).cast();
        self.context.bound(|functions| {
            // SAFETY: the pool is alive, and the attribute has the eight bytes of the value.
            unsafe { functions.cuMemPoolGetAttribute(self.raw, attribute, value) }
        })?;
        Ok(ByteCount::new(bytes))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.context.bound_in_drop(|functions| {
            // SAFETY: the last memory of the pool has been dropped. The driver itself waits for
            // frees that are still pending on streams.
            unsafe { functions.cuMemPoolDestroy(self.raw) }
        });
    }
}

// SAFETY: each region is a driver allocation, made for this call.
unsafe impl Allocate for DevicePool {
    type Memory = DevicePoolMemory;

    fn kind(&self) -> StorageKind {
        self.0.context.kind()
    }

    fn limits(&self) -> Limits {
        Limits {
            alignment: DRIVER_ALIGNMENT,
            granule: Alignment::BYTE,
            largest_region: Some(self.0.context.device().memory),
        }
    }

    fn allocate(&self, request: &RegionRequest) -> Result<DevicePoolMemory, AllocateError> {
        self.allocate_memory(request).map_err(|error| refusal(&self.0.context, error, request))
    }
}

/// Frees memory for a pool above this one that is exhausted: returns the unused memory that this
/// pool keeps.
impl TrimUpstream for DevicePool {
    fn trim_upstream(&self, wanted: ByteCount) -> ByteCount {
        let trimmed = || -> Result<Option<ByteCount>, CudaError> {
            let before = self.held()?;
            self.trim(before.checked_sub(wanted).unwrap_or(ByteCount::ZERO))?;
            Ok(before.checked_sub(self.held()?))
        };
        // If the query fails, nothing is freed, and the request fails with its own error.
        trimmed().ok().flatten().unwrap_or(ByteCount::ZERO)
    }
}

/// A region of device memory from a [`DevicePool`], returned to the pool when it drops. Its initial
/// contents are arbitrary. It keeps the pool alive.
#[derive(Debug)]
pub struct DevicePoolMemory {
    pool: Arc<Pool>,
    /// The stream on which it is freed.
    stream: Stream,
    /// The pool's allocation; `None` for no bytes.
    base: Option<u64>,
    /// The first byte, at the requested alignment.
    first: DeviceAddress,
    length: ByteCount,
}

impl DevicePoolMemory {
    /// The address of the first byte.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.first
    }
}

// SAFETY: the span lies within a pool allocation that this value alone owns. It is freed when the
// value drops, wherever the value moves. The allocation on the stream has completed.
unsafe impl Memory for DevicePoolMemory {
    fn kind(&self) -> StorageKind {
        self.pool.context.kind()
    }

    fn location(&self) -> Location {
        Location::Device { device: self.pool.context.device().id, address: self.first }
    }

    fn length(&self) -> ByteCount {
        self.length
    }
}

impl Drop for DevicePoolMemory {
    fn drop(&mut self) {
        if let Some(base) = self.base {
            self.pool.context.counters().pooled.subtract(self.length);
            self.pool.free(base, &self.stream);
        }
    }
}

/// Device memory in the order of a stream, from [`DevicePool::allocate_on`].
///
/// It does not implement [`Memory`], because not every stream can use it. Its drop frees it in the
/// order of its stream: work submitted there before may still use it. Before the drop, uses by
/// other streams must be complete, or the stream must wait for them ([`Stream::wait_for`]).
#[derive(Debug)]
#[must_use = "a dropped value is freed in the order of its stream"]
pub struct OrderedMemory(DevicePoolMemory);

impl OrderedMemory {
    /// The address of the first byte.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.0.first
    }

    /// The location of the first byte, for work in the order of the stream.
    #[must_use]
    pub fn location(&self) -> Location {
        self.0.location()
    }

    /// The length in bytes.
    #[must_use]
    pub const fn length(&self) -> ByteCount {
        self.0.length
    }

    /// The stream on which it is freed.
    #[must_use]
    pub const fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// Frees it in the order of another stream. That stream must already wait for every use on
    /// other streams.
    ///
    /// # Errors
    ///
    /// [`CudaError::WrongContext`] if that stream belongs to another device. The memory is then
    /// freed on its own stream.
    pub fn free_on(mut self, stream: &Stream) -> Result<(), CudaError> {
        self.0.pool.context.check_stream(stream)?;
        self.0.stream = stream.clone();
        Ok(())
    }

    /// Waits until the allocation on the stream has completed. The memory is then usable everywhere.
    ///
    /// # Errors
    ///
    /// [`CudaError::ContextLost`] or [`CudaError::Driver`]; the memory is then freed.
    pub fn settle(self) -> Result<DevicePoolMemory, CudaError> {
        let Self(mut memory) = self;
        memory.stream.synchronize()?;
        memory.stream = memory.pool.stream.clone();
        Ok(memory)
    }
}
