//! Gathers runs that are adjacent in a file into requests.

use rustc_hash::FxHashMap;
use terrane_core::convert::to_usize;
use terrane_core::{ByteCount, FilePosition, Location};

use crate::plan::TransferPlan;
use crate::plan::run::CopyRun;
use crate::side::Side;

/// A part of a run. It is the whole run, unless the run is longer than a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunPart {
    /// The run's index in the plan.
    pub(super) run: usize,
    /// The part's offset in the run, in bytes.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl RunPart {
    /// The start of the part at one end.
    pub(super) fn location(&self, plan: &TransferPlan, side: Side) -> Option<Location> {
        let run = plan.runs().get(self.run)?;
        plan.location(run, side)?.checked_add(ByteCount::new(self.offset))
    }
}

/// The remaining parts of a plan, in file order.
#[derive(Debug)]
pub(super) struct Extents {
    side: Side,
    /// The indices of the runs in file order; `None` if the plan has that order.
    order: Option<Vec<usize>>,
    next: usize,
    offset: u64,
}

impl Extents {
    /// All parts of `plan`, in the order of the file at `side`.
    pub(super) fn new(plan: &TransferPlan, side: Side) -> Self {
        let order =
            if plan.breaks_pieces() { Some(by_read(plan, side)) } else { by_run(plan, side) };
        Self { side, order, next: 0, offset: 0 }
    }

    pub(super) fn is_empty(&self, plan: &TransferPlan) -> bool {
        self.next >= plan.runs().len()
    }

    /// Gathers the parts of the next request into `parts`. They are adjacent in the file, and have
    /// at most `most` bytes. Returns their first position in the file.
    pub(super) fn take(
        &mut self,
        plan: &TransferPlan,
        most: u64,
        parts: &mut Vec<RunPart>,
    ) -> Option<FilePosition> {
        parts.clear();
        let mut first: Option<FilePosition> = None;
        let mut gathered = 0;
        while gathered < most {
            let index = match &self.order {
                Some(order) => order.get(self.next).copied(),
                None => Some(self.next),
            };
            let Some((index, run)) = index.and_then(|index| Some((index, plan.runs().get(index)?)))
            else {
                break;
            };
            let remaining = run.bytes().get() - self.offset;
            let part =
                RunPart { run: index, offset: self.offset, bytes: remaining.min(most - gathered) };
            let at = part.location(plan, self.side).and_then(Location::as_file)?;
            match first {
                None => first = Some(at),
                Some(first) if follows(first, gathered, at) => {}
                Some(_) => break,
            }
            parts.push(part);
            gathered += part.bytes;
            if part.bytes == remaining {
                self.next += 1;
                self.offset = 0;
            } else {
                self.offset += part.bytes;
            }
        }
        first
    }
}

fn by_run(plan: &TransferPlan, side: Side) -> Option<Vec<usize>> {
    let key = |run: &CopyRun| run.at(side);
    (!plan.runs().is_sorted_by_key(key)).then(|| {
        let mut order: Vec<usize> = (0..plan.runs().len()).collect();
        order.sort_by_cached_key(|&run| plan.runs().get(run).map(key));
        order
    })
}

/// The runs of broken-up pieces in file order. A source block that is named twice is read twice.
/// The runs of the two reads must not mix, because each alone may be too short for direct I/O.
fn by_read(plan: &TransferPlan, side: Side) -> Vec<usize> {
    let mut readings: FxHashMap<u32, u32> = FxHashMap::default();
    let reading_of_pair: Vec<u32> = plan
        .blocks(side)
        .iter()
        .map(|&block| {
            let reading = readings.entry(block).or_default();
            *reading += 1;
            *reading
        })
        .collect();
    let reading = |run| {
        let pair = to_usize(plan.pair_of(run)?.into());
        reading_of_pair.get(pair).copied()
    };
    let mut order: Vec<usize> = (0..plan.runs().len()).collect();
    order.sort_by_cached_key(|&run| (reading(run), plan.runs().get(run).map(|run| run.at(side))));
    order
}

/// Whether the position `at` is `bytes` bytes after `first`.
pub(super) fn follows(first: FilePosition, bytes: u64, at: FilePosition) -> bool {
    first.file.identity == at.file.identity
        && first.checked_add(ByteCount::new(bytes)).is_some_and(|end| end.offset == at.offset)
}
