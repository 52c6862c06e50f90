//! The division of a plan into chunks that fit into a slot.

use std::ops::Range;

use terrane_core::ByteCount;
use terrane_core::convert::{to_u64, to_usize};
use terrane_layout::Geometry;

use super::slot;
use crate::engine::declined::Declined;
use crate::plan::TransferPlan;

/// A plan's blocks and layers in chunks, and the layout of a chunk in a slot. That layout has whole
/// blocks, but only the layers of the chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunking {
    /// The layout of a full chunk. Its blocks and layers are those of a chunk.
    pub(super) slot: Geometry,
    blocks: usize,
    layers: Range<u32>,
    destination_first_layer: u32,
    /// Whether the first layers of all blocks come before the next layers.
    by_layer: bool,
}

/// Some of the plan's pairs of blocks, and some of its layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) pairs: Range<usize>,
    /// The layers, by their numbers in the source.
    pub(super) layers: Range<u32>,
    /// The destination's layer for the first of them.
    pub(super) destination_first_layer: u32,
}

/// With this many chunks, the faster hop mostly overlaps with the slower one.
const CHUNKS: u64 = 8;

/// Smaller chunks cost more in latency than the overlap gains.
const MIN_CHUNK: ByteCount = ByteCount::mib(1);

impl Chunking {
    /// Divides `plan` for slots of `slot_bytes`.
    ///
    /// Chunks have whole blocks. Their size is as near to an eighth of the plan as the slots and
    /// the latency of a hop allow. If a block does not fit, a chunk has some layers of one block.
    /// If layers are copied in order, a chunk has some layers of all blocks, or of as many blocks
    /// as fit.
    pub(super) fn of(
        plan: &TransferPlan,
        by_layer: bool,
        slot_bytes: ByteCount,
    ) -> Result<Self, Declined> {
        let layers = plan.layers();
        let num_layers = u64::from(layers.end - layers.start);
        // None of these exceeds the bytes of a block, or of the plan, whose sizes are already
        // checked.
        let (layer_bytes, keeps_layers) = slot::layer_bytes(plan);
        let layer_bytes = layer_bytes.get();
        let blocks = plan.destination_blocks().len();
        let num_blocks = to_u64(blocks).max(1);
        let wanted = (plan.bytes().get() / CHUNKS).max(MIN_CHUNK.get()).min(slot_bytes.get());
        // The number of outer and of inner items in a chunk, each of `bytes` bytes. If not even one
        // outer item with `inner` inner items fits, it has fewer inner items.
        let fit = |outer: u64, inner: u64, bytes: u64| {
            if inner * bytes <= slot_bytes.get() {
                ((wanted / (inner * bytes)).clamp(1, outer), inner)
            } else {
                (1, slot_bytes.get() / bytes)
            }
        };
        let (of_blocks, of_layers) = if by_layer {
            let (of_layers, of_blocks) = fit(num_layers, num_blocks, layer_bytes);
            (of_blocks, of_layers)
        } else {
            fit(num_blocks, num_layers, layer_bytes)
        };
        let [of_blocks, of_layers] = [of_blocks, of_layers].map(u32::try_from);
        let (Ok(of_blocks @ 1..), Ok(of_layers @ 1..)) = (of_blocks, of_layers) else {
            return Err(Declined::SlotTooSmall);
        };
        if keeps_layers && u64::from(of_layers) < num_layers {
            return Err(Declined::SlotTooSmall);
        }
        let slot =
            slot::geometry(plan, of_blocks, of_layers).map_err(|_| Declined::SlotTooSmall)?;
        Ok(Self {
            slot,
            blocks,
            layers,
            destination_first_layer: plan.destination_first_layer(),
            by_layer,
        })
    }

    /// The number of chunks.
    pub(super) fn chunks(&self) -> usize {
        self.groups_of_blocks() * self.groups_of_layers()
    }

    /// Returns a chunk by its number, starting at 0.
    pub(super) fn chunk(&self, number: usize) -> Option<Chunk> {
        let blocks = match self.by_layer {
            true => number.checked_rem(self.groups_of_blocks())?,
            false => number / self.groups_of_layers(),
        };
        let begin = blocks * index(self.slot.num_blocks());
        let pairs = begin..(begin + index(self.slot.num_blocks())).min(self.blocks);
        let layers = self.layers_of(self.group_of_layers(number)?)?;
        let destination_first_layer =
            self.destination_first_layer + (layers.start - self.layers.start);
        Some(Chunk { pairs, layers, destination_first_layer })
    }

    /// The layer group of a chunk.
    pub(super) fn group_of_layers(&self, number: usize) -> Option<usize> {
        if number >= self.chunks() {
            return None;
        }
        match self.by_layer {
            true => number.checked_div(self.groups_of_blocks()),
            false => Some(number % self.groups_of_layers()),
        }
    }

    /// The layers of a group.
    pub(super) fn layers_of(&self, group: usize) -> Option<Range<u32>> {
        let first = u32::try_from(group).ok()?.checked_mul(self.slot.num_layers())?;
        let first = self.layers.start.checked_add(first)?;
        Some(first..first.saturating_add(self.slot.num_layers()).min(self.layers.end))
    }

    /// The number of layer groups; each has chunks of all blocks.
    pub(super) fn groups_of_layers(&self) -> usize {
        index((self.layers.end - self.layers.start).div_ceil(self.slot.num_layers()))
    }

    /// The number of chunks in a layer group.
    pub(super) fn groups_of_blocks(&self) -> usize {
        self.blocks.div_ceil(index(self.slot.num_blocks()))
    }
}

/// The heads or tokens in a slot, from the range that is copied at one end.
pub(super) fn rows_in_slot(range: &Range<u32>) -> Range<u32> {
    0..range.end - range.start
}

fn index(count: u32) -> usize {
    to_usize(count.into())
}
