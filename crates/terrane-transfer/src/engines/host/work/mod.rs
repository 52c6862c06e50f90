//! A job in chunks, which threads copy in turn.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use terrane_core::convert::{to_u64, to_usize};
use terrane_core::sync::{lock, unpoisoned};
use terrane_core::{ByteCount, HostAddress, Location};

use super::{HostPath, HostRates};
use crate::checksums::host_memory::block_sum;
use crate::completion::waiter_progress::WaiterProgress;
use crate::engine::job::{CopyFailure, CopyJob};
use crate::engines::copy::{self, Store};
use crate::hazard::endpoint::Endpoint;
use crate::plan::TransferPlan;
use crate::plan::run::CopyRun;
use crate::side::{Ends, Side};

/// A job in the engine's queue, which threads that wait for it also use.
///
/// It is empty once every chunk has been taken. So the thread that copies the last chunk ends the
/// job, even if an engine's thread is still waking for it.
pub(super) struct QueuedJob {
    bytes: ByteCount,
    work: Mutex<Option<Arc<ChunkedJob>>>,
}

impl QueuedJob {
    /// Queues the work, and invites threads that wait for its job.
    pub(super) fn new(work: ChunkedJob) -> Arc<Self> {
        let work = Arc::new(work);
        let bytes = work.job.plan().bytes();
        let queued = Arc::new(Self { bytes, work: Mutex::new(Some(Arc::clone(&work))) });
        let progress: Arc<Self> = Arc::clone(&queued);
        work.job.invite_waiters(progress);
        // A thread that already waited may have copied everything by now. This then ends the job.
        ChunkedJob::release(work);
        queued
    }

    pub(super) fn bytes(&self) -> ByteCount {
        self.bytes
    }

    /// Returns whether the job has ended, was cancelled, or has passed its deadline.
    pub(super) fn must_stop(&self) -> bool {
        lock(&self.work).as_ref().is_none_or(|work| work.job.reason_to_stop().is_some())
    }

    /// Copies a chunk that no thread has taken yet. Returns whether there was one.
    pub(super) fn copy_one_chunk(&self) -> bool {
        let Some(work) = lock(&self.work).clone() else { return false };
        let has_copied = work.copy_one_chunk();
        if !has_copied {
            let last = lock(&self.work).take();
            last.into_iter().for_each(ChunkedJob::release);
        }
        ChunkedJob::release(work);
        has_copied
    }
}

impl WaiterProgress for QueuedJob {
    /// The thread that copies the last chunk ends the job at once, so there is nothing to poll.
    fn poll(&self) {}

    fn poll_blocking(&self) -> bool {
        self.copy_one_chunk()
    }
}

/// A job, shared by the threads that execute it.
///
/// It consists of units: the runs of the plan or, if pieces are broken up, its tiles. The many runs
/// of tiles are not listed.
pub(super) struct ChunkedJob {
    path: HostPath,
    chunk: u64,
    cursor: Mutex<Cursor>,
    failure: Mutex<Option<CopyFailure>>,
    rates: Arc<HostRates>,
    /// The bytes of each layer that have not been copied; empty if layers are not reported.
    left_of_layers: Box<[AtomicU64]>,
    /// The pair of blocks whose checksum is computed next.
    next_sum: AtomicUsize,
    job: CopyJob,
}

/// The position in the job from which no thread has taken any bytes.
#[derive(Clone, Copy, Default)]
struct Cursor {
    unit: usize,
    offset: u64,
}

impl ChunkedJob {
    pub(super) fn new(
        job: CopyJob,
        path: HostPath,
        chunk: ByteCount,
        rates: &Arc<HostRates>,
    ) -> Self {
        Self {
            path,
            chunk: chunk.get().max(1),
            cursor: Mutex::new(Cursor::default()),
            failure: Mutex::new(None),
            rates: Arc::clone(rates),
            left_of_layers: left_of_layers(&job),
            next_sum: AtomicUsize::new(0),
            job,
        }
    }

    /// Copies a chunk that no thread has taken yet, or computes a checksum. Returns whether there
    /// was anything to do.
    fn copy_one_chunk(&self) -> bool {
        let Some((begin, bytes)) = self.take_chunk() else { return self.sum_one_block() };
        if let Some(failure) = self.job.reason_to_stop() {
            self.fail(failure);
            return false;
        }
        self.job.start();
        let plan = self.job.plan();
        let copied = if plan.breaks_pieces() {
            copy_tiles(plan, begin.unit, bytes)
        } else {
            copy_runs(plan, begin, bytes, self.path.store())
        };
        copy::fence();
        match copied {
            Ok(()) => {
                self.job.progress().add(ByteCount::new(bytes));
                self.report_layers(begin, bytes);
            }
            Err(failure) => self.fail(failure),
        }
        true
    }

    /// Computes the checksum of a block that no thread has taken yet. Returns whether there was
    /// one.
    fn sum_one_block(&self) -> bool {
        // Relaxed: each thread only needs a distinct number.
        let pair = self.next_sum.fetch_add(1, Ordering::Relaxed);
        if pair >= self.job.checksums() || lock(&self.failure).is_some() {
            return false;
        }
        // A cancellation does not undo a copy whose bytes have all been taken.
        if let Some(late @ CopyFailure::DeadlineExceeded) = self.job.reason_to_stop() {
            self.fail(late);
            return false;
        }
        // SAFETY: the job keeps the source alive, and its claims exclude all writers.
        match unsafe { block_sum(self.job.plan(), Side::Source, pair) } {
            Some(sum) => self.job.set_checksum(pair, sum),
            None => self.fail(CopyFailure::Engine { source: Box::new(NotInHostMemory) }),
        }
        true
    }

    /// Drops a reference. The last one finishes the job.
    fn release(work: Arc<Self>) {
        let Some(Self { job, failure, rates, path, .. }) = Arc::into_inner(work) else { return };
        if let Some(failure) = unpoisoned(failure.into_inner()) {
            return job.finish(Err(failure));
        }
        // The job may have no bytes.
        job.start();
        if job.checksums() == 0 {
            rates.of(path).learn(job.plan().bytes(), job.running_for());
        }
        job.finish(Ok(()));
    }

    /// Takes the next chunk: its start, and its number of bytes.
    fn take_chunk(&self) -> Option<(Cursor, u64)> {
        let plan = self.job.plan();
        let mut cursor = lock(&self.cursor);
        let begin = *cursor;
        if plan.breaks_pieces() {
            // Whole tiles, at least one.
            let mut taken_bytes = 0;
            while let Some(bytes) = plan.tile(to_u64(cursor.unit)).map(|tile| tile.bytes())
                && (taken_bytes == 0 || taken_bytes + bytes <= self.chunk)
            {
                taken_bytes += bytes;
                cursor.unit += 1;
            }
            return (taken_bytes > 0).then_some((begin, taken_bytes));
        }
        let mut taken_bytes = 0;
        while let Some(run) = plan.runs().get(cursor.unit) {
            let left_of_run = run.bytes().get() - cursor.offset;
            let left_of_chunk = self.chunk - taken_bytes;
            if left_of_run > left_of_chunk {
                cursor.offset += left_of_chunk;
                return Some((begin, self.chunk));
            }
            taken_bytes += left_of_run;
            *cursor = Cursor { unit: cursor.unit + 1, offset: 0 };
            if taken_bytes == self.chunk {
                break;
            }
        }
        (taken_bytes > 0).then_some((begin, taken_bytes))
    }

    /// Ends the job with `failure` once the other threads have copied their chunks.
    fn fail(&self, failure: CopyFailure) {
        lock(&self.cursor).unit = usize::MAX;
        lock(&self.failure).get_or_insert(failure);
    }

    /// Reports each layer as done whose last bytes are among the `bytes` bytes from `begin` on.
    fn report_layers(&self, begin: Cursor, mut bytes: u64) {
        let Some(signals) = self.job.layers() else { return };
        let plan = self.job.plan();
        let (mut unit, mut offset) = (begin.unit, begin.offset);
        while bytes > 0 {
            // Without broken pieces, tiles are the runs.
            let Some(tile) = plan.tile(to_u64(unit)) else { return };
            let (layer, of_unit) = (tile.layer, tile.bytes());
            let length = (of_unit - offset).min(bytes);
            let index = to_usize((layer - plan.layers().start).into());
            // Each thread that copied releases its bytes here. The last one acquires those of all
            // others, and reports.
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
    store: Store,
) -> Result<(), CopyFailure> {
    let mut offset = begin.offset;
    for (index, run) in plan.runs().iter().enumerate().skip(begin.unit) {
        let rest = run.rest(ByteCount::new(offset));
        let length = rest.bytes().get().min(bytes);
        let Some(Ends { source, destination }) = host_addresses(plan, &rest) else {
            let (offset, source) = (ByteCount::new(offset), Box::new(NotInHostMemory));
            return Err(CopyFailure::Run { index, offset, source });
        };
        // SAFETY: the plan's runs are within the regions of both ends. The job keeps these alive,
        // and their bytes are valid by the contract of `Memory`. The runs do not overlap. The
        // transfer's claims exclude all writers of the source and all users of the destination. The
        // chunks of the threads are disjoint.
        unsafe {
            let length = to_usize(length);
            copy::copy(source.as_ptr(), destination.as_ptr(), length, store);
        }
        bytes -= length;
        offset = 0;
        if bytes == 0 {
            break;
        }
    }
    Ok(())
}

/// Copies the plan's tiles from the `first` on, `bytes` bytes in all.
fn copy_tiles(plan: &TransferPlan, first: usize, mut bytes: u64) -> Result<(), CopyFailure> {
    let mut index = to_u64(first);
    while bytes > 0 {
        let Some(tile) = plan.tile(index) else { return Ok(()) };
        let failed = || {
            let source = Box::new(NotInHostMemory);
            // The index of a tile's first run is the number of runs before it.
            let index = to_usize(plan.first_run_of(index));
            CopyFailure::Run { index, offset: ByteCount::ZERO, source }
        };
        let length = to_usize(tile.first.bytes);
        let mut regions = (tile.first.source_region, tile.first.destination_region);
        let mut at = host_addresses(plan, &tile.first).ok_or_else(failed)?;
        let (mut from, mut to) = (tile.first.source_offset, tile.first.destination_offset);
        let mut result = Ok(());
        tile.for_each(&mut |run| {
            if regions != (run.source_region, run.destination_region) {
                regions = (run.source_region, run.destination_region);
                match host_addresses(plan, run) {
                    Some(addresses) => at = addresses,
                    None => result = Err(failed()),
                }
                (from, to) = (run.source_offset, run.destination_offset);
            }
            if result.is_err() {
                return;
            }
            // Offsets wrap, because an iteration may return to the start of an outer loop.
            let from = to_usize(run.source_offset.wrapping_sub(from));
            let to = to_usize(run.destination_offset.wrapping_sub(to));
            let from = at.source.as_ptr().wrapping_add(from);
            let to = at.destination.as_ptr().wrapping_add(to);
            // SAFETY: as in `copy_runs`: the run belongs to the plan, so both pointers are within
            // their regions.
            unsafe { copy::copy(from, to, length, Store::Cached) };
        });
        result?;
        bytes = bytes.saturating_sub(tile.bytes());
        index += 1;
    }
    Ok(())
}

/// The error for memory whose kind is the host's, and whose location is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the memory is of a host kind and has no host address; correct its implementation of Memory"
)]
struct NotInHostMemory;

/// The start of a run at both ends.
fn host_addresses(plan: &TransferPlan, run: &CopyRun) -> Option<Ends<HostAddress>> {
    let at = |end: &Endpoint, region, offset| {
        end.base(region).and_then(Location::as_host)?.checked_add(ByteCount::new(offset))
    };
    let source = at(plan.end(Side::Source), run.source_region, run.source_offset)?;
    let destination =
        at(plan.end(Side::Destination), run.destination_region, run.destination_offset)?;
    Some(Ends { source, destination })
}

#[cfg(all(test, not(loom)))]
mod tests;
