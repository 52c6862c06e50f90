//! The counters of a pool.

use std::fmt;

use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, Label, Memory};

use crate::cache::shared_cache::SharedCache;
use crate::cache::sweep::SweepGuard;
use crate::error::Exhausted;
use crate::sync::{AtomicU64, Ordering};

/// The state of a pool at one instant, and its counters since its creation.
///
/// Taking a snapshot stops every thread's magazines for a few microseconds, so that the byte counts
/// agree: `held = live + cached + pending + abandoned`. Blocks that move between two places
/// meanwhile count as live.
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
    /// Bytes that are never freed, because the pool was closed before their streams finished.
    pub abandoned: ByteCount,
    /// Every class, the smallest first.
    pub classes: Vec<ClassSnapshot>,
    /// Counters of the steps that the pool took when the upstream was exhausted.
    pub reclaim: ReclaimSnapshot,
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
    /// Requests that neither the magazine nor the queue of this class served. If a larger class
    /// served one, that class counts a hit, too.
    pub misses: u64,
    /// Free blocks that were freed to the upstream.
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
        let blocks = to_u64(self.in_magazines + self.in_queue);
        ByteCount::new(self.size.get() * blocks)
    }
}

/// How often each step of a reclaim ran or served a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReclaimSnapshot {
    /// The upstream refused because it was out of memory.
    pub exhausted: u64,
    /// A freed block served the request, after its streams had finished, with or without a wait.
    pub pending: u64,
    /// A cached block of the class, or of a larger one, served the request.
    pub larger: u64,
    /// The upstream served the request after cached blocks were freed to it.
    pub trimmed: u64,
    /// The upstream served the request after it trimmed itself.
    pub upstream_trimmed: u64,
    /// The request was served after a call of the exhaustion callback.
    pub callback: u64,
    /// No step helped, and the request was refused.
    pub refused: u64,
}

/// Prints one line: the bytes by state, and the requests of all classes.
impl fmt::Display for PoolSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { held, peak_held, live, cached, pending, abandoned, classes, .. } = self;
        let sum = |count: fn(&ClassSnapshot) -> u64| classes.iter().map(count).sum::<u64>();
        write!(
            f,
            "{held} held: {live} live, {cached} cached, {pending} pending, {abandoned} abandoned; \
             at most {peak_held}; {} classes: {} requests served from magazines, {} from queues, {} \
             missed; {} evicted",
            classes.len(),
            sum(|class| class.magazine_hits),
            sum(|class| class.shared_hits),
            sum(|class| class.misses),
            sum(|class| class.evictions),
        )
    }
}

/// Prints one line: the size, the requests, and the free blocks.
impl fmt::Display for ClassSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { size, magazine_hits, shared_hits, misses, evictions, .. } = self;
        let Self { in_magazines, in_queue, pending, .. } = self;
        write!(
            f,
            "{size}: {magazine_hits} requests served from magazines, {shared_hits} from the queue, \
             {misses} missed; {evictions} evicted; {in_magazines} free in magazines, {in_queue} in \
             the queue, {pending} pending"
        )
    }
}

/// Prints one line: the requests that met an exhausted upstream, by the step that served them.
impl fmt::Display for ReclaimSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { exhausted, pending, larger, trimmed, upstream_trimmed, callback, refused } =
            self;
        write!(
            f,
            "{exhausted} requests met an exhausted upstream: {pending} got a pending block, \
             {larger} a cached block, {trimmed} memory after a trim, {upstream_trimmed} after a trim \
             of the upstream, {callback} after the callback, {refused} were refused"
        )
    }
}

/// The most labels that an error names.
const TOP: usize = 5;

/// The atomic counters behind [`ReclaimSnapshot`].
#[derive(Debug, Default)]
pub(crate) struct ReclaimCounts([AtomicU64; 7]);

/// A step of a reclaim, in the order of the fields of [`ReclaimSnapshot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReclaimStage {
    Exhausted,
    Pending,
    Larger,
    Trimmed,
    UpstreamTrimmed,
    Callback,
    Refused,
}

impl ReclaimCounts {
    pub(crate) fn count(&self, stage: ReclaimStage) {
        self.0[stage as usize].fetch_add(1, Ordering::Relaxed);
        tracing::debug!(?stage, "the upstream of a pool is exhausted");
    }

    pub(crate) fn snapshot(&self) -> ReclaimSnapshot {
        let counts = self.0.each_ref().map(|count| count.load(Ordering::Relaxed));
        let [exhausted, pending, larger, trimmed, upstream_trimmed, callback, refused] = counts;
        ReclaimSnapshot { exhausted, pending, larger, trimmed, upstream_trimmed, callback, refused }
    }
}

impl PoolSnapshot {
    pub(crate) fn new<M: Memory>(cache: &SharedCache<M>, reclaim_counts: &ReclaimCounts) -> Self {
        let mut classes: Vec<ClassSnapshot> = (0..cache.table.len())
            .map(|class| ClassSnapshot {
                size: ByteCount::new(cache.table.size(class)),
                ..ClassSnapshot::default()
            })
            .collect();
        let mut sweep = SweepGuard::new(cache);
        let mut in_stream_magazines = 0;
        sweep.for_each(|magazines| {
            for (class, magazine) in classes.iter_mut().zip(&magazines.stream.classes) {
                class.magazine_hits += magazine.hits;
                class.pending += magazine.blocks.len();
                let blocks = to_u64(magazine.blocks.len());
                in_stream_magazines += class.size.get() * blocks;
            }
            for (class, magazine) in classes.iter_mut().zip(&magazines.classes) {
                class.magazine_hits += magazine.hits;
                class.shared_hits += magazine.shared_hits;
                class.in_magazines += magazine.blocks.len();
            }
        });
        let cached = cache.cached_in(&mut sweep);
        let pending =
            cache.pending.as_ref().map_or(0, |pending| pending.bytes()) + in_stream_magazines;
        let held = cache.account.held();
        for (class, queue) in classes.iter_mut().zip(&cache.queues) {
            class.shared_hits += queue.shared_hits.load(Ordering::Relaxed);
            class.misses = queue.misses.load(Ordering::Relaxed);
            class.evictions = queue.evictions.load(Ordering::Relaxed);
            class.in_queue = queue.blocks();
        }
        drop(sweep);

        let counts = cache.pending.as_ref().map(|pending| pending.counts()).unwrap_or_default();
        for (class, count) in counts {
            if let Some(class) = classes.get_mut(class) {
                class.pending += count;
            }
        }
        let abandoned = cache.pending.as_ref().map_or(0, |pending| pending.abandoned());
        let not_live = [cached, pending, abandoned].into_iter().fold(0, u64::saturating_add);
        Self {
            held: ByteCount::new(held),
            peak_held: ByteCount::new(cache.account.peak()),
            // Blocks that move during the summing can make the sum too large.
            live: ByteCount::new(held.saturating_sub(not_live)),
            cached: ByteCount::new(cached),
            pending: ByteCount::new(pending),
            abandoned: ByteCount::new(abandoned),
            classes,
            reclaim: reclaim_counts.snapshot(),
            labels: cache.labels(usize::MAX),
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

impl<M: Memory> SharedCache<M> {
    /// Returns the state of a pool without streams and without magazines. No thread is stopped.
    pub(crate) fn exhausted(&self) -> Exhausted {
        let (held, cached) = (self.account.held(), self.limit.reserved());
        let free = self.occupied.iter().filter_map(|class| self.queues.get(class));
        let free = free.filter(|queue| queue.blocks() > 0).last();
        Exhausted {
            held: ByteCount::new(held),
            live: ByteCount::new(held.saturating_sub(cached)),
            cached: ByteCount::new(cached),
            pending: ByteCount::ZERO,
            largest_free: free.map(|queue| ByteCount::new(self.table.size(queue.class))),
            top_labels: self.labels(TOP),
            callback_attempts: 0,
            refusal: None,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use terrane_core::ByteCount;

    use super::*;

    #[test]
    fn a_snapshot_is_one_line_with_the_sums_of_its_classes() {
        let class = ClassSnapshot {
            size: ByteCount::kib(64),
            magazine_hits: 5,
            shared_hits: 2,
            misses: 1,
            in_queue: 3,
            ..ClassSnapshot::default()
        };
        assert_eq!(
            class.to_string(),
            "64 KiB: 5 requests served from magazines, 2 from the queue, 1 missed; 0 evicted; 0 \
             free in magazines, 3 in the queue, 0 pending"
        );
        let pool = PoolSnapshot { classes: vec![class; 2], ..PoolSnapshot::default() };
        let text = pool.to_string();
        assert!(
            text.contains("2 classes: 10 requests served from magazines, 4 from queues, 2 missed"),
            "{text}"
        );
        assert!(!text.contains('\n'));
    }
}
