//! The outputs of a transfer table whose copies are done.

use std::slice;

use terrane_core::{Allocate, ByteCount, Memory};

use super::error::StagingError;
use super::lease::try_reserve;
use super::transfer::{Direction, Entry, EntryId, TransferTable};

/// A table whose copies are done: its outputs can be read, in place or into the caller's memory.
///
/// A call that fails leaves what it was to write as it was. Dropping the table gives its buffers
/// back.
#[derive(Debug)]
pub struct FinishedTransfer<A: Allocate> {
    table: TransferTable<A>,
}

impl<A: Allocate> FinishedTransfer<A> {
    /// The caller has waited until no stream uses the table's buffers.
    pub(super) fn new(table: TransferTable<A>) -> Self {
        Self { table }
    }

    /// How many outputs there are.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.output_entries().count()
    }

    /// An output, without its padding.
    ///
    /// # Errors
    ///
    /// [`StagingError::NoSuchOutput`] for an upload, or for an entry of another table.
    pub fn output(&self, entry: EntryId) -> Result<&[u8], StagingError> {
        let entries = &self.table.entries;
        match entries.get(entry.0) {
            Some(output) if output.direction == Direction::FromDevice => self.bytes(output),
            _ => Err(StagingError::NoSuchOutput { index: entry.0, entries: entries.len() }),
        }
    }

    /// A part of an output.
    ///
    /// # Errors
    ///
    /// [`StagingError::OutOfBounds`] if it leaves the output; otherwise as for
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

    /// Copies the part of an output that begins at `offset` and is as long as `into`.
    ///
    /// # Errors
    ///
    /// As for [`range`](Self::range).
    pub fn read_into(
        &self,
        entry: EntryId,
        offset: ByteCount,
        into: &mut [u8],
    ) -> Result<(), StagingError> {
        let range = self.range(entry, offset, ByteCount::from_usize(into.len()))?;
        into.copy_from_slice(range);
        Ok(())
    }

    /// Copies every output into a vector of its own, in order. Vectors that are there already
    /// keep their capacity; there are as many as outputs afterwards.
    ///
    /// # Errors
    ///
    /// [`StagingError::Reserve`] if there is no memory for all of them.
    pub fn collect(&self, outputs: &mut Vec<Vec<u8>>) -> Result<(), StagingError> {
        let found: Vec<&[u8]> =
            self.output_entries().map(|output| self.bytes(output)).collect::<Result<_, _>>()?;
        // First everything that can fail, none of which changes what the vectors hold.
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

    /// Copies every output into a slice of the caller's, in order.
    ///
    /// # Errors
    ///
    /// [`StagingError::WrongCount`] if there are more or fewer slices than outputs, and
    /// [`StagingError::WrongLength`] if one is not as long as its output.
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

    fn output_entries(&self) -> impl Iterator<Item = &Entry> {
        self.table.entries.iter().filter(|entry| entry.direction == Direction::FromDevice)
    }

    fn bytes(&self, entry: &Entry) -> Result<&[u8], StagingError> {
        let Some(buffer) = entry.buffer.and_then(|index| self.table.lease.buffer(index)) else {
            return Ok(&[]);
        };
        let address =
            buffer.location().as_host().ok_or(StagingError::NotHost { kind: buffer.kind() })?;
        // SAFETY: the buffer holds at least so many bytes, which was checked when it was acquired;
        // host memory is initialised; and nobody writes to it, as every stream that was to use
        // it has come past.
        Ok(unsafe { slice::from_raw_parts(address.as_ptr(), entry.length.to_usize()) })
    }
}
