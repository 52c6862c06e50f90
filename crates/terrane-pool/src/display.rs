//! Snapshots as text.

use std::fmt;

use crate::{ClassSnapshot, PoolSnapshot};

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
