//! The progress of a bring-up, for other threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrane_core::ByteCount;

/// The progress of bring-ups, shared between threads that wait and threads that observe.
///
/// It is the sum over all allocators that report to it. Bytes are [touched](Self::touched) first
/// and then [ready](Self::ready). For system memory both happen together. Memory that is
/// page-locked for a device becomes ready when it is locked. So `ready` reaches
/// [`total`](Self::total) exactly when all requested memory can be used. The numbers of a bring-up
/// only grow. If it fails, all its numbers are subtracted, including its part of the total.
///
/// Cloning it costs a reference count.
///
/// ```
/// use terrane_core::{Allocate, ByteCount, RegionRequest};
/// use terrane_storage::{Progress, SystemAllocator, SystemOptions};
///
/// # fn main() -> Result<(), terrane_core::AllocateError> {
/// let progress = Progress::default();
/// let allocator = SystemAllocator::new(SystemOptions::default()).reporting_to(progress.clone());
/// let memory = allocator.allocate(&RegionRequest::new(ByteCount::mib(8)))?;
/// assert_eq!(progress.ready(), progress.total());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<State>);

#[derive(Debug, Default)]
struct State {
    touched: AtomicU64,
    ready: AtomicU64,
    total: AtomicU64,
    is_cancelled: AtomicBool,
}

impl Progress {
    /// The bytes with allocated pages, or whose pages are allocated on first use. They may not be
    /// usable yet. This is never less than [ready](Self::ready).
    #[must_use]
    pub fn touched(&self) -> ByteCount {
        ByteCount::new(self.0.touched.load(Ordering::Relaxed))
    }

    /// The bytes that can be used without further steps.
    #[must_use]
    pub fn ready(&self) -> ByteCount {
        ByteCount::new(self.0.ready.load(Ordering::Relaxed))
    }

    /// The total number of bytes requested so far.
    #[must_use]
    pub fn total(&self) -> ByteCount {
        ByteCount::new(self.0.total.load(Ordering::Relaxed))
    }

    /// Ends every current and later bring-up that reports here with
    /// [`StorageError::Cancelled`](crate::StorageError::Cancelled). Their memory is unmapped.
    pub fn cancel(&self) {
        self.0.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether [`cancel`](Self::cancel) was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(Ordering::Relaxed)
    }

    /// Adds a bring-up of `bytes` bytes, none of them touched. For allocators that report their own
    /// work here.
    pub fn enter(&self, bytes: ByteCount) -> ProgressEntry {
        self.0.total.fetch_add(bytes.get(), Ordering::Relaxed);
        ProgressEntry {
            progress: self.clone(),
            total: bytes.get(),
            touched: AtomicU64::new(0),
            ready: AtomicU64::new(0),
            is_finished: false,
        }
    }
}

/// The part of one bring-up in a [`Progress`]. If it drops before it is [finished](Self::finish),
/// its numbers are subtracted.
#[derive(Debug)]
#[must_use = "dropping an unfinished entry subtracts its numbers"]
pub struct ProgressEntry {
    progress: Progress,
    total: u64,
    touched: AtomicU64,
    ready: AtomicU64,
    is_finished: bool,
}

impl ProgressEntry {
    /// Reports that all bytes are ready.
    pub fn finish(mut self) {
        let left = |entered: &mut AtomicU64| self.total.saturating_sub(*entered.get_mut());
        let (touched, ready) = (left(&mut self.touched), left(&mut self.ready));
        self.progress.0.touched.fetch_add(touched, Ordering::Relaxed);
        self.progress.0.ready.fetch_add(ready, Ordering::Relaxed);
        self.is_finished = true;
    }

    /// Reports that this many more bytes have allocated pages.
    pub(super) fn touched(&self, bytes: ByteCount) {
        self.touched.fetch_add(bytes.get(), Ordering::Relaxed);
        self.progress.0.touched.fetch_add(bytes.get(), Ordering::Relaxed);
    }

    /// Reports that this many more bytes have allocated pages and are ready.
    pub(super) fn touched_and_ready(&self, bytes: ByteCount) {
        self.touched(bytes);
        self.ready.fetch_add(bytes.get(), Ordering::Relaxed);
        self.progress.0.ready.fetch_add(bytes.get(), Ordering::Relaxed);
    }

    /// Reports that the first `prefix` bytes, which have allocated pages, are ready. A smaller
    /// prefix than before has no effect.
    pub(super) fn ready_up_to(&self, prefix: ByteCount) {
        let before = self.ready.fetch_max(prefix.get(), Ordering::Relaxed);
        let more = prefix.get().saturating_sub(before);
        self.progress.0.ready.fetch_add(more, Ordering::Relaxed);
    }
}

impl Drop for ProgressEntry {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        // Subtract the total last, so that `ready` never exceeds it.
        let state = &self.progress.0;
        state.ready.fetch_sub(*self.ready.get_mut(), Ordering::Relaxed);
        state.touched.fetch_sub(*self.touched.get_mut(), Ordering::Relaxed);
        state.total.fetch_sub(self.total, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(bytes: u64) -> ByteCount {
        ByteCount::new(bytes)
    }

    fn seen(progress: &Progress) -> [u64; 3] {
        [progress.touched(), progress.ready(), progress.total()].map(ByteCount::get)
    }

    #[test]
    fn touched_bytes_are_ready_when_reported() {
        let progress = Progress::default();
        let entry = progress.enter(bytes(100));
        entry.touched(bytes(100));
        assert_eq!(seen(&progress), [100, 0, 100]);
        entry.ready_up_to(bytes(40));
        entry.ready_up_to(bytes(30));
        assert_eq!(seen(&progress), [100, 40, 100]);
        entry.finish();
        assert_eq!(seen(&progress), [100, 100, 100]);
    }

    #[test]
    fn what_is_not_finished_is_taken_back_and_nothing_of_others() {
        let progress = Progress::default();
        progress.enter(bytes(10)).finish();
        let entry = progress.enter(bytes(100));
        entry.touched_and_ready(bytes(60));
        entry.touched(bytes(20));
        assert_eq!(seen(&progress), [90, 70, 110]);
        drop(entry);
        assert_eq!(seen(&progress), [10, 10, 10]);
    }
}
