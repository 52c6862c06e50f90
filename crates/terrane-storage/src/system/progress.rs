//! How far memory has come up, seen from another thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrane_core::ByteCount;

/// The progress of bringing memory up, shared between who waits for it and who watches.
///
/// It adds up over all allocators that report to it. Bytes are [touched](Self::touched) first and
/// [ready](Self::ready) after: for system memory that is the same, while memory that is locked for
/// a device is ready when that has been done as well. So `ready` reaches [`total`](Self::total)
/// when all that was asked for can be used, and not before. What a bring-up has entered only
/// grows, unless it fails: then all of it is taken back, from the total too.
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
    /// The bytes that have their pages, or are to come by them as they are used, whether or not
    /// they can be used yet; never fewer than are [ready](Self::ready).
    #[must_use]
    pub fn touched(&self) -> ByteCount {
        ByteCount::new(self.0.touched.load(Ordering::Relaxed))
    }

    /// The bytes that need nothing more to be used.
    #[must_use]
    pub fn ready(&self) -> ByteCount {
        ByteCount::new(self.0.ready.load(Ordering::Relaxed))
    }

    /// The bytes that have been asked for so far.
    #[must_use]
    pub fn total(&self) -> ByteCount {
        ByteCount::new(self.0.total.load(Ordering::Relaxed))
    }

    /// Ends every bring-up that reports here, now and later, with
    /// [`StorageError::Cancelled`](crate::StorageError::Cancelled). What was mapped is unmapped.
    pub fn cancel(&self) {
        self.0.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether [`cancel`](Self::cancel) was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(Ordering::Relaxed)
    }

    /// Enters a bring-up of `bytes` bytes, none of which is touched: for allocators that report
    /// here what they do by themselves.
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

/// What one bring-up has entered in a [`Progress`]. Dropped before it is
/// [finished](Self::finish), it takes that back.
#[derive(Debug)]
#[must_use = "dropped, it takes back what was entered"]
pub struct ProgressEntry {
    progress: Progress,
    total: u64,
    touched: AtomicU64,
    ready: AtomicU64,
    is_finished: bool,
}

impl ProgressEntry {
    /// All of it is ready.
    pub fn finish(mut self) {
        let left = |entered: &mut AtomicU64| self.total.saturating_sub(*entered.get_mut());
        let (touched, ready) = (left(&mut self.touched), left(&mut self.ready));
        self.progress.0.touched.fetch_add(touched, Ordering::Relaxed);
        self.progress.0.ready.fetch_add(ready, Ordering::Relaxed);
        self.is_finished = true;
    }

    /// So many more bytes have their pages.
    pub(super) fn touched(&self, bytes: ByteCount) {
        self.touched.fetch_add(bytes.get(), Ordering::Relaxed);
        self.progress.0.touched.fetch_add(bytes.get(), Ordering::Relaxed);
    }

    /// So many more bytes have their pages, and need nothing else.
    pub(super) fn touched_and_ready(&self, bytes: ByteCount) {
        self.touched(bytes);
        self.ready.fetch_add(bytes.get(), Ordering::Relaxed);
        self.progress.0.ready.fetch_add(bytes.get(), Ordering::Relaxed);
    }

    /// The first `prefix` bytes, which have their pages, are ready. Less than before says nothing.
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
        // The total last: at no time are more bytes ready than were asked for.
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
    fn what_is_touched_is_ready_when_it_is_said() {
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
