//! Checksums of blocks that are copied through bounce buffers in canonical order.

use std::slice;

use rustc_hash::FxHashSet;
use terrane_core::convert::{to_u64, to_usize};
use terrane_layout::RegionOffset;

use super::super::bounce::BounceBuffer;
use super::super::extents::RunPart;
use super::super::request::{BufferDirection, NotForFiles, copy_parts, engine_failure};
use super::super::route::DiskRoute;
use crate::checksums::crc::{Crc64Shift, crc64};
use crate::engine::job::{CopyFailure, CopyJob};
use crate::plan::TransferPlan;
use crate::side::Side;

/// The checksums of a job whose blocks are one span each in the file, in canonical order. The bytes
/// are in the processor's cache when they are copied to or from a buffer.
pub(super) struct BufferSums {
    /// The end that is in the file.
    side: Side,
    block_bytes: u64,
    pairs: Vec<PairSum>,
}

/// The checksum of the bytes of a pair of blocks so far.
#[derive(Clone, Copy)]
struct PairSum {
    sum: u64,
    /// The bytes that are still missing.
    left: u64,
}

impl BufferSums {
    /// Returns `None` if the route has no buffers, or its file stores blocks in another order.
    pub(super) fn of(job: &CopyJob, route: &DiskRoute) -> Option<Self> {
        let (plan, side) = (job.plan(), route.file_side());
        let block_bytes = plan.bytes().get().checked_div(to_u64(job.checksums()))?;
        let pairs = vec![PairSum { sum: 0, left: block_bytes }; job.checksums()];
        (route.staged && is_canonical(plan, side)).then_some(Self { side, block_bytes, pairs })
    }

    /// Adds the bytes of a buffer, starting at `first`. They belong to these parts.
    ///
    /// # Safety
    ///
    /// The buffer has all bytes of the parts there, and nothing writes it during the call.
    pub(super) unsafe fn add(
        &mut self,
        job: &CopyJob,
        parts: &[RunPart],
        buffer: &BounceBuffer,
        first: u64,
    ) -> Result<(), CopyFailure> {
        let all: u64 = parts.iter().map(|part| part.bytes).sum();
        let (mut done, mut begin) = (0, 0);
        for part in parts {
            let end = begin + part.bytes;
            while done < end {
                // The rest of the block that the next byte belongs to.
                let skipped = part.offset + (done - begin);
                let piece = self.rest_of_block(job.plan(), part.run, skipped);
                let found = piece.zip(buffer.at(first + done));
                let ((pair, left), address) = found.ok_or_else(|| engine_failure(NotForFiles))?;
                let bytes = left.min(all - done);
                // SAFETY: the buffer has all bytes of the parts, and the first `done` of them come
                // before these. By the contract of this function, nothing writes them.
                let span = unsafe { slice::from_raw_parts(address.as_ptr(), to_usize(bytes)) };
                self.add_piece(job, pair, left - bytes, span);
                done += bytes;
            }
            begin = end;
        }
        Ok(())
    }

    /// The pair of blocks with a byte of a run, and the number of the block's bytes from there to
    /// its end. These bytes are adjacent in the file.
    fn rest_of_block(&self, plan: &TransferPlan, run: usize, offset: u64) -> Option<(usize, u64)> {
        let mut pair = None;
        plan.pairs_of(run, offset..offset + 1, &mut |found, _| pair = Some(to_usize(found.into())));
        let at = plan.runs().get(run)?.at(self.side);
        let (start, _) = block_span(plan, self.side, *plan.blocks(self.side).get(pair?)?)?;
        let in_block = (at.offset + offset).checked_sub(start.offset)?;
        let left = self.block_bytes.checked_sub(in_block).filter(|&left| left > 0)?;
        (at.region == start.region).then_some((pair?, left))
    }

    /// Adds bytes of a block. `behind` bytes of the block follow them.
    fn add_piece(&mut self, job: &CopyJob, pair: usize, behind: u64, bytes: &[u8]) {
        let Some(so_far) = self.pairs.get_mut(pair) else { return };
        so_far.sum ^= Crc64Shift::of(behind).apply(crc64(bytes));
        so_far.left = so_far.left.wrapping_sub(to_u64(bytes.len()));
        if so_far.left == 0 {
            job.set_checksum(pair, so_far.sum);
        }
    }
}

/// Whether the file at `side` stores the blocks of a plan in canonical order. Checksums are then
/// computed from buffers, in file order.
pub(in super::super) fn is_canonical(plan: &TransferPlan, side: Side) -> bool {
    let blocks = plan.blocks(side);
    let Some(&first) = blocks.first() else { return true };
    let block_bytes = plan.bytes().get() / to_u64(blocks.len());
    let is_one_span = block_span(plan, side, first).is_some_and(|(_, bytes)| bytes == block_bytes);
    // If a source block is named twice, its bytes for two pairs could be adjacent in a buffer.
    let mut seen = FxHashSet::default();
    is_one_span && (side == Side::Destination || blocks.iter().all(|block| seen.insert(*block)))
}

/// The bytes that are copied between two updates of the checksum, so that they are still in the
/// cache.
const HOT_BYTES: u64 = 128 << 10;

/// Copies the parts of a request between memory and its buffer, and adds their bytes to the job's
/// checksums, if it requests some.
pub(super) fn copy_and_sum(
    job: &CopyJob,
    sums: Option<&mut BufferSums>,
    parts: &[RunPart],
    buffer: &BounceBuffer,
    direction: BufferDirection,
) -> Result<(), CopyFailure> {
    let Some(sums) = sums else { return copy_parts(job, parts, buffer, 0, direction) };
    let (mut rest, mut first) = (parts, 0);
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |part: &&RunPart| {
            let has_room = bytes < HOT_BYTES;
            bytes += if has_room { part.bytes } else { 0 };
            has_room
        };
        let count = rest.iter().take_while(fits).count();
        let (parts, others) = rest.split_at(count);
        let sum = |sums: &mut BufferSums| {
            // SAFETY: the buffer was read before, or filled just now. It belongs to one operation,
            // which has no request in flight.
            unsafe { sums.add(job, parts, buffer, first) }
        };
        if direction == BufferDirection::OutOfBuffer {
            sum(sums)?;
        }
        copy_parts(job, parts, buffer, first, direction)?;
        if direction == BufferDirection::IntoBuffer {
            sum(sums)?;
        }
        (rest, first) = (others, first + bytes);
    }
    Ok(())
}

/// The copied bytes of a block, if they are one span in canonical order: their start and length.
fn block_span(plan: &TransferPlan, side: Side, block: u32) -> Option<(RegionOffset, u64)> {
    let (layers, tokens) = (plan.layers_of(side), plan.tokens(side));
    let (mut first, mut spans) = (None, 0);
    let geometry = plan.end(side).layout().geometry();
    geometry.canonical_spans_of(block, layers, tokens.unwrap_or(0..u32::MAX), &mut |at, bytes| {
        first.get_or_insert((at, bytes));
        spans += 1;
    });
    first.filter(|_| spans == 1)
}
