//! Counts of a process's device resources, for each context.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use terrane_core::ByteCount;

/// The resources of a [`Context`](crate::Context) and its clones at one moment, from
/// [`Context::usage`](crate::Context::usage).
///
/// Each number is exact. The numbers agree with each other only if nothing is created or dropped
/// during the call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResourceUsage {
    /// Device memory from a [`DeviceAllocator`](crate::DeviceAllocator), as requested from the
    /// driver.
    pub device: ResourceCount,
    /// Device memory in use from [`DevicePool`](crate::DevicePool)s. Each pool reports the memory
    /// that it holds beyond that.
    pub pooled: ResourceCount,
    /// Host memory registered with the driver, by registration.
    pub registered: ResourceCount,
    /// Host memory that the driver allocated.
    pub host: ResourceCount,
    /// Streams that were created here; borrowed ones do not count.
    pub streams: u64,
    /// Events that the driver has created so far. Reusing an event does not change the number.
    pub events_created: u64,
    /// Events that exist, in use or idle.
    pub events: u64,
    /// Idle events, kept for reuse.
    pub events_idle: u64,
    /// Handles to the context: one for each clone, and for each stream, event in use, pool and
    /// region of memory.
    pub handles: usize,
}

/// A number of objects, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceCount {
    /// The number of objects.
    pub count: u64,
    /// Their total bytes.
    pub bytes: ByteCount,
}

impl fmt::Display for ResourceCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.bytes, self.count)
    }
}

impl fmt::Display for ResourceUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, pooled, registered, host, streams, events, handles, .. } = self;
        write!(
            f,
            "device memory: {device}, from pools: {pooled}; pinned memory: registered {registered}, \
             of the driver {host}; streams: {streams}; events: {events}; handles: {handles}"
        )
    }
}

/// The counters behind [`ResourceUsage`].
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

/// A number of objects, and their bytes.
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

    /// Subtracts an added amount.
    pub(crate) fn subtract(&self, bytes: ByteCount) {
        self.count.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes.get(), Ordering::Relaxed);
    }

    pub(crate) fn held(&self) -> ResourceCount {
        let bytes = ByteCount::new(self.bytes.load(Ordering::Relaxed));
        ResourceCount { count: self.count.load(Ordering::Relaxed), bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn added_and_subtracted_amounts_cancel_out() {
        let tally = Tally::default();
        tally.add(ByteCount::mib(3));
        tally.add(ByteCount::ZERO);
        assert_eq!(tally.held(), ResourceCount { count: 2, bytes: ByteCount::mib(3) });
        assert_eq!(tally.held().to_string(), format!("{} in 2", ByteCount::mib(3)));
        tally.subtract(ByteCount::mib(3));
        tally.subtract(ByteCount::ZERO);
        assert_eq!(tally.held(), ResourceCount::default());
        assert!(ResourceUsage::default().to_string().contains("handles: 0"));
    }
}
