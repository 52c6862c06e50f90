//! Pinned memory that the driver allocates.

use std::ptr::{self, NonNull};

use terrane_core::{Alignment, ByteCount, HostAddress};

use crate::error::CudaError;
use crate::runtime::context::Context;

/// `CU_MEMHOSTALLOC_PORTABLE`: for every context; `CU_MEMHOSTALLOC_DEVICEMAP`: in the device's
/// address space.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;

/// An allocation of `cuMemHostAlloc`, zeroed, freed when it drops.
#[derive(Debug)]
pub(super) struct HostAllocation {
    context: Context,
    base: HostAddress,
    pub(super) first: HostAddress,
    length: ByteCount,
}

impl HostAllocation {
    /// Allocates `length` bytes at a multiple of `alignment`.
    ///
    /// # Errors
    ///
    /// The driver's refusal.
    pub(super) fn new(
        context: &Context,
        length: ByteCount,
        alignment: Alignment,
    ) -> Result<Self, CudaError> {
        // The driver's allocations begin at a page.
        let slack = if alignment > Alignment::PAGE { alignment.get() } else { 0 };
        let bytes = length.checked_add(ByteCount::new(slack))?;
        let mut address = ptr::null_mut();
        context.bound(|functions| {
            // SAFETY: the function writes one address.
            unsafe {
                functions.cuMemHostAlloc(&raw mut address, bytes.to_usize(), PORTABLE_AND_MAPPED)
            }
        })?;
        let base = HostAddress::new(NonNull::new(address).unwrap_or(NonNull::dangling()));
        // From here on, dropping the value frees the allocation.
        context.counters().host.add(length);
        let mut allocation = Self { context: context.clone(), base, first: base, length };
        let first = ByteCount::new(base.get()).align_up(alignment)?;
        let offset = first.checked_sub(ByteCount::new(base.get())).unwrap_or(ByteCount::ZERO);
        allocation.first = base.checked_add(offset).unwrap_or(base);
        // SAFETY: the span lies within the allocation, which nothing else uses yet.
        unsafe { allocation.first.as_ptr().write_bytes(0, length.to_usize()) };
        Ok(allocation)
    }
}

impl Drop for HostAllocation {
    fn drop(&mut self) {
        self.context.counters().host.subtract(self.length);
        self.context.bound_in_drop(|functions| {
            // SAFETY: it was allocated here, and nothing uses it any more.
            unsafe { functions.cuMemFreeHost(self.base.as_ptr().cast()) }
        });
    }
}
