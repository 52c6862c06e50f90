//! Checks that files are long enough for reads and writes. If a file ends early, a backend at best
//! reports a failure.

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, RawFd};

use smallvec::SmallVec;
use terrane_core::{Location, OsError};
use terrane_transfer::TransferPlan;

use crate::engine::error::RequestError;
use crate::engine::route::{Operation, Route, Target};

/// Checks before reads that the file has the plan's ranges.
pub(super) fn check_before(route: &Route, plan: &TransferPlan) -> Result<(), RequestError> {
    if route.operation == Operation::Write { Ok(()) } else { check_after(route, plan) }
}

/// Checks afterwards that the file has all ranges that the plan has read or written.
pub(super) fn check_after(route: &Route, plan: &TransferPlan) -> Result<(), RequestError> {
    if !matches!(route.target, Target::File) {
        return Ok(());
    }
    let side = route.target_side();
    let mut ends: SmallVec<[(RawFd, u64); 1]> = SmallVec::new();
    for run in plan.runs() {
        let at = run.at(side);
        let Some(position) = plan.end(side).base(at.region).and_then(Location::as_file) else {
            continue;
        };
        let file = position.file.descriptor;
        let end = position.offset.get() + at.offset + run.bytes().get();
        match ends.iter_mut().find(|(known, _)| *known == file) {
            Some((_, wanted)) => *wanted = end.max(*wanted),
            None => ends.push((file, end)),
        }
    }
    for (file, wanted) in ends {
        // SAFETY: the plan keeps the endpoint alive, and so the memory that owns this descriptor.
        let length = unsafe { length_of(file) }?;
        if length < wanted {
            return Err(match route.operation {
                Operation::Read => RequestError::FileEnds { length, wanted },
                Operation::Write => RequestError::WrittenShort { length, wanted },
            });
        }
    }
    Ok(())
}

/// The length of the file of an end.
///
/// # Safety
///
/// The descriptor must be open, and stay open during the call.
unsafe fn length_of(descriptor: RawFd) -> Result<u64, RequestError> {
    // SAFETY: the caller guarantees that the descriptor is open. It is borrowed, because this
    // `File` never drops.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(descriptor) });
    let metadata = file.metadata().map_err(|error| {
        let source = OsError::from_io("fstat", &error);
        RequestError::FileLength { source }
    })?;
    Ok(metadata.len())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects by panicking")]

    use super::*;

    #[test]
    fn a_failed_query_of_a_file_length_returns_the_systems_error() {
        // SAFETY: no process has so many descriptors, so the query fails. The descriptor is not
        // used otherwise.
        let error = unsafe { length_of(1 << 30) }.unwrap_err();
        match &error {
            RequestError::FileLength { source } => assert_eq!(source.operation, "fstat"),
            other => panic!("{other:?}"),
        }
        assert!(error.to_string().contains("file system"), "{error}");
    }
}
