//! What a transfer comes down to: runs of bytes.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crossbeam_queue::ArrayQueue;
use terrane_core::{Alignment, ByteCount, Location, OwnerProcess};
use terrane_layout::{BlockDimension, ContiguousUnit, Geometry, LayoutKind, RegionOffset};

use crate::cells::Cells;
use crate::pairs::PairSorter;
use crate::planner::make_runs;
use crate::sync::{Mutex, lock};
use crate::{CopyGrid, Endpoint, Side};

/// A validated transfer, broken into as few copies as there can be.
///
/// It keeps both ends alive. Its buffers go back to the planner when it drops.
pub struct TransferPlan {
    pub(crate) source: Endpoint,
    pub(crate) destination: Endpoint,
    pub(crate) layers: Range<u32>,
    /// The layer of the destination to which the first one goes.
    pub(crate) landing: u32,
    /// Whether layers are copied one after the other, and never together.
    pub(crate) layer_wise: bool,
    /// Of the source and of the destination.
    pub(crate) heads: [Range<u32>; 2],
    /// How pieces are broken up; `None` if they are copied whole.
    pub(crate) cells: Option<Cells>,
    pub(crate) pieces: u64,
    pub(crate) bytes: ByteCount,
    /// The runs, once somebody asks for the list: engines that compute addresses never do.
    pub(crate) made: OnceLock<Vec<CopyRun>>,
    /// The room for them until then.
    pub(crate) unmade: Mutex<Vec<CopyRun>>,
    pub(crate) run_count: u64,
    pub(crate) buffers: Buffers,
    pub(crate) spare: Arc<ArrayQueue<Buffers>>,
    pub(crate) owner: OwnerProcess,
}

/// The lists of a plan, used again by later ones.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// The blocks, as pairs in ascending order of the destination.
    pub(crate) sources: Vec<u32>,
    pub(crate) destinations: Vec<u32>,
    pub(crate) sorter: PairSorter,
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

    /// Whether another one goes on at both ends where this one ends.
    pub(crate) const fn is_followed_by(&self, next: &Self) -> bool {
        self.source_region == next.source_region
            && self.destination_region == next.destination_region
            && self.source_offset + self.bytes == next.source_offset
            && self.destination_offset + self.bytes == next.destination_offset
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

    /// `bytes` bytes, from these offsets on, which differ at the two ends.
    pub(crate) const fn part(&self, source: u64, destination: u64, bytes: u64) -> Self {
        Self {
            source_offset: self.source_offset + source,
            destination_offset: self.destination_offset + destination,
            bytes,
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

/// Which piece is meant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Indices {
    /// The place in the lists of blocks.
    pub(crate) pair: usize,
    pub(crate) layer: u32,
    pub(crate) outer: u32,
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
    ///
    /// The list is made at the first call: there can be hundreds of thousands, and millions of
    /// [broken-up](Self::breaks_pieces) pieces. Engines that need none take [`grid`](Self::grid).
    #[must_use]
    pub fn runs(&self) -> &[CopyRun] {
        self.made.get_or_init(|| {
            let Some(cells) = &self.cells else {
                let mut runs = std::mem::take(&mut *lock(&self.unmade));
                make_runs(self, &mut runs);
                return runs;
            };
            let mut runs = Vec::with_capacity(ByteCount::new(self.run_count()).to_usize());
            for piece in 0..self.pieces {
                let whole = self.piece(piece);
                cells.for_each(|from, to| runs.push(whole.part(from, to, cells.bytes)));
            }
            runs
        })
    }

    /// The number of runs, without a list of them.
    #[must_use]
    pub fn run_count(&self) -> u64 {
        self.run_count
    }

    /// A run by its index in [`runs`](Self::runs), without the list.
    #[must_use]
    pub fn run(&self, index: usize) -> Option<CopyRun> {
        let Some(cells) = &self.cells else { return self.runs().get(index).copied() };
        let index = ByteCount::from_usize(index).get();
        let piece = index / cells.count();
        let [from, to] = cells.offsets(index % cells.count());
        (piece < self.pieces).then(|| self.piece(piece).part(from, to, cells.bytes))
    }

    /// Whether less than whole pieces is copied at a time: the ends differ in their order of tokens
    /// and heads, or some heads are copied. Then every run lies within a piece, and every piece has
    /// as many.
    #[must_use]
    pub fn breaks_pieces(&self) -> bool {
        self.cells.is_some()
    }

    /// The heads that are copied, at one end; of a layout that does not state any, the one head that
    /// is its row.
    #[must_use]
    pub fn heads(&self, side: Side) -> Range<u32> {
        let [source, destination] = &self.heads;
        match side {
            Side::Source => source.clone(),
            Side::Destination => destination.clone(),
        }
    }

    /// The largest power of two that whatever is contiguous at one end begins and ends at a multiple
    /// of, however the other end breaks it up.
    #[must_use]
    pub fn alignment(&self, side: Side) -> Alignment {
        let of_pieces = self.end(side).alignment();
        let cells = self.cells.as_ref().map(|cells| match side {
            Side::Source => &cells.source,
            Side::Destination => &cells.destination,
        });
        cells.map_or(of_pieces, |cells| of_pieces.min(Alignment::of(cells.stretch_bits)))
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

    /// The blocks that are read, in ascending order, and those that they are written to: the same
    /// pairs as the n-th [source](Self::source_blocks) with the n-th
    /// [destination](Self::destination_blocks), for engines to which the source's order matters.
    #[must_use]
    pub fn pairs_by_source(&self) -> [Vec<u32>; 2] {
        let (mut sources, mut destinations) = (Vec::new(), Vec::new());
        let ids = self.source.layout().config().num_blocks();
        let (keys, values) = (self.source_blocks(), self.destination_blocks());
        PairSorter::default().sort(keys, values, ids, [&mut sources, &mut destinations]);
        [sources, destinations]
    }

    /// The layers, by their numbers in the source.
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
        let most = match (&self.cells, self.layer_wise) {
            (Some(_), _) => ContiguousUnit::Piece,
            (None, true) => ContiguousUnit::Layer,
            (None, false) => ContiguousUnit::Block,
        };
        source.min(destination).min(most)
    }

    /// The layer of which a run is, or that it begins with, by its number in the source.
    #[must_use]
    pub fn layer(&self, run: &CopyRun) -> u32 {
        let (geometry, at) = (self.source.layout().geometry(), run.source());
        if geometry.region_count() > 1 {
            return at.region;
        }
        let within_block = at.offset % geometry.block_stride().get();
        // One region of several layers has them within each block.
        let layer = within_block.checked_div(geometry.layer_stride().get()).unwrap_or(0);
        u32::try_from(layer).unwrap_or(u32::MAX)
    }

    /// The largest power of two that every run begins and ends at a multiple of, at one end.
    pub(crate) fn run_alignment(&self, side: Side) -> Alignment {
        let of_pieces = self.end(side).alignment();
        let Some(cells) = &self.cells else { return of_pieces };
        let end = match side {
            Side::Source => &cells.source,
            Side::Destination => &cells.destination,
        };
        let bits = cells.bytes | end.offset | end.row_stride | end.column_stride;
        of_pieces.min(Alignment::of(bits))
    }

    /// A piece, of those that are broken up, by its number: whole, as if it were one run.
    pub(crate) fn piece(&self, index: u64) -> CopyRun {
        let [source, destination] =
            [&self.source, &self.destination].map(|end| end.layout().geometry());
        let Indices { pair, layer, outer } = self.indices(index);
        let landing = layer.saturating_sub(self.layers.start).saturating_add(self.landing);
        let block = |blocks: &[u32]| blocks.get(pair).copied().unwrap_or_default();
        let from = source.offset(block(&self.buffers.sources), layer, outer);
        let to = destination.offset(block(&self.buffers.destinations), landing, outer);
        CopyRun {
            source_region: from.region,
            destination_region: to.region,
            source_offset: from.offset,
            destination_offset: to.offset,
            bytes: source.piece_bytes().get(),
        }
    }

    /// Which piece has a number. They are numbered in the order in which runs are.
    pub(crate) fn indices(&self, piece: u64) -> Indices {
        let outers = u64::from(self.source.layout().geometry().outer_dim());
        let layers = u64::from(self.layers.end - self.layers.start);
        let (pair, layer, outer) = if self.goes_by_block() {
            (piece / (layers * outers), piece / outers % layers, piece % outers)
        } else {
            let pairs = ByteCount::from_usize(self.buffers.sources.len()).get().max(1);
            (piece % pairs, piece / (pairs * outers), piece / pairs % outers)
        };
        // Remainders of numbers of 32 bits, but for pieces that do not exist.
        let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        Indices {
            pair: ByteCount::new(pair).to_usize(),
            layer: self.layers.start.saturating_add(small(layer)),
            outer: small(outer),
        }
    }

    /// Whether runs go block by block, for the end that holds blocks whole, which then is met in
    /// sequence; layer by layer otherwise.
    pub(crate) fn goes_by_block(&self) -> bool {
        let holds_blocks =
            |end: &Endpoint| end.layout().geometry().contiguous_unit() == ContiguousUnit::Block;
        !self.layer_wise && (holds_blocks(&self.source) || holds_blocks(&self.destination))
    }

    /// The mean length of a run; zero where there is none.
    #[must_use]
    pub fn mean_run(&self) -> ByteCount {
        ByteCount::new(self.bytes.get().checked_div(self.run_count()).unwrap_or(0))
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
        // In a forked process the list may be in the hands of a thread that is not there.
        if !self.owner.is_current() {
            return;
        }
        let mut buffers = std::mem::take(&mut self.buffers);
        let unmade = std::mem::take(&mut *lock(&self.unmade));
        // Broken-up pieces are rare, and their runs too many to be kept.
        let made = self.made.take().filter(|_| self.cells.is_none());
        buffers.runs = made.unwrap_or(unmade);
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
            .field("runs", &self.run_count())
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
