//! The runs of bytes that a transfer copies.

mod block_sort;
mod buffers;
pub(crate) mod grid;
mod loops;
mod nest;
mod overlap;
pub(crate) mod planner;
pub(crate) mod run;
mod runs;
mod shape;

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;
use terrane_core::{Alignment, ByteCount, Location};

use crate::hazard::endpoint::Endpoint;
use crate::side::{Ends, Side};
use crate::sync::lock;
use block_sort::PairSorter;
use buffers::{Buffers, PlanBuffers, Segment};
use loops::BlockLoops;
use nest::LayerGroup;
use run::CopyRun;

/// A validated transfer, broken into as few copies as possible.
///
/// It keeps both ends alive. Its buffers return to the planner when it drops.
pub struct TransferPlan {
    ends: Ends<Endpoint>,
    /// The copies for each pair of blocks.
    loops: Arc<BlockLoops>,
    /// The groups if all blocks are one segment that joins sections. Boxed, because plans are moved.
    joined_groups: Option<Box<SmallVec<[LayerGroup; 1]>>>,
    pieces: u64,
    bytes: ByteCount,
    run_count: u64,
    buffers: PlanBuffers,
}

impl TransferPlan {
    /// The source.
    #[must_use]
    pub fn source(&self) -> &Endpoint {
        &self.ends.source
    }

    /// The destination.
    #[must_use]
    pub fn destination(&self) -> &Endpoint {
        &self.ends.destination
    }

    /// One end.
    #[must_use]
    pub fn end(&self, side: Side) -> &Endpoint {
        self.ends.get(side)
    }

    /// The runs. No two overlap in the destination, and none overlaps any run's source.
    ///
    /// The first call creates the list. It can have hundreds of thousands of entries, and millions
    /// for [broken-up](Self::breaks_pieces) pieces. Engines that need no list use
    /// [`grids`](Self::grids).
    #[must_use]
    pub fn runs(&self) -> &[CopyRun] {
        self.buffers.listed_runs.get_or_init(|| {
            let mut runs = std::mem::take(&mut *lock(&self.buffers.spare_runs));
            self.make_runs(&mut runs);
            runs
        })
    }

    terrane_core::getters! {
        /// The number of runs. This does not create the list.
        run_count: u64,
        /// The pieces to copy: one for each block, layer and section.
        pieces: u64,
        /// The total number of bytes to copy.
        bytes: ByteCount,
    }

    /// Whether parts of pieces are copied one by one: the ends differ in the strides of rows, or
    /// only some heads or tokens are copied.
    #[must_use]
    pub fn breaks_pieces(&self) -> bool {
        self.loops.breaks_pieces
    }

    /// The copied heads at one end. If a layout does not state any, the row counts as one head.
    #[must_use]
    pub fn heads(&self, side: Side) -> Range<u32> {
        self.loops.selection.heads.get(side).clone()
    }

    /// The copied tokens at one end; `None` for all of them.
    #[must_use]
    pub fn tokens(&self, side: Side) -> Option<Range<u32>> {
        self.loops.selection.tokens.as_ref().map(|tokens| tokens.get(side).clone())
    }

    /// Whether all heads of both ends are copied.
    pub(crate) fn has_all_heads(&self) -> bool {
        self.loops.selection.has_all_heads
    }

    /// Whether all heads and tokens of the blocks of one end are copied.
    pub(crate) fn has_whole_rows(&self, side: Side) -> bool {
        let sections = self.end(side).layout().geometry().sections();
        let has_all = |range: Range<u32>, count: u32| range == (0..count);
        let heads = self.loops.selection.has_all_heads
            || sections.iter().all(|section| {
                section.shape().heads.is_none_or(|count| has_all(self.heads(side), count))
            });
        let tokens = self.tokens(side).is_none_or(|range| {
            sections.iter().all(|section| has_all(range.clone(), section.shape().tokens))
        });
        heads && tokens
    }

    /// The copies for each pair of blocks, or for all of them if sections are joined.
    fn groups(&self) -> &[LayerGroup] {
        self.joined_groups.as_deref().unwrap_or(&self.loops.groups)
    }

    fn segment_count(&self) -> usize {
        let Buffers { destinations, segments, .. } = &*self.buffers;
        if self.loops.joins_blocks { segments.len() } else { destinations.len() }
    }

    /// A segment by its number.
    fn segment(&self, number: usize) -> Option<Segment> {
        if self.loops.joins_blocks {
            return self.buffers.segments.get(number).copied();
        }
        let (sources, destinations) = (self.source_blocks(), self.destination_blocks());
        let (&source, &destination) = sources.get(number).zip(destinations.get(number))?;
        Some(Segment { source, destination, blocks: 1, pair: u32::try_from(number).ok()? })
    }

    fn segments(&self) -> impl Iterator<Item = Segment> + '_ {
        (0..self.segment_count()).map_while(|number| self.segment(number))
    }

    /// The source blocks. The n-th is copied to the n-th of
    /// [`destination_blocks`](Self::destination_blocks).
    #[must_use]
    pub fn source_blocks(&self) -> &[u32] {
        &self.buffers.sources
    }

    /// The destination blocks, in ascending order.
    #[must_use]
    pub fn destination_blocks(&self) -> &[u32] {
        &self.buffers.destinations
    }

    /// The blocks of one end, in the order of the pairs.
    #[must_use]
    pub fn blocks(&self, side: Side) -> &[u32] {
        match side {
            Side::Source => self.source_blocks(),
            Side::Destination => self.destination_blocks(),
        }
    }

    /// The source blocks in ascending order, with their destination blocks. These are the same
    /// pairs as the n-th [source](Self::source_blocks) with the n-th
    /// [destination](Self::destination_blocks), for engines that need the source's order.
    #[must_use]
    pub fn pairs_by_source(&self) -> [Vec<u32>; 2] {
        let pairs = self.source_blocks().len();
        let (mut sources, mut destinations) =
            (Vec::with_capacity(pairs), Vec::with_capacity(pairs));
        let ids = self.source().layout().geometry().num_blocks();
        let (keys, values) = (self.source_blocks(), self.destination_blocks());
        PairSorter::default().sort(keys, values, ids, [&mut sources, &mut destinations]);
        [sources, destinations]
    }

    /// The layers, by their numbers in the source.
    #[must_use]
    pub fn layers(&self) -> Range<u32> {
        self.layers_of(Side::Source)
    }

    /// The layer of the destination that the first layer is copied to.
    #[must_use]
    pub fn destination_first_layer(&self) -> u32 {
        self.loops.selection.layers.destination.start
    }

    /// The layers, by their numbers at one end.
    pub(crate) fn layers_of(&self, side: Side) -> Range<u32> {
        self.loops.selection.layers.get(side).clone()
    }

    /// The mean length of a run; zero if there is none.
    #[must_use]
    pub fn mean_run(&self) -> ByteCount {
        ByteCount::new(self.bytes.get().checked_div(self.run_count()).unwrap_or(0))
    }

    /// The start of a run at one end; `None` for a run of another plan.
    #[inline]
    #[must_use]
    pub fn location(&self, run: &CopyRun, side: Side) -> Option<Location> {
        let at = run.at(side);
        self.end(side).base(at.region)?.checked_add(ByteCount::new(at.offset))
    }

    /// The largest power of two that divides the start and the end of the longest contiguous
    /// stretches at one end. It does not depend on how the other end breaks them up.
    #[must_use]
    pub fn alignment(&self, side: Side) -> Alignment {
        if self.loops.breaks_pieces {
            self.stretch_alignment(side)
        } else {
            self.end(side).alignment()
        }
    }
}

impl Drop for TransferPlan {
    fn drop(&mut self) {
        // Plans that break pieces up are rare, and have too many runs to keep their list.
        if self.loops.breaks_pieces {
            self.buffers.listed_runs = OnceLock::new();
        }
    }
}

terrane_core::debug_fields!(TransferPlan, |plan| {
    blocks: plan.buffers.destinations.len(),
    layers: plan.loops.selection.layers.source,
    bytes: plan.bytes,
    pieces: plan.pieces,
    runs: plan.run_count()
});
