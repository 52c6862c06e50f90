//! What a process holds of a device through one context, counted.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use terrane_core::ByteCount;

/// What is held through a [`Context`](crate::Context) and its clones at one moment, from
/// [`Context::holdings`](crate::Context::holdings).
///
/// Each number is exact; together they are of one moment only where nothing is made or dropped
/// meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holdings {
    /// Device memory from a [`DeviceAllocator`](crate::DeviceAllocator), as was asked of the
    /// driver.
    pub device: Held,
    /// Device memory in use from [`DevicePool`](crate::DevicePool)s. What they keep beyond that,
    /// each of them says.
    pub pooled: Held,
    /// Host memory that was registered with the driver, by registration.
    pub registered: Held,
    /// Host memory that the driver allocated.
    pub host: Held,
    /// Streams that were made here; borrowed ones do not count.
    pub streams: u64,
    /// Events that the driver was asked to make so far. It stays as it is where events are used
    /// again.
    pub events_created: u64,
    /// Events that the driver has, in use or kept for the next user.
    pub events: u64,
    /// Events that are kept for the next user.
    pub events_idle: u64,
    /// Handles to the context: one for each clone, and for each stream, event in use, pool and
    /// region of memory.
    pub handles: usize,
}

/// So many of something, with so many bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// How many.
    pub count: u64,
    /// How many bytes they have together.
    pub bytes: ByteCount,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.bytes, self.count)
    }
}

impl fmt::Display for Holdings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, pooled, registered, host, streams, events, handles, .. } = self;
        write!(
            f,
            "device memory: {device}, from pools: {pooled}; pinned memory: registered {registered}, \
             of the driver {host}; streams: {streams}; events: {events}; handles: {handles}"
        )
    }
}

/// [`Holdings`] as they are counted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) device: Tally,
    pub(crate) pooled: Tally,
    pub(crate) registered: Tally,
    pub(crate) host: Tally,
    pub(crate) streams: Tally,
    pub(crate) events: Tally,
    pub(crate) events_created: AtomicU64,
}

/// How many there are of something, and their bytes.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl Tally {
    pub(crate) fn add(&self, bytes: ByteCount) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes.get(), Ordering::Relaxed);
    }

    /// Takes back what was added.
    pub(crate) fn subtract(&self, bytes: ByteCount) {
        self.count.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes.get(), Ordering::Relaxed);
    }

    pub(crate) fn held(&self) -> Held {
        let bytes = ByteCount::new(self.bytes.load(Ordering::Relaxed));
        Held { count: self.count.load(Ordering::Relaxed), bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_added_and_taken_back_leaves_nothing() {
        let tally = Tally::default();
        tally.add(ByteCount::mib(3));
        tally.add(ByteCount::ZERO);
        assert_eq!(tally.held(), Held { count: 2, bytes: ByteCount::mib(3) });
        assert_eq!(tally.held().to_string(), format!("{} in 2", ByteCount::mib(3)));
        tally.subtract(ByteCount::mib(3));
        tally.subtract(ByteCount::ZERO);
        assert_eq!(tally.held(), Held::default());
        assert!(Holdings::default().to_string().contains("handles: 0"));
    }
}
