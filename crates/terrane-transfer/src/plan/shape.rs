//! Checks that the two ends hold blocks of equal shape, and finds what to copy.

use std::ops::Range;

use smallvec::SmallVec;
use terrane_layout::{Axis, AxisSteps, Geometry, Section, SectionShape};

use crate::error::TransferError;
use crate::side::{Ends, Side};
use crate::transfer::Transfer;

/// The layers, heads and tokens to copy.
#[derive(Clone, Debug)]
pub(crate) struct Selection {
    /// The layers, by their numbers in the source.
    pub(crate) layers: Range<u32>,
    /// The layer of the destination that the first one is copied to.
    pub(crate) destination_first_layer: u32,
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
    pub(crate) ends: [&'a Section; 2],
    /// The bytes that are never split.
    pub(crate) unit: u64,
    rows: [[AxisSteps; 2]; 3],
    has_layers: bool,
}

/// A loop over rows: the strides at both ends, and the positions to copy.
pub(crate) type RowAxis<'a> = ((&'a AxisSteps, &'a AxisSteps), [Range<u32>; 2]);

impl SharedSection<'_> {
    /// Whether it is copied layer by layer, that is, has as many layers as the layout.
    pub(crate) const fn has_layers(&self) -> bool {
        self.has_layers
    }

    /// Heads, tokens and elements.
    pub(crate) fn rows(&self, selection: &Selection) -> [RowAxis<'_>; 3] {
        let all = |[from, _]: &[AxisSteps; 2]| {
            let count = u32::try_from(from.count()).unwrap_or(u32::MAX);
            [0..count, 0..count]
        };
        let [heads, tokens, elements] = &self.rows;
        let of_heads =
            if selection.has_all_heads { all(heads) } else { selection.heads.clone().into_array() };
        let of_tokens = selection.tokens.clone().map_or_else(|| all(tokens), Ends::into_array);
        [
            ((&heads[0], &heads[1]), of_heads),
            ((&tokens[0], &tokens[1]), of_tokens),
            ((&elements[0], &elements[1]), all(elements)),
        ]
    }

    /// The copied bytes of one layer of one block.
    pub(crate) fn piece_bytes(&self, selection: &Selection) -> u64 {
        let counts = self.rows(selection).map(|(_, [from, _])| u64::from(from.end - from.start));
        // At most the bytes of a block, which its geometry has proved to fit.
        counts.iter().product::<u64>() * self.unit
    }
}

/// Checks that blocks are of equal shape, and finds what to copy. The number of blocks and all
/// strides may differ.
pub(crate) fn check<'a>(
    transfer: &'a Transfer,
) -> Result<(Selection, SmallVec<[SharedSection<'a>; 2]>), TransferError> {
    let ends = [&transfer.source, &transfer.destination].map(|end| end.layout().geometry());
    let [from, to] = ends;
    // With a `destination_first_layer`, only the copied layers have to fit both ends.
    if transfer.destination_first_layer.is_none() {
        equal("num_layers", from.num_layers().into(), to.num_layers().into())?;
    }
    equal("outer_dim", from.section_count().into(), to.section_count().into())?;
    let layers = check_layers(transfer.layers.as_ref(), from.num_layers())?;
    let destination_first_layer =
        check_destination_layers(transfer.destination_first_layer, &layers, to.num_layers())?;
    let mut sections = SmallVec::new();
    for section in from.sections() {
        let Some(other) = to.section(section.name()) else {
            return Err(TransferError::NoSuchSection {
                section: section.name(),
                side: Side::Destination,
            });
        };
        let is_partial = layers.end - layers.start != from.num_layers()
            || transfer.destination_first_layer.is_some();
        sections.push(shared([section, other], ends, is_partial, transfer)?);
    }
    let (heads, has_all_heads) = check_heads(transfer, ends)?;
    let tokens = check_tokens(transfer, ends)?;
    Ok((Selection { layers, destination_first_layer, heads, tokens, has_all_heads }, sections))
}

fn equal(field: &'static str, from: u64, to: u64) -> Result<(), TransferError> {
    if from == to { Ok(()) } else { Err(TransferError::ShapeMismatch { field, from, to }) }
}

/// Compares one section of both ends.
fn shared<'a>(
    sections: [&'a Section; 2],
    ends: [&Geometry; 2],
    is_partial: bool,
    transfer: &Transfer,
) -> Result<SharedSection<'a>, TransferError> {
    let [from, to] = sections.map(Section::shape);
    // If only some tokens are copied, their range has to fit both ends.
    if transfer.tokens.is_none() {
        equal("page_size", from.tokens.into(), to.tokens.into())?;
    }
    for (shape, (end, side)) in
        [&from, &to].into_iter().zip(ends.into_iter().zip([Side::Source, Side::Destination]))
    {
        let needs_layers = is_partial || transfer.options.layer_by_layer;
        if needs_layers && shape.layers == 1 && end.num_layers() > 1 {
            let [section, _] = sections;
            return Err(TransferError::SectionHasNoLayers { section: section.name(), side });
        }
    }
    let is_absent =
        |shape: &SectionShape, end: &Geometry| shape.layers == 1 && end.num_layers() > 1;
    if is_absent(&from, ends[0]) != is_absent(&to, ends[1]) {
        equal("layers of a section", from.layers.into(), to.layers.into())?;
    }
    let has_layers = !is_absent(&from, ends[0]);
    let steps = |axis| sections.map(|section| *section.steps(axis));
    let (tokens, element_bytes) = (steps(Axis::Token), u64::from(from.element_bytes));
    if let (Some(_), Some(_)) = (from.heads, to.heads) {
        // The number of heads is checked with the requested heads.
        let are_alike = from.elements == to.elements && from.element_bytes == to.element_bytes;
        let rows = [steps(Axis::Head), tokens];
        if are_alike {
            let [heads, tokens] = rows;
            let rows = [heads, tokens, steps(Axis::Element)];
            return Ok(SharedSection { ends: sections, unit: element_bytes, rows, has_layers });
        }
        if from.elements > 1 && to.elements > 1 {
            equal("head_dim", from.elements.into(), to.elements.into())?;
        }
        equal("bytes a head", from.head_bytes(), to.head_bytes())?;
        check_contiguous(sections, false)?;
        let [heads, tokens] = rows;
        return Ok(SharedSection {
            ends: sections,
            unit: from.head_bytes(),
            rows: [heads, tokens, ABSENT],
            has_layers,
        });
    }
    let elements =
        |shape: &SectionShape| u64::from(shape.elements) * u64::from(shape.heads.unwrap_or(1));
    let is_whole = |shape: &SectionShape| shape.elements == 1;
    if !is_whole(&from) && !is_whole(&to) {
        equal("inner_dim", elements(&from), elements(&to))?;
    }
    equal("bytes a token", from.row_bytes(), to.row_bytes())?;
    if from.heads.is_none() && to.heads.is_none() && from.elements == to.elements {
        let rows = [ABSENT, tokens, steps(Axis::Element)];
        return Ok(SharedSection { ends: sections, unit: element_bytes, rows, has_layers });
    }
    // One end does not state its heads: whole rows are copied.
    check_contiguous(sections, true)?;
    let rows = [ABSENT, tokens, ABSENT];
    Ok(SharedSection { ends: sections, unit: from.row_bytes(), rows, has_layers })
}

const ABSENT: [AxisSteps; 2] = [AxisSteps::ABSENT; 2];

/// Checks that the elements of a head, or of a row, are adjacent at both ends.
fn check_contiguous(sections: [&Section; 2], whole_rows: bool) -> Result<(), TransferError> {
    for (section, side) in sections.into_iter().zip([Side::Destination, Side::Source]) {
        let shape = section.shape();
        let follows = |axis, bytes: u64| {
            let steps = section.steps(axis);
            steps.count() == 1 || (steps.outer().count == 1 && steps.inner().stride == bytes)
        };
        let heads_follow = !whole_rows || follows(Axis::Head, shape.head_bytes());
        if !follows(Axis::Element, shape.element_bytes.into()) || !heads_follow {
            // The end that states its heads separates them, and the other one does not state any.
            return Err(TransferError::HeadsNotStated { side });
        }
    }
    Ok(())
}

/// The heads to copy at both ends, and whether these are all heads.
fn check_heads(
    transfer: &Transfer,
    ends: [&Geometry; 2],
) -> Result<(Ends<Range<u32>>, bool), TransferError> {
    let sides = [Side::Source, Side::Destination];
    let all = ends.map(|end| stated(end).flatten().max().unwrap_or(1));
    let Some(heads) = &transfer.heads else {
        for (from, to) in stated_pairs(ends) {
            equal("num_heads", from.into(), to.into())?;
        }
        return Ok((Ends::from(all).map(|heads| 0..heads), true));
    };
    for (end, side) in ends.into_iter().zip(sides) {
        if stated(end).any(|heads| heads.is_none()) {
            return Err(TransferError::HeadsNotStated { side });
        }
        let num_heads = stated(end).flatten().max().unwrap_or(1);
        if stated(end).flatten().any(|heads| heads != num_heads) {
            return Err(TransferError::HeadsDiffer { side });
        }
    }
    for ((side, num_heads), heads) in sides.into_iter().zip(all).zip(heads.as_ref()) {
        if heads.start >= heads.end || heads.end > num_heads {
            let heads = heads.clone();
            return Err(TransferError::NoSuchHeads { side, heads, num_heads });
        }
    }
    let [from, to] = heads.as_ref().map(|heads| heads.end - heads.start).into_array();
    if from == to {
        Ok((heads.clone(), false))
    } else {
        Err(TransferError::UnequalHeadCounts { from, to })
    }
}

/// The heads of each section of one end.
fn stated(end: &Geometry) -> impl Iterator<Item = Option<u32>> + '_ {
    end.sections().iter().map(|section| section.shape().heads)
}

/// The heads of each section, if both ends state them.
fn stated_pairs(ends: [&Geometry; 2]) -> impl Iterator<Item = (u32, u32)> {
    let [from, to] = ends;
    from.sections().iter().filter_map(|section| {
        Some((section.shape().heads?, to.section(section.name())?.shape().heads?))
    })
}

fn check_tokens(
    transfer: &Transfer,
    ends: [&Geometry; 2],
) -> Result<Option<Ends<Range<u32>>>, TransferError> {
    let Some(tokens) = &transfer.tokens else { return Ok(None) };
    for ((end, tokens), side) in
        ends.into_iter().zip(tokens.as_ref()).zip([Side::Source, Side::Destination])
    {
        for section in end.sections() {
            let num_tokens = section.shape().tokens;
            if tokens.start >= tokens.end || tokens.end > num_tokens {
                let tokens = tokens.clone();
                return Err(TransferError::NoSuchTokens { side, tokens, num_tokens });
            }
        }
    }
    let [from, to] = tokens.as_ref().map(|tokens| tokens.end - tokens.start).into_array();
    if from == to {
        Ok(Some(tokens.clone()))
    } else {
        Err(TransferError::UnequalTokenCounts { from, to })
    }
}

fn check_layers(layers: Option<&Range<u32>>, num_layers: u32) -> Result<Range<u32>, TransferError> {
    let layers = layers.cloned().unwrap_or(0..num_layers);
    if layers.start < layers.end && layers.end <= num_layers {
        Ok(layers)
    } else {
        Err(TransferError::NoSuchLayers { layers, num_layers })
    }
}

fn check_destination_layers(
    destination_first_layer: Option<u32>,
    layers: &Range<u32>,
    num_layers: u32,
) -> Result<u32, TransferError> {
    let Some(first) = destination_first_layer else { return Ok(layers.start) };
    let end = first.checked_add(layers.end - layers.start);
    if end.is_some_and(|end| end <= num_layers) {
        Ok(first)
    } else {
        let layers = first..end.unwrap_or(u32::MAX);
        Err(TransferError::NoSuchLayers { layers, num_layers })
    }
}
