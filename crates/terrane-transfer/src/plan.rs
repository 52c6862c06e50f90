//! What a transfer comes down to: runs of bytes.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use terrane_core::{ByteCount, Location};
use terrane_layout::{BlockDimension, ContiguousUnit, Geometry, LayoutKind, RegionOffset};

use crate::{CopyGrid, Endpoint, Side};

/// A validated transfer, broken into as few copies as there can be.
///
/// It keeps both ends alive. Its buffers go back to the planner when it drops.
pub struct TransferPlan {
    pub(crate) source: Endpoint,
    pub(crate) destination: Endpoint,
    pub(crate) layers: Range<u32>,
    /// Whether layers are copied one after the other, and never together.
    pub(crate) layer_wise: bool,
    pub(crate) pieces: u64,
    pub(crate) bytes: ByteCount,
    pub(crate) buffers: Buffers,
    pub(crate) spare: Arc<ArrayQueue<Buffers>>,
}

/// The lists of a plan, used again by later ones.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// The blocks, as pairs in ascending order of the destination.
    pub(crate) sources: Vec<u32>,
    pub(crate) destinations: Vec<u32>,
    pub(crate) segments: Vec<Segment>,
    pub(crate) runs: Vec<CopyRun>,
}

/// Blocks that follow one another at both ends and are adjacent in memory there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) source: u32,
    pub(crate) destination: u32,
    pub(crate) blocks: u32,
}

/// A run of bytes that is contiguous at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRun {
    pub(crate) source_region: u32,
    pub(crate) destination_region: u32,
    pub(crate) source_offset: u64,
    pub(crate) destination_offset: u64,
    pub(crate) bytes: u64,
}

impl CopyRun {
    /// Where it begins in the source.
    #[inline]
    #[must_use]
    pub const fn source(&self) -> RegionOffset {
        RegionOffset { region: self.source_region, offset: self.source_offset }
    }

    /// Where it begins in the destination.
    #[inline]
    #[must_use]
    pub const fn destination(&self) -> RegionOffset {
        RegionOffset { region: self.destination_region, offset: self.destination_offset }
    }

    /// Where it begins at one end.
    #[inline]
    #[must_use]
    pub const fn at(&self, side: Side) -> RegionOffset {
        match side {
            Side::Source => self.source(),
            Side::Destination => self.destination(),
        }
    }

    /// What is left of it from `offset` on; all of it, if it is shorter than that.
    pub(crate) const fn rest(&self, offset: ByteCount) -> Self {
        let skipped = if offset.get() < self.bytes { offset.get() } else { 0 };
        Self {
            source_offset: self.source_offset + skipped,
            destination_offset: self.destination_offset + skipped,
            bytes: self.bytes - skipped,
            ..*self
        }
    }

    /// How long it is.
    #[inline]
    #[must_use]
    pub const fn bytes(&self) -> ByteCount {
        ByteCount::new(self.bytes)
    }
}

impl TransferPlan {
    /// Where the bytes come from.
    #[must_use]
    pub fn source(&self) -> &Endpoint {
        &self.source
    }

    /// Where they go.
    #[must_use]
    pub fn destination(&self) -> &Endpoint {
        &self.destination
    }

    /// One end.
    #[must_use]
    pub fn end(&self, side: Side) -> &Endpoint {
        match side {
            Side::Source => &self.source,
            Side::Destination => &self.destination,
        }
    }

    /// The runs. No two overlap in the destination, and none overlaps any run's source.
    #[must_use]
    pub fn runs(&self) -> &[CopyRun] {
        &self.buffers.runs
    }

    /// The same copies as strides, for engines that compute addresses. The blocks are those of
    /// [`source_blocks`](Self::source_blocks) and [`destination_blocks`](Self::destination_blocks).
    #[must_use]
    pub fn grid(&self) -> CopyGrid {
        CopyGrid::of(self)
    }

    /// The blocks that are read, the n-th into the n-th of
    /// [`destination_blocks`](Self::destination_blocks).
    #[must_use]
    pub fn source_blocks(&self) -> &[u32] {
        &self.buffers.sources
    }

    /// The blocks that are written, in ascending order.
    #[must_use]
    pub fn destination_blocks(&self) -> &[u32] {
        &self.buffers.destinations
    }

    /// The layers.
    #[must_use]
    pub fn layers(&self) -> Range<u32> {
        self.layers.clone()
    }

    /// The spans before coalescing: one for each block, layer and outer.
    #[must_use]
    pub fn pieces(&self) -> u64 {
        self.pieces
    }

    /// All the bytes to copy.
    #[must_use]
    pub fn bytes(&self) -> ByteCount {
        self.bytes
    }

    /// How much of a block is contiguous at both ends, as far as it is copied together.
    pub(crate) fn unit(&self) -> ContiguousUnit {
        let [source, destination] =
            [&self.source, &self.destination].map(|end| end.layout().geometry().contiguous_unit());
        let whole = if self.layer_wise { ContiguousUnit::Layer } else { ContiguousUnit::Block };
        source.min(destination).min(whole)
    }

    /// The layer of which a run is, or that it begins with.
    #[must_use]
    pub fn layer(&self, run: &CopyRun) -> u32 {
        let (geometry, at) = (self.destination.layout().geometry(), run.destination());
        if geometry.region_count() > 1 {
            return at.region;
        }
        let within_block = at.offset % geometry.block_stride().get();
        // One region of several layers has them within each block.
        let layer = within_block.checked_div(geometry.layer_stride().get()).unwrap_or(0);
        u32::try_from(layer).unwrap_or(u32::MAX)
    }

    /// The mean length of a run; zero where there is none.
    #[must_use]
    pub fn mean_run(&self) -> ByteCount {
        let runs = ByteCount::from_usize(self.runs().len()).get();
        ByteCount::new(self.bytes.get().checked_div(runs).unwrap_or(0))
    }

    /// Where a run begins at one end; `None` for a run of another plan.
    #[inline]
    #[must_use]
    pub fn location(&self, run: &CopyRun, side: Side) -> Option<Location> {
        let at = run.at(side);
        self.end(side).base(at.region)?.checked_add(ByteCount::new(at.offset))
    }

    /// The block of the source in which a run begins.
    #[must_use]
    pub fn source_block(&self, run: &CopyRun) -> u32 {
        block_at(self.source.layout().geometry(), run.source())
    }

    /// The block of the destination in which a run begins.
    #[must_use]
    pub fn destination_block(&self, run: &CopyRun) -> u32 {
        block_at(self.destination.layout().geometry(), run.destination())
    }
}

impl Drop for TransferPlan {
    fn drop(&mut self) {
        let mut buffers = std::mem::take(&mut self.buffers);
        buffers.clear();
        // With spares enough, these are just freed.
        let _ = self.spare.push(buffers);
    }
}

impl fmt::Debug for TransferPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferPlan")
            .field("blocks", &self.buffers.destinations.len())
            .field("layers", &self.layers)
            .field("bytes", &self.bytes)
            .field("pieces", &self.pieces)
            .field("runs", &self.buffers.runs.len())
            .finish_non_exhaustive()
    }
}

impl Buffers {
    pub(crate) fn clear(&mut self) {
        self.sources.clear();
        self.destinations.clear();
        self.segments.clear();
        self.runs.clear();
    }
}

/// The block that holds an offset: outers may lie outside blocks, layers never do.
fn block_at(geometry: &Geometry, at: RegionOffset) -> u32 {
    let outer_first = LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };
    let within_outer = if geometry.kind() == outer_first {
        at.offset % geometry.outer_stride().get()
    } else {
        at.offset
    };
    u32::try_from(within_outer / geometry.block_stride().get()).unwrap_or(u32::MAX)
}
