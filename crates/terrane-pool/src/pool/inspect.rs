//! Lists every free block of a pool.

use terrane_core::{Allocate, ByteCount, Label, Memory, Span};

use super::Pool;
use super::record::Record;
use crate::adaptors::accounting::snapshot::{BlockRecord, BlockState, Inspect};
use crate::cache::sweep::SweepGuard;

/// Lists free blocks: cached ones, and pending ones, which streams may still be using.
///
/// The pool does not list blocks in use, because that would cost every hit a table entry. A
/// [`Tags`](crate::adaptors::Tags) around the pool lists them, and the two make a complete
/// snapshot:
///
/// ```
/// use terrane_core::{Allocate, ByteCount, RegionRequest};
/// use terrane_pool::adaptors::{Adapt, BlockState, LiveBlocks, Snapshot};
/// use terrane_pool::{HeapAllocator, Pool, PoolOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = Pool::new(HeapAllocator, PoolOptions::default())?;
/// let live = LiveBlocks::new();
/// let tagged = pool.clone().tagged(live.clone());
/// let kept = tagged.allocate(&RegionRequest::new(ByteCount::kib(4)).labelled("kv"))?;
/// drop(tagged.allocate(&RegionRequest::new(ByteCount::kib(8)))?);
/// let snapshot = Snapshot::of(&[&live, &pool]);
/// let states: Vec<_> = snapshot.blocks.iter().map(|block| block.state).collect();
/// assert_eq!(states, [BlockState::Live, BlockState::Cached]);
/// # Ok(())
/// # }
/// ```
///
/// Each source is listed at its own instant. A block that moves between the two meanwhile may be in
/// both or in neither.
impl<A: Allocate> Inspect for Pool<A> {
    fn inspect(&self, show: &mut dyn FnMut(BlockRecord)) {
        let cache = &self.cache;
        // `show` is called after the gates are open again: it may take long, use the pool, or
        // panic.
        let mut found = Vec::new();
        let mut visit = |block| found.push(block);
        let mut sweep = SweepGuard::new(cache);
        sweep.for_each(|magazines| {
            let cached = magazines.classes.iter().flat_map(|magazine| magazine.blocks.iter());
            cached.for_each(|block| visit(shown(block, BlockState::Cached)));
            let of_stream = magazines.stream.classes.iter();
            let of_stream = of_stream.flat_map(|magazine| magazine.blocks.iter());
            of_stream.for_each(|block| visit(shown(block, BlockState::Pending)));
        });
        for queue in &cache.queues {
            queue.for_each(|block| visit(shown(block, BlockState::Cached)));
        }
        if let Some(pending) = &cache.pending {
            pending.for_each(|block| visit(shown(block, BlockState::Pending)));
        }
        drop(sweep);
        found.into_iter().for_each(show);
    }
}

fn shown<M: Memory>(record: &Record<M>, state: BlockState) -> BlockRecord {
    let (kind, location) = (record.kind, record.location);
    BlockRecord {
        span: Span { kind, location, length: ByteCount::new(record.granted) },
        requested: ByteCount::ZERO,
        tag: Label::default(),
        state,
        sequence: 0,
    }
}
