//! Every free block of a pool, one by one.

use terrane_core::{Allocate, ByteCount, Label, Memory, Span};

use crate::Pool;
use crate::adaptors::{BlockRecord, BlockState, Inspect};
use crate::record::Record;
use crate::sweep::Frozen;

/// Lists free blocks: cached ones, and pending ones, which streams may still be using.
///
/// The pool does not list blocks in use, because that would cost every hit a table entry. A
/// [`Tags`](crate::adaptors::Tags) around the pool lists them, and the two make a complete
/// snapshot:
///
/// ```
/// use terrane_core::{Allocate, ByteCount, RegionRequest};
/// use terrane_pool::adaptors::{Adapt, BlockState, LiveBlocks, Simulated, SimulatedOptions, Snapshot};
/// use terrane_pool::{Pool, PoolOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Simulated::new(SimulatedOptions::default());
/// let pool = std::sync::Arc::new(Pool::new(device, PoolOptions::default())?);
/// let live = LiveBlocks::new();
/// let tagged = std::sync::Arc::clone(&pool).tagged(live.clone());
/// let kept = tagged.allocate(&RegionRequest::new(ByteCount::kib(4)).labelled("kv"))?;
/// drop(tagged.allocate(&RegionRequest::new(ByteCount::kib(8)))?);
/// let snapshot = Snapshot::of(&[&live, &*pool]);
/// let states: Vec<_> = snapshot.blocks.iter().map(|block| block.state).collect();
/// assert_eq!(states, [BlockState::Live, BlockState::Cached]);
/// # Ok(())
/// # }
/// ```
///
/// Each source is listed at an instant of its own. A block that moves between the two meanwhile may
/// be in both or in neither.
impl<A: Allocate> Inspect for Pool<A> {
    fn inspect(&self, show: &mut dyn FnMut(BlockRecord)) {
        let stock = &self.stock;
        // Called after other threads can continue: `show` may take long, use the pool, or panic.
        let mut found = Vec::new();
        let mut visit = |block| found.push(block);
        let mut frozen = Frozen::new(stock);
        frozen.for_each(|shelf| {
            let cached = shelf.magazines.iter().flat_map(|magazine| magazine.blocks.iter());
            cached.for_each(|record| visit(shown(record, BlockState::Cached)));
            let lane = shelf.lane.magazines.iter().flat_map(|magazine| magazine.blocks.iter());
            lane.for_each(|record| visit(shown(record, BlockState::Pending)));
        });
        for depot in &stock.depots {
            depot.for_each(|record| visit(shown(record, BlockState::Cached)));
        }
        if let Some(parking) = &stock.parking {
            parking.for_each(|record| visit(shown(record, BlockState::Pending)));
        }
        drop(frozen);
        found.into_iter().for_each(show);
    }
}

fn shown<M: Memory>(record: &Record<M>, state: BlockState) -> BlockRecord {
    let (kind, location) = (record.kind, record.location);
    BlockRecord {
        span: Span { kind, location, length: ByteCount::new(record.granted) },
        asked: ByteCount::ZERO,
        tag: Label::default(),
        state,
        sequence: 0,
    }
}
