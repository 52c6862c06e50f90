//! Numbers about the requests of the slab files.

use std::sync::atomic::{AtomicU64, Ordering};

/// The blocks that the I/O thread has, and its requests so far. Only that thread writes them.
#[derive(Debug, Default)]
pub(super) struct IoCounts {
    reads: AtomicU64,
    writes: AtomicU64,
    requests: AtomicU64,
}

/// Numbers about the I/O of the slab files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IoNumbers {
    /// The blocks to read that wait or are in the device.
    pub(crate) reads: u64,
    /// The same for blocks to write.
    pub(crate) writes: u64,
    /// The requests to the device so far. A large block takes several.
    pub(crate) requests: u64,
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

    pub(super) fn get(&self) -> IoNumbers {
        let [reads, writes, requests] =
            [&self.reads, &self.writes, &self.requests].map(|count| count.load(Ordering::Relaxed));
        IoNumbers { reads, writes, requests }
    }
}
