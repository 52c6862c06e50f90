//! Unmaps memory when the process has reached its limit on mappings.
//!
//! The kernel merges neighbouring mappings with equal properties and counts them as one. To unmap a
//! range inside a merged mapping, the kernel splits that mapping. The split fails with `ENOMEM` if
//! the process has as many mappings as `vm.max_map_count` allows. This module then frees the pages
//! of the range at once. It keeps the addresses and unmaps them later. It may unmap them with a
//! neighbour, as a longer range may need no split. Otherwise it waits until another mapping is
//! possible.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use terrane_core::OsError;
use terrane_core::sync::lock;

use crate::sys;

/// The maximum number of kept ranges that a drop tries to unmap, so that no drop takes long.
const RETRIES: usize = 64;

/// Ranges without pages that are still mapped.
static KEPT: Kept = Kept { count: AtomicUsize::new(0), ranges: Mutex::new(BTreeMap::new()) };

/// Unmaps a range. If that fails, frees its pages now and unmaps it later.
///
/// # Safety
///
/// The range was mapped by [`sys::memory::map`], begins and ends at multiples of its page size, and
/// is still mapped. No code uses it any more.
pub(super) unsafe fn unmap(address: NonNull<u8>, length: usize) {
    let range = KEPT.take_with_neighbours(Range { address, length });
    match range.unmap() {
        Ok(()) => KEPT.retry(),
        Err(error) => {
            // Only the new part: the pages of the others have been freed already.
            // SAFETY: `sys::memory::map` mapped the range, so it is anonymous, private and aligned
            // to pages. The caller guarantees that it is still mapped and that no code uses it.
            let discarded = unsafe { sys::memory::discard(address, length) };
            let count = KEPT.keep(range);
            if let Err(refusal) = discarded {
                tracing::warn!(%error, %refusal, bytes = length, "memory stays mapped, with its pages");
            } else if count == 1 {
                tracing::warn!(
                    %error,
                    "the process has as many mappings as vm.max_map_count allows; addresses of \
                     freed memory stay mapped for a while, without pages"
                );
            }
        }
    }
}

/// A mapped range that no code uses.
#[derive(Debug)]
struct Range {
    address: NonNull<u8>,
    length: usize,
}

// SAFETY: mappings are not tied to threads, and no code uses the bytes.
unsafe impl Send for Range {}

impl Range {
    fn begin(&self) -> usize {
        self.address.addr().get()
    }

    fn end(&self) -> usize {
        self.begin() + self.length
    }

    fn unmap(&self) -> Result<(), OsError> {
        // SAFETY: a range consists of parts that `unmap` was called for and that are still mapped.
        // This value alone owns it.
        unsafe { sys::memory::unmap(self.address, self.length) }
    }
}

struct Kept {
    /// The number of ranges. It is zero unless the limit was reached; no lock is needed then.
    count: AtomicUsize,
    /// The ranges, by their first address.
    ranges: Mutex<BTreeMap<usize, Range>>,
}

impl Kept {
    /// Calls `change` with the ranges, under the lock. `change` runs no foreign code.
    fn with<R>(&self, change: impl FnOnce(&mut BTreeMap<usize, Range>) -> R) -> R {
        let mut ranges = lock(&self.ranges);
        let result = change(&mut ranges);
        self.count.store(ranges.len(), Ordering::Relaxed);
        result
    }

    /// Joins `range` with the kept ranges next to it.
    fn take_with_neighbours(&self, range: Range) -> Range {
        if self.count.load(Ordering::Relaxed) == 0 {
            return range;
        }
        self.with(|ranges| join(range, ranges))
    }

    /// Keeps a range for later. Returns the number of kept ranges.
    fn keep(&self, range: Range) -> usize {
        self.with(|ranges| {
            // Another thread may have kept a neighbour meanwhile.
            let range = join(range, ranges);
            ranges.insert(range.begin(), range);
            ranges.len()
        })
    }

    /// Tries to unmap the kept ranges, until one call fails.
    fn retry(&self) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        for _ in 0..RETRIES {
            let Some((_, range)) = self.with(BTreeMap::pop_first) else { return };
            if range.unmap().is_err() {
                self.keep(range);
                return;
            }
        }
    }
}

/// Joins `range` with those of `ranges` that are next to it.
fn join(mut range: Range, ranges: &mut BTreeMap<usize, Range>) -> Range {
    let before = ranges.range(..range.begin()).next_back();
    let before = before.filter(|(_, before)| before.end() == range.begin());
    if let Some(begin) = before.map(|(begin, _)| *begin)
        && let Some(before) = ranges.remove(&begin)
    {
        range = Range { length: before.length + range.length, ..before };
    }
    if let Some(after) = ranges.remove(&range.end()) {
        range.length += after.length;
    }
    range
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(begin: usize, length: usize) -> Range {
        Range { address: NonNull::new(std::ptr::without_provenance_mut(begin)).unwrap(), length }
    }

    #[test]
    fn ranges_that_lie_next_to_one_another_become_one() {
        let mut ranges = BTreeMap::new();
        for (begin, length) in [(1, 1), (4, 2), (8, 1)] {
            let joined = join(range(begin, length), &mut ranges);
            ranges.insert(joined.begin(), joined);
        }
        assert_eq!(ranges.len(), 3);
        let joined = join(range(6, 2), &mut ranges);
        assert_eq!((joined.begin(), joined.length), (4, 5));
        let joined = join(range(2, 1), &mut ranges);
        assert_eq!((joined.begin(), joined.length), (1, 2));
        assert!(ranges.is_empty());
    }
}
