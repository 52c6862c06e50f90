//! Transfer tables: uploads to a device, and outputs read back from it.

use std::fmt;
use std::ptr;
use std::time::Duration;

use terrane_core::{Allocate, ByteCount, DeviceAddress, Memory, RegionRequest, Span};

use super::area::StagingArea;
use super::error::{NotFinished, StagingError};
use super::finished::FinishedTransfer;
use super::lease::{Lease, try_reserve};
use crate::streams::fence::StreamId;

/// Transfers in preparation, in host memory.
///
/// Uploads are copied at once, so the caller may reuse its bytes. Outputs are space for data that
/// the device will write. Entries of zero bytes allocate nothing and are never copied, but have an
/// index. An error does not change the table.
pub struct TransferTable<A: Allocate> {
    pub(super) lease: Lease<A>,
    pub(super) entries: Vec<TransferEntry>,
}

/// The index of an entry in a table, uploads and outputs counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(pub(super) usize);

#[derive(Clone, Copy, Debug)]
pub(super) struct TransferEntry {
    pub(super) direction: Direction,
    /// The bytes of data, without padding.
    pub(super) length: ByteCount,
    /// The bytes to copy, with padding.
    padded: ByteCount,
    /// `None` if the entry has zero bytes.
    pub(super) buffer: Option<usize>,
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From host memory to the device.
    ToDevice,
    /// From the device to host memory.
    FromDevice,
}

/// One copy that a table requires.
#[derive(Clone, Copy, Debug)]
pub struct HostCopy {
    /// The entry.
    pub entry: EntryId,
    /// The direction.
    pub direction: Direction,
    /// The host side: exactly the bytes to copy.
    pub host: Span,
    /// The number of bytes to copy, padding included; never zero.
    pub length: ByteCount,
    /// The address with which the device accesses the host side, if it can.
    pub device_alias: Option<DeviceAddress>,
}

impl<A: Allocate> StagingArea<A> {
    /// Creates an empty transfer table.
    ///
    /// # Errors
    ///
    /// [`StagingError::NotHost`] if the upstream's memory is not host memory.
    pub fn transfer_table(&self) -> Result<TransferTable<A>, StagingError> {
        let kind = self.upstream().kind();
        if !kind.is_host() {
            return Err(StagingError::NotHost { kind });
        }
        Ok(TransferTable { lease: Lease::new(self.clone()), entries: Vec::new() })
    }
}

impl<A: Allocate> TransferTable<A> {
    /// Reserves space for `additional` entries.
    ///
    /// # Errors
    ///
    /// [`StagingError::Reserve`].
    pub fn try_reserve(&mut self, additional: usize) -> Result<(), StagingError> {
        self.lease.try_reserve(additional)?;
        try_reserve(&mut self.entries, additional)
    }

    /// Copies `bytes` into the table, for upload to the device.
    ///
    /// # Errors
    ///
    /// [`StagingError::Allocate`] or [`StagingError::Reserve`].
    pub fn upload(&mut self, bytes: &[u8]) -> Result<EntryId, StagingError> {
        self.upload_padded(bytes, ByteCount::from_usize(bytes.len()))
    }

    /// Copies `bytes` into the table, followed by zeros up to `padded` bytes, for upload to the
    /// device.
    ///
    /// # Errors
    ///
    /// [`StagingError::PaddingTooShort`] if `padded` is less than the length of `bytes`; otherwise
    /// as for [`upload`](Self::upload).
    pub fn upload_padded(
        &mut self,
        bytes: &[u8],
        padded: ByteCount,
    ) -> Result<EntryId, StagingError> {
        let length = ByteCount::from_usize(bytes.len());
        let entry = self.allocate_buffer(Direction::ToDevice, length, padded)?;
        if let Some(buffer) = entry.buffer.and_then(|index| self.lease.buffer(index)) {
            write(buffer, bytes, padded)?;
        }
        Ok(self.push(entry))
    }

    /// Copies `words` into the table in native byte order, for upload to the device.
    ///
    /// # Errors
    ///
    /// As for [`upload`](Self::upload).
    pub fn upload_words(&mut self, words: &[u32]) -> Result<EntryId, StagingError> {
        self.upload(bytemuck::cast_slice(words))
    }

    /// Allocates space for an output of `length` bytes.
    ///
    /// # Errors
    ///
    /// As for [`upload`](Self::upload).
    pub fn output(&mut self, length: ByteCount) -> Result<EntryId, StagingError> {
        self.output_padded(length, length)
    }

    /// Allocates space for `padded` bytes to read back. The first `length` bytes are the output.
    ///
    /// # Errors
    ///
    /// As for [`upload_padded`](Self::upload_padded).
    pub fn output_padded(
        &mut self,
        length: ByteCount,
        padded: ByteCount,
    ) -> Result<EntryId, StagingError> {
        let entry = self.allocate_buffer(Direction::FromDevice, length, padded)?;
        Ok(self.push(entry))
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there is no entry.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Gives access to the locations of the buffers, for copies that are submitted only to
    /// `streams`.
    ///
    /// # Errors
    ///
    /// [`StagingError::NoFences`], with the unchanged table, if there are streams and the area has
    /// no fences.
    #[expect(clippy::result_large_err, reason = "the error contains the table")]
    pub fn begin(mut self, streams: &[StreamId]) -> Result<Copying<A>, (Self, StagingError)> {
        match self.lease.begin(streams) {
            Ok(()) => Ok(Copying { table: self }),
            Err(error) => Err((self, error)),
        }
    }

    /// Creates an entry, and reserves space for it in the table, without adding it yet.
    fn allocate_buffer(
        &mut self,
        direction: Direction,
        length: ByteCount,
        padded: ByteCount,
    ) -> Result<TransferEntry, StagingError> {
        if padded < length {
            return Err(StagingError::PaddingTooShort { length, padded });
        }
        try_reserve(&mut self.entries, 1)?;
        let label = match direction {
            Direction::ToDevice => "upload",
            Direction::FromDevice => "output",
        };
        let buffer = self.lease.allocate_buffer(&RegionRequest::new(padded).labelled(label))?;
        Ok(TransferEntry { direction, length, padded, buffer })
    }

    fn push(&mut self, entry: TransferEntry) -> EntryId {
        self.entries.push(entry);
        EntryId(self.entries.len() - 1)
    }
}

/// Copies `bytes` to the start of a buffer to which the table has exclusive access. Zeroes the rest
/// up to `padded`. The buffer was checked to hold `padded` bytes.
fn write(buffer: &impl Memory, bytes: &[u8], padded: ByteCount) -> Result<(), StagingError> {
    let address =
        buffer.location().as_host().ok_or(StagingError::NotHost { kind: buffer.kind() })?;
    let start = address.as_ptr();
    // SAFETY: the buffer is valid for `padded` bytes, which is at least the length of `bytes`. This
    // table allocated the buffer and no other code knows it, so it does not overlap `bytes`.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) };
    let tail = padded.to_usize() - bytes.len();
    // SAFETY: from the end of the bytes to the end of the padding, within the buffer.
    unsafe { ptr::write_bytes(start.wrapping_add(bytes.len()), 0, tail) };
    Ok(())
}

/// A table whose copies are being submitted.
#[derive(Debug)]
pub struct Copying<A: Allocate> {
    table: TransferTable<A>,
}

impl<A: Allocate> Copying<A> {
    /// Returns the copies to submit, in the order of the entries. An entry of zero bytes has none.
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

    /// Declares that all the copies have been submitted. Dropping the table does the same.
    #[must_use]
    pub fn submitted(mut self) -> PendingTransfer<A> {
        self.table.lease.submitted();
        PendingTransfer { table: self.table }
    }
}

/// A table whose copies have been submitted. Dropping it moves the buffers to the area, which frees
/// them when the streams are done.
#[derive(Debug)]
pub struct PendingTransfer<A: Allocate> {
    table: TransferTable<A>,
}

impl<A: Allocate> PendingTransfer<A> {
    /// Returns whether the streams are done with it. Never blocks.
    ///
    /// # Errors
    ///
    /// [`StagingError::Fence`] if a fence fails.
    pub fn is_complete(&mut self) -> Result<bool, StagingError> {
        self.table.lease.is_complete()
    }

    /// Waits until the streams are done with it. Then the outputs can be read.
    ///
    /// # Errors
    ///
    /// [`NotFinished`], with the table, after `timeout` or if a fence fails.
    #[expect(clippy::result_large_err, reason = "the error contains the table")]
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
