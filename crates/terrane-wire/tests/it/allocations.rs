//! Counts the allocations of decoding.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// The bytes that this thread has allocated. The counter has no destructor, so it outlives all
    /// values that have one.
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator with a count per thread, so that tests do not affect each other.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count(bytes: usize) {
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    ALLOCATED.with(|count| count.set(count.get().saturating_add(bytes)));
}

// SAFETY: every call is forwarded to the system's allocator unchanged, and counting allocates
// nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller guarantees it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller guarantees it.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes);
        // SAFETY: the caller guarantees it.
        unsafe { System.realloc(block, layout, bytes) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees it.
        unsafe { System.dealloc(block, layout) }
    }
}

/// The bytes that `body` allocates on this thread in total, even if it frees them.
pub fn allocated<T>(body: impl FnOnce() -> T) -> (u64, T) {
    let before = ALLOCATED.get();
    let result = body();
    (ALLOCATED.get() - before, result)
}
