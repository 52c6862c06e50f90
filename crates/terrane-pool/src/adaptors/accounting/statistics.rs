//! Counts the allocations of an upstream.

use std::fmt;
use std::sync::Arc;

use terrane_core::{Allocate, AllocateError, ByteCount, Memory, RegionRequest, delegate_allocate};

use crate::adaptors::attached::Attached;
use crate::sync::Mutex;

/// An upstream whose allocations are counted.
///
/// The counters are in a [`Counters`] handle, which several upstreams may share. Bytes are those
/// obtained, not those requested.
#[derive(Debug)]
pub struct Statistics<A> {
    upstream: A,
    counters: Counters,
}

/// Memory from [`Statistics`].
pub type Counted<M> = Attached<M, (), Count>;

impl<A: Allocate> Statistics<A> {
    /// Counts the allocations of `upstream` in `counters`.
    #[must_use]
    pub fn new(upstream: A, counters: Counters) -> Self {
        Self { upstream, counters }
    }

    /// The upstream.
    #[must_use]
    pub fn upstream(&self) -> &A {
        &self.upstream
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other caller.
unsafe impl<A: Allocate> Allocate for Statistics<A> {
    type Memory = Counted<A::Memory>;

    delegate_allocate!(self, self.upstream);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        match self.upstream.allocate(request) {
            Ok(memory) => {
                let count = self.counters.enter(memory.length());
                Ok(Attached::after(memory, count))
            }
            Err(error) => {
                self.counters.0.lock().record(|totals| totals.failed += 1);
                Err(error)
            }
        }
    }
}

/// Counters of allocations, exact and consistent with one another at every instant.
///
/// All change together under one short lock. Otherwise a peak of bytes, a peak of blocks and any
/// number of measurement windows could not all be exact. Cloning returns another handle to the same
/// counters.
#[derive(Clone, Debug, Default)]
pub struct Counters(Arc<Mutex<Ledger>>);

#[derive(Debug, Default)]
struct Ledger {
    since_start: Totals,
    /// The open windows. The slot of a closed window is reused.
    windows: Vec<Option<Totals>>,
}

/// The counts of a window, or of all time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes and blocks that are live.
    pub current: Amount,
    /// The most bytes, and the most blocks, that were live at once.
    pub peak: Amount,
    /// All allocations, live or freed.
    pub total: Amount,
    /// Requests that were refused.
    pub failed: u64,
}

/// A number of bytes in a number of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// The bytes.
    pub bytes: u64,
    /// The blocks.
    pub count: u64,
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {} blocks", ByteCount::new(self.bytes), self.count)
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { current, peak, total, failed } = self;
        write!(f, "{current} live (peak {peak}), {total} allocated in all, {failed} refused")
    }
}

impl Counters {
    /// Creates counters that are zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the counts since the counters were created.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.0.lock().since_start
    }

    /// Resets the peaks since creation to the live bytes and blocks. Windows keep their peaks.
    pub fn reset_peak(&self) {
        let totals = &mut self.0.lock().since_start;
        totals.peak = totals.current;
    }

    /// Opens a measurement window. It counts from now on, independently of other windows.
    #[must_use]
    pub fn window(&self) -> Window {
        let mut ledger = self.0.lock();
        let current = ledger.since_start.current;
        let opened = Totals { current, peak: current, ..Totals::default() };
        let free = ledger.windows.iter().position(Option::is_none);
        let slot = free.unwrap_or(ledger.windows.len());
        match ledger.windows.get_mut(slot) {
            Some(window) => *window = Some(opened),
            None => ledger.windows.push(Some(opened)),
        }
        Window { counters: self.clone(), slot }
    }

    fn enter(&self, bytes: ByteCount) -> Count {
        let bytes = bytes.get();
        self.0.lock().record(|totals| totals.obtain(bytes));
        Count { counters: self.clone(), bytes }
    }
}

impl Ledger {
    fn record(&mut self, change: impl Fn(&mut Totals)) {
        change(&mut self.since_start);
        self.windows.iter_mut().flatten().for_each(change);
    }
}

impl Totals {
    fn obtain(&mut self, bytes: u64) {
        for amount in [&mut self.current, &mut self.total] {
            // Wraps only after 2^64 bytes in all, which only simulated memory can reach.
            amount.bytes = amount.bytes.wrapping_add(bytes);
            amount.count += 1;
        }
        self.peak.bytes = self.peak.bytes.max(self.current.bytes);
        self.peak.count = self.peak.count.max(self.current.count);
    }

    fn release(&mut self, bytes: u64) {
        self.current.bytes = self.current.bytes.wrapping_sub(bytes);
        self.current.count -= 1;
    }
}

/// A measurement window over [`Counters`], open until it drops.
///
/// `current` and `peak` include the memory that was live when it opened. `total` and `failed` count
/// only later events.
#[derive(Debug)]
pub struct Window {
    counters: Counters,
    slot: usize,
}

impl Window {
    /// Returns the counts since the window opened.
    #[must_use]
    pub fn totals(&self) -> Totals {
        let ledger = self.counters.0.lock();
        ledger.windows.get(self.slot).copied().flatten().unwrap_or_default()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Some(window) = self.counters.0.lock().windows.get_mut(self.slot) {
            *window = None;
        }
    }
}

/// The entry of one live block. It is removed from the counters on drop.
#[derive(Debug)]
pub struct Count {
    counters: Counters,
    bytes: u64,
}

impl Drop for Count {
    fn drop(&mut self) {
        self.counters.0.lock().record(|totals| totals.release(self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    fn amount(bytes: u64, count: u64) -> Amount {
        Amount { bytes, count }
    }

    #[test]
    fn windows_count_their_own_time_and_nest_in_any_order() {
        let capacity = ByteCount::new(100);
        let upstream = Simulated::new(SimulatedOptions { capacity, ..SimulatedOptions::default() });
        let source = Statistics::new(upstream, Counters::new());
        let counters = source.counters().clone();
        let obtain = |bytes| source.allocate(&RegionRequest::new(ByteCount::new(bytes)));

        let before = obtain(60).unwrap();
        let outer = counters.window();
        drop(before);
        let inner = counters.window();
        let held = obtain(30).unwrap();
        obtain(80).unwrap_err();
        assert_eq!(
            inner.totals(),
            Totals { current: amount(30, 1), peak: amount(30, 1), total: amount(30, 1), failed: 1 }
        );
        assert_eq!((outer.totals().peak, outer.totals().total), (amount(60, 1), amount(30, 1)));
        drop(outer);
        let reused_slot = counters.window();
        drop(held);
        assert_eq!(
            (inner.totals().current, reused_slot.totals().peak),
            (amount(0, 0), amount(30, 1))
        );
        let all = counters.totals();
        assert_eq!((all.peak, all.total, all.failed), (amount(60, 1), amount(90, 2), 1));
    }
}
