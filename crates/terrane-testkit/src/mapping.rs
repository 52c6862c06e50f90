//! Mappings whose addresses a test can map again.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A range of addresses that no other mapping of the process takes.
///
/// It stays reserved while a clone of it or a mapping is alive. A test that unmaps memory and maps
/// the same addresses again would otherwise race with every thread that maps memory.
#[derive(Clone, Debug)]
pub struct AddressRange(Arc<Reservation>);

#[derive(Debug)]
struct Reservation {
    address: NonNull<u8>,
    length: usize,
    mapped: AtomicBool,
}

// SAFETY: mappings are not tied to threads.
unsafe impl Send for Reservation {}
// SAFETY: as above.
unsafe impl Sync for Reservation {}

/// The flags of addresses without memory.
const RESERVED: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

impl AddressRange {
    /// Reserves `length` bytes of addresses.
    ///
    /// # Panics
    ///
    /// If the kernel refuses the range.
    #[must_use]
    pub fn new(length: usize) -> Self {
        // SAFETY: the kernel chooses an unused range.
        let address =
            unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_NONE, RESERVED, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED, "{length} bytes: {}", io::Error::last_os_error());
        let address = NonNull::new(address.cast()).expect("the kernel maps nothing at address 0");
        Self(Arc::new(Reservation { address, length, mapped: AtomicBool::new(false) }))
    }

    /// Maps zeroed memory, or the beginning of `file`, over the whole range.
    ///
    /// # Panics
    ///
    /// If a mapping of the range is alive, or the kernel refuses it.
    #[must_use]
    pub fn map(&self, file: Option<&File>) -> Mapping {
        assert!(!self.0.mapped.swap(true, Ordering::Acquire), "the range is mapped");
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = file.map_or(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, |_| libc::MAP_SHARED);
        // SAFETY: the range is reserved, and has no mapping.
        unsafe { self.0.replace(access, kind, file.map_or(-1, AsRawFd::as_raw_fd)) };
        Mapping(self.clone())
    }
}

impl Reservation {
    /// Replaces the whole range.
    ///
    /// # Safety
    ///
    /// Nothing uses its memory.
    unsafe fn replace(&self, protection: i32, flags: i32, file: i32) {
        let (at, flags) = (self.address.as_ptr().cast(), flags | libc::MAP_FIXED);
        // SAFETY: as the caller states; the range is this reservation's own.
        let mapped = unsafe { libc::mmap(at, self.length, protection, flags, file, 0) };
        assert_eq!(mapped, at, "{}", io::Error::last_os_error());
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the last mapping of the range has dropped.
        assert_eq!(unsafe { libc::munmap(self.address.as_ptr().cast(), self.length) }, 0);
    }
}

/// Readable and writable memory over a whole [`AddressRange`].
#[derive(Debug)]
pub struct Mapping(AddressRange);

impl Mapping {
    /// Maps `length` bytes of zeroed memory in a range of its own.
    ///
    /// # Panics
    ///
    /// If the kernel refuses it.
    #[must_use]
    pub fn new(length: usize) -> Self {
        AddressRange::new(length).map(None)
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn address(&self) -> NonNull<u8> {
        self.0.0.address
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        self.0.0.length
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the owner of the mapping has stopped using its memory.
        unsafe { self.0.0.replace(libc::PROT_NONE, RESERVED, -1) };
        self.0.0.mapped.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::AddressRange;

    #[test]
    fn a_range_is_mapped_again_with_zeroed_memory() {
        let range = AddressRange::new(1 << 16);
        let mut found = Vec::new();
        for _ in 0..2 {
            let mapping = range.map(None);
            let last = mapping.address().as_ptr().wrapping_add(mapping.length() - 1);
            // SAFETY: the byte lies in the mapping, and is initialised.
            found.push((mapping.address(), unsafe { last.replace(1) }));
        }
        assert_eq!(found[0], (found[1].0, 0));
        assert_eq!(found[1].1, 0);
    }

    #[test]
    #[should_panic(expected = "the range is mapped")]
    fn a_range_has_one_mapping_at_a_time() {
        let range = AddressRange::new(1 << 16);
        let _first = range.map(None);
        drop(range.map(None));
    }
}
