//! Registering mapped memory with the driver, chunk by chunk.

use std::sync::Arc;

use terrane_core::{Alignment, ByteCount, DeviceAddress, HostAddress};
use terrane_storage::SystemMemory;

use crate::driver::code::DriverCode;
use crate::error::CudaError;
use crate::memory::pinned::options::LARGEST_REGISTRATION;
use crate::runtime::context::Context;

/// `CU_MEMHOSTREGISTER_PORTABLE`: for every context; `CU_MEMHOSTREGISTER_DEVICEMAP`: in the
/// device's address space.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;

/// Mapped memory that is locked for the device, chunk by chunk, until this drops.
///
/// If the driver refuses to unregister a chunk, the memory stays mapped until the process ends. The
/// driver would otherwise take the next mapping at this address for pinned memory.
#[derive(Debug)]
pub(super) struct Registrations {
    context: Context,
    memory: Arc<SystemMemory>,
    /// Each chunk, in order.
    chunks: Vec<(HostAddress, ByteCount)>,
    pub(super) chunk_length: ByteCount,
}

impl Registrations {
    /// Creates an empty registration of memory, for chunks of `chunk_length`.
    pub(super) fn none(
        context: &Context,
        memory: Arc<SystemMemory>,
        chunk_length: ByteCount,
    ) -> Self {
        Self { context: context.clone(), memory, chunks: Vec::new(), chunk_length }
    }

    /// Registers memory in chunks of `chunk_length`. Before each chunk, `before_chunk` gets the
    /// number of registered bytes and may stop the work with an error.
    ///
    /// # Errors
    ///
    /// The driver's first refusal, or the error of `before_chunk`. The chunks that were registered
    /// before are unregistered.
    ///
    /// # Safety
    ///
    /// The span is the memory's.
    pub(super) unsafe fn new(
        context: &Context,
        memory: Arc<SystemMemory>,
        (address, length): (HostAddress, ByteCount),
        chunk_length: ByteCount,
        before_chunk: impl Fn(ByteCount) -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        // On an error, dropping this value unregisters the chunks.
        let mut registrations = Self::none(context, memory, chunk_length);
        for (offset, bytes) in chunks(length, chunk_length) {
            before_chunk(offset)?;
            let Some(chunk) = address.checked_add(offset) else { break };
            // SAFETY: the chunk is a part of the span, which is the memory's.
            unsafe { registrations.register(chunk, bytes) }?;
        }
        Ok(registrations)
    }

    /// Registers the next chunk. It has `chunk_length` bytes unless it is the last.
    ///
    /// # Errors
    ///
    /// The driver's refusal; earlier chunks stay registered.
    ///
    /// # Safety
    ///
    /// The chunk is a part of the memory.
    pub(super) unsafe fn register(
        &mut self,
        chunk: HostAddress,
        bytes: ByteCount,
    ) -> Result<(), CudaError> {
        self.context.bound(|functions| {
            let (start, bytes) = (chunk.as_ptr().cast(), bytes.to_usize());
            // SAFETY: the memory, and so the chunk, is mapped until it is unregistered.
            unsafe { functions.cuMemHostRegister_v2(start, bytes, PORTABLE_AND_MAPPED) }
        })?;
        self.context.counters().registered.add(bytes);
        self.chunks.push((chunk, bytes));
        tracing::trace!(%bytes, "host memory is locked for the device");
        Ok(())
    }

    /// The device address of the first byte, if the device addresses of all chunks are contiguous.
    /// The driver assigns each chunk an address, and these addresses may not be contiguous.
    pub(super) fn device_alias(&self) -> Option<DeviceAddress> {
        let mut expected = None;
        let mut first = None;
        for &(chunk, bytes) in &self.chunks {
            let alias = device_pointer(&self.context, chunk).ok()?;
            if expected.is_some_and(|expected| alias != expected) {
                return None;
            }
            first = first.or(Some(alias));
            expected = alias.checked_add(bytes);
        }
        first
    }
}

impl Drop for Registrations {
    fn drop(&mut self) {
        for &(chunk, bytes) in self.chunks.iter().rev() {
            let unregistered = self.context.bound(|functions| {
                // SAFETY: it was registered here, and no copy uses it any more.
                unsafe { functions.cuMemHostUnregister(chunk.as_ptr().cast()) }
            });
            match unregistered {
                Err(error) if self.is_still_registered(&error) => {
                    self.context.leak(Arc::clone(&self.memory), &error);
                    continue;
                }
                Err(error) => self.context.note_failed_drop(&error),
                Ok(()) => {}
            }
            self.context.counters().registered.subtract(bytes);
        }
    }
}

impl Registrations {
    /// Whether the driver may still use a chunk that it refused to unregister. It runs no more
    /// copies for a lost context, after its end, or in a forked process.
    fn is_still_registered(&self, error: &CudaError) -> bool {
        let has_ended = matches!(error, CudaError::Forked)
            || error.code() == Some(DriverCode::DEINITIALIZED)
            || self.context.lost().is_some();
        !has_ended
    }
}

/// The device address of a byte of locked host memory.
///
/// # Errors
///
/// [`CudaError::Driver`] if the device cannot access it.
pub(crate) fn device_pointer(
    context: &Context,
    address: HostAddress,
) -> Result<DeviceAddress, CudaError> {
    let mut pointer = 0;
    context.bound(|functions| {
        let host = address.as_ptr().cast();
        // SAFETY: one address is written, and the host's address is checked.
        unsafe { functions.cuMemHostGetDevicePointer_v2(&raw mut pointer, host, 0) }
    })?;
    Ok(DeviceAddress::new(pointer))
}

/// The length of a chunk in bytes. It is a multiple of the page and of the unit: as many as fit
/// into `wanted`, at least one, and no more than `largest`.
///
/// # Errors
///
/// [`CudaError::UnitTooLarge`] if not even one unit fits.
pub(super) fn chunk_length(
    unit: ByteCount,
    page: Alignment,
    wanted: ByteCount,
    largest: ByteCount,
) -> Result<ByteCount, CudaError> {
    let refused = CudaError::UnitTooLarge { unit, largest };
    let largest = largest.min(LARGEST_REGISTRATION);
    // The least common multiple: the page is a power of two. A product that saturates is too large.
    let step = match unit.get() {
        0 => page.get(),
        unit => unit.saturating_mul(page.get() / Alignment::of(unit).get().min(page.get())),
    };
    if step > largest.get() {
        return Err(refused);
    }
    let wanted = wanted.min(largest).get();
    Ok(ByteCount::new((wanted - wanted % step).max(step)))
}

/// The offset and the length of each chunk of `length` bytes.
fn chunks(
    length: ByteCount,
    chunk_length: ByteCount,
) -> impl Iterator<Item = (ByteCount, ByteCount)> {
    let step = usize::try_from(chunk_length.get().max(1)).unwrap_or(usize::MAX);
    (0..length.get()).step_by(step).map(move |offset| {
        let left = ByteCount::new(length.get() - offset);
        (ByteCount::new(offset), left.min(chunk_length))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_everything_once() {
        for (length, chunk) in [(1, 1), (10, 3), (9, 3), (8, 64), (0, 4)] {
            let mut end = 0;
            for (offset, bytes) in chunks(ByteCount::new(length), ByteCount::new(chunk)) {
                assert_eq!(offset.get(), end);
                assert!(!bytes.is_zero() && bytes.get() <= chunk);
                end += bytes.get();
            }
            assert_eq!(end, length);
        }
    }

    #[test]
    fn no_chunk_splits_a_unit_or_a_page() {
        let page = Alignment::PAGE;
        for unit in [0, 1, 512, 4096, 36_864, 2 << 20, 3 * 4096 + 512] {
            let unit = ByteCount::new(unit);
            let most = ByteCount::gib(64);
            let length = chunk_length(unit, page, most, most).unwrap();
            assert!(length.is_aligned_to(page), "{unit:?}");
            assert_eq!(length.get() % unit.get().max(1), 0, "{unit:?}");
            assert!(length <= ByteCount::gib(64) && length > ByteCount::gib(63), "{unit:?}");
        }
    }

    #[test]
    fn a_unit_that_fits_no_chunk_is_refused() {
        for (unit, largest) in [(8192, 4096), (4097, 4 << 20), (u64::MAX, 64 << 30)] {
            let (unit, largest) = (ByteCount::new(unit), ByteCount::new(largest));
            let error = chunk_length(unit, Alignment::PAGE, largest, largest).unwrap_err();
            assert!(matches!(error, CudaError::UnitTooLarge { .. }), "{error}");
        }
    }

    #[test]
    fn chunks_have_at_most_64_gib() {
        let most = ByteCount::new(u64::MAX);
        let length = chunk_length(ByteCount::mib(2), Alignment::PAGE, most, most);
        assert_eq!(length.unwrap(), ByteCount::gib(64));
    }

    #[test]
    fn a_chunk_holds_one_unit_at_least() {
        let length = |unit, wanted| {
            let (unit, wanted) = (ByteCount::new(unit), ByteCount::new(wanted));
            chunk_length(unit, Alignment::PAGE, wanted, ByteCount::mib(64)).unwrap().get()
        };
        assert_eq!(length(3 << 20, 8 << 20), 6 << 20);
        assert_eq!(length(3 << 20, 1 << 20), 3 << 20);
        assert_eq!(length(3 << 20, 0), 3 << 20);
        assert_eq!(length(0, 0), 4096);
        assert_eq!(length(3 << 20, 1 << 40), 63 << 20);
    }
}
