//! What a pool shows of itself.

use terrane_core::{ByteCount, Label, Memory};

use crate::Exhausted;
use crate::stock::Stock;
use crate::sweep::Frozen;
use crate::sync::{AtomicU64, Ordering};

/// The state of a pool at one instant, with what it has done so far.
///
/// Taking it stops every thread's magazines for a few microseconds, so that the byte counts fit
/// one another: `held = live + cached + pending`, up to blocks that are on their way between two
/// places, which count as live.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PoolSnapshot {
    /// Bytes obtained from the upstream and not given back.
    pub held: ByteCount,
    /// The most that was ever held.
    pub peak_held: ByteCount,
    /// Bytes of blocks in use.
    pub live: ByteCount,
    /// Bytes of free blocks.
    pub cached: ByteCount,
    /// Bytes of freed blocks that streams may still be using.
    pub pending: ByteCount,
    /// Bytes that will never be given back, as the pool was closed before their streams ended.
    pub abandoned: ByteCount,
    /// Every class, the smallest first.
    pub classes: Vec<ClassSnapshot>,
    /// What exhaustion made the pool do.
    pub ladder: LadderSnapshot,
    /// Live bytes by label, the largest first; unlabelled ones are not counted.
    pub labels: Vec<(Label, ByteCount)>,
}

/// One size class of a [`PoolSnapshot`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct ClassSnapshot {
    /// The length of a block.
    pub size: ByteCount,
    /// Requests served from a magazine.
    pub magazine_hits: u64,
    /// Requests served from the shared queue.
    pub shared_hits: u64,
    /// Requests that neither could serve at once.
    pub misses: u64,
    /// Free blocks that were given back to the upstream.
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

/// How far an exhausted pool had to climb, and how often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LadderSnapshot {
    /// The upstream refused for want of memory.
    pub exhausted: u64,
    /// A freed block, finished or waited for, served the request.
    pub pending: u64,
    /// A cached block, of the class or a larger one, served the request.
    pub larger: u64,
    /// Giving cached blocks back made the upstream serve the request.
    pub trimmed: u64,
    /// Having the upstream trim itself did.
    pub upstream_trimmed: u64,
    /// Asking the caller's callback did.
    pub callback: u64,
    /// Nothing did.
    pub refused: u64,
}

/// How many labels an error names.
const TOP: usize = 5;

/// [`LadderSnapshot`] as it counts.
#[derive(Debug, Default)]
pub(crate) struct LadderCounts([AtomicU64; 7]);

/// A rung of the ladder, in the order of the fields of [`LadderSnapshot`].
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
            // Blocks that came or went while this was summed up can make the sum too large.
            live: ByteCount::new(held.saturating_sub(free)),
            cached: ByteCount::new(cached),
            pending: ByteCount::new(pending),
            abandoned: ByteCount::new(stock.parking.as_ref().map_or(0, |p| p.abandoned())),
            classes,
            ladder: ladder.snapshot(),
            labels: stock.labels(usize::MAX),
        }
    }

    /// The same as the context of an error.
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
    /// The state of a pool without streams whose threads keep nothing: no thread is stopped.
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
