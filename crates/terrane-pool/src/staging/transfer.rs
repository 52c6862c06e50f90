//! Transfer tables: what goes to a device, and what comes back.

use std::fmt;
use std::ptr;
use std::time::Duration;

use terrane_core::{Allocate, ByteCount, DeviceAddress, Memory, RegionRequest, Span};

use super::area::StagingArea;
use super::error::{NotFinished, StagingError};
use super::finished::FinishedTransfer;
use super::lease::{Lease, try_reserve};
use crate::StreamId;

/// Transfers that are being put together in host memory.
///
/// Uploads are copied in at once, so that the caller's bytes are free again; outputs are room for
/// what will come back. Entries of no bytes acquire nothing and are never copied, but keep their
/// place. An error leaves the table as it was.
pub struct TransferTable<A: Allocate> {
    pub(super) lease: Lease<A>,
    pub(super) entries: Vec<Entry>,
}

/// Which of a table's entries, uploads and outputs counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(pub(super) usize);

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) direction: Direction,
    /// The bytes that mean something.
    pub(super) length: ByteCount,
    /// The bytes that are copied.
    padded: ByteCount,
    /// `None` if there are none.
    pub(super) buffer: Option<usize>,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From host memory to the device.
    ToDevice,
    /// From the device to host memory.
    FromDevice,
}

/// One copy that a table asks for.
#[derive(Clone, Copy, Debug)]
pub struct HostCopy {
    /// The entry.
    pub entry: EntryId,
    /// Which way.
    pub direction: Direction,
    /// The host's end: exactly the bytes to copy.
    pub host: Span,
    /// How many bytes to copy, padding included; more than none.
    pub length: ByteCount,
    /// The address by which the device reaches the host's end, where it does.
    pub device_alias: Option<DeviceAddress>,
}

impl<A: Allocate> TransferTable<A> {
    pub(super) fn new(area: StagingArea<A>) -> Self {
        Self { lease: Lease::new(area), entries: Vec::new() }
    }

    /// Makes room for `additional` entries.
    ///
    /// # Errors
    ///
    /// [`StagingError::Reserve`].
    pub fn try_reserve(&mut self, additional: usize) -> Result<(), StagingError> {
        self.lease.try_reserve(additional)?;
        try_reserve(&mut self.entries, additional)
    }

    /// Copies `bytes` in, to go to the device.
    ///
    /// # Errors
    ///
    /// [`StagingError::Allocate`] or [`StagingError::Reserve`].
    pub fn upload(&mut self, bytes: &[u8]) -> Result<EntryId, StagingError> {
        self.upload_padded(bytes, ByteCount::from_usize(bytes.len()))
    }

    /// Copies `bytes` in, followed by zeros up to `padded` bytes, to go to the device.
    ///
    /// # Errors
    ///
    /// [`StagingError::PaddingTooShort`] if `padded` is less than there is; otherwise as for
    /// [`upload`](Self::upload).
    pub fn upload_padded(
        &mut self,
        bytes: &[u8],
        padded: ByteCount,
    ) -> Result<EntryId, StagingError> {
        let length = ByteCount::from_usize(bytes.len());
        let entry = self.acquire(Direction::ToDevice, length, padded)?;
        if let Some(buffer) = entry.buffer.and_then(|index| self.lease.buffer(index)) {
            write(buffer, bytes, padded)?;
        }
        Ok(self.push(entry))
    }

    /// Copies `words` in as they lie in memory, to go to the device.
    ///
    /// # Errors
    ///
    /// As for [`upload`](Self::upload).
    pub fn upload_words(&mut self, words: &[u32]) -> Result<EntryId, StagingError> {
        self.upload(bytemuck::cast_slice(words))
    }

    /// Room for `length` bytes that come back.
    ///
    /// # Errors
    ///
    /// As for [`upload`](Self::upload).
    pub fn output(&mut self, length: ByteCount) -> Result<EntryId, StagingError> {
        self.output_padded(length, length)
    }

    /// Room for `padded` bytes that come back, of which the first `length` are the output.
    ///
    /// # Errors
    ///
    /// As for [`upload_padded`](Self::upload_padded).
    pub fn output_padded(
        &mut self,
        length: ByteCount,
        padded: ByteCount,
    ) -> Result<EntryId, StagingError> {
        let entry = self.acquire(Direction::FromDevice, length, padded)?;
        Ok(self.push(entry))
    }

    /// How many entries there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Shows where the buffers are, for copies that are submitted to `streams` and to no other.
    ///
    /// # Errors
    ///
    /// [`StagingError::NoFences`], with the table as it was, if there are streams and the area
    /// knows none.
    #[expect(clippy::result_large_err, reason = "the error gives the table back")]
    pub fn begin(mut self, streams: &[StreamId]) -> Result<Copying<A>, (Self, StagingError)> {
        match self.lease.begin(streams) {
            Ok(()) => Ok(Copying { table: self }),
            Err(error) => Err((self, error)),
        }
    }

    /// An entry, with room for it in the table, that has not been entered yet.
    fn acquire(
        &mut self,
        direction: Direction,
        length: ByteCount,
        padded: ByteCount,
    ) -> Result<Entry, StagingError> {
        if padded < length {
            return Err(StagingError::PaddingTooShort { length, padded });
        }
        try_reserve(&mut self.entries, 1)?;
        let label = match direction {
            Direction::ToDevice => "upload",
            Direction::FromDevice => "output",
        };
        let buffer = self.lease.acquire(&RegionRequest::new(padded).labelled(label))?;
        Ok(Entry { direction, length, padded, buffer })
    }

    fn push(&mut self, entry: Entry) -> EntryId {
        self.entries.push(entry);
        EntryId(self.entries.len() - 1)
    }
}

/// Copies `bytes` to the beginning of a buffer that nobody else has, and zeroes the rest up to
/// `padded`, which the buffer has been checked to hold.
fn write(buffer: &impl Memory, bytes: &[u8], padded: ByteCount) -> Result<(), StagingError> {
    let address =
        buffer.location().as_host().ok_or(StagingError::NotHost { kind: buffer.kind() })?;
    let start = address.as_ptr();
    // SAFETY: the buffer is valid for `padded` bytes, which is no less than these are; it was
    // acquired by this table, which has shown it to nobody, so it does not overlap them either.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) };
    let tail = padded.to_usize() - bytes.len();
    // SAFETY: from the end of the bytes to that of the padding, within the buffer.
    unsafe { ptr::write_bytes(start.wrapping_add(bytes.len()), 0, tail) };
    Ok(())
}

/// A table whose copies are being submitted.
#[derive(Debug)]
pub struct Copying<A: Allocate> {
    table: TransferTable<A>,
}

impl<A: Allocate> Copying<A> {
    /// The copies to submit, in the order of the entries. There is none for an entry of no bytes.
    pub fn copies(&self) -> impl Iterator<Item = HostCopy> {
        self.table.entries.iter().enumerate().filter_map(|(index, entry)| {
            let buffer = self.table.lease.buffer(entry.buffer?)?;
            Some(HostCopy {
                entry: EntryId(index),
                direction: entry.direction,
                host: Span { length: entry.padded, ..Span::of(buffer) },
                length: entry.padded,
                device_alias: buffer.device_alias(),
            })
        })
    }

    /// All the copies have been submitted. To drop the table here says the same.
    #[must_use]
    pub fn submitted(mut self) -> PendingTransfer<A> {
        self.table.lease.submitted();
        PendingTransfer { table: self.table }
    }
}

/// A table whose copies have been submitted. Dropping it leaves the buffers to the area, which
/// gives them back when the streams are done.
#[derive(Debug)]
pub struct PendingTransfer<A: Allocate> {
    table: TransferTable<A>,
}

impl<A: Allocate> PendingTransfer<A> {
    /// Whether the streams are done with it. Never blocks.
    ///
    /// # Errors
    ///
    /// [`StagingError::Fence`] if that cannot be told.
    pub fn is_complete(&mut self) -> Result<bool, StagingError> {
        self.table.lease.is_complete()
    }

    /// Waits until the streams are done with it; then the outputs can be read.
    ///
    /// # Errors
    ///
    /// [`NotFinished`], with the table, after `timeout`, or if it cannot be told.
    #[expect(clippy::result_large_err, reason = "the error gives the table back")]
    pub fn wait(mut self, timeout: Duration) -> Result<FinishedTransfer<A>, NotFinished<Self>> {
        match self.table.lease.wait(timeout) {
            Ok(()) => Ok(FinishedTransfer::new(self.table)),
            Err(cause) => Err(NotFinished { pending: self, cause }),
        }
    }
}

impl<A: Allocate> fmt::Debug for TransferTable<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferTable")
            .field("entries", &self.entries.len())
            .field("lease", &self.lease)
            .finish()
    }
}
