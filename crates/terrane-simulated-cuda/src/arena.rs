//! A device's memory: addresses that the host cannot touch, and bytes that it can.

use std::ffi::c_void;
use std::ptr;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// How much larger than the memory the range of addresses is, so that one that was freed is not
/// given again soon, and who uses it meanwhile is caught.
const SPREAD: usize = 8;

/// The addresses of a device's memory, none of which the host can dereference, and behind them a
/// mapping of the same size that holds the bytes, of which the system provides what is used.
#[derive(Debug)]
pub struct Arena {
    addresses: *mut c_void,
    bytes: *mut c_void,
    length: usize,
}

// SAFETY: both mappings are the value's own, and reached only through it.
unsafe impl Send for Arena {}

impl Arena {
    /// For a device with so many bytes.
    ///
    /// # Errors
    ///
    /// The system's, if it does not reserve as many addresses.
    pub fn new(memory: u64) -> rustix::io::Result<Self> {
        let memory = usize::try_from(memory).map_err(|_| rustix::io::Errno::NOMEM)?;
        let length = memory.max(1 << 20).checked_mul(SPREAD).ok_or(rustix::io::Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, at a place of the system's choice.
        let addresses =
            unsafe { mmap_anonymous(ptr::null_mut(), length, ProtFlags::empty(), flags) }?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as above.
        match unsafe { mmap_anonymous(ptr::null_mut(), length, rights, flags) } {
            Ok(bytes) => Ok(Self { addresses, bytes, length }),
            Err(error) => {
                // SAFETY: mapped above, and not yet in use.
                let _ = unsafe { munmap(addresses, length) };
                Err(error)
            }
        }
    }

    /// The first address.
    pub fn start(&self) -> u64 {
        wide(self.addresses.expose_provenance())
    }

    /// The address behind the last.
    pub fn end(&self) -> u64 {
        self.start() + wide(self.length)
    }

    /// Where the bytes of `length` addresses from `address` on are; `None` if they are not all
    /// among this arena's.
    pub fn bytes(&self, address: u64, length: u64) -> Option<*mut u8> {
        let offset = address.checked_sub(self.start())?;
        let end = offset.checked_add(length)?;
        if end > wide(self.length) {
            return None;
        }
        // Within the mapping, so that no wrapping happens.
        Some(self.bytes.cast::<u8>().wrapping_add(usize::try_from(offset).ok()?))
    }

    /// Gives whole pages among the bytes back to the system.
    pub fn discard(&self, address: u64, length: u64) {
        const PAGE: u64 = 4096;
        let first = address.next_multiple_of(PAGE);
        let end = (address + length) / PAGE * PAGE;
        let Some(pages) = end.checked_sub(first).filter(|&pages| pages > 0) else { return };
        let (Some(at), Ok(pages)) = (self.bytes(first, pages), usize::try_from(pages)) else {
            return;
        };
        // SAFETY: the pages are this mapping's, and their contents are not needed. If
        // the system refuses, they keep their bytes, which is equivalent.
        let _ = unsafe { madvise(at.cast(), pages, Advice::LinuxDontNeed) };
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for mapping in [self.addresses, self.bytes] {
            // SAFETY: mapped by `new`, with this length; nothing points into it any more.
            let _ = unsafe { munmap(mapping, self.length) };
        }
    }
}

/// A size as a number of 64 bits, which it fits in.
pub fn wide(size: usize) -> u64 {
    u64::try_from(size).unwrap_or(u64::MAX)
}

/// A length that the address space of the host holds.
pub fn to_usize(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_lie_behind_addresses() {
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
