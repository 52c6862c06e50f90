//! The memory of an index's tables, and its way into the cache.

use std::mem::MaybeUninit;

use rustix::mm::{Advice, madvise};

const HUGE_PAGE: usize = 2 << 20;

/// So many default values, in huge pages where the system has them: a random read of a large table
/// otherwise costs a page walk, too.
pub(super) fn filled<T: Default>(count: usize) -> Box<[T]> {
    let mut values = Vec::with_capacity(count);
    // Before the first touch, which chooses the size of the pages.
    advise_huge_pages(values.spare_capacity_mut());
    values.resize_with(count, T::default);
    values.into()
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
        tracing::debug!(%error, "the tables of an index have base pages");
    }
}

/// Loads the cache line of a value ahead of its first use.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "the instruction takes an address")]
pub(super) fn prefetch<T>(value: &T) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: every x86-64 processor has the instruction, and it accesses no memory that it is not
    // allowed to.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) const fn prefetch<T>(_: &T) {}
