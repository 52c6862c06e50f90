//! The planner, which breaks a transfer into runs.

use std::sync::Arc;

use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, OwnerProcess};

use super::buffers::{Buffers, PlanBuffers, Segment, SpareBuffers};
use super::loops::LoopsCache;
use super::nest::{LoopAxis, LoopNest, per_segment};
use super::{TransferPlan, overlap};
use crate::error::TransferError;
use crate::hazard::endpoint::Endpoint;
use crate::side::{Ends, Side};
use crate::transfer::Transfer;

/// Validates transfers and plans them. Clones share the buffers and the cache.
///
/// The loops that copy a whole block between two endpoints are computed once for these endpoints.
/// The planner reuses the buffers of plans that have dropped. So planning allocates nothing in the
/// steady state, and never allocates per span.
#[derive(Clone, Debug)]
pub struct Planner {
    loops: Arc<LoopsCache>,
    spare: Arc<SpareBuffers>,
    owner: OwnerProcess,
}

/// The number of plans whose buffers are kept. It is more than most engines have in flight.
const SPARE_BUFFERS: usize = 32;

impl Planner {
    /// Creates a planner without buffers.
    #[must_use]
    pub fn new() -> Self {
        let spare = Arc::new(SpareBuffers::new(SPARE_BUFFERS));
        let loops = Arc::default();
        Self { loops, spare, owner: OwnerProcess::current() }
    }

    /// Validates a transfer and breaks it into runs. A transfer of no blocks is a plan of no runs.
    ///
    /// All checks are made in every build: equal shapes, ids and layers in range, no destination
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
        let loops = self.loops.get(transfer)?;
        let (from, to) = (transfer.source_blocks.len(), transfer.destination_blocks.len());
        if from != to {
            return Err(TransferError::UnequalBlockCounts { from, to });
        }
        source.check_blocks(&transfer.source_blocks, Side::Source)?;
        destination.check_blocks(&transfer.destination_blocks, Side::Destination)?;

        let mut plan = TransferPlan {
            ends: Ends { source, destination }.map(Endpoint::clone),
            loops,
            joined_groups: None,
            pieces: 0,
            bytes: ByteCount::ZERO,
            run_count: 0,
            buffers: PlanBuffers::take(&self.spare, self.owner),
        };
        sort_pairs(transfer, &mut plan.buffers)?;
        let blocks = to_u64(plan.buffers.destinations.len());
        plan.bytes = plan.loops.bytes.checked_mul("blocks", blocks)?;
        // Each piece has at least one byte.
        plan.pieces = plan.loops.pieces * blocks;
        if source.is(destination) {
            overlap::check_within_layout(&plan)?;
        }
        if plan.loops.joins_blocks {
            make_segments(&mut plan);
        }
        let joined = plan.joined_groups.as_deref();
        let runs = joined.map(|groups| per_segment(groups, LoopNest::inner_count));
        plan.run_count = runs.unwrap_or(plan.loops.runs) * to_u64(plan.segment_count());
        if plan.loops.ends_overlap {
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
    // Without a branch for each element, the compiler vectorises the comparison.
    let next = destinations.get(1..).unwrap_or_default();
    let equals = |found, (one, next): (&u32, &u32)| found | (one == next);
    if !destinations.iter().zip(next).fold(false, equals) {
        return Ok(());
    }
    match destinations.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(TransferError::DuplicateDestination { block: pair[0] }),
        None => Ok(()),
    }
}

/// Lists the segments of blocks that can be joined. Otherwise each pair is one segment.
fn make_segments(plan: &mut TransferPlan) {
    let Buffers { sources, destinations, segments, .. } = &mut *plan.buffers;
    let mut pairs = (0_u32..).zip(sources.iter().copied().zip(destinations.iter().copied()));
    let Some((pair, (source, destination))) = pairs.next() else { return };
    // A segment is added to the list only when complete: changing an entry just after its store
    // takes longer than comparing.
    let mut open = Segment { source, destination, blocks: 1, pair };
    for (pair, (source, destination)) in pairs {
        let goes_on =
            open.source + open.blocks == source && open.destination + open.blocks == destination;
        if goes_on {
            open.blocks += 1;
        } else {
            let next = Segment { source, destination, blocks: 1, pair };
            segments.push(std::mem::replace(&mut open, next));
        }
    }
    segments.push(open);
    if segments.len() == 1 {
        join_sections(plan);
    }
}

/// Joins adjacent sections once all their blocks are one segment.
fn join_sections(plan: &mut TransferPlan) {
    let Some(segment) = plan.buffers.segments.first() else { return };
    let blocks = u64::from(segment.blocks);
    let joins = |nest: &LoopNest| {
        nest.outer.iter().position(|level| {
            level.over == LoopAxis::Sections && level.step.is_step_of(nest.unit * blocks)
        })
    };
    if plan.loops.groups.iter().flat_map(|group| &group.nests).all(|nest| joins(nest).is_none()) {
        return;
    }
    let mut groups = plan.loops.groups.clone();
    for nest in groups.iter_mut().flat_map(|group| &mut group.nests) {
        if let Some(found) = joins(nest) {
            let joined = nest.outer.remove(found);
            nest.unit *= joined.count;
            nest.joined_loop = Some(joined);
        }
    }
    plan.joined_groups = Some(Box::new(groups));
}
