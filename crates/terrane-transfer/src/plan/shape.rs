//! Checks that the blocks of the two ends have equal shapes, and determines what to copy.

use std::ops::Range;

use smallvec::SmallVec;
use terrane_layout::{Axis, AxisSteps, Geometry, Section, SectionShape};

use crate::error::TransferError;
use crate::side::{Ends, Side};
use crate::transfer::Transfer;

/// The layers, heads and tokens to copy.
#[derive(Clone, Debug)]
pub(crate) struct Selection {
    /// The layers at the source and at the destination.
    pub(crate) layers: Ends<Range<u32>>,
    /// The heads at the source and at the destination. The row counts as one head if heads are not
    /// stated.
    pub(crate) heads: Ends<Range<u32>>,
    /// The tokens at the source and at the destination; `None` for all tokens.
    pub(crate) tokens: Option<Ends<Range<u32>>>,
    /// Whether all heads of both ends are copied.
    pub(crate) has_all_heads: bool,
}

/// A section of both ends, with the strides of its rows there.
#[derive(Clone)]
pub(crate) struct SharedSection<'a> {
    pub(crate) ends: Ends<&'a Section>,
    /// The bytes that are never split.
    pub(crate) unit: u64,
    /// The strides of heads, tokens and elements.
    rows: [Ends<AxisSteps>; 3],
    has_layers: bool,
}

/// A loop over rows.
pub(crate) struct RowAxis<'a> {
    /// The strides.
    pub(crate) steps: Ends<&'a AxisSteps>,
    /// The positions to copy, equally many at both ends.
    pub(crate) positions: Ends<Range<u32>>,
}

impl<'a> RowAxis<'a> {
    /// The loop over some positions, or over all.
    fn new(steps: Ends<&'a AxisSteps>, positions: Option<Ends<Range<u32>>>) -> Self {
        let positions = positions.unwrap_or_else(|| {
            let count = u32::try_from(steps.source.count()).unwrap_or(u32::MAX);
            Ends { source: 0..count, destination: 0..count }
        });
        Self { steps, positions }
    }
}

impl SharedSection<'_> {
    /// Whether the section is copied layer by layer: it has as many layers as the layout.
    pub(crate) const fn has_layers(&self) -> bool {
        self.has_layers
    }

    /// Heads, tokens and elements.
    pub(crate) fn rows(&self, selection: &Selection) -> [RowAxis<'_>; 3] {
        let [heads, tokens, elements] = self.rows.each_ref().map(Ends::as_ref);
        let some_heads = (!selection.has_all_heads).then(|| selection.heads.clone());
        [
            RowAxis::new(heads, some_heads),
            RowAxis::new(tokens, selection.tokens.clone()),
            RowAxis::new(elements, None),
        ]
    }

    /// The copied bytes of one layer of one block.
    pub(crate) fn piece_bytes(&self, selection: &Selection) -> u64 {
        let counts = self.rows(selection).map(|row| u64::from(count_of(&row.positions.source)));
        // At most the bytes of a block, which its geometry has checked.
        counts.iter().product::<u64>() * self.unit
    }
}

/// Checks that blocks have equal shapes, and determines what to copy. The number of blocks and all
/// strides may differ.
pub(crate) fn check<'a>(
    transfer: &'a Transfer,
) -> Result<(Selection, SmallVec<[SharedSection<'a>; 2]>), TransferError> {
    let ends = Ends { source: &transfer.source, destination: &transfer.destination }
        .map(|end| end.layout().geometry());
    let Ends { source: from, destination: to } = ends;
    // With a `destination_first_layer`, only the copied layers must fit both ends.
    if transfer.destination_first_layer.is_none() {
        equal("num_layers", from.num_layers().into(), to.num_layers().into())?;
    }
    equal("outer_dim", from.section_count().into(), to.section_count().into())?;
    let layers = check_layers(transfer, ends)?;
    let mut sections = SmallVec::new();
    for section in from.sections() {
        let Some(other) = to.section(section.name()) else {
            return Err(TransferError::NoSuchSection {
                section: section.name(),
                side: Side::Destination,
            });
        };
        let is_partial = count_of(&layers.source) != from.num_layers()
            || transfer.destination_first_layer.is_some();
        sections.push(shared(
            Ends { source: section, destination: other },
            ends,
            is_partial,
            transfer,
        )?);
    }
    let (heads, has_all_heads) = check_heads(transfer, ends)?;
    let tokens = check_tokens(transfer, ends)?;
    Ok((Selection { layers, heads, tokens, has_all_heads }, sections))
}

fn equal(field: &'static str, from: u64, to: u64) -> Result<(), TransferError> {
    if from == to { Ok(()) } else { Err(TransferError::ShapeMismatch { field, from, to }) }
}

/// Compares one section of both ends.
fn shared<'a>(
    sections: Ends<&'a Section>,
    ends: Ends<&Geometry>,
    is_partial: bool,
    transfer: &Transfer,
) -> Result<SharedSection<'a>, TransferError> {
    let Ends { source: from, destination: to } = sections.map(Section::shape);
    // If only some tokens are copied, their range must fit both ends.
    if transfer.tokens.is_none() {
        equal("page_size", from.tokens.into(), to.tokens.into())?;
    }
    let lacks_layers =
        |(shape, end): (SectionShape, &Geometry)| shape.layers == 1 && end.num_layers() > 1;
    let lacking = Ends { source: from, destination: to }.zip(ends).map(lacks_layers);
    let needs_layers = is_partial || transfer.options.layer_by_layer;
    if let Some(side) = Side::BOTH.into_iter().find(|&side| needs_layers && *lacking.get(side)) {
        let section = sections.source.name();
        return Err(TransferError::SectionHasNoLayers { section, side });
    }
    if lacking.source != lacking.destination {
        equal("layers of a section", from.layers.into(), to.layers.into())?;
    }
    let steps = |axis| sections.map(|section| *section.steps(axis));
    let (tokens, elements) = (steps(Axis::Token), steps(Axis::Element));
    let element_bytes = u64::from(from.element_bytes);
    let is_whole = |shape: &SectionShape| shape.elements == 1;
    let (unit, rows) = if from.heads.is_some() && to.heads.is_some() {
        // The number of heads is checked with the requested heads.
        let heads = steps(Axis::Head);
        if from.elements == to.elements && from.element_bytes == to.element_bytes {
            (element_bytes, [heads, tokens, elements])
        } else {
            if !is_whole(&from) && !is_whole(&to) {
                equal("head_dim", from.elements.into(), to.elements.into())?;
            }
            equal("bytes a head", from.head_bytes(), to.head_bytes())?;
            check_contiguous(sections, false)?;
            (from.head_bytes(), [heads, tokens, ABSENT])
        }
    } else {
        let inner_dim =
            |shape: &SectionShape| u64::from(shape.elements) * u64::from(shape.heads.unwrap_or(1));
        if !is_whole(&from) && !is_whole(&to) {
            equal("inner_dim", inner_dim(&from), inner_dim(&to))?;
        }
        equal("bytes a token", from.row_bytes(), to.row_bytes())?;
        if from.heads.is_none() && to.heads.is_none() && from.elements == to.elements {
            (element_bytes, [ABSENT, tokens, elements])
        } else {
            // One end does not state its heads: whole rows are copied.
            check_contiguous(sections, true)?;
            (from.row_bytes(), [ABSENT, tokens, ABSENT])
        }
    };
    Ok(SharedSection { ends: sections, unit, rows, has_layers: !lacking.source })
}

const ABSENT: Ends<AxisSteps> = Ends { source: AxisSteps::ABSENT, destination: AxisSteps::ABSENT };

/// Checks that the elements of a head, or of a row, are adjacent at both ends.
fn check_contiguous(sections: Ends<&Section>, whole_rows: bool) -> Result<(), TransferError> {
    for side in Side::BOTH {
        let section = *sections.get(side);
        let shape = section.shape();
        let follows = |axis, bytes: u64| {
            let steps = section.steps(axis);
            steps.count() == 1 || (steps.outer().count == 1 && steps.inner().stride == bytes)
        };
        let heads_follow = !whole_rows || follows(Axis::Head, shape.head_bytes());
        if !follows(Axis::Element, shape.element_bytes.into()) || !heads_follow {
            // The end that states its heads separates them in memory, and the other end does not
            // state any.
            return Err(TransferError::HeadsNotStated { side: side.other() });
        }
    }
    Ok(())
}

/// The heads to copy at both ends, and whether these are all heads.
fn check_heads(
    transfer: &Transfer,
    ends: Ends<&Geometry>,
) -> Result<(Ends<Range<u32>>, bool), TransferError> {
    let all = ends.map(|end| stated(end).flatten().max().unwrap_or(1));
    let Some(heads) = &transfer.heads else {
        for (from, to) in stated_pairs(ends) {
            equal("num_heads", from.into(), to.into())?;
        }
        return Ok((all.map(|heads| 0..heads), true));
    };
    for (end, side) in ends.into_iter().zip(Side::BOTH) {
        if stated(end).any(|heads| heads.is_none()) {
            return Err(TransferError::HeadsNotStated { side });
        }
        let num_heads = stated(end).flatten().max().unwrap_or(1);
        if stated(end).flatten().any(|heads| heads != num_heads) {
            return Err(TransferError::HeadsDiffer { side });
        }
    }
    for ((side, num_heads), heads) in Side::BOTH.into_iter().zip(all).zip(heads.as_ref()) {
        if heads.start >= heads.end || heads.end > num_heads {
            let heads = heads.clone();
            return Err(TransferError::NoSuchHeads { side, heads, num_heads });
        }
    }
    match heads.as_ref().map(count_of) {
        Ends { source, destination } if source == destination => Ok((heads.clone(), false)),
        Ends { source: from, destination: to } => {
            Err(TransferError::UnequalHeadCounts { from, to })
        }
    }
}

/// The heads of each section of one end.
fn stated(end: &Geometry) -> impl Iterator<Item = Option<u32>> + '_ {
    end.sections().iter().map(|section| section.shape().heads)
}

/// The heads of each section, if both ends state them.
fn stated_pairs(ends: Ends<&Geometry>) -> impl Iterator<Item = (u32, u32)> {
    let Ends { source: from, destination: to } = ends;
    from.sections().iter().filter_map(|section| {
        Some((section.shape().heads?, to.section(section.name())?.shape().heads?))
    })
}

fn check_tokens(
    transfer: &Transfer,
    ends: Ends<&Geometry>,
) -> Result<Option<Ends<Range<u32>>>, TransferError> {
    let Some(tokens) = &transfer.tokens else { return Ok(None) };
    for ((end, tokens), side) in ends.into_iter().zip(tokens.as_ref()).zip(Side::BOTH) {
        for section in end.sections() {
            let num_tokens = section.shape().tokens;
            if tokens.start >= tokens.end || tokens.end > num_tokens {
                let tokens = tokens.clone();
                return Err(TransferError::NoSuchTokens { side, tokens, num_tokens });
            }
        }
    }
    match tokens.as_ref().map(count_of) {
        Ends { source, destination } if source == destination => Ok(Some(tokens.clone())),
        Ends { source: from, destination: to } => {
            Err(TransferError::UnequalTokenCounts { from, to })
        }
    }
}

fn check_layers(
    transfer: &Transfer,
    ends: Ends<&Geometry>,
) -> Result<Ends<Range<u32>>, TransferError> {
    let Ends { source: from, destination: to } = ends.map(Geometry::num_layers);
    let source = transfer.layers.clone().unwrap_or(0..from);
    if source.is_empty() || source.end > from {
        return Err(TransferError::NoSuchLayers { layers: source, num_layers: from });
    }
    let first = transfer.destination_first_layer.unwrap_or(source.start);
    match first.checked_add(count_of(&source)) {
        Some(end) if end <= to => Ok(Ends { source, destination: first..end }),
        end => {
            let layers = first..end.unwrap_or(u32::MAX);
            Err(TransferError::NoSuchLayers { layers, num_layers: to })
        }
    }
}

pub(super) const fn count_of(range: &Range<u32>) -> u32 {
    range.end - range.start
}
