//! Breaks a transfer into runs.

use std::sync::{Arc, OnceLock};

use crossbeam_queue::ArrayQueue;
use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, OwnerProcess};
use terrane_layout::Geometry;

use super::nest::{self, Joining, LoopNest};
use super::{Buffers, Segment, TransferPlan, overlap, shape};
use crate::error::TransferError;
use crate::side::Side;
use crate::sync::Mutex;
use crate::transfer::Transfer;

/// Validates transfers and plans them. Clones share the buffers.
///
/// It reuses the buffers of plans that have dropped. So planning allocates nothing in the steady
/// state, and never allocates per span.
#[derive(Clone, Debug)]
pub struct Planner {
    spare: Arc<ArrayQueue<Buffers>>,
    owner: OwnerProcess,
}

/// The number of plans whose buffers are kept, which is more than most engines have in flight.
const SPARE_BUFFERS: usize = 32;

impl Planner {
    /// A planner with no buffers yet.
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
    /// A refusal of [`TransferError`].
    pub fn plan(&self, transfer: &Transfer) -> Result<TransferPlan, TransferError> {
        let (source, destination) = (&transfer.source, &transfer.destination);
        self.owner.check()?;
        source.check_owner()?;
        destination.check_owner()?;
        let (selection, sections) = shape::check(transfer)?;
        let (from, to) = (transfer.source_blocks.len(), transfer.destination_blocks.len());
        if from != to {
            return Err(TransferError::UnequalBlockCounts { from, to });
        }
        source.check_blocks(&transfer.source_blocks, Side::Source)?;
        destination.check_blocks(&transfer.destination_blocks, Side::Destination)?;

        let ends = [source, destination].map(|end| end.layout().geometry());
        let layer_by_layer = transfer.options.layer_by_layer;
        // An end with contiguous blocks is accessed in sequence if runs go block by block.
        let by_block = !layer_by_layer && ends.iter().any(|end| holds_blocks(end));
        let groups = nest::layer_groups(&sections, &selection, Joining { layers: by_block });
        let layers = u64::from(selection.layers.end - selection.layers.start);
        let (mut pieces, mut piece_bytes) = (0, ByteCount::ZERO);
        for section in &sections {
            let count = if section.has_layers() { layers } else { 1 };
            pieces += count;
            let bytes = ByteCount::new(section.piece_bytes(&selection));
            piece_bytes = piece_bytes.checked_add(bytes.checked_mul("layers", count)?)?;
        }
        let breaks_pieces =
            groups.iter().flat_map(|group| &group.nests).any(|nest| !nest.inner.is_empty())
                || is_partial(&selection, &sections);
        let mut buffers = self.spare.pop().unwrap_or_default();
        let mut plan = TransferPlan {
            source: source.clone(),
            destination: destination.clone(),
            selection,
            groups,
            by_block,
            breaks_pieces,
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
        let blocks = to_u64(plan.buffers.destinations.len());
        plan.pieces = ByteCount::product(&[("blocks", blocks), ("pieces a block", pieces)])?.get();
        plan.bytes = piece_bytes.checked_mul("blocks", blocks)?;
        if source.is(destination) {
            overlap::check_within_layout(&plan)?;
        }
        make_segments(&mut plan);
        plan.run_count = plan.count(LoopNest::inner_count);
        if !source.is(destination) && source.overlaps(destination) {
            overlap::check_between_layouts(&plan)?;
        }
        Ok(plan)
    }
}

/// Whether blocks are adjacent, each of them whole.
fn holds_blocks(geometry: &Geometry) -> bool {
    geometry.page().is_some()
}

/// Whether only some rows of pieces are copied. Pieces then count as broken up even if one run is
/// left of each.
fn is_partial(selection: &shape::Selection, sections: &[shape::SharedSection<'_>]) -> bool {
    let copies_all = |section: &shape::SharedSection<'_>| {
        let bytes = section.piece_bytes(selection);
        section.ends.iter().all(|end| end.shape().piece_bytes() == bytes)
    };
    let has_all_rows = selection.has_all_heads && selection.tokens.is_none();
    !has_all_rows && !sections.iter().all(copies_all)
}

impl Default for Planner {
    fn default() -> Self {
        Self::new()
    }
}

/// Sorts the pairs in ascending order of the destination, so that neighbours and duplicates are
/// adjacent.
fn sort_pairs(transfer: &Transfer, buffers: &mut Buffers) -> Result<(), TransferError> {
    let (sources, destinations) = (&mut buffers.sources, &mut buffers.destinations);
    if transfer.destination_blocks.is_sorted() {
        sources.extend_from_slice(&transfer.source_blocks);
        destinations.extend_from_slice(&transfer.destination_blocks);
    } else {
        let (keys, values) = (&transfer.destination_blocks, &transfer.source_blocks);
        let ids = transfer.destination.layout().geometry().num_blocks();
        buffers.sorter.sort(keys, values, ids, [destinations, sources]);
    }
    // Without a branch for each, the compiler compares several at a time.
    let is_next_to_itself = |found, pair: &[u32]| found | (pair[0] == pair[1]);
    if !destinations.windows(2).fold(false, is_next_to_itself) {
        return Ok(());
    }
    match destinations.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(TransferError::DuplicateDestination { block: pair[0] }),
        None => Ok(()),
    }
}

/// Lists the pairs of blocks, joined where the next block's bytes follow at both ends.
fn make_segments(plan: &mut TransferPlan) {
    let join = touches(plan);
    let Buffers { sources, destinations, segments, .. } = &mut plan.buffers;
    let mut pairs = (0_u32..).zip(sources.iter().copied().zip(destinations.iter().copied()));
    let Some((pair, (source, destination))) = pairs.next() else { return };
    // A segment enters the list only when complete: changing an entry just after its store takes
    // longer than comparing.
    let mut open = Segment { source, destination, blocks: 1, pair };
    for (pair, (source, destination)) in pairs {
        let goes_on =
            open.source + open.blocks == source && open.destination + open.blocks == destination;
        if join && goes_on {
            open.blocks += 1;
        } else {
            let next = Segment { source, destination, blocks: 1, pair };
            segments.push(std::mem::replace(&mut open, next));
        }
    }
    segments.push(open);
    if join && segments.len() == 1 {
        join_sections(plan);
    }
}

/// Whether every nest is one run for each block, adjacent to that of the next block at both ends.
fn touches(plan: &TransferPlan) -> bool {
    let mut nests = plan.groups.iter().flat_map(|group| &group.nests);
    nests.all(|nest| {
        nest.inner.is_empty()
            && nest.block.iter().all(|steps| {
                steps.outer().count == 1
                    && (steps.inner().stride == nest.unit || steps.count() == 1)
            })
    })
}

/// Joins adjacent sections once all their blocks are one segment.
fn join_sections(plan: &mut TransferPlan) {
    let Some(segment) = plan.buffers.segments.first_mut() else { return };
    let blocks = u64::from(segment.blocks);
    let nests = plan.groups.iter_mut().flat_map(|group| &mut group.nests);
    for nest in nests {
        let found = nest.outer.iter().position(|level| {
            level.over == nest::LoopAxis::Sections && level.step.is_step_of(nest.unit * blocks)
        });
        if let Some(found) = found {
            let joined = nest.outer.remove(found);
            nest.unit *= joined.count;
            nest.joined = Some(joined);
        }
    }
}
