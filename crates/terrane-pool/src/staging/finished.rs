//! The outputs of a transfer table whose copies are complete.

use std::slice;

use terrane_core::{Allocate, ByteCount, Memory};

use super::error::StagingError;
use super::lease::try_reserve;
use super::transfer::{Direction, EntryId, TransferEntry, TransferTable};

/// A table whose copies are complete. Its outputs can be read in place or copied into the caller's
/// memory.
///
/// A call that fails does not change its destination. Dropping the table frees its buffers.
#[derive(Debug)]
pub struct FinishedTransfer<A: Allocate> {
    table: TransferTable<A>,
}

impl<A: Allocate> FinishedTransfer<A> {
    /// The caller has waited until no stream uses the table's buffers.
    pub(super) fn new(table: TransferTable<A>) -> Self {
        Self { table }
    }

    /// Returns the number of outputs.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.output_entries().count()
    }

    /// Returns an output, without its padding.
    ///
    /// # Errors
    ///
    /// [`StagingError::NoSuchOutput`] if the table has no output with the index of `entry`. An
    /// entry of another table is not detected if this table has an output with its index.
    pub fn output(&self, entry: EntryId) -> Result<&[u8], StagingError> {
        let entries = &self.table.entries;
        match entries.get(entry.0) {
            Some(output) if output.direction == Direction::FromDevice => self.bytes(output),
            _ => Err(StagingError::NoSuchOutput { index: entry.0, entries: entries.len() }),
        }
    }

    /// Returns a part of an output.
    ///
    /// # Errors
    ///
    /// [`StagingError::OutOfBounds`] if the part extends beyond the output; otherwise as for
    /// [`output`](Self::output).
    pub fn range(
        &self,
        entry: EntryId,
        offset: ByteCount,
        length: ByteCount,
    ) -> Result<&[u8], StagingError> {
        let output = self.output(entry)?;
        let start = offset.to_usize();
        let end = start.checked_add(length.to_usize());
        end.and_then(|end| output.get(start..end)).ok_or_else(|| StagingError::OutOfBounds {
            index: entry.0,
            offset,
            length,
            output: ByteCount::from_usize(output.len()),
        })
    }

    /// Copies each output into one vector, in order. Afterwards `outputs` has one vector for each
    /// output. Existing vectors keep their capacity.
    ///
    /// # Errors
    ///
    /// [`StagingError::Reserve`] if there is no memory for all of them.
    pub fn collect(&self, outputs: &mut Vec<Vec<u8>>) -> Result<(), StagingError> {
        let found: Vec<&[u8]> =
            self.output_entries().map(|output| self.bytes(output)).collect::<Result<_, _>>()?;
        // The steps that can fail come first. None of them changes the content of the vectors.
        for (bytes, output) in found.iter().zip(outputs.iter_mut()) {
            let more = bytes.len().saturating_sub(output.len());
            try_reserve(output, more)?;
        }
        let mut fresh = Vec::new();
        for bytes in found.iter().skip(outputs.len()) {
            let mut output = Vec::new();
            try_reserve(&mut output, bytes.len())?;
            fresh.push(output);
        }
        try_reserve(outputs, fresh.len())?;

        outputs.truncate(found.len());
        outputs.append(&mut fresh);
        for (bytes, output) in found.into_iter().zip(outputs) {
            output.clear();
            output.extend_from_slice(bytes);
        }
        Ok(())
    }

    /// Copies each output into one slice of the caller, in order.
    ///
    /// # Errors
    ///
    /// [`StagingError::WrongCount`] if there are more or fewer slices than outputs, and
    /// [`StagingError::WrongLength`] if a slice and its output differ in length.
    pub fn collect_into(&self, slices: &mut [&mut [u8]]) -> Result<(), StagingError> {
        let (outputs, given) = (self.outputs(), slices.len());
        if outputs != given {
            return Err(StagingError::WrongCount { outputs, given });
        }
        for (position, (output, slice)) in self.output_entries().zip(&*slices).enumerate() {
            let given = ByteCount::from_usize(slice.len());
            if output.length != given {
                return Err(StagingError::WrongLength { position, output: output.length, given });
            }
        }
        let found: Vec<&[u8]> =
            self.output_entries().map(|output| self.bytes(output)).collect::<Result<_, _>>()?;
        for (bytes, slice) in found.into_iter().zip(slices) {
            slice.copy_from_slice(bytes);
        }
        Ok(())
    }

    fn output_entries(&self) -> impl Iterator<Item = &TransferEntry> {
        self.table.entries.iter().filter(|entry| entry.direction == Direction::FromDevice)
    }

    fn bytes(&self, entry: &TransferEntry) -> Result<&[u8], StagingError> {
        let Some(buffer) = entry.buffer.and_then(|index| self.table.lease.buffer(index)) else {
            return Ok(&[]);
        };
        let address =
            buffer.location().as_host().ok_or(StagingError::NotHost { kind: buffer.kind() })?;
        // SAFETY: the buffer has at least this many bytes, which was checked when it was allocated.
        // Host memory is initialised. No code writes to it, because every stream that uses it has
        // passed the end of the work.
        Ok(unsafe { slice::from_raw_parts(address.as_ptr(), entry.length.to_usize()) })
    }
}
