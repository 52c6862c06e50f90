//! What can be chosen about a pool.

use std::time::Duration;

use terrane_core::{Alignment, ByteCount};

use crate::SizeClasses;

/// The choices of a [`Pool`](crate::Pool), with defaults for scratch and staging memory.
///
/// ```
/// use terrane_core::ByteCount;
/// use terrane_pool::{PoolOptions, SizeClasses};
///
/// let for_kv_blocks = PoolOptions {
///     classes: SizeClasses::ExactSlab { stride: ByteCount::kib(144), count: 4096 },
///     ..PoolOptions::default()
/// };
/// assert_eq!(for_kv_blocks.alignment.get(), 512);
/// ```
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// How sizes are rounded. Default: eight steps a doubling.
    pub classes: SizeClasses,
    /// The smallest block: a power of two, 16 bytes or more, and no less than the granule of an
    /// upstream whose regions are the blocks. Smaller requests get one of this size. Default:
    /// 512 bytes.
    pub smallest_class: ByteCount,
    /// The largest request that is pooled, at most 2^48 bytes. Larger ones go straight to the
    /// upstream and back to it. Default: 1 GiB.
    pub largest_class: ByteCount,
    /// What every pooled block is aligned to; where each block is a region of the upstream's and
    /// those are aligned more strictly, so are the blocks. A request that is stricter still goes
    /// straight to the upstream. Default: 512 bytes.
    pub alignment: Alignment,
    /// The most bytes that the pool keeps beyond those in use, in all; never exceeded. Slabs do
    /// not count. Default: 4 GiB.
    pub cached_bytes: ByteCount,
    /// How much of what the pool holds may be cached when it is about to hold more than ever
    /// before, in percent: a miss then first returns cached blocks, those of the least recently used
    /// class first, so that the peak stays near what is in use. Caches of up to 64 MiB are left
    /// alone, and with 100 all are. Default: 10.
    pub cached_percent: u8,
    /// The most blocks that the shared queue of a class keeps; never exceeded. The magazines of
    /// the threads hold up to [`magazine_depth`](Self::magazine_depth) blocks more each. Slabs do
    /// not count. Default: 1,024.
    pub blocks_per_class: usize,
    /// The most blocks that a thread keeps of a class; more than 28 count as 28, and with 0 all
    /// go through the shared queues. Default: 28.
    pub magazine_depth: usize,
    /// The most bytes that a thread keeps of a class; where not even one block fits, the class
    /// has no magazines, but its blocks go through the shared queue. Of blocks that one stream uses
    /// a thread keeps one of each class however large, unless that is more than a 64th of
    /// [`cached_bytes`](Self::cached_bytes), to which it counts, or this is zero. Default: 8 MiB.
    pub magazine_bytes: ByteCount,
    /// How many threads have magazines at a time; further ones use the shared queues.
    /// Default: 256.
    pub threads: usize,
    /// How much larger than the request a cached block of a larger class may be that serves it in
    /// an exhausted pool, in percent. The pool takes blocks that are larger still only after it
    /// has returned cached blocks to the upstream and was refused again. Default: 25.
    pub larger_class_waste: u8,
    /// How long an exhausted pool waits for streams to finish with freed blocks, in all, before
    /// it goes on to trim; and how long a closed pool waits for a block. Default: 1 s.
    pub pending_wait: Duration,
    /// How often an exhausted pool asks the caller's callback before it refuses. Default: 3.
    pub callback_attempts: u32,
    /// Whether a block that another stream is not yet done with may be handed out after making
    /// the asking stream wait for that one, rather than asking the upstream for more.
    /// Default: no.
    pub order_streams: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self {
            classes: SizeClasses::default(),
            smallest_class: ByteCount::new(512),
            largest_class: ByteCount::gib(1),
            alignment: Alignment::SECTOR,
            cached_bytes: ByteCount::gib(4),
            cached_percent: 10,
            blocks_per_class: 1024,
            magazine_depth: 28,
            magazine_bytes: ByteCount::mib(8),
            threads: 256,
            larger_class_waste: 25,
            pending_wait: Duration::from_secs(1),
            callback_attempts: 3,
            order_streams: false,
        }
    }
}
