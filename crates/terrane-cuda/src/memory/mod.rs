//! The kinds of CUDA memory: device memory, and pinned host memory.

pub(crate) mod device;
pub(crate) mod device_pool;
pub(crate) mod pinned;

use std::ptr::NonNull;

use terrane_core::{Alignment, AllocateError, ByteCount, HostAddress, RegionRequest, StorageKind};

use crate::error::CudaError;
use crate::runtime::context::Context;

pub use device::{DeviceAllocator, DeviceMemory};
pub use device_pool::{DevicePool, DevicePoolMemory, OrderedMemory};
pub use pinned::{PinnedAllocator, PinnedBringUp, PinnedMemory, PinnedNuma, PinnedOptions};

/// The minimum alignment of all driver allocations: 256 bytes, as "Device Memory Accesses" in the
/// CUDA C++ programming guide states.
const DRIVER_ALIGNMENT: Alignment = match Alignment::new(256) {
    Ok(alignment) => alignment,
    Err(_) => Alignment::BYTE,
};

/// The maximum alignment that is supported: that of the driver's large pages.
const STRICTEST: Alignment = Alignment::HUGE_PAGE;

/// Checks a request for device memory.
///
/// # Errors
///
/// [`CudaError::TooStrictlyAligned`], [`CudaError::TooLarge`].
fn check_request(context: &Context, request: &RegionRequest) -> Result<(), CudaError> {
    if request.alignment > STRICTEST {
        return Err(CudaError::TooStrictlyAligned {
            requested: request.alignment,
            largest: STRICTEST,
        });
    }
    let largest = context.device().memory;
    if request.bytes > largest {
        return Err(CudaError::TooLarge { requested: request.bytes, largest });
    }
    Ok(())
}

/// The error of a request for device memory, with the remaining memory if memory ran out.
fn refusal(context: &Context, error: CudaError, request: &RegionRequest) -> AllocateError {
    let available = context.memory().ok().map(|(free, _)| free);
    let kind = context.kind();
    error.into_allocate_error(kind, request.bytes, available, request.label.clone())
}

/// Allocates device memory whose address is a multiple of the alignment. The first call of
/// `allocate` requests only the bytes, because most results are already aligned. If not, a second
/// call requests enough bytes to skip the unaligned beginning. Returns the address of the
/// allocation, and the first aligned address.
///
/// # Errors
///
/// The errors of `allocate`.
fn aligned(
    request: &RegionRequest,
    mut allocate: impl FnMut(ByteCount) -> Result<u64, CudaError>,
    free: impl FnOnce(u64),
) -> Result<(u64, u64), CudaError> {
    let base = allocate(request.bytes)?;
    if ByteCount::new(base).is_aligned_to(request.alignment) {
        return Ok((base, base));
    }
    free(base);
    let slack = ByteCount::new(request.alignment.get());
    let base = allocate(request.bytes.checked_add(slack)?)?;
    let first = ByteCount::new(base).align_up(request.alignment)?;
    Ok((base, first.get()))
}

/// The address of an empty span: an aligned number without memory.
fn address_of_no_bytes(alignment: Alignment) -> HostAddress {
    let address = ByteCount::new(alignment.get()).to_usize();
    let address = std::ptr::without_provenance_mut::<u8>(address);
    HostAddress::new(NonNull::new(address).unwrap_or(NonNull::dangling()))
}

/// The storage kind of pinned allocations.
const PINNED: StorageKind = StorageKind::Pinned;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aligned_span_lies_within_its_allocation() {
        let request = RegionRequest::new(ByteCount::new(1000)).aligned_to(Alignment::PAGE);
        let mut requests = Vec::new();
        let mut freed = Vec::new();
        let allocate = |bytes: ByteCount| {
            requests.push(bytes.get());
            Ok(0x1_0000_0100)
        };
        let (base, first) = aligned(&request, allocate, |base| freed.push(base)).unwrap();
        assert_eq!((base, first), (0x1_0000_0100, 0x1_0000_1000));
        assert_eq!(requests, [1000, 1000 + 4096]);
        assert_eq!(freed, [0x1_0000_0100]);
        assert!(first + 1000 <= base + 1000 + 4096);
    }

    #[test]
    fn an_aligned_first_allocation_is_kept() {
        let request = RegionRequest::new(ByteCount::new(7)).aligned_to(Alignment::PAGE);
        let first =
            aligned(&request, |_| Ok(0x7000), |_| panic!("freed the allocation that was kept"));
        assert_eq!(first.unwrap(), (0x7000, 0x7000));
    }
}
