//! How a plan is cut into chunks that fit a slot.

use std::ops::Range;

use terrane_core::{Alignment, ByteCount, StorageKind};
use terrane_layout::LayoutConfig;

use crate::{Declined, Endpoint, TransferPlan};

/// A plan's blocks and layers in chunks of so many, and what a chunk looks like in a slot:
/// the config of a layout of whole blocks, of which only the layers of the chunk are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Of a full chunk. Its blocks and layers are those of a chunk.
    pub(super) slot: LayoutConfig,
    blocks: usize,
    first_layer: u32,
    end_layer: u32,
}

/// Some of the plan's pairs of blocks, and some of its layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) pairs: Range<usize>,
    pub(super) layers: Range<u32>,
}

/// With this many chunks, all but an eighth of the shorter hop is hidden behind the other one.
const CHUNKS: u64 = 8;

/// Smaller chunks would cost more in latency than they hide.
const LEAST_CHUNK: ByteCount = ByteCount::mib(1);

impl Cut {
    /// Cuts `plan` for slots of `slot_bytes`.
    ///
    /// Chunks are of whole blocks, as near to an eighth of the plan as the slots and the latency
    /// of a hop allow; of some layers of one block, where a block does not fit.
    pub(super) fn of(plan: &TransferPlan, slot_bytes: ByteCount) -> Result<Self, Declined> {
        let base = shaping_end(plan).layout().config();
        let all = plan.layers();
        // Both are at most the bytes of a block, which its config proved to fit.
        let layer_bytes = base.piece_bytes().get() * u64::from(base.outer_dim());
        let block_bytes = layer_bytes * u64::from(all.end - all.start);
        let wanted = (plan.bytes().get() / CHUNKS).max(LEAST_CHUNK.get()).min(slot_bytes.get());
        let count = ByteCount::from_usize(plan.destination_blocks().len()).get();
        let (blocks, layers) = if block_bytes <= slot_bytes.get() {
            ((wanted / block_bytes.max(1)).clamp(1, count.max(1)), all.end - all.start)
        } else {
            let layers = slot_bytes.get().checked_div(layer_bytes).unwrap_or(0);
            (1, u32::try_from(layers).unwrap_or(u32::MAX).min(all.end - all.start))
        };
        if layers == 0 {
            return Err(Declined::SlotTooSmall);
        }
        let slot =
            u32::try_from(blocks).map_err(|_| Declined::SlotTooSmall).and_then(|blocks| {
                base.with_num_layers(layers)
                    .and_then(|config| config.with_num_blocks(blocks))
                    .and_then(|config| config.with_block_alignment(Alignment::BYTE))
                    .map_err(|_| Declined::SlotTooSmall)
            })?;
        let blocks = ByteCount::new(count).to_usize();
        Ok(Self { slot, blocks, first_layer: all.start, end_layer: all.end })
    }

    /// How many chunks there are.
    pub(super) fn chunks(&self) -> usize {
        self.blocks.div_ceil(self.pairs_of_chunk()) * self.groups_of_layers()
    }

    /// A chunk by its number, from 0 on; one block after the other.
    pub(super) fn chunk(&self, number: usize) -> Option<Chunk> {
        if number >= self.chunks() {
            return None;
        }
        let (group, part) = (number / self.groups_of_layers(), number % self.groups_of_layers());
        let begin = group * self.pairs_of_chunk();
        let pairs = begin..(begin + self.pairs_of_chunk()).min(self.blocks);
        let part = u32::try_from(part).ok()?;
        let first = self.first_layer + part * self.slot.num_layers();
        let layers = first..first.saturating_add(self.slot.num_layers()).min(self.end_layer);
        Some(Chunk { pairs, layers })
    }

    fn pairs_of_chunk(&self) -> usize {
        index(self.slot.num_blocks())
    }

    fn groups_of_layers(&self) -> usize {
        index((self.end_layer - self.first_layer).div_ceil(self.slot.num_layers()))
    }
}

/// The end whose blocks the chunks look like: what reorders pieces is then the other hop. Files
/// want what they have in one piece, and devices reorder best.
fn shaping_end(plan: &TransferPlan) -> &Endpoint {
    let rank = |end: &Endpoint| match end.kind() {
        StorageKind::Disk => 2,
        kind if kind.is_device() => 0,
        _ => 1,
    };
    let (source, destination) = (plan.source(), plan.destination());
    if rank(source) > rank(destination) { source } else { destination }
}

fn index(count: u32) -> usize {
    ByteCount::new(count.into()).to_usize()
}
