//! Device memory: each region is one allocation of the driver.

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, DeviceAddress, Limits, Location, Memory,
    RegionRequest, StorageKind,
};

use crate::error::CudaError;
use crate::memory::{DRIVER_ALIGNMENT, aligned, check_request, refusal};
use crate::runtime::context::Context;

/// Allocates device memory; each region is one driver allocation (`cuMemAlloc`).
///
/// An allocation takes tens of microseconds and is mapped in steps of 2 MiB, and a free waits for
/// the device. Use this for memory with a long lifetime. For memory with a short lifetime use
/// [`DevicePool`](crate::DevicePool), or a pool of `terrane-pool` over either.
#[derive(Clone, Debug)]
pub struct DeviceAllocator {
    context: Context,
}

impl DeviceAllocator {
    /// Creates an allocator for the context's device.
    #[must_use]
    pub fn new(context: &Context) -> Self {
        Self { context: context.clone() }
    }

    /// Allocates one region, like [`allocate`](Allocate::allocate), but returns this crate's error.
    ///
    /// # Errors
    ///
    /// [`CudaError::TooStrictlyAligned`] above 2 MiB; [`CudaError::TooLarge`] for more than the
    /// device's memory; [`CudaError::Driver`] with `CUDA_ERROR_OUT_OF_MEMORY` if less memory is
    /// left; [`CudaError::ContextLost`].
    pub fn allocate_memory(&self, request: &RegionRequest) -> Result<DeviceMemory, CudaError> {
        check_request(&self.context, request)?;
        let context = self.context.clone();
        let length = request.bytes;
        if length.is_zero() {
            let first = DeviceAddress::new(request.alignment.max(DRIVER_ALIGNMENT).get());
            return Ok(DeviceMemory { context, base: None, first, length });
        }
        let allocate = |bytes: ByteCount| {
            let mut address = 0;
            context.bound(|functions| {
                // SAFETY: the function writes one address.
                unsafe { functions.cuMemAlloc_v2(&raw mut address, bytes.to_usize()) }
            })?;
            Ok(address)
        };
        let (base, first) = aligned(request, allocate, |base| free(&context, base))?;
        let first = DeviceAddress::new(first);
        context.counters().device.add(length);
        Ok(DeviceMemory { context, base: Some(base), first, length })
    }
}

// SAFETY: each region is a driver allocation, made for this call.
unsafe impl Allocate for DeviceAllocator {
    type Memory = DeviceMemory;

    fn kind(&self) -> StorageKind {
        self.context.kind()
    }

    fn limits(&self) -> Limits {
        Limits {
            alignment: DRIVER_ALIGNMENT,
            granule: Alignment::BYTE,
            largest_region: Some(self.context.device().memory),
        }
    }

    fn allocate(&self, request: &RegionRequest) -> Result<DeviceMemory, AllocateError> {
        self.allocate_memory(request).map_err(|error| refusal(&self.context, error, request))
    }
}

/// A region of device memory, freed when it drops. Its initial contents are arbitrary.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Context,
    /// The driver allocation; `None` for no bytes.
    base: Option<u64>,
    /// The first byte, at the requested alignment.
    first: DeviceAddress,
    length: ByteCount,
}

impl DeviceMemory {
    /// The address of the first byte.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.first
    }

    /// The context of the allocation.
    #[must_use]
    pub const fn context(&self) -> &Context {
        &self.context
    }
}

// SAFETY: the span lies within a driver allocation that this value alone owns. It is freed when the
// value drops, wherever the value moves.
unsafe impl Memory for DeviceMemory {
    fn kind(&self) -> StorageKind {
        self.context.kind()
    }

    fn location(&self) -> Location {
        Location::Device { device: self.context.device().id, address: self.first }
    }

    fn length(&self) -> ByteCount {
        self.length
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Some(base) = self.base {
            self.context.counters().device.subtract(self.length);
            free(&self.context, base);
        }
    }
}

fn free(context: &Context, base: u64) {
    // SAFETY: it was allocated here, and nothing uses it any more.
    context.bound_in_drop(|functions| unsafe { functions.cuMemFree_v2(base) });
}
