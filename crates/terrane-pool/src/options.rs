//! The options of a pool.

use std::time::Duration;

use terrane_core::{Alignment, ByteCount};

use crate::size_class::SizeClasses;

/// Options of a [`Pool`](crate::Pool), with defaults for scratch and staging memory.
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
    /// How sizes are rounded. Default: eight steps per doubling.
    pub classes: SizeClasses,
    /// The smallest block in bytes: a power of two, and at least 16. If blocks are regions of the
    /// upstream, it is at least the upstream's granule. Smaller requests get a block of this size.
    /// Default: 512 bytes.
    pub smallest_class: ByteCount,
    /// The largest request that is pooled, at most 2^48 bytes. Larger requests are passed to the
    /// upstream, and their memory is freed to the upstream. Default: 1 GiB.
    pub largest_class: ByteCount,
    /// The alignment of every pooled block. If each block is a region of the upstream and regions
    /// have a stricter alignment, blocks have that alignment too. A request for a stricter
    /// alignment is passed to the upstream. Default: 512 bytes.
    pub alignment: Alignment,
    /// The most bytes that the pool caches in all; never exceeded. Slabs do not count. Default: 16
    /// GiB.
    pub cached_bytes: ByteCount,
    /// The share of held bytes that may be cached when a miss would raise the peak of held bytes,
    /// in percent. Above it, the miss takes a cached block of a slightly larger class (see
    /// [`larger_class_waste`](Self::larger_class_waste)). If there is none, it first frees cached
    /// blocks to the upstream, beginning with the least recently used class. So the peak stays near
    /// the bytes in use. Blocks in magazines count as cached, but a miss does not free them; only
    /// an exhaustion or a trim does. Caches of up to 64 MiB are never reduced, and 100 disables
    /// this limit. Default: 10.
    pub cached_percent: u8,
    /// The most blocks that the shared queue of a class keeps; never exceeded. The magazine of each
    /// thread holds up to [`magazine_depth`](Self::magazine_depth) more. Slabs do not count.
    /// Default: 16,384.
    pub blocks_per_class: usize,
    /// The most blocks of a class that a thread keeps, up to 28. With 0, all blocks go through the
    /// shared queues. Default: 28.
    pub magazine_depth: usize,
    /// The most bytes of a class that a thread keeps, and as many for one stream. A class whose
    /// single block exceeds this has no magazines, and its blocks go through the shared queue or
    /// the pending frees. Default: 256 MiB.
    pub magazine_bytes: ByteCount,
    /// The most threads that have magazines at a time, up to 65,536. Further threads use the shared
    /// queues. Default: 256.
    pub threads: usize,
    /// The most by which a cached block of a larger class may exceed the request that it serves, in
    /// percent. A pool uses such a block if it is exhausted. It also uses one for the host if a
    /// block from the upstream would raise the peak, see [`cached_percent`](Self::cached_percent).
    /// It uses still larger blocks only after it has freed cached blocks to the upstream and was
    /// refused again. Default: 25.
    pub larger_class_waste: u8,
    /// The longest time in all that an exhausted pool waits for streams to finish with freed
    /// blocks, before it trims. A closed pool waits at most as long for pending blocks. Default: 1
    /// s.
    pub pending_wait: Duration,
    /// The most calls of the exhaustion callback per request before the pool refuses. Default: 3.
    pub callback_attempts: u32,
    /// Whether a request on one stream may get a block that another stream still uses. The pool
    /// then makes the requesting stream wait for the other one, instead of requesting more memory
    /// from the upstream. Default: no.
    pub order_streams: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self {
            classes: SizeClasses::default(),
            smallest_class: ByteCount::new(512),
            largest_class: ByteCount::gib(1),
            alignment: Alignment::SECTOR,
            cached_bytes: ByteCount::gib(16),
            cached_percent: 10,
            blocks_per_class: 1 << 14,
            magazine_depth: 28,
            magazine_bytes: ByteCount::mib(256),
            threads: 256,
            larger_class_waste: 25,
            pending_wait: Duration::from_secs(1),
            callback_attempts: 3,
            order_streams: false,
        }
    }
}
