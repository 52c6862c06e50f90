//! Detects bytes that one transfer would both read and write.

use terrane_core::{AddressSpace, ByteCount, Position};

use super::TransferPlan;
use crate::error::TransferError;
use crate::hazard::table::blocks::overlap;
use crate::side::Side;

/// Checks a transfer within one layout. Different blocks never overlap, nor do different heads of a
/// block. So it suffices that no block is named at both ends with heads in common.
pub(crate) fn check_within_layout(plan: &TransferPlan) -> Result<(), TransferError> {
    if !overlap(&plan.heads(Side::Source), &plan.heads(Side::Destination)) {
        return Ok(());
    }
    let destinations = plan.destination_blocks();
    match plan.source_blocks().iter().find(|block| destinations.binary_search(block).is_ok()) {
        Some(&block) => Err(TransferError::Overlap { source_block: block, destination: block }),
        None => Ok(()),
    }
}

/// Checks a transfer between two layouts that share memory, by a sweep over all runs of both ends
/// in address order.
#[cold]
pub(crate) fn check_between_layouts(plan: &TransferPlan) -> Result<(), TransferError> {
    let mut spans: Vec<RunSpan> = Vec::with_capacity(2 * plan.runs().len());
    for (index, run) in plan.runs().iter().enumerate() {
        for side in [Side::Source, Side::Destination] {
            if let Some(location) = plan.location(run, side) {
                let Position { space, start } = location.position();
                spans.push(RunSpan { space, start, end: start + run.bytes, side, run: index });
            }
        }
    }
    spans.sort_unstable_by_key(|span| (span.space, span.start));
    // Sources may overlap each other, so the furthest end so far is stored for each side.
    let mut furthest: [Option<RunSpan>; 2] = [None, None];
    for span in spans {
        let (own, other) = match span.side {
            Side::Source => (0, 1),
            Side::Destination => (1, 0),
        };
        if let Some(met) = furthest[other].filter(|met| met.reaches_into(&span)) {
            let (read, written) = match span.side {
                Side::Source => (span.run, met.run),
                Side::Destination => (met.run, span.run),
            };
            let block = |run, side| {
                plan.blocks_of(run, ByteCount::ZERO).map_or(u32::MAX, |blocks| *blocks.get(side))
            };
            return Err(TransferError::Overlap {
                source_block: block(read, Side::Source),
                destination: block(written, Side::Destination),
            });
        }
        let further =
            furthest[own].is_none_or(|last| last.space != span.space || last.end < span.end);
        if further {
            furthest[own] = Some(span);
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct RunSpan {
    space: AddressSpace,
    start: u64,
    end: u64,
    side: Side,
    run: usize,
}

impl RunSpan {
    fn reaches_into(&self, later: &Self) -> bool {
        self.space == later.space && self.end > later.start
    }
}
