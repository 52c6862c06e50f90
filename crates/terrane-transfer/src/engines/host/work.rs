//! A job in chunks, which threads take in turn.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use terrane_core::{ByteCount, HostAddress, Location};

use super::Rates;
use crate::cells::Cells;
use crate::engines::copy::{self, Caching};
use crate::{CopyFailure, CopyJob, CopyRun, Endpoint, Side, TransferPlan};

/// A job, shared by the threads that execute it.
///
/// It consists of units: the runs of the plan or, where pieces are broken up, its pieces, whose many
/// cells are listed nowhere.
pub(super) struct Work {
    caching: Caching,
    chunk: u64,
    cursor: Mutex<Cursor>,
    failure: Mutex<Option<CopyFailure>>,
    rates: Arc<Rates>,
    /// The bytes of each layer that have not been copied; of no layer, if nobody wants to know.
    left_of_layers: Box<[AtomicU64]>,
    job: CopyJob,
}

/// Where the part of the job begins that no thread has taken yet.
#[derive(Clone, Copy, Default)]
struct Cursor {
    unit: usize,
    offset: u64,
}

impl Work {
    pub(super) fn new(
        job: CopyJob,
        caching: Caching,
        chunk: ByteCount,
        rates: &Arc<Rates>,
    ) -> Self {
        Self {
            caching,
            chunk: chunk.get().max(1),
            cursor: Mutex::new(Cursor::default()),
            failure: Mutex::new(None),
            rates: Arc::clone(rates),
            left_of_layers: left_of_layers(&job),
            job,
        }
    }

    /// Copies a chunk that no thread has taken yet. Says whether there was one.
    pub(super) fn copy_one_chunk(&self) -> bool {
        self.job.start();
        let Some((begin, bytes)) = self.take_chunk() else { return false };
        if self.job.terms().deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            self.fail(CopyFailure::DeadlineExceeded);
            return false;
        }
        let plan = self.job.plan();
        let copied = match &plan.cells {
            None => copy_runs(plan, begin, bytes, self.caching),
            Some(cells) => copy_pieces(plan, cells, begin.unit, bytes),
        };
        copy::publish();
        match copied {
            Ok(()) => {
                self.job.progress().add(ByteCount::new(bytes));
                self.tell_layers(begin, bytes);
            }
            Err(failure) => self.fail(failure),
        }
        true
    }

    /// Lets go of the work; the last one to do so finishes the job.
    pub(super) fn release(work: Arc<Self>) {
        let Some(Self { job, failure, rates, .. }) = Arc::into_inner(work) else { return };
        if let Some(failure) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return job.finish(Err(failure));
        }
        rates.of(job.path()).learn(job.plan().bytes(), job.running_for());
        job.finish(Ok(()));
    }

    /// Takes the next chunk: where it begins, and how many bytes it has.
    fn take_chunk(&self) -> Option<(Cursor, u64)> {
        let plan = self.job.plan();
        let mut cursor = lock(&self.cursor);
        let begin = *cursor;
        if let Some(cells) = &plan.cells {
            // Whole pieces, one at least.
            let first = ByteCount::from_usize(begin.unit).get();
            let most = (self.chunk / cells.piece_bytes()).max(1);
            let pieces = plan.pieces().saturating_sub(first).min(most);
            cursor.unit += ByteCount::new(pieces).to_usize();
            return (pieces > 0).then_some((begin, pieces * cells.piece_bytes()));
        }
        let mut taken = 0;
        while let Some(run) = plan.runs().get(cursor.unit) {
            let left_of_run = run.bytes().get() - cursor.offset;
            let left_of_chunk = self.chunk - taken;
            if left_of_run > left_of_chunk {
                cursor.offset += left_of_chunk;
                return Some((begin, self.chunk));
            }
            taken += left_of_run;
            *cursor = Cursor { unit: cursor.unit + 1, offset: 0 };
            if taken == self.chunk {
                break;
            }
        }
        (taken > 0).then_some((begin, taken))
    }

    /// Ends the job with `failure` once the other threads have copied what they have taken.
    fn fail(&self, failure: CopyFailure) {
        lock(&self.cursor).unit = usize::MAX;
        lock(&self.failure).get_or_insert(failure);
    }

    /// Says of each layer that `bytes` from `begin` on were the last of, that it is done.
    fn tell_layers(&self, begin: Cursor, mut bytes: u64) {
        let Some(signals) = self.job.layers() else { return };
        let plan = self.job.plan();
        let (mut unit, mut offset) = (begin.unit, begin.offset);
        while bytes > 0 {
            let (layer, of_unit) = match &plan.cells {
                None => match plan.runs().get(unit) {
                    Some(run) => (plan.layer(run), run.bytes().get()),
                    None => return,
                },
                Some(cells) => {
                    let piece = ByteCount::from_usize(unit).get();
                    (plan.indices(piece).layer, cells.piece_bytes())
                }
            };
            let length = (of_unit - offset).min(bytes);
            let index = ByteCount::new((layer - plan.layers().start).into()).to_usize();
            // Released by whoever copied, and acquired by whoever was last and tells of all.
            let left = self.left_of_layers.get(index);
            if left.is_some_and(|left| left.fetch_sub(length, Ordering::AcqRel) == length) {
                signals.done(layer..layer + 1);
            }
            bytes -= length;
            (unit, offset) = (unit + 1, 0);
        }
    }
}

fn left_of_layers(job: &CopyJob) -> Box<[AtomicU64]> {
    if job.layers().is_none() {
        return Box::default();
    }
    let plan = job.plan();
    let layers = plan.layers();
    let of_each = plan.bytes().get() / u64::from(layers.end - layers.start);
    layers.map(|_| AtomicU64::new(of_each)).collect()
}

/// Copies `bytes` bytes of the plan's runs from `begin` on.
fn copy_runs(
    plan: &TransferPlan,
    begin: Cursor,
    mut bytes: u64,
    caching: Caching,
) -> Result<(), CopyFailure> {
    let mut offset = begin.offset;
    for (index, run) in plan.runs().iter().enumerate().skip(begin.unit) {
        let rest = run.rest(ByteCount::new(offset));
        let length = rest.bytes().get().min(bytes);
        let Some([source, destination]) = host_addresses(plan, &rest) else {
            let (offset, source) = (ByteCount::new(offset), Box::new(NotInHostMemory));
            return Err(CopyFailure::Run { index, offset, source });
        };
        // SAFETY: the plan's runs lie within the regions of both ends, which the job keeps alive
        // and whose bytes are valid by the contract of `Memory`; they do not overlap; the claims
        // of the transfer keep all others from writing the source or touching the destination;
        // and the chunks that threads take are disjoint.
        unsafe {
            let length = ByteCount::new(length).to_usize();
            copy::copy(source.as_ptr(), destination.as_ptr(), length, caching);
        }
        bytes -= length;
        offset = 0;
        if bytes == 0 {
            break;
        }
    }
    Ok(())
}

/// Copies the cells of the plan's pieces from the `first` on, `bytes` bytes in all.
fn copy_pieces(
    plan: &TransferPlan,
    cells: &Cells,
    first: usize,
    bytes: u64,
) -> Result<(), CopyFailure> {
    let length = ByteCount::new(cells.bytes).to_usize();
    let first = ByteCount::from_usize(first).get();
    for index in first..first + bytes / cells.piece_bytes() {
        let Some([source, destination]) = host_addresses(plan, &plan.piece(index)) else {
            let index = ByteCount::new(index * cells.count()).to_usize();
            let (offset, source) = (ByteCount::ZERO, Box::new(NotInHostMemory));
            return Err(CopyFailure::Run { index, offset, source });
        };
        let (source, destination) = (source.as_ptr(), destination.as_ptr());
        cells.for_each(|from, to| {
            let (from, to) = (ByteCount::new(from).to_usize(), ByteCount::new(to).to_usize());
            // SAFETY: the cell is a part of its piece, which lies within its region.
            let from = unsafe { source.add(from) };
            // SAFETY: likewise.
            let to = unsafe { destination.add(to) };
            // SAFETY: as in `copy_runs`: the cell is one of the plan's runs.
            unsafe { copy::copy(from, to, length, Caching::Through) };
        });
    }
    Ok(())
}

/// Memory whose kind says that it is the host's, and whose location says that it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("memory of a host kind has no host address; its implementation of Memory is wrong")]
struct NotInHostMemory;

/// Where a run begins at both ends.
fn host_addresses(plan: &TransferPlan, run: &CopyRun) -> Option<[HostAddress; 2]> {
    let at = |end: &Endpoint, region, offset| {
        end.base(region).and_then(Location::as_host)?.checked_add(ByteCount::new(offset))
    };
    let source = at(plan.end(Side::Source), run.source_region, run.source_offset)?;
    let destination =
        at(plan.end(Side::Destination), run.destination_region, run.destination_offset)?;
    Some([source, destination])
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
