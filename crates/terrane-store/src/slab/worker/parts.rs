//! Requests for parts of blocks, their completions, and the blocks' checksums.

#![expect(unsafe_code, reason = "the queue and the copies use memory of the callers")]

use std::sync::Arc;
use std::time::Instant;

use terrane_core::ByteCount;
use terrane_core::convert::{to_u64, to_usize};
use terrane_storage::{IoCompletion, IoFailure, IoFailureReason, IoRequest};

use super::block::failure_of;
use super::{Block, Worker};
use crate::error::StoreError;
use crate::slab::bounce::BounceBuffer;
use crate::slab::cut::{Cut, CutLimits};
use crate::slab::memory::{self, BounceDirection};
use crate::slab::request::SlabFailure;

/// The most bytes of a request to read while few bytes are left to read.
///
/// Measured on a drive of 2 GB/s: 64 blocks of 1 MiB take 1.5 % longer with requests of 1 MiB.
const SMALLEST_READ: u64 = 512 << 10;

/// The most bytes of a request to read while many bytes are left to read.
///
/// Measured on that drive: 64 blocks of 4 MiB take 1.5 % longer with requests of 4 MiB or 512 KiB.
const LARGEST_READ: u64 = 1 << 20;

/// A request in flight.
pub(super) struct Part {
    block: usize,
    cut: Cut,
    bounce: Option<BounceBuffer>,
    /// Its place in the block.
    begin: u64,
    end: u64,
}

impl Worker {
    /// Submits parts until the queue is full or none may be submitted, and starts them.
    pub(super) fn fill_queue(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut is_idle = self.queue.in_flight() == 0;
        while self.queue.has_room() {
            let Some(key) = self.waiting.next(now, self.in_flight) else { break };
            let is_write = self.blocks.get(key).is_some_and(Block::is_write);
            if let Some(failure) = self.shared.health.refusal(is_write) {
                self.fail(key, failure);
                continue;
            }
            if !is_write && !self.has_window() {
                break;
            }
            if let Err(error) = self.submit_part(key) {
                self.fail(key, SlabFailure::Refused(Arc::new(error)));
            } else if std::mem::take(&mut is_idle) {
                // The device works while the kernel prepares the other requests.
                self.start();
            }
        }
        self.start();
    }

    fn start(&mut self) {
        if let Err(error) = self.queue.flush() {
            self.turn_off(error);
        }
    }

    /// Whether another part of a read may be submitted.
    ///
    /// Some devices end all their requests at about the same time. No request is left then to cover the
    /// time that the checksums of the last ones take. So at most three quarters of the bytes that are left
    /// are in the device, unless that would be too little to keep it busy.
    fn has_window(&self) -> bool {
        let (reading, left) = (self.in_flight.read_bytes, self.reads_left);
        reading < self.window.max((reading + left) / 4 * 3)
    }

    /// The most bytes of the next request to read.
    ///
    /// Small requests at the end leave few bytes to checksum after the last one.
    fn read_bytes(&self) -> u64 {
        let granule = self.shared.files.granule().get();
        let bytes = (self.reads_left / 128).clamp(SMALLEST_READ, LARGEST_READ);
        self.request_bytes.min(bytes - bytes % granule).max(granule)
    }

    /// Submits the next part of a block.
    fn submit_part(&mut self, key: usize) -> Result<(), StoreError> {
        let read_bytes = self.read_bytes();
        let Some(block) = self.blocks.get_mut(key) else { return Ok(()) };
        let limits = CutLimits {
            granule: self.shared.files.granule().get(),
            memory_alignment: block.memory_alignment,
            request: if block.is_write() { self.request_bytes } else { read_bytes },
            bounce: self.bounce.largest(),
        };
        let begin = block.submitted.position;
        let mut end = block.submitted;
        let cut = Cut::next(&block.request.buffers, &mut end, &limits);
        let bounce = if cut.bounce > 0 { Some(self.bounce.take(cut.bounce)?) } else { None };
        if let Some(bounce) = bounce.as_ref().filter(|_| block.is_write()) {
            // SAFETY: the bounce buffer is free and has room for the cut. The submitter of the block
            // keeps its memory valid until the block has ended.
            unsafe { memory::copy(&cut, bounce.address, BounceDirection::IntoBounce) };
        }
        cut.resolve(bounce.as_ref().map(|bounce| bounce.address), &mut self.buffers);
        let token = to_u64(self.parts.vacant_key());
        let offset = ByteCount::new(block.offset + begin);
        let mut request = if block.is_write() {
            IoRequest::write(token, block.file, offset, &self.buffers)
        } else {
            IoRequest::read(token, block.file, offset, &self.buffers)
        };
        request.deadline = block.request.deadline;
        // A bounce buffer is in other memory. The kernel pins no pages for the page cache.
        request.memory =
            block.request.memory.as_ref().filter(|_| bounce.is_none() && block.is_direct);
        // SAFETY: the buffers are those of the block, which its submitter keeps valid until the block has
        // ended, and a bounce buffer. Both are kept until the completion was handled, and the queue
        // drops before the bounce buffers. The files stay open as long as this thread runs.
        if let Err(error) = unsafe { self.queue.submit(&request) } {
            if let Some(bounce) = bounce {
                self.bounce.give_back(bounce);
            }
            return Err(error.into());
        }
        self.shared.counts.requested();
        let bytes = end.position - begin;
        block.submitted = end;
        block.in_flight += 1;
        if block.is_write() {
            self.in_flight.writes += 1;
        } else {
            self.in_flight.reads += 1;
            self.in_flight.read_bytes += bytes;
            self.reads_left -= bytes;
        }
        let is_last = block.submitted.position == block.total;
        // The bytes of a write are there already.
        if block.is_write() && block.sum.add_ready(begin, end.position) {
            self.to_sum.push_back(key);
        }
        self.parts.insert(Part { block: key, cut, bounce, begin, end: end.position });
        if is_last {
            self.stop_waiting(key);
        }
        Ok(())
    }

    /// Handles the completion of a part.
    pub(super) fn complete(&mut self, completion: IoCompletion) {
        let Some(part) = self.parts.try_remove(to_usize(completion.token)) else { return };
        let Part { block: key, cut, bounce, begin, end } = part;
        let Some(block) = self.blocks.get_mut(key) else { return };
        block.in_flight -= 1;
        let is_write = block.is_write();
        if is_write {
            self.in_flight.writes -= 1;
        } else {
            self.in_flight.reads -= 1;
            self.in_flight.read_bytes -= end - begin;
            self.in_flight.last_read = Some(Instant::now());
        }
        let is_good = completion.outcome.is_ok() && block.failure.is_none();
        if let Some(bounce) = &bounce
            && is_good
            && !is_write
        {
            // SAFETY: the request that filled the bounce buffer has completed, and the submitter of the
            // block keeps its memory valid until the block has ended.
            unsafe { memory::copy(&cut, bounce.address, BounceDirection::OutOfBounce) };
        }
        if let Some(bounce) = bounce {
            self.bounce.give_back(bounce);
        }
        if is_write
            && let Some(place) =
                self.shared.files.place(block.request.group, block.request.slot, block.total)
        {
            place.file.note_write();
        }
        if is_good && !is_write && block.sum.add_ready(begin, end) {
            self.to_sum.push_back(key);
        }
        match completion.outcome {
            Ok(()) => self.end_if_done(key),
            Err(failure) => self.part_failed(key, is_write, failure),
        }
    }

    fn part_failed(&mut self, key: usize, is_write: bool, failure: IoFailure) {
        let makes_read_only = is_write && ends_writing(&failure);
        if makes_read_only {
            self.shared.health.make_read_only(StoreError::WriteFailed(failure.clone()));
        }
        self.fail(key, failure_of(failure));
        if makes_read_only {
            self.refuse_waiting();
        }
    }

    /// Adds the bytes of one part to the checksum of its block.
    pub(super) fn compute_sum(&mut self) {
        let Some(key) = self.to_sum.pop_front() else { return };
        let Some(block) = self.blocks.get_mut(key) else { return };
        if let Some(bytes) = block.sum.take_next() {
            let sum = &mut block.sum;
            // SAFETY: the submitter of the block keeps its memory valid until it has ended, and lets no
            // other code write it. The bytes were read from the file, or are those to be written.
            unsafe {
                memory::add_to_sum(&mut sum.sum, &block.request.buffers, &mut sum.added, bytes);
            }
        }
        block.sum.is_listed = block.sum.has_next();
        if block.sum.is_listed {
            self.to_sum.push_back(key);
        }
        self.end_if_done(key);
    }

    /// Asks for the cancellation of the requests in flight of these blocks.
    pub(super) fn stop_parts(&mut self, select: impl Fn(usize) -> bool) {
        for (token, part) in &self.parts {
            if select(part.block) {
                // A refusal is reported by the next wait.
                let _ = self.queue.cancel(to_u64(token));
            }
        }
    }
}

/// Whether a failed write says that later ones would fail as well: no space, or a failed device. A
/// write of memory that is not mapped says nothing about the file.
fn ends_writing(failure: &IoFailure) -> bool {
    match failure.reason {
        IoFailureReason::Os(error) => {
            use rustix::io::Errno;
            let code = Errno::from_raw_os_error(error.code);
            failure.is_exhaustion() || !matches!(code, Errno::FAULT | Errno::INVAL | Errno::NOMEM)
        }
        IoFailureReason::EndOfFile | IoFailureReason::NoProgress => true,
        _ => false,
    }
}
