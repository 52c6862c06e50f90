//! The copies for each pair of blocks: loops around runs that are contiguous at both ends.

use smallvec::SmallVec;
use terrane_core::convert::to_u64;
use terrane_layout::{Axis, AxisSteps, RegionOffset, Section};

use super::run::Distance;
use super::shape::{RowAxis, Selection, SharedSection, count_of};
use crate::side::Ends;

/// The loops around one run, for each pair of blocks.
#[derive(Clone, Debug)]
pub(crate) struct LoopNest {
    /// The start of the first run of block 0 at both ends.
    pub(crate) base: Ends<RegionOffset>,
    /// The bytes of a run.
    pub(crate) unit: u64,
    /// Layers, then sections; the outermost first.
    pub(crate) outer: SmallVec<[Loop; 2]>,
    /// Heads, tokens and elements, in the order of the destination; the outermost first.
    pub(crate) inner: SmallVec<[Loop; 4]>,
    /// The strides of blocks at both ends.
    pub(crate) block: Ends<AxisSteps>,
    /// The loop over sections that a run joins, if the run covers the blocks of its segment once
    /// for each section.
    pub(crate) joined_loop: Option<Loop>,
}

/// One loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Loop {
    pub(crate) over: LoopAxis,
    pub(crate) count: u64,
    pub(crate) step: Distance,
}

impl Loop {
    fn over_rows(count: u32, step: Distance) -> Self {
        Self { over: LoopAxis::Rows, count: count.into(), step }
    }
}

/// The dimension of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LoopAxis {
    Layers,
    Sections,
    Rows,
}

/// Nests of some layers. Their loops over layers have equal counts.
#[derive(Clone, Debug)]
pub(crate) struct LayerGroup {
    pub(crate) nests: SmallVec<[LoopNest; 2]>,
    /// The first layer, counted from the first layer of the transfer.
    pub(crate) first: u32,
    /// Iterations of the loops over layers.
    pub(crate) steps: u64,
    /// Layers that each iteration copies.
    pub(crate) layers_per_step: u32,
}

/// The nests of a transfer.
pub(crate) fn layer_groups(
    sections: &[SharedSection<'_>],
    selection: &Selection,
    joins_layers: bool,
) -> SmallVec<[LayerGroup; 1]> {
    let count = count_of(&selection.layers.source);
    if !sections.iter().all(SharedSection::has_layers) {
        return apart_from_layers(sections, selection, joins_layers);
    }
    layers_of(sections, selection, count, joins_layers)
}

/// Sections without layers are a separate group after the others, if there are other layers.
fn apart_from_layers(
    sections: &[SharedSection<'_>],
    selection: &Selection,
    joins_layers: bool,
) -> SmallVec<[LayerGroup; 1]> {
    let count = count_of(&selection.layers.source);
    let (with, without): (Vec<_>, Vec<_>) = sections.iter().partition(|each| each.has_layers());
    let copied = |sections: Vec<&SharedSection<'_>>, layers| {
        let sections: Vec<SharedSection<'_>> = sections.into_iter().cloned().collect();
        layers_of(&sections, selection, layers, joins_layers)
    };
    let mut groups = if with.is_empty() { SmallVec::new() } else { copied(with, count) };
    for mut group in copied(without, 1) {
        group.layers_per_step = count;
        groups.push(group);
    }
    groups
}

fn layers_of(
    sections: &[SharedSection<'_>],
    selection: &Selection,
    count: u32,
    joins_layers: bool,
) -> SmallVec<[LayerGroup; 1]> {
    let is_linear = |section: &SharedSection<'_>| {
        section.ends.into_iter().all(|end| linear(end.steps(Axis::Layer)).is_some())
    };
    let firsts = selection.layers.as_ref().map(|layers| layers.start);
    if sections.iter().all(is_linear) {
        return SmallVec::from_iter([layer_group(
            sections,
            selection,
            firsts,
            count,
            0,
            joins_layers,
        )]);
    }
    // Layers at uneven distances are one group each.
    (0..count)
        .map(|layer| {
            let firsts = firsts.map(|first| first + layer);
            layer_group(sections, selection, firsts, 1, layer, joins_layers)
        })
        .collect()
}

fn layer_group(
    sections: &[SharedSection<'_>],
    selection: &Selection,
    firsts: Ends<u32>,
    count: u32,
    first: u32,
    joins_layers: bool,
) -> LayerGroup {
    let joined_nests = |joins_layers| {
        let mut nests: SmallVec<[LoopNest; 2]> = SmallVec::new();
        for section in sections {
            push_nests(section, selection, firsts, count, &mut nests);
        }
        combine_sections(&mut nests);
        nests.iter_mut().for_each(|nest| nest.join(joins_layers));
        nests
    };
    let nests = joined_nests(joins_layers);
    let steps_of =
        |nest: &LoopNest| nest.outer_over(LoopAxis::Layers).map_or(1, |level| level.count);
    let steps = nests.iter().map(steps_of).max().unwrap_or(1);
    if nests.iter().any(|nest| steps_of(nest) != steps) {
        // Layers join in some nests only. Then all nests keep the loop.
        let (nests, steps) = (joined_nests(false), count.into());
        return LayerGroup { nests, first, steps, layers_per_step: 1 };
    }
    let per_step = u64::from(count).checked_div(steps).unwrap_or(1);
    LayerGroup { nests, first, steps, layers_per_step: u32::try_from(per_step).unwrap_or(count) }
}

/// Adds the loops of one section. An axis that the two ends split differently makes several loops.
fn push_nests(
    section: &SharedSection<'_>,
    selection: &Selection,
    firsts: Ends<u32>,
    count: u32,
    nests: &mut SmallVec<[LoopNest; 2]>,
) {
    let begin = |(end, layer): (&Section, u32)| {
        // A section without layers is part of the first one.
        end.begin(0, if end.steps(Axis::Layer).count() == 1 { 0 } else { layer })
    };
    let mut base = LoopNest {
        base: section.ends.zip(firsts).map(begin),
        unit: section.unit,
        outer: SmallVec::new(),
        inner: SmallVec::new(),
        block: section.ends.map(|end| *end.steps(Axis::Block)),
        joined_loop: None,
    };
    if count > 1 {
        let strides =
            section.ends.map(|end| linear(end.steps(Axis::Layer)).unwrap_or(RegionOffset::ZERO));
        let step = Distance(strides);
        base.outer.push(Loop { over: LoopAxis::Layers, count: count.into(), step });
    }
    let mut uneven: SmallVec<[RowAxis<'_>; 3]> = SmallVec::new();
    for axis in section.rows(selection) {
        let RowAxis { steps, positions } = &axis;
        match (linear(steps.source), linear(steps.destination)) {
            (Some(source), Some(destination)) => {
                let step = Ends { source, destination };
                let at = step
                    .zip(positions.as_ref())
                    .map(|(step, positions)| step.times(positions.start.into()));
                let count = count_of(&positions.source);
                base.add(&Distance(at), [Loop::over_rows(count, Distance(step))]);
            }
            _ => uneven.push(axis),
        }
    }
    let first = nests.len();
    nests.push(base);
    for axis in uneven {
        let parts = split(&axis);
        let before: SmallVec<[LoopNest; 2]> = nests.drain(first..).collect();
        for nest in &before {
            nests.extend(parts.iter().map(|part| {
                let mut nest = nest.clone();
                nest.add(&part.base, part.levels.iter().copied());
                nest
            }));
        }
    }
}

/// Positions of an axis that are equal loops at both ends.
#[derive(Clone, Debug)]
struct AxisPart {
    base: Distance,
    levels: SmallVec<[Loop; 3]>,
}

/// The distance between positions, if it is constant along the axis.
fn linear(steps: &AxisSteps) -> Option<RegionOffset> {
    match steps.parts() {
        [(_, inner), (1, _)] => Some(inner),
        [(1, _), (_, outer)] => Some(outer),
        _ => None,
    }
}

/// Splits positions of an axis into parts that are loops at both ends.
fn split(axis: &RowAxis<'_>) -> SmallVec<[AxisPart; 2]> {
    let starts = axis.positions.as_ref().map(|positions| positions.start);
    let place =
        |position: u32| axis.steps.zip(starts).map(|(steps, first)| steps.place(first + position));
    let level = Loop::over_rows;
    let count = axis.positions.source.end - starts.source;
    let mut parts = SmallVec::new();
    let groups = axis.steps.map(|steps| match linear(steps) {
        // An axis that is not split counts as one endless group.
        Some(_) => u32::MAX,
        None => steps.inner().count,
    });
    let mut at = 0;
    while at < count {
        let within = starts.zip(groups).map(|(start, group)| (start + at) % group);
        let rest = count - at;
        let small = groups.source.min(groups.destination);
        let nested = within_bounds(within, groups, rest);
        let mut levels = SmallVec::new();
        let taken = match nested {
            Some((whole, middle)) => {
                let whole_count = rest / whole;
                // The innermost loop first.
                levels.push(level(small, distance(&place, at, 1, small)));
                if middle > 1 {
                    levels.push(level(middle, distance(&place, at, small, whole)));
                }
                if whole_count > 1 {
                    levels.push(level(whole_count, distance(&place, at, whole, rest)));
                }
                whole * whole_count
            }
            None => {
                let left = groups.zip(within).map(|(group, within)| group - within);
                let run = rest.min(left.source).min(left.destination);
                levels.push(level(run, distance(&place, at, 1, run)));
                run
            }
        };
        parts.push(AxisPart { base: Distance(place(at)), levels });
        at += taken;
    }
    parts
}

/// The bytes between positions `at` and `at + step`, if there are that many.
fn distance(
    place: &impl Fn(u32) -> Ends<RegionOffset>,
    at: u32,
    step: u32,
    limit: u32,
) -> Distance {
    if step >= limit {
        return Distance::ZERO;
    }
    Distance::between(place(at), place(at + step))
}

/// The counts of a loop over whole groups of both ends, and of the smaller groups within them.
fn within_bounds(within: Ends<u32>, groups: Ends<u32>, rest: u32) -> Option<(u32, u32)> {
    let (small, large) =
        (groups.source.min(groups.destination), groups.source.max(groups.destination));
    if large == u32::MAX {
        // One end is not split: the groups of the other end are adjacent.
        let at_start =
            groups.zip(within).into_iter().all(|(group, at)| group == u32::MAX || at == 0);
        return (at_start && rest >= small).then_some((small, 1));
    }
    let aligned = within == Ends::default() && large.is_multiple_of(small) && rest >= large;
    aligned.then_some((large, large / small))
}

/// Joins nests that differ only in their base into one loop over sections.
fn combine_sections(nests: &mut SmallVec<[LoopNest; 2]>) {
    let [first, others @ ..] = nests.as_slice() else { return };
    let Some(second) = others.first() else { return };
    let step = Distance::between(first.base, second.base);
    let mut previous = first;
    for nest in others {
        if !nest.is_like(first) || Distance::between(previous.base, nest.base) != step {
            return;
        }
        previous = nest;
    }
    // A negative step would wrap, and loops only count upwards.
    let goes_on = |each: &RegionOffset| each.region < u32::MAX / 2 && each.offset < u64::MAX / 2;
    if !step.0.as_ref().into_iter().all(goes_on) {
        return;
    }
    let count = nests.len();
    nests.truncate(1);
    if let Some(nest) = nests.first_mut() {
        let count = to_u64(count);
        nest.outer.push(Loop { over: LoopAxis::Sections, count, step });
    }
}

impl LoopNest {
    /// Moves the nest by `at` and adds loops inside it.
    fn add(&mut self, at: &Distance, levels: impl IntoIterator<Item = Loop>) {
        self.base = Distance(self.base).plus(at).0;
        self.inner.extend(levels.into_iter().filter(|level| level.count > 1));
    }

    fn is_like(&self, other: &Self) -> bool {
        self.unit == other.unit
            && self.outer == other.outer
            && self.inner == other.inner
            && self.block == other.block
    }

    /// Joins loops whose iterations are adjacent at both ends, and sorts the others. Then joins two
    /// loops if the outer one continues the inner one at both ends.
    fn join(&mut self, layers: bool) {
        while let Some(found) = self.inner.iter().position(|level| level.step.is_step_of(self.unit))
        {
            self.unit *= self.inner.remove(found).count;
        }
        if self.inner.is_empty() {
            while let Some(found) = self.outer.iter().position(|level| {
                level.step.is_step_of(self.unit) && (layers || level.over == LoopAxis::Sections)
            }) {
                self.unit *= self.outer.remove(found).count;
            }
        }
        let key = |level: &Loop| {
            let at = level.step.0.destination;
            std::cmp::Reverse((at.region, at.offset))
        };
        self.inner.sort_by_key(key);
        let is_continued = |levels: &[Loop]| match levels {
            [outer, inner] => outer.step == inner.step.times(inner.count),
            _ => false,
        };
        while let Some(found) = self.inner.windows(2).position(is_continued) {
            let outer = self.inner.remove(found);
            if let Some(inner) = self.inner.get_mut(found) {
                inner.count *= outer.count;
            }
        }
    }

    /// Whether adjacent blocks are one run: a run is a whole block, and begins where the previous one
    /// ends.
    pub(super) fn joins_blocks(&self) -> bool {
        self.inner.is_empty()
            && self.block.as_ref().into_iter().all(|steps| {
                steps.outer().count == 1
                    && (steps.inner().stride == self.unit || steps.count() == 1)
            })
    }

    /// The number of times that a run covers the blocks of its segment.
    pub(crate) fn passes(&self) -> u64 {
        self.joined_loop.map_or(1, |level| level.count)
    }

    /// The iterations of the loops over sections.
    pub(crate) fn sections(&self) -> u64 {
        self.outer_over(LoopAxis::Sections).map_or(1, |level| level.count)
    }

    /// The loop over layers or over sections, if there is one.
    pub(crate) fn outer_over(&self, over: LoopAxis) -> Option<&Loop> {
        self.outer.iter().find(|level| level.over == over)
    }

    /// The runs of each iteration of the outer loops.
    pub(crate) fn inner_count(&self) -> u64 {
        self.inner.iter().map(|level| level.count).product()
    }

    /// The distance of a run from the first run of its tile, by its number.
    pub(crate) fn inner_distance(&self, index: u64) -> Distance {
        distance_of(self.inner.iter().rev(), index)
    }

    /// Calls `each` with the distance of every run of a tile, in the order of their numbers.
    pub(crate) fn for_each_inner(&self, each: &mut impl FnMut(&Distance)) {
        visit(&self.inner, Distance::ZERO, each);
    }
}

/// The sum of `weight` over the tiles of every nest, for each segment.
pub(super) fn per_segment(groups: &[LayerGroup], weight: impl Fn(&LoopNest) -> u64) -> u64 {
    groups.iter().map(|group| group.steps * per_step(group, &weight)).sum()
}

/// The sum of `weight` over the tiles of one iteration over layers, for each segment.
pub(super) fn per_step(group: &LayerGroup, weight: &impl Fn(&LoopNest) -> u64) -> u64 {
    group.nests.iter().map(|nest| nest.sections() * weight(nest)).sum()
}

/// The distance of an iteration of nested loops, by its number. The first level is the innermost.
pub(super) fn distance_of<'a>(levels: impl Iterator<Item = &'a Loop>, mut index: u64) -> Distance {
    let mut at = Distance::ZERO;
    for level in levels {
        at = at.plus(&level.step.times(index % level.count));
        index /= level.count;
    }
    at
}

fn visit(levels: &[Loop], at: Distance, each: &mut impl FnMut(&Distance)) {
    let Some((level, inner)) = levels.split_first() else { return each(&at) };
    let mut at = at;
    for _ in 0..level.count {
        visit(inner, at, each);
        at = at.plus(&level.step);
    }
}
