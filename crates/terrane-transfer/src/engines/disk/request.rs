//! The parts of requests, and the meaning of their failures.

use std::sync::Arc;

use terrane_core::convert::to_usize;
use terrane_core::{ByteCount, Durability, FileHandle, FilePosition, HostAddress, Location};
use terrane_storage::{
    IoBuffer, IoFailure, IoFailureReason, IoFile, IoOperation, IoRequest, StorageError,
};

use super::bounce::BounceBuffer;
use super::extents::RunPart;
use crate::engine::job::{CopyFailure, CopyJob};
use crate::engines::copy::{self, Store};
use crate::plan::TransferPlan;
use crate::side::Side;

/// The error for memory whose kind is disk or host, and whose location is neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the memory is of kind disk or host, and its location is neither a file nor a host address; correct \
     its implementation of Memory"
)]
pub(super) struct NotForFiles;

/// The error of an engine whose queue has failed permanently.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the queue of the disk engine failed and serves no more requests; create a new engine")]
pub(super) struct QueueFailed(#[source] pub(super) Arc<StorageError>);

/// A failure of the engine as a whole.
pub(super) fn engine_failure(
    source: impl std::error::Error + Send + Sync + 'static,
) -> CopyFailure {
    CopyFailure::Engine { source: Box::new(source) }
}

/// Converts a failed request to the job's failure: the run and the offset at which it stopped, and
/// the cause.
///
/// The run is found by its file position, because one operation between files consists of several
/// requests.
pub(super) fn describe(failure: IoFailure, parts: &[RunPart], plan: &TransferPlan) -> CopyFailure {
    if failure.reason == IoFailureReason::DeadlineExceeded {
        return CopyFailure::DeadlineExceeded;
    }
    let side = match failure.operation {
        IoOperation::Read => Side::Source,
        _ => Side::Destination,
    };
    let stopped_in = |part: &RunPart| {
        let begin = part.location(plan, side)?.as_file()?;
        let done = failure.offset.get().checked_sub(begin.offset.get())?;
        let is_within = begin.file.identity == failure.file && done < part.bytes;
        is_within.then(|| (part.run, ByteCount::new(part.offset + done)))
    };
    match parts.iter().find_map(stopped_in) {
        Some((index, offset)) => CopyFailure::Run { index, offset, source: Box::new(failure) },
        None => engine_failure(failure),
    }
}

pub(super) fn io_buffer(address: Option<HostAddress>, bytes: u64) -> Result<IoBuffer, CopyFailure> {
    let address = address.ok_or_else(|| engine_failure(NotForFiles))?;
    Ok(IoBuffer { address, length: ByteCount::new(bytes) })
}

/// The file, by the descriptor that the route uses.
pub(super) fn io_file(file: &FileHandle, direct: bool) -> Result<IoFile, CopyFailure> {
    if direct {
        IoFile::direct(file).ok_or_else(|| engine_failure(NotForFiles))
    } else {
        Ok(IoFile::buffered(file))
    }
}

/// Adds the job's deadline to the request, which is cancelled then.
pub(super) fn by_deadline<'a>(request: IoRequest<'a>, job: &CopyJob) -> IoRequest<'a> {
    match job.options().deadline {
        Some(deadline) => request.by(deadline),
        None => request,
    }
}

/// The distinct files that a job writes and must make durable, each with its durability.
pub(super) fn files_to_sync(job: &CopyJob) -> Vec<(FileHandle, Durability)> {
    let mut files: Vec<(FileHandle, Durability)> = Vec::new();
    if job.options().more_follows {
        return files;
    }
    for base in job.plan().destination().bases() {
        let Location::File(FilePosition { file, .. }) = base else { continue };
        let durability = file.durability.max(job.options().durability);
        match files.iter_mut().find(|(other, _)| other.identity == file.identity) {
            Some((_, known)) => *known = durability.max(*known),
            None if durability > Durability::None => files.push((*file, durability)),
            None => {}
        }
    }
    files
}

/// The direction of a copy between a bounce buffer and the runs in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BufferDirection {
    /// From the source of the runs.
    IntoBuffer,
    /// To the destination of the runs.
    OutOfBuffer,
}

/// Shorter parts are copied through the cache.
const MIN_STREAMED: usize = 4096;

/// Copies parts of an operation between memory and the bounce buffer. In the buffer they are
/// adjacent, starting at `begin`.
pub(super) fn copy_parts(
    job: &CopyJob,
    parts: &[RunPart],
    buffer: &BounceBuffer,
    mut begin: u64,
    direction: BufferDirection,
) -> Result<(), CopyFailure> {
    let side = match direction {
        BufferDirection::IntoBuffer => Side::Source,
        BufferDirection::OutOfBuffer => Side::Destination,
    };
    for part in parts {
        let memory = part.location(job.plan(), side).and_then(Location::as_host);
        let memory = memory.ok_or_else(|| engine_failure(NotForFiles))?;
        let staged = buffer.at(begin).ok_or_else(|| engine_failure(NotForFiles))?;
        let (from, to) = match direction {
            BufferDirection::IntoBuffer => (memory, staged),
            BufferDirection::OutOfBuffer => (staged, memory),
        };
        let length = to_usize(part.bytes);
        // This thread does not use data that it copies to memory. Data that it copies to the buffer
        // is read next, by the disk.
        let streams = direction == BufferDirection::OutOfBuffer
            && length >= MIN_STREAMED
            && copy::has_non_temporal_stores();
        let store = if streams { Store::NonTemporal } else { Store::Cached };
        // SAFETY: the memory belongs to a run. It is within its region, which the job keeps alive
        // and claims. The buffer is as large as all parts together. It belongs to this operation,
        // which has no request in flight now.
        unsafe { copy::copy(from.as_ptr(), to.as_ptr(), length, store) };
        begin += part.bytes;
    }
    copy::fence();
    Ok(())
}
