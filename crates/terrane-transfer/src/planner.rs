//! From a transfer to the runs that it comes down to.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crossbeam_queue::ArrayQueue;
use terrane_core::{ByteCount, OwnerProcess};
use terrane_layout::{ContiguousUnit, Geometry, LayoutConfig, TokenOrder};

use crate::cells::{Cells, HeadsOfEnd};
use crate::overlap;
use crate::plan::{Buffers, Segment};
use crate::sync::Mutex;
use crate::{CopyRun, Side, Transfer, TransferError, TransferPlan};

/// Validates transfers and plans them. Cloning it shares the buffers.
///
/// The buffers of plans that have dropped are used again, so that planning in a steady state
/// allocates nothing, and never anything for each span.
#[derive(Clone, Debug)]
pub struct Planner {
    spare: Arc<ArrayQueue<Buffers>>,
    owner: OwnerProcess,
}

/// As many plans' buffers are kept; more than are in flight at once in most engines.
const SPARE_BUFFERS: usize = 32;

impl Planner {
    /// A planner without buffers yet.
    #[must_use]
    pub fn new() -> Self {
        let spare = Arc::new(ArrayQueue::new(SPARE_BUFFERS));
        Self { spare, owner: OwnerProcess::current() }
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
        self.owner.check()?;
        source.check_owner()?;
        destination.check_owner()?;
        let config = source.layout().config();
        let destination_config = destination.layout().config();
        let heads = check_shapes(transfer)?;
        let layers = check_layers(transfer.layers.as_ref(), config.num_layers())?;
        let landing = check_landing(transfer.landing, &layers, destination_config.num_layers())?;
        let (from, to) = (transfer.source_blocks.len(), transfer.destination_blocks.len());
        if from != to {
            return Err(TransferError::UnequalBlockCounts { from, to });
        }
        source.check_blocks(&transfer.source_blocks, Side::Source)?;
        destination.check_blocks(&transfer.destination_blocks, Side::Destination)?;

        // The bytes are at most those of the destination, whose size fits in 64 bits, as no
        // destination block is named twice; that is checked below.
        let [of_source, of_destination] = [source, destination].map(|end| end.layout().config());
        let cells = Cells::new(
            &HeadsOfEnd { config: of_source, heads: heads[0].clone() },
            &HeadsOfEnd { config: of_destination, heads: heads[1].clone() },
        );
        let piece = cells
            .as_ref()
            .map_or(config.piece_bytes(), |cells| ByteCount::new(cells.piece_bytes()));
        let pieces = u64::from(layers.end - layers.start) * u64::from(config.outer_dim());
        let mut buffers = self.spare.pop().unwrap_or_default();
        let mut plan = TransferPlan {
            source: source.clone(),
            destination: destination.clone(),
            layers,
            landing,
            layer_wise: transfer.terms.layer_wise,
            heads,
            cells,
            pieces: 0,
            bytes: ByteCount::ZERO,
            made: OnceLock::new(),
            unmade: Mutex::new(std::mem::take(&mut buffers.runs)),
            run_count: 0,
            buffers,
            spare: Arc::clone(&self.spare),
            owner: self.owner,
        };
        sort_pairs(transfer, &mut plan.buffers)?;
        let blocks = ByteCount::from_usize(plan.buffers.destinations.len()).get();
        plan.pieces = ByteCount::product(&[("blocks", blocks), ("pieces a block", pieces)])?.get();
        plan.bytes = piece.checked_mul("pieces", plan.pieces)?;
        if source.is(destination) {
            overlap::check_within_layout(&plan)?;
        }
        plan.run_count = match &plan.cells {
            None => prepare_runs(&mut plan),
            Some(cells) => {
                let factors = [("pieces", plan.pieces), ("runs a piece", cells.count())];
                ByteCount::product(&factors)?.get()
            }
        };
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

/// Checks that blocks are of equal shape, and finds the heads to copy at both ends. The number of
/// blocks, their alignment, and the order of stated heads may differ.
fn check_shapes(transfer: &Transfer) -> Result<[Range<u32>; 2], TransferError> {
    type Field = (&'static str, fn(&LayoutConfig) -> u64);
    const OF_ALL: [Field; 3] = [
        ("num_layers", |config| config.num_layers().into()),
        ("outer_dim", |config| config.outer_dim().into()),
        ("page_size", |config| config.page_size().into()),
    ];
    const OF_ROWS: [Field; 2] = [
        ("inner_dim", |config| config.inner_dim().into()),
        // With all else equal, this differs with the element format alone.
        ("bytes a piece", |config| config.piece_bytes().get()),
    ];
    const OF_HEADS: [Field; 2] = [
        ("head_dim", |config| config.head_dim().unwrap_or_default().into()),
        ("bytes a head", |config| config.head_bytes().unwrap_or_default().get()),
    ];
    let ends = [&transfer.source, &transfer.destination];
    let [from, to] = ends.map(|end| end.layout().config());
    let agree = |fields: &[Field]| {
        for &(field, get) in fields {
            let (from, to) = (get(from), get(to));
            if from != to {
                return Err(TransferError::ShapeMismatch { field, from, to });
            }
        }
        Ok(())
    };
    // With a landing, it is the layers copied that have to fit both ends.
    agree(if transfer.landing.is_none() { &OF_ALL } else { &OF_ALL[1..] })?;
    let sides = [(Side::Source, from), (Side::Destination, to)];
    let are_stated = sides.iter().all(|(_, config)| config.num_heads().is_some());
    if !are_stated {
        agree(&OF_ROWS)?;
        let one_is_unstated = |(_, config): &&(Side, &LayoutConfig)| config.num_heads().is_none();
        let needs_heads = transfer.heads.is_some()
            || sides.iter().any(|(_, config)| config.token_order() == TokenOrder::HeadMajor);
        return match sides.iter().find(one_is_unstated) {
            Some(&(side, _)) if needs_heads => Err(TransferError::HeadsNotStated { side }),
            // Whole rows; each as one head, where it is not stated how many.
            _ => Ok([from, to].map(|config| 0..config.num_heads().unwrap_or(1))),
        };
    }
    agree(&OF_HEADS)?;
    let Some(heads) = &transfer.heads else {
        agree(&[("num_heads", |config| config.num_heads().unwrap_or_default().into())])?;
        return Ok([from, to].map(|config| 0..config.num_heads().unwrap_or(1)));
    };
    for ((side, config), heads) in sides.into_iter().zip(heads) {
        let num_heads = config.num_heads().unwrap_or(1);
        if heads.start >= heads.end || heads.end > num_heads {
            let heads = heads.clone();
            return Err(TransferError::NoSuchHeads { side, heads, num_heads });
        }
    }
    let [from, to] = heads.each_ref().map(|heads| heads.end - heads.start);
    if from == to { Ok(heads.clone()) } else { Err(TransferError::UnequalHeadCounts { from, to }) }
}

fn check_layers(layers: Option<&Range<u32>>, num_layers: u32) -> Result<Range<u32>, TransferError> {
    let layers = layers.cloned().unwrap_or(0..num_layers);
    if layers.start < layers.end && layers.end <= num_layers {
        Ok(layers)
    } else {
        Err(TransferError::NoSuchLayers { layers, num_layers })
    }
}

fn check_landing(
    landing: Option<u32>,
    layers: &Range<u32>,
    num_layers: u32,
) -> Result<u32, TransferError> {
    let Some(first) = landing else { return Ok(layers.start) };
    let end = first.checked_add(layers.end - layers.start);
    if end.is_some_and(|end| end <= num_layers) {
        Ok(first)
    } else {
        let layers = first..end.unwrap_or(u32::MAX);
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
        let (keys, values) = (&transfer.destination_blocks, &transfer.source_blocks);
        let ids = transfer.destination.layout().config().num_blocks();
        buffers.sorter.sort(keys, values, ids, [destinations, sources]);
    }
    // Without a branch for each, several are compared at a time.
    let is_next_to_itself = |found, pair: &[u32]| found | (pair[0] == pair[1]);
    if !destinations.windows(2).fold(false, is_next_to_itself) {
        return Ok(());
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
    /// Where the first of the layers goes.
    landing: u32,
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
            landing: plan.landing,
            outers: if unit == ContiguousUnit::Piece { source.outer_dim() } else { 1 },
        }
    }
}

impl Joining {
    /// Whether runs go block by block: only where a block is several.
    fn goes_by_block(&self, plan: &TransferPlan) -> bool {
        plan.goes_by_block() && self.unit != ContiguousUnit::Block
    }

    /// The run of a segment's blocks, of one outer and one of the layers.
    fn run(
        &self,
        source: &Geometry,
        destination: &Geometry,
        segment: &Segment,
        layer: u32,
        outer: u32,
    ) -> CopyRun {
        let landing = self.landing + (layer - self.layers.start);
        let from = source.offset(segment.source, layer, outer);
        let to = destination.offset(segment.destination, landing, outer);
        CopyRun {
            source_region: from.region,
            destination_region: to.region,
            source_offset: from.offset,
            destination_offset: to.offset,
            bytes: self.unit_bytes * u64::from(segment.blocks),
        }
    }
}

fn geometries(plan: &TransferPlan) -> (&Geometry, &Geometry) {
    (plan.source.layout().geometry(), plan.destination.layout().geometry())
}

/// Joins blocks that touch, and answers how many runs there will be.
fn prepare_runs(plan: &mut TransferPlan) -> u64 {
    let joining = Joining::new(plan);
    make_segments(&mut plan.buffers, joining.across_blocks);
    let segments = ByteCount::from_usize(plan.buffers.segments.len()).get();
    let (layers, outers) = (u64::from(joining.layers.end - joining.layers.start), joining.outers);
    // At most one for each piece, whose number fits.
    let all = segments * layers * u64::from(outers);
    let ends = (plan.buffers.segments.last(), plan.buffers.segments.first());
    let (Some(last), Some(first)) = ends else { return 0 };
    if outers < 2 || joining.goes_by_block(plan) {
        return all;
    }
    // The last run of an outer and the first of the next are one, or are not, in every layer.
    let (source, destination) = geometries(plan);
    let layer = joining.layers.start;
    let before = joining.run(source, destination, last, layer, 0);
    let after = joining.run(source, destination, first, layer, 1);
    let joins = if before.is_followed_by(&after) { layers * u64::from(outers - 1) } else { 0 };
    all - joins
}

/// Fills in the runs of a plan that breaks no pieces.
///
/// Products and sums cannot overflow: every run lies within its regions, as ids, layers and
/// outers have been checked against the geometries, which prove that of all their pieces.
pub(crate) fn make_runs(plan: &TransferPlan, runs: &mut Vec<CopyRun>) {
    let joining = Joining::new(plan);
    runs.reserve(ByteCount::new(plan.run_count).to_usize());
    if joining.goes_by_block(plan) {
        block_by_block(plan, &joining, runs);
    } else {
        layer_by_layer(plan, &joining, runs);
    }
}

/// Pairs of blocks, joined where both ends go on with the next id, if that is of use.
fn make_segments(buffers: &mut Buffers, join: bool) {
    let Buffers { sources, destinations, segments, .. } = buffers;
    let mut pairs = sources.iter().copied().zip(destinations.iter().copied());
    let Some((source, destination)) = pairs.next() else { return };
    // Not in the list before it is whole: to add to what was just stored takes longer than to compare.
    let mut open = Segment { source, destination, blocks: 1 };
    for (source, destination) in pairs {
        let goes_on =
            open.source + open.blocks == source && open.destination + open.blocks == destination;
        if join && goes_on {
            open.blocks += 1;
        } else {
            segments.push(std::mem::replace(&mut open, Segment { source, destination, blocks: 1 }));
        }
    }
    segments.push(open);
}

fn block_by_block(plan: &TransferPlan, joining: &Joining, runs: &mut Vec<CopyRun>) {
    let (source, destination) = geometries(plan);
    let Some((first, others)) = plan.buffers.segments.split_first() else { return };
    let units = joining
        .layers
        .clone()
        .flat_map(|layer| (0..joining.outers).map(move |outer| (layer, outer)));
    runs.extend(units.map(|(layer, outer)| joining.run(source, destination, first, layer, outer)));
    // Every other segment has the same runs, as far from these at each end as its blocks are. Ids are
    // in no order, so the distances wrap.
    let of_segment = runs.len();
    let layer = joining.layers.start;
    let at = |segment| joining.run(source, destination, segment, layer, 0);
    let first = at(first);
    for segment in others {
        let next = at(segment);
        let from = next.source_offset.wrapping_sub(first.source_offset);
        let to = next.destination_offset.wrapping_sub(first.destination_offset);
        let begin = runs.len();
        runs.extend_from_within(..of_segment);
        for run in runs.iter_mut().skip(begin) {
            run.source_offset = run.source_offset.wrapping_add(from);
            run.destination_offset = run.destination_offset.wrapping_add(to);
            run.bytes = next.bytes;
        }
    }
}

fn layer_by_layer(plan: &TransferPlan, joining: &Joining, runs: &mut Vec<CopyRun>) {
    let (source, destination) = geometries(plan);
    let first_layer = joining.layers.start;
    for outer in 0..joining.outers {
        let segments = plan.buffers.segments.iter();
        let mut found =
            segments.map(|segment| joining.run(source, destination, segment, first_layer, outer));
        // Runs of different layers stay apart: where they touch, all of the block does, or the
        // layers are wanted one by one. But the last block of K is followed by the first block
        // of V where outers are outermost.
        let first = found.next();
        match (runs.last_mut(), first) {
            (Some(last), Some(next)) if last.is_followed_by(&next) => last.bytes += next.bytes,
            (_, first) => runs.extend(first),
        }
        runs.extend(found);
    }
    // Every other layer has the same runs, one stride further at each end.
    let (of_layer, from, to) = (runs.len(), source.offset(0, 1, 0), destination.offset(0, 1, 0));
    for _ in joining.layers.clone().skip(1) {
        let begin = runs.len() - of_layer;
        runs.extend_from_within(begin..);
        for run in runs.iter_mut().skip(begin + of_layer) {
            run.source_region += from.region;
            run.destination_region += to.region;
            run.source_offset += from.offset;
            run.destination_offset += to.offset;
        }
    }
}
