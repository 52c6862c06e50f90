//! The runs of a plan: by their numbers, and as a list.
//!
//! A *tile* is the copies of one iteration of the outer loops (blocks, layers, sections). It has
//! one run for each iteration of the inner loops.

use std::ops::Range;

use terrane_core::convert::{to_u64, to_usize};
use terrane_core::{Alignment, ByteCount};
use terrane_layout::AxisSteps;

use super::nest::{LayerGroup, LoopAxis, LoopNest, per_segment, per_step};
use super::run::{CopyRun, Distance};
use super::{Segment, TransferPlan};
use crate::side::{Ends, Side};

/// A tile: the start of its first run, and the loops around that run.
pub(crate) struct Tile<'a> {
    pub(crate) first: CopyRun,
    pub(crate) nest: &'a LoopNest,
    /// The first of its layers, by its number in the source.
    pub(crate) layer: u32,
    segment: usize,
}

impl Tile<'_> {
    /// Calls `each` with every run, in the order of their numbers.
    pub(crate) fn for_each(&self, each: &mut impl FnMut(&CopyRun)) {
        self.nest.for_each_inner(&mut |by| each(&self.first.moved(by)));
    }

    /// The bytes of all its runs.
    pub(crate) fn bytes(&self) -> u64 {
        self.first.bytes * self.nest.inner_count()
    }
}

impl TransferPlan {
    /// A tile by its number.
    pub(crate) fn tile(&self, index: u64) -> Option<Tile<'_>> {
        self.find(index, |_| 1).map(|(tile, _)| tile)
    }

    /// The number of the first run of a tile.
    pub(crate) fn first_run_of(&self, tile: u64) -> u64 {
        (0..tile).filter_map(|tile| self.tile(tile)).map(|tile| tile.nest.inner_count()).sum()
    }

    /// A run by its index in [`runs`](Self::runs). This does not create the list.
    #[must_use]
    pub fn run(&self, index: usize) -> Option<CopyRun> {
        let (tile, inner) = self.find(to_u64(index), LoopNest::inner_count)?;
        Some(tile.first.moved(&tile.nest.inner_distance(inner)))
    }

    /// The layer that a run begins with, by its number in the source; `u32::MAX` if there is no
    /// such run.
    #[must_use]
    pub fn layer(&self, run: usize) -> u32 {
        self.find(to_u64(run), LoopNest::inner_count).map_or(u32::MAX, |(tile, _)| tile.layer)
    }

    /// The source block and the destination block of byte `offset` of a run; `None` if there is no
    /// such run.
    #[must_use]
    pub fn blocks_of(&self, run: usize, offset: ByteCount) -> Option<Ends<u32>> {
        let (segment, of_each) = self.pieces_of(run)?;
        let piece = offset.get() / of_each % u64::from(segment.blocks);
        let further = u32::try_from(piece).unwrap_or(0);
        let (source, destination) = (segment.source + further, segment.destination + further);
        Some(Ends { source, destination })
    }

    /// Calls `each` with the pairs of blocks of some bytes of a run: the index of the pair, and its
    /// number of bytes.
    pub(crate) fn pairs_of(&self, run: usize, bytes: Range<u64>, each: &mut impl FnMut(u32, u64)) {
        let Some((segment, of_each)) = self.pieces_of(run) else { return };
        let mut at = bytes.start;
        while at < bytes.end {
            let piece = at / of_each;
            let end = ((piece + 1) * of_each).min(bytes.end);
            let further = u32::try_from(piece % u64::from(segment.blocks)).unwrap_or(0);
            each(segment.pair + further, end - at);
            at = end;
        }
    }

    /// The index of a run's first block in the lists of blocks.
    pub(crate) fn pair_of(&self, run: usize) -> Option<u32> {
        self.pieces_of(run).map(|(segment, _)| segment.pair)
    }

    /// The blocks of a run, and the bytes of each of its pieces.
    fn pieces_of(&self, run: usize) -> Option<(Segment, u64)> {
        let (tile, _) = self.find(to_u64(run), LoopNest::inner_count)?;
        let segment = self.segment(tile.segment)?;
        let pieces = u64::from(segment.blocks) * tile.nest.passes();
        let of_each = tile.first.bytes.checked_div(pieces).unwrap_or(0).max(1);
        Some((segment, of_each))
    }

    /// The tile with item `index`, and the item's number within the tile. Each tile has `weight`
    /// items.
    fn find(&self, index: u64, weight: impl Fn(&LoopNest) -> u64) -> Option<(Tile<'_>, u64)> {
        let segments = to_u64(self.segment_count());
        let of_group = |group: &LayerGroup| group.steps * per_step(group, &weight);
        let all = per_segment(self.groups(), &weight);
        let (block, mut rest, repeat) = if self.loops.by_block {
            (index.checked_div(all)?, index % all, 1)
        } else {
            (0, index, segments)
        };
        for group in self.groups() {
            let items = of_group(group) * repeat;
            if rest >= items {
                rest -= items;
                continue;
            }
            let of_step = per_step(group, &weight) * repeat;
            let (step, mut rest) = (rest / of_step, rest % of_step);
            for nest in &group.nests {
                let each = weight(nest);
                let items = nest.sections() * each * repeat;
                if rest >= items {
                    rest -= items;
                    continue;
                }
                let (outer, item) = (rest / each, rest % each);
                let (section, segment) = if self.loops.by_block {
                    (outer, block)
                } else {
                    (outer / segments, outer % segments)
                };
                let segment = to_usize(segment);
                let tile = Tile {
                    first: tile_run(nest, step, section, &self.segment(segment)?),
                    nest,
                    layer: self.layer_of(group, step),
                    segment,
                };
                return Some((tile, item));
            }
        }
        None
    }

    fn layer_of(&self, group: &LayerGroup, step: u64) -> u32 {
        let step = u32::try_from(step).unwrap_or(u32::MAX);
        self.loops.selection.layers.source.start
            + group.first
            + step.saturating_mul(group.layers_per_step)
    }

    /// Fills in the list of runs.
    ///
    /// Products and sums cannot overflow: every run is within its regions. Ids, layers and rows
    /// have been checked against the geometries, which prove that all their bytes fit.
    pub(super) fn make_runs(&self, runs: &mut Vec<CopyRun>) {
        runs.reserve(to_usize(self.run_count));
        if self.loops.breaks_pieces {
            let tiles = per_segment(self.groups(), |_| 1) * to_u64(self.segment_count());
            let tiles = (0..tiles).filter_map(|index| self.tile(index));
            tiles.for_each(|tile| tile.for_each(&mut |run| runs.push(*run)));
        } else if self.loops.by_block {
            self.block_by_block(runs);
        } else {
            self.layer_by_layer(runs);
        }
    }

    fn block_by_block(&self, runs: &mut Vec<CopyRun>) {
        let add_segment = |runs: &mut Vec<CopyRun>, segment: &Segment| {
            for group in self.groups() {
                for step in 0..group.steps {
                    for nest in &group.nests {
                        let sections = 0..nest.sections();
                        runs.extend(sections.map(|section| tile_run(nest, step, section, segment)));
                    }
                }
            }
        };
        let mut segments = self.segments();
        let Some(first) = segments.next() else { return };
        add_segment(runs, &first);
        // All other segments have the same runs, moved by the distance of their blocks.
        let of_segment = runs.len();
        let Some(steps) = self.linear_blocks() else {
            // Blocks at uneven distances.
            return segments.for_each(|segment| add_segment(runs, &segment));
        };
        let strides = steps.map(|steps| steps.inner().stride);
        for segment in segments {
            let from = distance(first.source, segment.source, strides.source);
            let to = distance(first.destination, segment.destination, strides.destination);
            let begin = runs.len();
            runs.extend_from_within(..of_segment);
            let added = runs.get_mut(begin..).unwrap_or_default();
            for run in &mut *added {
                run.source_offset = run.source_offset.wrapping_add(from);
                run.destination_offset = run.destination_offset.wrapping_add(to);
            }
            // Most plans join no blocks, and then a division for each run would take longer than
            // all other work.
            if segment.blocks != first.blocks {
                let (had, has) = (u64::from(first.blocks), u64::from(segment.blocks));
                added.iter_mut().for_each(|run| run.bytes = run.bytes / had * has);
            }
        }
    }

    /// The strides of blocks, if they are equal in all nests and blocks are not split.
    fn linear_blocks(&self) -> Option<Ends<AxisSteps>> {
        let mut nests = self.groups().iter().flat_map(|group| &group.nests);
        let steps = nests.next()?.block;
        let is_linear = steps.as_ref().into_iter().all(|steps| steps.outer().count == 1);
        (is_linear && nests.all(|nest| nest.block == steps)).then_some(steps)
    }

    fn layer_by_layer(&self, runs: &mut Vec<CopyRun>) {
        for group in self.groups() {
            let add_step = |runs: &mut Vec<CopyRun>, step| {
                for nest in &group.nests {
                    for section in 0..nest.sections() {
                        let run = |segment| tile_run(nest, step, section, &segment);
                        runs.extend(self.segments().map(run));
                    }
                }
            };
            let begin = runs.len();
            add_step(runs, 0);
            let of_layer = runs.len() - begin;
            let mut nests = group.nests.iter().map(|nest| nest.outer_over(LoopAxis::Layers));
            let level = nests.next().flatten();
            if level.is_some() && nests.all(|other| other == level) {
                // All other layers have the same runs, one step further at each end.
                let step = level.map_or(Distance::ZERO, |level| level.step);
                for _ in 1..group.steps {
                    let last = runs.len() - of_layer;
                    runs.extend_from_within(last..);
                    for run in runs.iter_mut().skip(last + of_layer) {
                        *run = run.moved(&step);
                    }
                }
                continue;
            }
            (1..group.steps).for_each(|step| add_step(runs, step));
        }
    }

    /// The alignment of the offsets and lengths of all runs at one end.
    pub(crate) fn run_alignment(&self, side: Side) -> Alignment {
        let of_end = self.end(side).alignment();
        if !self.loops.breaks_pieces {
            return of_end;
        }
        let nests = self.groups().iter().flat_map(|group| &group.nests);
        let bits = nests.fold(0, |bits, nest| {
            let levels = nest.outer.iter().chain(&nest.inner);
            let start = bits | nest.unit | nest.base.get(side).offset;
            levels.fold(start, |bits, level| bits | level.step.0.get(side).offset)
        });
        of_end_bases(self, side).min(Alignment::of(bits | self.block_bits(side)))
    }

    /// The alignment of contiguous stretches at one end, over all runs of a pair of blocks.
    pub(super) fn stretch_alignment(&self, side: Side) -> Alignment {
        let mut bits = self.block_bits(side);
        for group in self.groups() {
            let mut nests: Vec<NestAtEnd> =
                group.nests.iter().map(|nest| NestAtEnd::of(nest, side)).collect();
            join_adjacent(&mut nests);
            for nest in &nests {
                bits |= nest.start | nest.bytes;
                bits = nest.levels.iter().fold(bits, |bits, &(_, stride)| bits | stride);
            }
        }
        of_end_bases(self, side).min(Alignment::of(bits))
    }

    fn block_bits(&self, side: Side) -> u64 {
        let sections = self.end(side).layout().geometry().sections();
        let blocks = sections.iter().map(|section| section.steps(terrane_layout::Axis::Block));
        let steps = blocks.flat_map(|steps| steps.parts()).filter(|(count, _)| *count > 1);
        steps.fold(0, |bits, (_, step)| bits | step.offset)
    }
}

/// The largest power of two that divides the start of every region of an end.
fn of_end_bases(plan: &TransferPlan, side: Side) -> Alignment {
    let bases = plan.end(side).bases().iter();
    bases.map(|base| base.alignment()).min().unwrap_or(Alignment::BYTE)
}

/// The runs of a nest at one end: equal stretches in loops. The innermost loop comes first.
struct NestAtEnd {
    region: u32,
    start: u64,
    bytes: u64,
    levels: Vec<(u64, u64)>,
}

impl NestAtEnd {
    fn of(nest: &LoopNest, side: Side) -> Self {
        let base = nest.base.get(side);
        let levels = nest.outer.iter().chain(&nest.inner);
        let mut levels: Vec<(u64, u64)> = levels
            .map(|level| (level.count, level.step.0.get(side)))
            // The stretches of other regions are equal.
            .filter(|(_, step)| step.region == 0)
            .map(|(count, step)| (count, step.offset))
            .collect();
        levels.sort_by_key(|&(_, stride)| stride);
        let mut nest = Self { region: base.region, start: base.offset, bytes: nest.unit, levels };
        nest.join();
        nest
    }

    fn join(&mut self) {
        while let Some(&(count, stride)) = self.levels.first().filter(|level| level.1 == self.bytes)
        {
            self.bytes = count * stride;
            self.levels.remove(0);
        }
    }
}

/// Joins adjacent nests, such as those of K and V in shared rows.
fn join_adjacent(nests: &mut Vec<NestAtEnd>) {
    nests.sort_by_key(|nest| (nest.region, nest.start));
    let mut joined = true;
    while joined {
        joined = false;
        for index in 1..nests.len() {
            let Some([first, second]) = nests
                .get_mut(index - 1..=index)
                .and_then(|two| <&mut [NestAtEnd; 2]>::try_from(two).ok())
            else {
                continue;
            };
            let follows = first.region == second.region
                && first.start + first.bytes == second.start
                && first.levels == second.levels;
            if follows {
                first.bytes += second.bytes;
                first.join();
                nests.remove(index);
                joined = true;
                break;
            }
        }
    }
}

/// The first run of a tile, for the blocks of a segment.
fn tile_run(nest: &LoopNest, step: u64, section: u64, segment: &Segment) -> CopyRun {
    let mut by = Distance(Ends {
        source: nest.block.source.place(segment.source),
        destination: nest.block.destination.place(segment.destination),
    });
    for level in &nest.outer {
        let index = if level.over == LoopAxis::Layers { step } else { section };
        by = by.plus(&level.step.times(index));
    }
    CopyRun::new(&nest.base, nest.unit * u64::from(segment.blocks)).moved(&by)
}

fn distance(from: u32, to: u32, stride: u64) -> u64 {
    u64::from(to).wrapping_sub(from.into()).wrapping_mul(stride)
}
