//! From a transfer to the runs that it comes down to.

use std::ops::Range;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use terrane_core::ByteCount;
use terrane_layout::{ContiguousUnit, Geometry, LayoutConfig};

use crate::overlap;
use crate::plan::{Buffers, Segment};
use crate::{CopyRun, Side, Transfer, TransferError, TransferPlan};

/// Validates transfers and plans them. Cloning it shares the buffers.
///
/// The buffers of plans that have dropped are used again, so that planning in a steady state
/// allocates nothing, and never anything for each span.
#[derive(Clone, Debug)]
pub struct Planner {
    spare: Arc<ArrayQueue<Buffers>>,
}

/// As many plans' buffers are kept; more than are in flight at once in most engines.
const SPARE_BUFFERS: usize = 32;

impl Planner {
    /// A planner without buffers yet.
    #[must_use]
    pub fn new() -> Self {
        Self { spare: Arc::new(ArrayQueue::new(SPARE_BUFFERS)) }
    }

    /// Validates a transfer and breaks it into runs. A transfer of no blocks is a plan of no runs.
    ///
    /// Every check is made in every build: equal shapes, ids and layers in range, no destination
    /// named twice, no byte both read and written.
    ///
    /// # Errors
    ///
    /// The refusals of [`TransferError`].
    pub fn plan(&self, transfer: &Transfer) -> Result<TransferPlan, TransferError> {
        let (source, destination) = (&transfer.source, &transfer.destination);
        let config = source.layout().config();
        check_shapes(config, destination.layout().config())?;
        let layers = check_layers(transfer.layers.as_ref(), config.num_layers())?;
        let (from, to) = (transfer.source_blocks.len(), transfer.destination_blocks.len());
        if from != to {
            return Err(TransferError::UnequalBlockCounts { from, to });
        }
        source.check_blocks(&transfer.source_blocks, Side::Source)?;
        destination.check_blocks(&transfer.destination_blocks, Side::Destination)?;

        // The bytes are at most those of the destination, whose size fits in 64 bits, as no
        // destination block is named twice; that is checked below.
        let piece = config.piece_bytes();
        let pieces = u64::from(layers.end - layers.start) * u64::from(config.outer_dim());
        let mut plan = TransferPlan {
            source: source.clone(),
            destination: destination.clone(),
            layers,
            layer_wise: transfer.terms.layer_wise,
            pieces: 0,
            bytes: ByteCount::ZERO,
            buffers: self.spare.pop().unwrap_or_default(),
            spare: Arc::clone(&self.spare),
        };
        sort_pairs(transfer, &mut plan.buffers)?;
        let blocks = ByteCount::from_usize(plan.buffers.destinations.len()).get();
        plan.pieces = ByteCount::product(&[("blocks", blocks), ("pieces a block", pieces)])?.get();
        plan.bytes = piece.checked_mul("pieces", plan.pieces)?;
        if source.is(destination) {
            overlap::check_within_layout(&plan)?;
        }
        make_runs(&mut plan);
        if !source.is(destination) && source.overlaps(destination) {
            overlap::check_between_layouts(&plan)?;
        }
        Ok(plan)
    }
}

impl Default for Planner {
    fn default() -> Self {
        Self::new()
    }
}

/// Blocks are of equal shape if these agree. The number of blocks and their alignment may differ.
fn check_shapes(from: &LayoutConfig, to: &LayoutConfig) -> Result<(), TransferError> {
    type Field = (&'static str, fn(&LayoutConfig) -> u64);
    const FIELDS: [Field; 5] = [
        ("num_layers", |config| config.num_layers().into()),
        ("outer_dim", |config| config.outer_dim().into()),
        ("page_size", |config| config.page_size().into()),
        ("inner_dim", |config| config.inner_dim().into()),
        // With all else equal, this differs with the element format alone.
        ("bytes a piece", |config| config.piece_bytes().get()),
    ];
    for (field, get) in FIELDS {
        let (from, to) = (get(from), get(to));
        if from != to {
            return Err(TransferError::ShapeMismatch { field, from, to });
        }
    }
    Ok(())
}

fn check_layers(layers: Option<&Range<u32>>, num_layers: u32) -> Result<Range<u32>, TransferError> {
    let layers = layers.cloned().unwrap_or(0..num_layers);
    if layers.start < layers.end && layers.end <= num_layers {
        Ok(layers)
    } else {
        Err(TransferError::NoSuchLayers { layers, num_layers })
    }
}

/// Puts the pairs in ascending order of the destination, in which neighbours and duplicates meet.
fn sort_pairs(transfer: &Transfer, buffers: &mut Buffers) -> Result<(), TransferError> {
    let (sources, destinations) = (&mut buffers.sources, &mut buffers.destinations);
    if transfer.destination_blocks.is_sorted() {
        sources.extend_from_slice(&transfer.source_blocks);
        destinations.extend_from_slice(&transfer.destination_blocks);
    } else {
        let pairs = transfer.destination_blocks.iter().zip(&transfer.source_blocks);
        // The segments serve as the buffer of pairs; they are made after this.
        buffers.segments.extend(pairs.map(|(&destination, &source)| Segment {
            source,
            destination,
            blocks: 1,
        }));
        buffers.segments.sort_unstable_by_key(|pair| pair.destination);
        sources.extend(buffers.segments.iter().map(|pair| pair.source));
        destinations.extend(buffers.segments.iter().map(|pair| pair.destination));
        buffers.segments.clear();
    }
    match destinations.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(TransferError::DuplicateDestination { block: pair[0] }),
        None => Ok(()),
    }
}

/// How pieces of equal shape at both ends join into runs.
struct Joining {
    /// How much of a block is contiguous at both ends.
    unit: ContiguousUnit,
    unit_bytes: u64,
    /// Whether the units of neighbouring blocks touch at both ends.
    across_blocks: bool,
    layers: Range<u32>,
    outers: u32,
}

impl Joining {
    fn new(plan: &TransferPlan) -> Self {
        let (source, destination) = geometries(plan);
        let unit = plan.unit();
        let layers = plan.layers.clone();
        let pieces = match unit {
            ContiguousUnit::Piece => 1,
            ContiguousUnit::Layer => u64::from(source.outer_dim()),
            ContiguousUnit::Block => {
                u64::from(source.outer_dim()) * u64::from(layers.end - layers.start)
            }
        };
        let unit_bytes = source.piece_bytes().get() * pieces;
        let touches = |geometry: &Geometry| geometry.block_stride().get() == unit_bytes;
        Self {
            unit,
            unit_bytes,
            across_blocks: touches(source) && touches(destination),
            // A unit that spans layers or outers is emitted once, where it begins.
            layers: if unit == ContiguousUnit::Block {
                layers.start..layers.start + 1
            } else {
                layers
            },
            outers: if unit == ContiguousUnit::Piece { source.outer_dim() } else { 1 },
        }
    }
}

fn geometries(plan: &TransferPlan) -> (&Geometry, &Geometry) {
    (plan.source.layout().geometry(), plan.destination.layout().geometry())
}

/// Fills in the plan's runs.
///
/// Products and sums cannot overflow: every run lies within its regions, as ids, layers and
/// outers have been checked against the geometries, which prove that of all their pieces.
fn make_runs(plan: &mut TransferPlan) {
    let joining = Joining::new(plan);
    let mut buffers = std::mem::take(&mut plan.buffers);
    make_segments(&mut buffers, joining.across_blocks);
    let units = joining.layers.len() * ByteCount::new(joining.outers.into()).to_usize();
    buffers.runs.reserve(buffers.segments.len() * units);

    let (source, destination) = geometries(plan);
    let either_holds_whole_blocks = source.contiguous_unit() == ContiguousUnit::Block
        || destination.contiguous_unit() == ContiguousUnit::Block;
    let by_block = either_holds_whole_blocks && !plan.layer_wise;
    if by_block && joining.unit != ContiguousUnit::Block {
        // In the order of the end that holds blocks whole, which it then meets in sequence.
        block_by_block(source, destination, &joining, &mut buffers);
    } else {
        layer_by_layer(source, destination, &joining, &mut buffers);
    }
    plan.buffers = buffers;
}

/// Pairs of blocks, joined where both ends go on with the next id, if that is of use.
fn make_segments(buffers: &mut Buffers, join: bool) {
    let Buffers { sources, destinations, segments, .. } = buffers;
    for (&source, &destination) in sources.iter().zip(destinations.iter()) {
        match segments.last_mut() {
            Some(last)
                if join
                    && last.source + last.blocks == source
                    && last.destination + last.blocks == destination =>
            {
                last.blocks += 1;
            }
            _ => segments.push(Segment { source, destination, blocks: 1 }),
        }
    }
}

fn block_by_block(
    source: &Geometry,
    destination: &Geometry,
    joining: &Joining,
    buffers: &mut Buffers,
) {
    for segment in &buffers.segments {
        for layer in joining.layers.clone() {
            for outer in 0..joining.outers {
                let from = source.offset(segment.source, layer, outer);
                let to = destination.offset(segment.destination, layer, outer);
                buffers.runs.push(CopyRun {
                    source_region: from.region,
                    destination_region: to.region,
                    source_offset: from.offset,
                    destination_offset: to.offset,
                    bytes: joining.unit_bytes,
                });
            }
        }
    }
}

fn layer_by_layer(
    source: &Geometry,
    destination: &Geometry,
    joining: &Joining,
    buffers: &mut Buffers,
) {
    for layer in joining.layers.clone() {
        for outer in 0..joining.outers {
            let begun = buffers.runs.len();
            buffers.runs.extend(buffers.segments.iter().map(|segment| {
                let from = source.offset(segment.source, layer, outer);
                let to = destination.offset(segment.destination, layer, outer);
                CopyRun {
                    source_region: from.region,
                    destination_region: to.region,
                    source_offset: from.offset,
                    destination_offset: to.offset,
                    bytes: joining.unit_bytes * u64::from(segment.blocks),
                }
            }));
            // Runs of different layers stay apart: where they touch, all of the block does, or the
            // layers are wanted one by one.
            if outer > 0 {
                join_at(&mut buffers.runs, begun);
            }
        }
    }
}

/// Joins the run at `index` with the one before, if it follows it at both ends: the last block of
/// K is followed by the first block of V where outers are outermost.
fn join_at(runs: &mut Vec<CopyRun>, index: usize) {
    let Some(before) = index.checked_sub(1) else { return };
    let (Some(&last), Some(&next)) = (runs.get(before), runs.get(index)) else { return };
    let follows = last.source_region == next.source_region
        && last.destination_region == next.destination_region
        && last.source_offset + last.bytes == next.source_offset
        && last.destination_offset + last.bytes == next.destination_offset;
    if follows {
        runs[before].bytes += next.bytes;
        runs.remove(index);
    }
}
