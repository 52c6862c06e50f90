//! Device memory from a pool of the driver's, which keeps what is given back.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUmemPool_attribute, CUmemoryPool};
use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, DeviceAddress, Limits, Location, Memory,
    RegionRequest, StorageKind,
};
use terrane_pool::TrimUpstream;

use super::{DRIVER_ALIGNMENT, aligned, check_request, refusal};
use crate::context::Context;
use crate::driver::PoolProperties;
use crate::error::{CudaError, check};
use crate::stream::Stream;

/// A memory pool of the driver's (`cuMemPoolCreate`), apart from the one that the process's other
/// libraries share, with a release threshold of our own.
///
/// Memory is allocated and freed in the order of a stream that is the pool's alone and otherwise
/// idle. An allocation waits for that stream, which takes microseconds, so that the memory is good
/// for every stream and for other libraries from the start; a free waits for nothing. Cloning
/// gives another handle to the same pool.
#[derive(Clone, Debug)]
pub struct DevicePool(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    raw: RawPool,
    /// Destroyed after the pool, as fields drop in their order.
    stream: Stream,
}

#[derive(Debug)]
struct RawPool {
    raw: CUmemoryPool,
    context: Context,
}

// SAFETY: the driver takes a pool's handle on any thread, and synchronises.
unsafe impl Send for RawPool {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawPool {}

impl DevicePool {
    /// A pool that keeps up to `kept` bytes of what is given back to it. The driver's own default
    /// is zero: everything goes back to the system whenever a stream is waited for.
    ///
    /// # Errors
    ///
    /// [`CudaError::DriverTooOld`] if the driver has no pools, [`CudaError::Driver`] if the device
    /// has none, [`CudaError::DeviceLost`].
    pub fn new(context: &Context, kept: ByteCount) -> Result<Self, CudaError> {
        let stream = Stream::new(context)?;
        let functions = context.driver().functions();
        let create = require(context, functions.cuMemPoolCreate, "cuMemPoolCreate")?;
        // What an allocation and the end of the pool need, before there is one.
        let allocate = functions.cuMemAllocFromPoolAsync;
        require(context, allocate, "cuMemAllocFromPoolAsync")?;
        require(context, functions.cuMemFreeAsync, "cuMemFreeAsync")?;
        require(context, functions.cuMemPoolDestroy, "cuMemPoolDestroy")?;
        let properties = PoolProperties {
            // CU_MEM_ALLOCATION_TYPE_PINNED: memory that stays where it is; the only type.
            allocation_type: 1,
            handle_types: 0,
            // CU_MEM_LOCATION_TYPE_DEVICE
            location_type: 1,
            location_id: i32::try_from(context.device().id.get()).unwrap_or(i32::MAX),
            security_attributes: ptr::null_mut(),
            rest: [0; 64],
        };
        let mut raw = ptr::null_mut();
        context.bound(|_| {
            // SAFETY: the properties are read, and one handle is written.
            check("cuMemPoolCreate", unsafe { create(&raw mut raw, &raw const properties) })
        })?;
        let raw = RawPool { raw, context: context.clone() };
        let mut threshold = kept.get();
        raw.attribute(
            CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            &mut threshold,
            Way::Set,
        )?;
        Ok(Self(Arc::new(Pool { raw, stream })))
    }

    /// The bytes that the pool holds of the device's memory, in use or not.
    ///
    /// # Errors
    ///
    /// [`CudaError::DriverTooOld`], [`CudaError::Driver`], [`CudaError::DeviceLost`].
    pub fn held(&self) -> Result<ByteCount, CudaError> {
        self.0.raw.get(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    }

    /// The bytes that are in use.
    ///
    /// # Errors
    ///
    /// As for [`held`](Self::held).
    pub fn in_use(&self) -> Result<ByteCount, CudaError> {
        self.0.raw.get(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    }

    /// Gives memory that is not in use back to the system, until the pool holds no more than
    /// `kept`. Waits for what has been freed.
    ///
    /// # Errors
    ///
    /// As for [`held`](Self::held).
    pub fn trim(&self, kept: ByteCount) -> Result<(), CudaError> {
        self.0.stream.synchronize()?;
        let context = &self.0.raw.context;
        let trim =
            require(context, context.driver().functions().cuMemPoolTrimTo, "cuMemPoolTrimTo")?;
        context.bound(|_| {
            // SAFETY: the pool is alive.
            check("cuMemPoolTrimTo", unsafe { trim(self.0.raw.raw, kept.to_usize()) })
        })
    }

    /// Allocates one region; what [`allocate`](Allocate::allocate) does, with this crate's error.
    ///
    /// # Errors
    ///
    /// As for [`DeviceAllocator::bring_up`](crate::DeviceAllocator::bring_up).
    pub fn bring_up(&self, request: &RegionRequest) -> Result<DevicePoolMemory, CudaError> {
        let pool = &self.0;
        check_request(&pool.raw.context, request)?;
        let length = request.bytes;
        let owner = Arc::clone(pool);
        if length.is_zero() {
            let first = DeviceAddress::new(request.alignment.max(DRIVER_ALIGNMENT).get());
            return Ok(DevicePoolMemory { pool: owner, base: None, first, length });
        }
        let (base, first) = aligned(request, |bytes| pool.take(bytes), |base| pool.give(base))?;
        let first = DeviceAddress::new(first);
        let memory = DevicePoolMemory { pool: owner, base: Some(base), first, length };
        pool.stream.synchronize()?;
        Ok(memory)
    }
}

impl Pool {
    fn take(&self, bytes: ByteCount) -> Result<u64, CudaError> {
        let context = &self.raw.context;
        let allocate = context.driver().functions().cuMemAllocFromPoolAsync;
        let allocate = require(context, allocate, "cuMemAllocFromPoolAsync")?;
        let mut address = 0;
        context.bound(|_| {
            let (pool, stream) = (self.raw.raw, self.stream.raw());
            // SAFETY: pool and stream are alive; one address is written.
            let code = unsafe { allocate(&raw mut address, bytes.to_usize(), pool, stream) };
            check("cuMemAllocFromPoolAsync", code)
        })?;
        Ok(address)
    }

    fn give(&self, base: u64) {
        let context = &self.raw.context;
        context.bound_in_drop(|functions| {
            let free = require(context, functions.cuMemFreeAsync, "cuMemFreeAsync")?;
            // SAFETY: it was allocated on this stream, and nobody uses it any more.
            check("cuMemFreeAsync", unsafe { free(base, self.stream.raw()) })
        });
    }
}

enum Way {
    Get,
    Set,
}

impl RawPool {
    fn get(&self, attribute: CUmemPool_attribute) -> Result<ByteCount, CudaError> {
        let mut value = 0;
        self.attribute(attribute, &mut value, Way::Get)?;
        Ok(ByteCount::new(value))
    }

    /// Reads or writes an attribute that is a number of 64 bits.
    fn attribute(
        &self,
        attribute: CUmemPool_attribute,
        value: &mut u64,
        way: Way,
    ) -> Result<(), CudaError> {
        let functions = self.context.driver().functions();
        let (call, name) = match way {
            Way::Get => (functions.cuMemPoolGetAttribute, "cuMemPoolGetAttribute"),
            Way::Set => (functions.cuMemPoolSetAttribute, "cuMemPoolSetAttribute"),
        };
        let call = require(&self.context, call, name)?;
        let value: *mut c_void = ptr::from_mut(value).cast();
        self.context.bound(|_| {
            // SAFETY: the pool is alive, and the attribute has the eight bytes of the value.
            check(name, unsafe { call(self.raw, attribute, value) })
        })
    }
}

/// A function that the driver may lack.
fn require<F>(
    context: &Context,
    function: Option<F>,
    symbol: &'static str,
) -> Result<F, CudaError> {
    let version = || context.driver().version().ok();
    function.ok_or_else(|| CudaError::DriverTooOld { symbol, version: version() })
}

impl Drop for RawPool {
    fn drop(&mut self) {
        self.context.bound_in_drop(|functions| {
            let destroy = require(&self.context, functions.cuMemPoolDestroy, "cuMemPoolDestroy")?;
            // SAFETY: the last memory of the pool has gone; what was freed on its stream and has
            // not come to pass, the driver waits for by itself.
            check("cuMemPoolDestroy", unsafe { destroy(self.raw) })
        });
    }
}

// SAFETY: each region is an allocation of the driver's, made for this call.
unsafe impl Allocate for DevicePool {
    type Memory = DevicePoolMemory;

    fn kind(&self) -> StorageKind {
        self.0.raw.context.kind()
    }

    fn limits(&self) -> Limits {
        Limits {
            alignment: DRIVER_ALIGNMENT,
            granule: Alignment::BYTE,
            largest_region: Some(self.0.raw.context.device().memory),
        }
    }

    fn allocate(&self, request: &RegionRequest) -> Result<DevicePoolMemory, AllocateError> {
        self.bring_up(request).map_err(|error| refusal(&self.0.raw.context, error, request))
    }
}

/// What a pool over device memory does when memory is out: it takes back what this one keeps.
impl TrimUpstream for DevicePool {
    fn trim_upstream(&self, wanted: ByteCount) -> ByteCount {
        let trimmed = || -> Result<Option<ByteCount>, CudaError> {
            let before = self.held()?;
            self.trim(before.checked_sub(wanted).unwrap_or(ByteCount::ZERO))?;
            Ok(before.checked_sub(self.held()?))
        };
        // What cannot be asked gives nothing back, and the request fails with its own error.
        trimmed().ok().flatten().unwrap_or(ByteCount::ZERO)
    }
}

/// A region of device memory from a [`DevicePool`], given back to it when it drops. What it holds
/// at first is arbitrary. It keeps the pool alive.
#[derive(Debug)]
pub struct DevicePoolMemory {
    pool: Arc<Pool>,
    /// What the pool allocated; `None` for no bytes.
    base: Option<u64>,
    /// The first byte that is aligned as was asked for.
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

// SAFETY: the span lies within an allocation of the pool's that is this value's alone and is freed
// when it drops, wherever it moves; the stream that it was allocated on has come to it.
unsafe impl Memory for DevicePoolMemory {
    fn kind(&self) -> StorageKind {
        self.pool.raw.context.kind()
    }

    fn location(&self) -> Location {
        Location::Device { device: self.pool.raw.context.device().id, address: self.first }
    }

    fn length(&self) -> ByteCount {
        self.length
    }
}

impl Drop for DevicePoolMemory {
    fn drop(&mut self) {
        if let Some(base) = self.base {
            self.pool.give(base);
        }
    }
}
