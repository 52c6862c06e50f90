//! Unmapping memory where the kernel has no mapping left to split.
//!
//! The kernel joins neighbouring mappings of equal properties and counts them as one. To unmap a
//! range within a joined mapping, it splits that mapping in two, which fails with `ENOMEM` where
//! the process has as many mappings as `vm.max_map_count` allows. The pages of the range are then
//! given back at once. Its addresses are kept here and unmapped later: with a neighbour, as a
//! longer range may need no split, or when there is room for another mapping.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use terrane_core::OsError;

use crate::sys;

/// How many kept ranges a drop tries to unmap at most, so that no drop takes long.
const RETRIES: usize = 64;

/// Ranges without pages that are still mapped.
static KEPT: Kept = Kept { count: AtomicUsize::new(0), ranges: Mutex::new(BTreeMap::new()) };

/// Unmaps a range, or gives its pages back and unmaps it later.
///
/// # Safety
///
/// The range was mapped by [`sys::memory::map`], begins and ends at multiples of its page size, is
/// still mapped, and nobody uses it any more.
pub(super) unsafe fn unmap(address: NonNull<u8>, length: usize) {
    let range = KEPT.take_with_neighbours(Range { address, length });
    match range.unmap() {
        Ok(()) => KEPT.retry(),
        Err(error) => {
            // Only the new part: the pages of the others have been given back before.
            // SAFETY: the range is mapped, and the caller vouches that nobody uses it.
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

/// A mapped range that nobody uses.
#[derive(Debug)]
struct Range {
    address: NonNull<u8>,
    length: usize,
}

// SAFETY: no thread owns a mapping, and nobody uses the bytes.
unsafe impl Send for Range {}

impl Range {
    fn begin(&self) -> usize {
        self.address.addr().get()
    }

    fn end(&self) -> usize {
        self.begin() + self.length
    }

    fn unmap(&self) -> Result<(), OsError> {
        // SAFETY: a range is made of parts that `unmap` was called for and that are still mapped,
        // and belongs to this value alone.
        unsafe { sys::memory::unmap(self.address, self.length) }
    }
}

struct Kept {
    /// How many ranges there are: none, unless the limit was met, and then no lock is needed.
    count: AtomicUsize,
    /// By their first address.
    ranges: Mutex<BTreeMap<usize, Range>>,
}

impl Kept {
    /// Runs `change` on the ranges. No foreign code runs within.
    fn with<R>(&self, change: impl FnOnce(&mut BTreeMap<usize, Range>) -> R) -> R {
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut ranges);
        self.count.store(ranges.len(), Ordering::Relaxed);
        result
    }

    /// `range` together with the kept ranges that lie next to it.
    fn take_with_neighbours(&self, range: Range) -> Range {
        if self.count.load(Ordering::Relaxed) == 0 {
            return range;
        }
        self.with(|ranges| join(range, ranges))
    }

    /// Keeps a range for later. Returns how many there are now.
    fn keep(&self, range: Range) -> usize {
        self.with(|ranges| {
            // Another thread may have kept a neighbour meanwhile.
            let range = join(range, ranges);
            ranges.insert(range.begin(), range);
            ranges.len()
        })
    }

    /// Tries the kept ranges again, until one is refused.
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

/// `range`, and those of `ranges` that lie next to it.
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
