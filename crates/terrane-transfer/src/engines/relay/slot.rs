//! The layout of the blocks in a slot.

use terrane_core::{ByteCount, StorageKind};
use terrane_layout::{Axis, AxisSteps, Geometry, LayoutError, Section};

use crate::hazard::endpoint::Endpoint;
use crate::plan::TransferPlan;
use crate::side::Side;

/// The layout of blocks in a slot copies the layout of one end, so that the hop to that end has
/// long runs.
pub(super) fn geometry(
    plan: &TransferPlan,
    blocks: u32,
    layers: u32,
) -> Result<Geometry, LayoutError> {
    let side = shaping_side(plan);
    let end = plan.end(side).layout().geometry();
    let image = if plan.has_whole_rows(side) {
        let whole = layers == end.num_layers();
        whole
            .then(|| page_image(end, blocks))
            .flatten()
            .or_else(|| layer_image(end, blocks, layers))
    } else {
        None
    };
    Geometry::from_sections(image.unwrap_or_else(|| packed(plan, side, end, blocks, layers)))
}

/// The end whose layout the slots copy. The other hop then reorders pieces. Files and peers need
/// contiguous pieces, and devices reorder best.
fn shaping_side(plan: &TransferPlan) -> Side {
    let rank = |end: &Endpoint| match end.kind() {
        StorageKind::Disk => 3,
        kind if kind.is_remote() => 2,
        kind if kind.is_device() => 0,
        _ => 1,
    };
    let is_source = rank(plan.source()) > rank(plan.destination());
    if is_source { Side::Source } else { Side::Destination }
}

/// Whole pages, if they have no gaps.
fn page_image(end: &Geometry, blocks: u32) -> Option<Vec<Section>> {
    let page = end.page().filter(|page| page.bytes() == end.block_bytes().get())?;
    let steps = AxisSteps::new(blocks, page.bytes());
    let moved = |section: &Section| {
        section.at(0, section.offset() - page.offset()).axis(Axis::Block, steps)
    };
    Some(end.sections().iter().map(moved).collect())
}

/// The bytes of one layer of one block, layer after layer, if they are one piece without gaps.
fn layer_image(end: &Geometry, blocks: u32, layers: u32) -> Option<Vec<Section>> {
    let first = end.sections().first()?;
    let start = end.sections().iter().map(Section::offset).min()?;
    let (mut bytes, mut reach) = (0_u64, 0_u64);
    for section in end.sections() {
        let in_region = section.first_region() == first.first_region()
            && ROWS.iter().all(|&axis| section.steps(axis).regions() == 0);
        if !in_region || (section.shape().layers == 1 && end.num_layers() > 1) {
            return None;
        }
        bytes += section.shape().piece_bytes();
        reach = reach.max(section.offset() - start + rows_span(section));
    }
    if bytes != reach {
        return None;
    }
    let layer = AxisSteps::new(layers, bytes);
    let block = AxisSteps::new(blocks, bytes.checked_mul(layers.into())?);
    let moved = |section: &Section| {
        let moved = section.at(0, section.offset() - start);
        moved.axis(Axis::Layer, layer).axis(Axis::Block, block)
    };
    Some(end.sections().iter().map(moved).collect())
}

const ROWS: [Axis; 3] = [Axis::Head, Axis::Token, Axis::Element];

/// The bytes from the first to the last of one block and layer.
fn rows_span(section: &Section) -> u64 {
    let parts = ROWS.iter().flat_map(|&axis| section.steps(axis).parts());
    // None of these exceeds the span of the section, which its geometry has checked.
    let far: u64 = parts.map(|(count, step)| step.offset * u64::from(count - 1)).sum();
    far + section.element_bytes().get()
}

/// The copied rows without gaps, in the order of tokens and heads of `end`.
fn packed(
    plan: &TransferPlan,
    side: Side,
    end: &Geometry,
    blocks: u32,
    layers: u32,
) -> Vec<Section> {
    let has_layers = |section: &Section| section.shape().layers > 1 || end.num_layers() == 1;
    let sized: Vec<(&Section, Rows)> =
        end.sections().iter().map(|section| (section, Rows::of(plan, side, section))).collect();
    let of_layer: u64 =
        sized.iter().filter(|(s, _)| has_layers(s)).map(|(_, rows)| rows.bytes()).sum();
    let mut apart = of_layer * u64::from(layers);
    let mut within = 0;
    let placed: Vec<(Section, bool)> = sized
        .iter()
        .map(|(section, rows)| {
            let layered = has_layers(section);
            let at = if layered { &mut within } else { &mut apart };
            let offset = *at;
            *at += rows.bytes();
            (rows.section(section).at(0, offset), layered)
        })
        .collect();
    let block = AxisSteps::new(blocks, apart);
    let layer = AxisSteps::new(layers, of_layer);
    let finish = |(section, layered): (Section, bool)| {
        let section = section.axis(Axis::Block, block);
        if layered { section.axis(Axis::Layer, layer) } else { section }
    };
    placed.into_iter().map(finish).collect()
}

/// The copied rows of one block and layer.
struct Rows {
    tokens: u32,
    heads: Option<u32>,
    elements: u32,
    element_bytes: u64,
}

impl Rows {
    fn of(plan: &TransferPlan, side: Side, section: &Section) -> Self {
        let shape = section.shape();
        let count = |range: std::ops::Range<u32>| range.end - range.start;
        let has_all_heads = plan.has_all_heads();
        Self {
            tokens: plan.tokens(side).map_or(shape.tokens, count),
            heads: shape.heads.map(|all| if has_all_heads { all } else { count(plan.heads(side)) }),
            elements: shape.elements,
            element_bytes: shape.element_bytes.into(),
        }
    }

    fn bytes(&self) -> u64 {
        let rows = u64::from(self.tokens) * u64::from(self.heads.unwrap_or(1));
        rows * u64::from(self.elements) * self.element_bytes
    }

    fn section(&self, of: &Section) -> Section {
        let head = u64::from(self.elements) * self.element_bytes;
        let heads = u64::from(self.heads.unwrap_or(1));
        let far = |axis| {
            let steps = of.steps(axis);
            steps.inner().stride.max(steps.outer().stride)
        };
        let token_major = far(Axis::Token) >= far(Axis::Head) || heads == 1;
        let (token_stride, head_stride) =
            if token_major { (head * heads, head) } else { (head, head * u64::from(self.tokens)) };
        let section = Section::new(of.name(), of.shape().element_bytes)
            .axis(Axis::Token, AxisSteps::new(self.tokens, token_stride))
            .axis(Axis::Element, AxisSteps::new(self.elements, self.element_bytes));
        match self.heads {
            Some(heads) => section.axis(Axis::Head, AxisSteps::new(heads, head_stride)),
            None => section,
        }
    }
}

/// The copied bytes of one layer of one block, and whether some section has no layers. In that
/// case, layers are not copied separately.
pub(super) fn layer_bytes(plan: &TransferPlan) -> (ByteCount, bool) {
    let side = shaping_side(plan);
    let end = plan.end(side).layout().geometry();
    let is_whole = |section: &Section| section.shape().layers == 1 && end.num_layers() > 1;
    let bytes: u64 =
        end.sections().iter().map(|section| Rows::of(plan, side, section).bytes()).sum();
    (ByteCount::new(bytes), end.sections().iter().any(is_whole))
}
