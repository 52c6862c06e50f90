//! The requests that the thread makes.

use terrane_core::convert::to_u64;
use terrane_core::{Durability, FileHandle, Location};
use terrane_storage::{IoBuffer, IoFile, IoMemory, IoRequest};

use super::super::bounce::BounceBuffer;
use super::super::extents::{RunPart, follows};
use super::super::request::{
    BufferDirection, NotForFiles, by_deadline, engine_failure, io_buffer, io_file,
};
use super::super::route::FileFlow;
use super::buffer_sums::copy_and_sum;
use super::sums::JobSums;
use super::{DiskWorker, JobState, Operation, RequestOutcome, Stage};
use crate::engine::job::CopyFailure;
use crate::hazard::endpoint::Endpoint;
use crate::plan::TransferPlan;
use crate::side::Side;

impl DiskWorker {
    /// Requests the next extent of a job.
    pub(super) fn advance(&mut self, key: usize) -> Result<RequestOutcome, CopyFailure> {
        let Some(active) = self.jobs.get_mut(key) else { return Ok(RequestOutcome::NothingLeft) };
        if active.failure.is_some() || !active.has_extents_left() {
            return Ok(RequestOutcome::NothingLeft);
        }
        if let Some(failure) = active.job.reason_to_stop() {
            return Err(failure);
        }
        let mut buffer = None;
        let copied = active.route.staged && active.route.flow == FileFlow::Write;
        if active.route.staged {
            buffer = self.bounce.take().map_err(engine_failure)?;
            if buffer.is_none() {
                return Ok(RequestOutcome::Blocked);
            }
        }
        let requested = self.request_extent(key, &mut buffer);
        // `Some` only if no request was made: a lost buffer would block staged jobs forever.
        if let Some(buffer) = buffer {
            self.bounce.give_back(buffer);
        }
        requested?;
        let has_more = self.jobs.get(key).is_some_and(JobState::has_extents_left);
        Ok(if has_more { RequestOutcome::Made { copied } } else { RequestOutcome::NothingLeft })
    }

    /// Requests the next extent of a job, through `buffer` if the route is staged. A request then
    /// owns the buffer.
    fn request_extent(
        &mut self,
        key: usize,
        buffer: &mut Option<BounceBuffer>,
    ) -> Result<(), CopyFailure> {
        let Some(active) = self.jobs.get_mut(key) else { return Ok(()) };
        active.job.start();
        let mut parts = self.spare_parts.pop().unwrap_or_default();
        let plan = active.job.plan();
        let most = if buffer.is_some() { self.bounce.size().get() } else { self.request_bytes };
        let Some(position) = active.extents.take(plan, most, &mut parts) else {
            return Err(engine_failure(NotForFiles));
        };
        let route = active.route;
        let memory_side = route.memory_side().unwrap_or(Side::Source);
        self.buffers.clear();
        match &*buffer {
            Some(buffer) => {
                let bytes = parts.iter().map(|part| part.bytes).sum();
                if route.flow == FileFlow::Write {
                    let sums = active.sums.as_mut().and_then(JobSums::of_buffers);
                    let direction = BufferDirection::IntoBuffer;
                    copy_and_sum(&active.job, sums, &parts, buffer, direction)?;
                }
                if route.is_staged_by_choice() {
                    list_memory(plan, memory_side, &parts, &mut self.buffers)?;
                    // The other path is measured again once the memory is registered.
                    if let Some(memory) = memory_of(plan.end(memory_side), &self.buffers) {
                        self.queue.note_use(memory, &self.buffers);
                    }
                    self.buffers.clear();
                }
                self.buffers.push(io_buffer(buffer.at(0), bytes)?);
            }
            None => list_memory(plan, memory_side, &parts, &mut self.buffers)?,
        }
        let stage = match route.flow {
            FileFlow::Read | FileFlow::BetweenFiles => Stage::Reading,
            FileFlow::Write => Stage::Writing { next: parts.len(), requests: 1 },
        };
        let is_direct = route.is_direct(route.file_side());
        let memory = match &*buffer {
            // The kernel pins no pages for requests through the page cache.
            _ if !is_direct => None,
            Some(_) => self.bounce.io_memory(),
            None => memory_of(plan.end(memory_side), &self.buffers),
        };
        let file = io_file(&position.file, is_direct)?;
        let token = to_u64(self.operations.vacant_key());
        let offset = position.offset;
        let request = match stage {
            Stage::Reading => IoRequest::read(token, file, offset, &self.buffers),
            _ => IoRequest::write(token, file, offset, &self.buffers),
        };
        let request = by_deadline(request, &active.job).within(memory);
        // SAFETY: the buffers are memory of the job's runs, which the job keeps alive and claims,
        // or an engine's buffer. Both exist until the completion has been handled, and the queue
        // drops before either. The descriptors are open while the memory lives.
        unsafe { self.queue.submit(&request) }.map_err(engine_failure)?;
        active.operations += 1;
        self.operations.insert(Operation { job: key, parts, buffer: buffer.take(), stage });
        Ok(())
    }

    /// Requests the next write of an operation between files.
    pub(super) fn write_on(&mut self, index: usize) {
        let Some(operation) = self.operations.get(index) else { return };
        let key = operation.job;
        match self.write_next(index) {
            Ok(true) => self.to_write.push_front(index),
            Ok(false) => {}
            Err(failure) => self.fail(key, failure),
        }
        self.end_if_done(index, false);
        self.finish_if_done(key);
    }

    /// Requests a write of parts that are adjacent in the destination, starting with the next one.
    /// Returns whether parts remain.
    fn write_next(&mut self, index: usize) -> Result<bool, CopyFailure> {
        let Some(operation) = self.operations.get_mut(index) else { return Ok(false) };
        let Operation { job: key, parts, buffer, stage: Stage::Writing { next, requests } } =
            operation
        else {
            return Ok(false);
        };
        let Some(active) = self.jobs.get(*key) else { return Ok(false) };
        if active.failure.is_some() {
            return Ok(false);
        }
        let plan = active.job.plan();
        let begin: u64 = parts.iter().take(*next).map(|part| part.bytes).sum();
        let (mut bytes, mut first) = (0, None);
        for part in parts.iter().skip(*next) {
            let place = part.location(plan, Side::Destination).and_then(Location::as_file);
            let Some(place) = place else { return Err(engine_failure(NotForFiles)) };
            match first {
                None => first = Some(place),
                Some(first) if follows(first, bytes, place) => {}
                Some(_) => break,
            }
            bytes += part.bytes;
            *next += 1;
        }
        let (Some(position), Some(buffer)) = (first, buffer) else { return Ok(false) };
        let is_direct = active.route.is_direct(Side::Destination);
        let memory = self.bounce.io_memory().filter(|_| is_direct);
        let file = io_file(&position.file, is_direct)?;
        let source = [io_buffer(buffer.at(begin), bytes)?];
        let request = IoRequest::write(to_u64(index), file, position.offset, &source);
        let request = by_deadline(request, &active.job).within(memory);
        // SAFETY: the operation owns the buffer until its last completion has been handled, and the
        // queue drops before the buffer. The descriptor is open while the job exists.
        unsafe { self.queue.submit(&request) }.map_err(engine_failure)?;
        *requests += 1;
        Ok(*next < parts.len())
    }

    /// Requests that a file is made durable.
    pub(super) fn sync(
        &mut self,
        key: usize,
        file: &FileHandle,
        durability: Durability,
    ) -> Result<(), CopyFailure> {
        let Some(active) = self.jobs.get_mut(key) else { return Ok(()) };
        let token = to_u64(self.operations.vacant_key());
        let file = IoFile::buffered(file);
        let request = match durability {
            Durability::Full => IoRequest::sync_all(token, file),
            Durability::None | Durability::Data => IoRequest::sync_data(token, file),
        };
        let request = by_deadline(request, &active.job);
        // SAFETY: there are no buffers, and the descriptor is open while the job exists.
        unsafe { self.queue.submit(&request) }.map_err(engine_failure)?;
        active.operations += 1;
        let parts = self.spare_parts.pop().unwrap_or_default();
        self.operations.insert(Operation { job: key, parts, buffer: None, stage: Stage::Syncing });
        Ok(())
    }
}

/// Lists the memory of parts.
fn list_memory(
    plan: &TransferPlan,
    side: Side,
    parts: &[RunPart],
    buffers: &mut Vec<IoBuffer>,
) -> Result<(), CopyFailure> {
    for part in parts {
        let address = part.location(plan, side).and_then(Location::as_host);
        buffers.push(io_buffer(address, part.bytes)?);
    }
    Ok(())
}

/// The endpoint's memory that contains the first buffer. The queue checks the others.
fn memory_of<'a>(end: &'a Endpoint, buffers: &[IoBuffer]) -> Option<&'a IoMemory> {
    let first = buffers.first()?;
    end.io_memory().iter().find(|memory| memory.contains(first.address))
}
