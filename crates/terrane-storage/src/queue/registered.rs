//! The table of the buffers that are registered with a ring.

use io_uring::{IoUring, Probe, opcode};
use terrane_core::{ByteCount, OsError, Reason};

use super::request::IoBuffer;

/// A buffer that is registered with an [`IoQueue`](super::IoQueue).
///
/// It is a number in the queue's table. It keeps nothing alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegisteredBuffer {
    index: u16,
    /// A number that a later buffer at the same index does not have.
    generation: u32,
}

impl RegisteredBuffer {
    /// The largest buffer that the kernel registers.
    pub const MAX_BYTES: ByteCount = ByteCount::gib(1);

    /// The maximum number of buffers of one queue. The kernel's limit is 16,384.
    pub const MAX_COUNT: u16 = 4096;

    pub(super) const fn index(self) -> u16 {
        self.index
    }
}

/// The table of a ring. The kernel gets it with the first buffer.
#[derive(Debug, Default)]
pub(super) struct BufferTable {
    entries: Vec<Entry>,
    free: Vec<u16>,
    /// Whether the kernel has requests that read or write several ranges of one registered buffer.
    has_vectored: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// The registered range; an empty range if the entry is free.
    address: usize,
    length: usize,
    generation: u32,
    /// The number of requests in flight that use it.
    uses: u32,
    /// The buffer was unregistered while requests used it. The last of them removes it.
    is_ending: bool,
}

impl BufferTable {
    /// Registers a buffer: the kernel pins its pages.
    pub(super) fn register(
        &mut self,
        ring: &IoUring,
        buffer: &IoBuffer,
    ) -> Result<RegisteredBuffer, Reason> {
        let too_many = Reason::Exhausted {
            needed: ByteCount::new(1),
            available: ByteCount::ZERO,
        };
        if self.entries.is_empty() {
            self.create(ring)?;
        }
        let Some(&index) = self.free.last() else { return Err(too_many) };
        let Some(entry) = self.entries.get_mut(usize::from(index)) else { return Err(too_many) };
        let vector = libc::iovec {
            iov_base: buffer.address.as_ptr().cast(),
            iov_len: buffer.length.to_usize(),
        };
        update(ring, index, vector)
            .map_err(|error| Reason::Os(OsError::from_io("io_uring_register", &error)))?;
        self.free.pop();
        *entry = Entry {
            address: buffer.address.as_ptr().addr(),
            length: vector.iov_len,
            generation: entry.generation.wrapping_add(1),
            uses: 0,
            is_ending: false,
        };
        Ok(RegisteredBuffer { index, generation: entry.generation })
    }

    fn create(&mut self, ring: &IoUring) -> Result<(), Reason> {
        let count = RegisteredBuffer::MAX_COUNT;
        let submitter = ring.submitter();
        submitter
            .register_buffers_sparse(u32::from(count))
            .map_err(|error| Reason::Os(OsError::from_io("io_uring_register", &error)))?;
        let mut probe = Probe::new();
        self.has_vectored = submitter.register_probe(&mut probe).is_ok()
            && probe.is_supported(opcode::ReadvFixed::CODE)
            && probe.is_supported(opcode::WritevFixed::CODE);
        self.entries = vec![Entry::default(); usize::from(count)];
        self.free = (0..count).rev().collect();
        Ok(())
    }

    /// Whether requests of several ranges can use a registered buffer.
    pub(super) const fn has_vectored(&self) -> bool {
        self.has_vectored
    }

    /// Unregisters a buffer once no request uses it.
    pub(super) fn unregister(&mut self, ring: &IoUring, buffer: RegisteredBuffer) {
        let Some(entry) = self.entry(buffer) else { return };
        entry.is_ending = true;
        self.remove_unused(ring, buffer.index);
    }

    /// Counts a request that uses the buffer. Returns `false` if there is no such buffer, or if the
    /// ranges are not all in it.
    pub(super) fn begin_use(
        &mut self,
        buffer: RegisteredBuffer,
        mut ranges: impl Iterator<Item = (usize, usize)>,
    ) -> bool {
        let Some(entry) = self.entry(buffer).filter(|entry| !entry.is_ending) else { return false };
        let is_inside = |(address, length): (usize, usize)| {
            address.checked_sub(entry.address).is_some_and(|before| {
                entry.length.checked_sub(before).is_some_and(|rest| length <= rest)
            })
        };
        if !ranges.all(is_inside) {
            return false;
        }
        entry.uses += 1;
        true
    }

    /// Ends a use that [`begin_use`](Self::begin_use) has counted.
    pub(super) fn end_use(&mut self, ring: &IoUring, buffer: RegisteredBuffer) {
        if let Some(entry) = self.entry(buffer) {
            entry.uses = entry.uses.saturating_sub(1);
        }
        self.remove_unused(ring, buffer.index);
    }

    fn entry(&mut self, buffer: RegisteredBuffer) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(usize::from(buffer.index))?;
        (entry.length > 0 && entry.generation == buffer.generation).then_some(entry)
    }

    fn remove_unused(&mut self, ring: &IoUring, index: u16) {
        let Some(entry) = self.entries.get_mut(usize::from(index)) else { return };
        if !entry.is_ending || entry.uses > 0 {
            return;
        }
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        match update(ring, index, empty) {
            Ok(()) => {
                *entry = Entry { generation: entry.generation, ..Entry::default() };
                self.free.push(index);
            }
            // The pages stay pinned until the ring closes. No request uses the entry again.
            Err(error) => tracing::warn!(%error, "a buffer could not be unregistered"),
        }
    }
}

/// Replaces an entry of the kernel's table.
fn update(ring: &IoUring, index: u16, vector: libc::iovec) -> std::io::Result<()> {
    // SAFETY: the kernel pins the pages that are mapped at the range, or fails. It accesses them
    // only for requests that name the entry. `IoQueue::submit` states what holds for those.
    unsafe { ring.submitter().register_buffers_update(u32::from(index), &[vector], None) }
        .map(drop)
}
