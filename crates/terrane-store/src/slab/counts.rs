//! Counts of the blocks and requests of the slab files.

use std::sync::atomic::{AtomicU64, Ordering};

/// The blocks that the I/O thread has, and its requests so far. Only that thread writes them.
#[derive(Debug, Default)]
pub(super) struct IoCounts {
    reads: AtomicU64,
    writes: AtomicU64,
    requests: AtomicU64,
}

impl IoCounts {
    fn blocks(&self, is_write: bool) -> &AtomicU64 {
        if is_write { &self.writes } else { &self.reads }
    }

    // Relaxed, here and below: numbers order nothing.
    pub(super) fn begun(&self, is_write: bool) {
        self.blocks(is_write).fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn ended(&self, is_write: bool) {
        self.blocks(is_write).fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn requested(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// The blocks to read and those to write that wait or are in the device, and the requests to the
    /// device so far. A large block takes several.
    pub(super) fn get(&self) -> [u64; 3] {
        [&self.reads, &self.writes, &self.requests].map(|count| count.load(Ordering::Relaxed))
    }
}
