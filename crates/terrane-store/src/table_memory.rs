//! The memory of large tables: huge pages, the first touch, and loads into the cache.

use std::mem::MaybeUninit;
use std::num::NonZeroUsize;
use std::thread;

use rustix::mm::{Advice, madvise};

use crate::parallel::fold;

const HUGE_PAGE: usize = 2 << 20;

/// The bytes that a thread fills at least. A thread takes 50 µs to start, as long as for this much.
const SHARE: usize = 16 << 20;

/// The most threads that fill a table. More of them share the same memory bandwidth.
const MOST_THREADS: usize = 4;

/// Returns `count` values, in huge pages where the system has them. Without huge pages, a random read of
/// a large table also costs a page walk. Several threads fill a large table, because the kernel clears
/// each page at its first use.
#[expect(unsafe_code, reason = "the length of a vector that several threads have filled")]
pub(crate) fn filled<T: Send>(count: usize, value: impl Fn() -> T + Sync) -> Box<[T]> {
    let mut values: Vec<T> = Vec::with_capacity(count);
    // Before the first touch, which chooses the size of the pages.
    advise_huge_pages(values.spare_capacity_mut());
    let memory = values.spare_capacity_mut().get_mut(..count).unwrap_or_default();
    let shares = (size_of_val(memory) / SHARE).clamp(1, MOST_THREADS);
    let shares = match shares {
        1 => 1,
        // The number of processors is read from files.
        shares => thread::available_parallelism().map_or(1, NonZeroUsize::get).min(shares),
    };
    fill(memory, count.div_ceil(shares).max(1), &value);
    // SAFETY: `fill` has returned, so it has written a value to each of the `count` places.
    unsafe { values.set_len(count) };
    values.into()
}

/// Writes a value to each place, on several threads if the system has them, `share` places at a time.
fn fill<T: Send>(memory: &mut [MaybeUninit<T>], share: usize, value: &(impl Fn() -> T + Sync)) {
    let threads = (memory.len().div_ceil(share), "terrane-fill");
    let write = |(): &mut (), part: &mut [MaybeUninit<T>]| {
        for place in part {
            place.write(value());
        }
    };
    fold(threads, memory.chunks_mut(share), || (), write);
}

#[expect(unsafe_code, reason = "advice about pages is given by their address")]
fn advise_huge_pages<T>(memory: &mut [MaybeUninit<T>]) {
    let start = memory.as_mut_ptr().cast::<u8>();
    let skipped = start.align_offset(HUGE_PAGE);
    let whole = size_of_val(memory).saturating_sub(skipped) / HUGE_PAGE * HUGE_PAGE;
    if whole == 0 {
        return;
    }
    let first = start.wrapping_add(skipped).cast();
    // SAFETY: the range is inside `memory`, which this function borrows. The advice changes no byte.
    let advised = unsafe { madvise(first, whole, Advice::LinuxHugepage) };
    if let Err(error) = advised {
        tracing::debug!(%error, "a large table has base pages");
    }
}

/// Loads the cache line of a value ahead of its first use.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the instruction takes an address")]
pub(crate) fn prefetch<T>(value: &T) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: every x86-64 processor has the instruction, and it accesses no memory that it is not
    // allowed to.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) const fn prefetch<T>(_: &T) {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    static MADE: AtomicUsize = AtomicUsize::new(0);

    struct Counted(u64);

    impl Counted {
        fn new() -> Self {
            MADE.fetch_add(1, Ordering::Relaxed);
            Self(7)
        }
    }

    #[test]
    #[expect(unsafe_code, reason = "the test reads what was written to spare capacity")]
    fn each_place_is_filled_once_by_any_number_of_threads() {
        let mut memory: Vec<Counted> = Vec::new();
        for (count, share) in [(0, 1), (1, 1), (10, 3), (100, 100), (100, 1000), (64, 1)] {
            MADE.store(0, Ordering::Relaxed);
            memory.clear();
            memory.reserve(count);
            let places = &mut memory.spare_capacity_mut()[..count];
            fill(places, share, &Counted::new);
            // SAFETY: `fill` has written to each of them.
            let values = places.iter().map(|place| unsafe { place.assume_init_ref() }.0);
            assert_eq!(values.filter(|value| *value == 7).count(), count);
            assert_eq!(MADE.load(Ordering::Relaxed), count);
        }
        let large: Box<[u64]> = filled((SHARE * 3 / size_of::<u64>()) + 1, || 3);
        assert!(large.iter().all(|value| *value == 3));
    }
}
