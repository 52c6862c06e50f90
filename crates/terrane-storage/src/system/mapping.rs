//! An owned mapping of anonymous memory.

use std::ptr::NonNull;

use terrane_core::{Alignment, ByteCount, OsError};

use super::unmapping;
use crate::sys;

/// Mapped, zeroed memory. The drop unmaps it.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// The aligned part of the mapped range.
    address: NonNull<u8>,
    length: usize,
    /// The whole mapped range. It equals the aligned part unless trimming failed.
    mapped: NonNull<u8>,
    mapped_length: usize,
}

// SAFETY: this value alone owns the mapping, and mappings are not tied to threads.
unsafe impl Send for Mapping {}
// SAFETY: shared references return the address only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes, rounded up to whole pages, at a multiple of `alignment`. With `huge`,
    /// it uses explicit huge pages of that size.
    ///
    /// The kernel aligns to its pages only. For a stricter alignment, a longer range is mapped and
    /// trimmed at both ends. Explicit huge pages must be available for the longer range for a
    /// moment.
    pub(crate) fn new(
        length: ByteCount,
        alignment: Alignment,
        huge: Option<Alignment>,
    ) -> Result<Self, OsError> {
        let no_memory = OsError::new("mmap", libc::ENOMEM);
        let page = huge.unwrap_or_else(sys::memory::page_size);
        let length = length.align_up(page).map_err(|_| no_memory)?;
        let slack = alignment.max(page).get() - page.get();
        let mapped_length = length.checked_add(ByteCount::new(slack)).map_err(|_| no_memory)?;
        let mapped = sys::memory::map(mapped_length.to_usize(), huge.map(Alignment::log2))?;
        let mut mapping = Self {
            address: mapped,
            length: length.to_usize(),
            mapped,
            mapped_length: mapped_length.to_usize(),
        };
        if slack > 0 {
            mapping.trim(ByteCount::new(alignment.get()).to_usize());
        }
        Ok(mapping)
    }

    /// Moves the beginning to a multiple of `alignment` and unmaps the surplus at both ends. If the
    /// kernel refuses, because the process has too many mappings, the surplus stays mapped. It
    /// stays untouched and without pages.
    fn trim(&mut self, alignment: usize) {
        let head = self.mapped.as_ptr().align_offset(alignment);
        // `head` is less than the slack, so the aligned part ends within the mapped range.
        if let Some(address) = NonNull::new(self.mapped.as_ptr().wrapping_add(head)) {
            self.address = address;
        }
        if head > 0 {
            // SAFETY: the range is the beginning of the mapped range, up to a page boundary. No
            // other code has its address yet.
            if unsafe { sys::memory::unmap(self.mapped, head) }.is_ok() {
                self.mapped = self.address;
                self.mapped_length -= head;
            }
        }
        let before = self.address.as_ptr().addr() - self.mapped.as_ptr().addr();
        let kept = before + self.length;
        let tail = self.mapped_length - kept;
        if let Some(end) = NonNull::new(self.mapped.as_ptr().wrapping_add(kept))
            && tail > 0
        {
            // SAFETY: the range is the end of the mapped range, from a page boundary on. No other
            // code has its address yet.
            if unsafe { sys::memory::unmap(end, tail) }.is_ok() {
                self.mapped_length = kept;
            }
        }
    }

    pub(crate) const fn address(&self) -> NonNull<u8> {
        self.address
    }

    pub(super) const fn length(&self) -> usize {
        self.length
    }

    /// The `length` bytes from `offset` on, limited to the end of the mapping.
    pub(super) fn part(&self, offset: usize, length: usize) -> (NonNull<u8>, usize) {
        let offset = offset.min(self.length);
        let address = self.address.as_ptr().wrapping_add(offset);
        (NonNull::new(address).unwrap_or(self.address), length.min(self.length - offset))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` mapped whole pages, and trimmed pages are excluded. The owner drops, so no
        // code uses the addresses any more.
        unsafe { unmapping::unmap(self.mapped, self.mapped_length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_beyond_the_page_is_reached_by_trimming() {
        for log2 in [0, 9, 12, 16, 21, 30] {
            let alignment = Alignment::new(1 << log2).unwrap();
            let mapping = Mapping::new(ByteCount::new(5000), alignment, None).unwrap();
            assert_eq!(mapping.length(), 8192);
            assert_eq!(mapping.address().as_ptr().align_offset(1 << log2), 0);
            assert_eq!((mapping.mapped, mapping.mapped_length), (mapping.address, 8192));
        }
    }

    #[test]
    fn impossible_lengths_are_refused() {
        for length in [1 << 50, u64::MAX - 4095, u64::MAX] {
            let error = Mapping::new(ByteCount::new(length), Alignment::PAGE, None).unwrap_err();
            assert_eq!(error.code, libc::ENOMEM);
        }
    }

    #[test]
    fn parts_end_with_the_mapping() {
        let mapping = Mapping::new(ByteCount::new(10_000), Alignment::PAGE, None).unwrap();
        assert_eq!(mapping.part(8192, 8192).1, 4096);
        assert_eq!(mapping.part(1 << 20, 1).1, 0);
    }
}
