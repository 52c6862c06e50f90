//! A device's memory: addresses that the host cannot dereference, and a host mapping with the
//! bytes.

use std::ffi::c_void;
use std::ptr;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The ratio of the address range to the memory. A freed address is therefore not reused soon, and
/// its late use is detected.
const SPREAD: usize = 8;

/// The addresses of a device's memory, which the host cannot dereference. A second mapping of the
/// same size has the bytes; the system allocates only the pages that are used.
#[derive(Debug)]
pub struct Arena {
    addresses: *mut c_void,
    bytes: *mut c_void,
    length: usize,
}

// SAFETY: this value owns both mappings, and all accesses go through it.
unsafe impl Send for Arena {}

impl Arena {
    /// Creates the arena of a device with this many bytes.
    ///
    /// # Errors
    ///
    /// The system's error, if it does not reserve that many addresses.
    pub fn new(memory: u64) -> rustix::io::Result<Self> {
        let memory = usize::try_from(memory).map_err(|_| rustix::io::Errno::NOMEM)?;
        let length = memory.max(1 << 20).checked_mul(SPREAD).ok_or(rustix::io::Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, at an address that the system chooses.
        let addresses =
            unsafe { mmap_anonymous(ptr::null_mut(), length, ProtFlags::empty(), flags) }?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as above.
        match unsafe { mmap_anonymous(ptr::null_mut(), length, rights, flags) } {
            Ok(bytes) => Ok(Self { addresses, bytes, length }),
            Err(error) => {
                // SAFETY: mapped above, and not in use yet.
                let _ = unsafe { munmap(addresses, length) };
                Err(error)
            }
        }
    }

    /// The first address.
    pub fn start(&self) -> u64 {
        wide(self.addresses.expose_provenance())
    }

    /// The address after the last.
    pub fn end(&self) -> u64 {
        self.start() + wide(self.length)
    }

    /// The host address of the bytes of `length` addresses from `address` on; `None` if they are
    /// not all in this arena.
    pub fn bytes(&self, address: u64, length: u64) -> Option<*mut u8> {
        let offset = address.checked_sub(self.start())?;
        let end = offset.checked_add(length)?;
        if end > wide(self.length) {
            return None;
        }
        // Within the mapping, so the sum does not wrap.
        Some(self.bytes.cast::<u8>().wrapping_add(usize::try_from(offset).ok()?))
    }

    /// Returns whole pages of the bytes to the system.
    pub fn discard(&self, address: u64, length: u64) {
        const PAGE: u64 = 4096;
        let first = address.next_multiple_of(PAGE);
        let end = (address + length) / PAGE * PAGE;
        let Some(pages) = end.checked_sub(first).filter(|&pages| pages > 0) else { return };
        let (Some(at), Ok(pages)) = (self.bytes(first, pages), usize::try_from(pages)) else {
            return;
        };
        // SAFETY: the pages belong to this mapping, and their contents are not needed. If the
        // system refuses, they keep their bytes, which is equivalent.
        let _ = unsafe { madvise(at.cast(), pages, Advice::LinuxDontNeed) };
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for mapping in [self.addresses, self.bytes] {
            // SAFETY: mapped by `new`, with this length; no pointer into it remains.
            let _ = unsafe { munmap(mapping, self.length) };
        }
    }
}

/// Converts a size to 64 bits.
pub fn wide(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}

/// Converts a length that fits into the host's address space.
pub fn to_usize(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_has_a_byte() {
        let arena = Arena::new(1 << 20).unwrap();
        assert_eq!(arena.end() - arena.start(), 8 << 20);
        let at = arena.bytes(arena.start() + 5, 10).unwrap();
        // SAFETY: within the mapping.
        unsafe { at.write_bytes(7, 10) };
        // SAFETY: as above.
        assert_eq!(unsafe { at.wrapping_add(9).read() }, 7);
        assert!(arena.bytes(arena.start() - 1, 1).is_none());
        assert!(arena.bytes(arena.end() - 1, 2).is_none());
        assert!(arena.bytes(u64::MAX, 2).is_none());
        arena.discard(arena.start(), 4096);
        // SAFETY: as above; the page is a fresh one.
        assert_eq!(unsafe { at.read() }, 0);
    }
}
