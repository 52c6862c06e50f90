//! The counters of a pool.

use terrane_core::{ByteCount, Label, Memory};

use crate::Exhausted;
use crate::stock::Stock;
use crate::sweep::Frozen;
use crate::sync::{AtomicU64, Ordering};

/// The state of a pool at one instant, and its counters since it was made.
///
/// Taking a snapshot stops every thread's magazines for a few microseconds, so that the byte counts
/// agree: `held = live + cached + pending`. Blocks that move between two places meanwhile count as
/// live.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PoolSnapshot {
    /// Bytes obtained from the upstream and not returned.
    pub held: ByteCount,
    /// The highest number of held bytes so far.
    pub peak_held: ByteCount,
    /// Bytes of blocks in use.
    pub live: ByteCount,
    /// Bytes of free blocks.
    pub cached: ByteCount,
    /// Bytes of freed blocks that streams may still be using.
    pub pending: ByteCount,
    /// Bytes that are never returned, because the pool was closed before their streams ended.
    pub abandoned: ByteCount,
    /// Every class, the smallest first.
    pub classes: Vec<ClassSnapshot>,
    /// Counters of what the pool did when exhausted.
    pub ladder: LadderSnapshot,
    /// Live bytes by label, the largest first. Blocks without a label are not counted.
    pub labels: Vec<(Label, ByteCount)>,
}

/// One size class of a [`PoolSnapshot`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct ClassSnapshot {
    /// The length of a block in bytes.
    pub size: ByteCount,
    /// Requests served from a magazine.
    pub magazine_hits: u64,
    /// Requests served from the shared queue.
    pub shared_hits: u64,
    /// Requests that neither served at once.
    pub misses: u64,
    /// Free blocks that were returned to the upstream.
    pub evictions: u64,
    /// Free blocks in magazines.
    pub in_magazines: usize,
    /// Free blocks in the shared queue.
    pub in_queue: usize,
    /// Freed blocks that streams may still be using.
    pub pending: usize,
}

impl ClassSnapshot {
    /// Bytes of free blocks.
    #[must_use]
    pub fn cached(&self) -> ByteCount {
        let blocks = ByteCount::from_usize(self.in_magazines + self.in_queue).get();
        ByteCount::new(self.size.get() * blocks)
    }
}

/// How often each step of the ladder ran or served a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LadderSnapshot {
    /// The upstream refused because it was out of memory.
    pub exhausted: u64,
    /// A freed block served the request, after its streams had finished, with or without a wait.
    pub pending: u64,
    /// A cached block of the class, or of a larger one, served the request.
    pub larger: u64,
    /// The upstream served the request after cached blocks were returned to it.
    pub trimmed: u64,
    /// The upstream served the request after it trimmed itself.
    pub upstream_trimmed: u64,
    /// The request was served after a call of the exhaustion callback.
    pub callback: u64,
    /// No step helped, and the request was refused.
    pub refused: u64,
}

/// The most labels that an error names.
const TOP: usize = 5;

/// The atomic counters behind [`LadderSnapshot`].
#[derive(Debug, Default)]
pub(crate) struct LadderCounts([AtomicU64; 7]);

/// A step of the ladder, in the order of the fields of [`LadderSnapshot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rung {
    Exhausted,
    Pending,
    Larger,
    Trimmed,
    UpstreamTrimmed,
    Callback,
    Refused,
}

impl LadderCounts {
    pub(crate) fn count(&self, rung: Rung) {
        self.of(rung).fetch_add(1, Ordering::Relaxed);
        tracing::debug!(?rung, "an exhausted pool climbs its ladder");
    }

    fn of(&self, rung: Rung) -> &AtomicU64 {
        let [exhausted, pending, larger, trimmed, upstream, callback, refused] = &self.0;
        match rung {
            Rung::Exhausted => exhausted,
            Rung::Pending => pending,
            Rung::Larger => larger,
            Rung::Trimmed => trimmed,
            Rung::UpstreamTrimmed => upstream,
            Rung::Callback => callback,
            Rung::Refused => refused,
        }
    }

    pub(crate) fn snapshot(&self) -> LadderSnapshot {
        let read = |rung| self.of(rung).load(Ordering::Relaxed);
        LadderSnapshot {
            exhausted: read(Rung::Exhausted),
            pending: read(Rung::Pending),
            larger: read(Rung::Larger),
            trimmed: read(Rung::Trimmed),
            upstream_trimmed: read(Rung::UpstreamTrimmed),
            callback: read(Rung::Callback),
            refused: read(Rung::Refused),
        }
    }
}

impl PoolSnapshot {
    pub(crate) fn new<M: Memory>(stock: &Stock<M>, ladder: &LadderCounts) -> Self {
        let mut classes: Vec<ClassSnapshot> = (0..stock.table.len())
            .map(|class| ClassSnapshot {
                size: ByteCount::new(stock.table.size(class)),
                ..ClassSnapshot::default()
            })
            .collect();
        let mut frozen = Frozen::new(stock);
        let mut in_lanes = 0;
        frozen.for_each(|shelf| {
            for (class, magazine) in classes.iter_mut().zip(&shelf.lane.magazines) {
                class.magazine_hits += magazine.hits;
                class.pending += magazine.blocks.len();
                let blocks = ByteCount::from_usize(magazine.blocks.len()).get();
                in_lanes += class.size.get() * blocks;
            }
            for (class, magazine) in classes.iter_mut().zip(&shelf.magazines) {
                class.magazine_hits += magazine.hits;
                class.shared_hits += magazine.shared_hits;
                class.in_magazines += magazine.blocks.len();
            }
        });
        let cached = stock.cached_in(&mut frozen);
        let pending = stock.parking.as_ref().map_or(0, |parking| parking.bytes()) + in_lanes;
        let held = stock.account.held();
        for (class, depot) in classes.iter_mut().zip(&stock.depots) {
            class.shared_hits += depot.shared_hits.load(Ordering::Relaxed);
            class.misses = depot.misses.load(Ordering::Relaxed);
            class.evictions = depot.evictions.load(Ordering::Relaxed);
            class.in_queue = depot.blocks();
        }
        drop(frozen);

        let census = stock.parking.as_ref().map(|parking| parking.census()).unwrap_or_default();
        for (class, count) in census {
            if let Some(class) = classes.get_mut(class) {
                class.pending += count;
            }
        }
        let free = cached.checked_add(pending).unwrap_or(held);
        Self {
            held: ByteCount::new(held),
            peak_held: ByteCount::new(stock.account.peak()),
            // Blocks that moved during the summing can make the sum too large.
            live: ByteCount::new(held.saturating_sub(free)),
            cached: ByteCount::new(cached),
            pending: ByteCount::new(pending),
            abandoned: ByteCount::new(stock.parking.as_ref().map_or(0, |p| p.abandoned())),
            classes,
            ladder: ladder.snapshot(),
            labels: stock.labels(usize::MAX),
        }
    }

    /// Returns the same state as the context of an error.
    pub(crate) fn exhausted(self) -> Exhausted {
        let free = self.classes.iter().rev().find(|class| !class.cached().is_zero());
        Exhausted {
            held: self.held,
            live: self.live,
            cached: self.cached,
            pending: self.pending,
            largest_free: free.map(|class| class.size),
            top_labels: self.labels.into_iter().take(TOP).collect(),
            callback_attempts: 0,
            refusal: None,
        }
    }
}

impl<M: Memory> Stock<M> {
    /// Returns the state of a pool without streams and without magazines. No thread is stopped.
    pub(crate) fn exhausted(&self) -> Exhausted {
        let (held, cached) = (self.account.held(), self.budget.reserved());
        let free = self.occupied.iter().filter_map(|class| self.depots.get(class));
        let free = free.filter(|depot| depot.blocks() > 0).last();
        Exhausted {
            held: ByteCount::new(held),
            live: ByteCount::new(held.saturating_sub(cached)),
            cached: ByteCount::new(cached),
            pending: ByteCount::ZERO,
            largest_free: free.map(|depot| ByteCount::new(self.table.size(depot.class()))),
            top_labels: self.labels(TOP),
            callback_attempts: 0,
            refusal: None,
        }
    }
}
