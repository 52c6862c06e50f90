//! The number of copied bytes of a transfer.

use std::sync::atomic::{AtomicU64, Ordering};

use terrane_core::ByteCount;

/// The progress of a transfer.
#[derive(Debug, Default)]
pub struct CopyProgress {
    copied: AtomicU64,
}

impl CopyProgress {
    /// The bytes copied so far. Each engine adds to it in steps of its own size.
    #[must_use]
    pub fn copied(&self) -> ByteCount {
        // Relaxed: an informational figure, which orders nothing.
        ByteCount::new(self.copied.load(Ordering::Relaxed))
    }

    /// Counts bytes as copied.
    pub fn add(&self, bytes: ByteCount) {
        self.copied.fetch_add(bytes.get(), Ordering::Relaxed);
    }
}
