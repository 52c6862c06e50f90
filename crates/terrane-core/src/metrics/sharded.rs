//! Counters in shards.

use std::cell::Cell;
use std::hint::spin_loop;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{available_parallelism, yield_now};

use super::histogram::{HISTOGRAM_CELLS, HistogramSnapshot, bucket_of};

/// Numbered counters in several shards, so that threads rarely write the same cache line.
///
/// An update needs one atomic exchange for any number of counters. A reader needs no lock. A
/// counter never decreases, and is exact when no update is in progress.
///
/// ```
/// use terrane_core::metrics::ShardedCounters;
///
/// let counters = ShardedCounters::new(2);
/// counters.update(|shard| {
///     shard.add(0, 1);
///     shard.add(1, 4096);
/// });
/// assert_eq!([counters.get(0), counters.get(1)], [1, 4096]);
/// ```
pub struct ShardedCounters {
    cells: usize,
    shards: Box<[CounterShard]>,
}

/// A shard, which one thread owns during an [update](ShardedCounters::update).
#[repr(align(128))]
pub struct CounterShard {
    is_taken: AtomicBool,
    lines: Box<[Line]>,
}

/// A cache line.
#[derive(Default)]
#[repr(align(64))]
struct Line([AtomicU64; CELLS]);

const CELLS: usize = 8;

/// More shards use memory, and separate no more threads in practice.
const MOST_SHARDS: usize = 16;

thread_local! {
    /// The number of this thread, which selects its shard.
    static THREAD: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// The number of this thread.
#[inline]
fn thread_number() -> usize {
    // A thread that is ending has no thread-locals.
    THREAD
        .try_with(|number| {
            if number.get() == usize::MAX {
                number.set(next_thread());
            }
            number.get()
        })
        .unwrap_or(0)
}

#[cold]
fn next_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: only distinct numbers are required. `usize::MAX` means that no number is assigned.
    NEXT.fetch_add(1, Ordering::Relaxed) % usize::MAX
}

impl ShardedCounters {
    /// Counters with the numbers from 0 to `cells - 1`, all zero.
    ///
    /// They use `8 * cells` bytes for each processor, for 16 processors at most.
    #[must_use]
    pub fn new(cells: usize) -> Self {
        let processors = available_parallelism().map_or(1, NonZeroUsize::get);
        let count = processors.min(MOST_SHARDS).next_power_of_two();
        let shard = |_| CounterShard {
            is_taken: AtomicBool::new(false),
            lines: (0..cells.div_ceil(CELLS)).map(|_| Line::default()).collect(),
        };
        Self { cells, shards: (0..count).map(shard).collect() }
    }

    /// Changes counters of one shard. No other thread changes this shard meanwhile.
    ///
    /// `change` should take nanoseconds, because a thread waits if all shards are in use. It must
    /// not update the same counters, because that call would wait forever if there is one shard.
    #[inline]
    pub fn update(&self, change: impl FnOnce(&CounterShard)) {
        /// Frees the shard, even if a panic unwinds.
        struct Taken<'a>(&'a CounterShard);

        impl Drop for Taken<'_> {
            fn drop(&mut self) {
                // The next thread that acquires the shard continues from these values.
                self.0.is_taken.store(false, Ordering::Release);
            }
        }

        let guard = Taken(self.take());
        change(guard.0);
    }

    /// Adds to one counter.
    #[inline]
    pub fn add(&self, cell: usize, amount: u64) {
        self.update(|shard| shard.add(cell, amount));
    }

    /// The value of a counter, modulo 2^64; zero for a number that does not exist.
    #[must_use]
    pub fn get(&self, cell: usize) -> u64 {
        self.shards.iter().fold(0, |sum, shard| sum.wrapping_add(shard.get(cell)))
    }

    /// The number of counters.
    #[must_use]
    pub fn len(&self) -> usize {
        self.cells
    }

    /// Whether there are no counters.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cells == 0
    }

    /// The histogram in the counters from `first` on; see [`CounterShard::record`].
    #[must_use]
    pub fn histogram(&self, first: usize) -> HistogramSnapshot {
        HistogramSnapshot::from_cells(|cell| self.get(first + cell))
    }

    #[inline]
    fn take(&self) -> &CounterShard {
        // The number of shards is a power of two.
        let first = thread_number() & (self.shards.len() - 1);
        match self.shards.get(first).filter(|shard| shard.try_take()) {
            Some(shard) => shard,
            None => self.take_any(first),
        }
    }

    #[cold]
    fn take_any(&self, first: usize) -> &CounterShard {
        let mut rounds = 0_u32;
        loop {
            let others = self.shards.iter().cycle().skip(first + 1).take(self.shards.len());
            for shard in others {
                if shard.try_take() {
                    return shard;
                }
            }
            // The thread that owns the shard may have been preempted.
            rounds += 1;
            if rounds.is_multiple_of(16) { yield_now() } else { spin_loop() }
        }
    }
}

impl CounterShard {
    /// Adds to a counter, modulo 2^64. A number that does not exist changes nothing.
    #[inline]
    pub fn add(&self, cell: usize, amount: u64) {
        let counter_cell = self.cell(cell);
        debug_assert!(counter_cell.is_some(), "there is no counter {cell}");
        if let Some(counter) = counter_cell {
            // Relaxed, and no exchange: only the thread that owns the shard writes.
            let value = counter.load(Ordering::Relaxed).wrapping_add(amount);
            counter.store(value, Ordering::Relaxed);
        }
    }

    /// Adds a value to the histogram in the [`HISTOGRAM_CELLS`] counters from `first` on.
    #[inline]
    pub fn record(&self, first: usize, value: u64) {
        self.add(first + bucket_of(value), 1);
        self.add(first + HISTOGRAM_CELLS - 1, value);
    }

    #[inline]
    fn try_take(&self) -> bool {
        !self.is_taken.swap(true, Ordering::Acquire)
    }

    #[inline]
    fn get(&self, cell: usize) -> u64 {
        self.cell(cell).map_or(0, |counter| counter.load(Ordering::Relaxed))
    }

    #[inline]
    fn cell(&self, cell: usize) -> Option<&AtomicU64> {
        self.lines.get(cell / CELLS)?.0.get(cell % CELLS)
    }
}

crate::debug_fields!(ShardedCounters, |it| { cells: it.cells });

crate::debug_fields!(CounterShard {});

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn no_update_of_several_threads_is_lost() {
        let updates = if cfg!(miri) { 20 } else { 20_000 };
        let counters = ShardedCounters::new(3);
        let update = |shard: &CounterShard| {
            shard.add(0, 1);
            shard.add(2, 3);
        };
        thread::scope(|scope| {
            let update_often = || (0..updates).for_each(|_| counters.update(update));
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(update_often)).collect();
            let mut last = 0;
            while !threads.iter().all(thread::ScopedJoinHandle::is_finished) {
                let now = counters.get(0);
                assert!(now >= last, "{now} after {last}");
                last = now;
            }
        });
        let found = [0, 1, 2].map(|cell| counters.get(cell));
        assert_eq!(found, [8 * updates, 0, 24 * updates]);
        assert_eq!(counters.get(99), 0);
    }

    #[test]
    fn a_panic_in_an_update_frees_the_shard() {
        let counters = ShardedCounters::new(1);
        let update = || counters.update(|_| panic!("a test panics in an update"));
        for _ in 0..2 * MOST_SHARDS {
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(update)).is_err());
        }
        counters.add(0, 1);
        assert_eq!(counters.get(0), 1);
    }
}
