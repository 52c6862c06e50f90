//! How far memory has come up, seen from another thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrane_core::ByteCount;

/// The progress of bringing memory up, shared between who waits for it and who watches.
///
/// It adds up over all allocations of the [`SystemAllocator`](crate::SystemAllocator)s that
/// report to it. Cloning it costs a reference count.
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
    ready: AtomicU64,
    total: AtomicU64,
    is_cancelled: AtomicBool,
}

impl Progress {
    /// The bytes that have been touched.
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

    pub(super) fn begin(&self, bytes: ByteCount) {
        self.0.total.fetch_add(bytes.get(), Ordering::Relaxed);
    }

    pub(super) fn advance(&self, bytes: ByteCount) {
        self.0.ready.fetch_add(bytes.get(), Ordering::Relaxed);
    }

    /// Takes back what a failed bring-up had entered.
    pub(super) fn take_back(&self, ready: ByteCount, total: ByteCount) {
        self.0.ready.fetch_sub(ready.get(), Ordering::Relaxed);
        self.0.total.fetch_sub(total.get(), Ordering::Relaxed);
    }
}
