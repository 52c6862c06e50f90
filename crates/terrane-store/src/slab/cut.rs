//! Cuts a block into requests, and each request into bytes that go directly and bytes that need a
//! bounce buffer.
//!
//! A slot begins at a multiple of the granule. A granule goes directly if one buffer holds all of it
//! at an aligned address. Other granules go through the bounce buffer: those that two buffers share,
//! those of unaligned memory, and the last one if the block does not fill it.

use smallvec::SmallVec;
use terrane_core::{ByteCount, HostAddress};
use terrane_storage::IoBuffer;

/// The maximum number of buffers of one system call: the kernel's `UIO_MAXIOV`.
const MAX_VECTORS: usize = 1024;

/// A place in the buffers of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cursor {
    buffer: usize,
    /// Bytes from the beginning of that buffer.
    offset: u64,
    /// Bytes from the beginning of the block.
    pub(super) position: u64,
}

impl Cursor {
    /// Takes the next bytes, at most `most` and from one buffer. `None` at the end of the block.
    pub(super) fn take(&mut self, buffers: &[IoBuffer], most: u64) -> Option<IoBuffer> {
        let (address, left) = self.rest(buffers)?;
        let bytes = left.min(most);
        self.offset += bytes;
        self.position += bytes;
        Some(IoBuffer { address, length: ByteCount::new(bytes) })
    }

    /// The address here, and the bytes of its buffer from here on. `None` at the end of the block.
    fn rest(&mut self, buffers: &[IoBuffer]) -> Option<(HostAddress, u64)> {
        loop {
            let buffer = buffers.get(self.buffer)?;
            let left = buffer.length.get().saturating_sub(self.offset);
            if left > 0 {
                return Some((buffer.address.checked_add(ByteCount::new(self.offset))?, left));
            }
            self.buffer += 1;
            self.offset = 0;
        }
    }
}

/// The alignments and sizes of requests. All are powers of two or multiples of the granule.
#[derive(Clone, Copy, Debug)]
pub(super) struct CutLimits {
    /// Requests begin and end at multiples of it.
    pub(super) granule: u64,
    /// The alignment of memory that the file can access directly.
    pub(super) memory_alignment: u64,
    /// The most bytes of a request.
    pub(super) request: u64,
    /// The most bytes of a request that go through its bounce buffer.
    pub(super) bounce: u64,
}

/// A part of a request's bytes, in the order of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vector {
    /// The next bytes are in the block's memory.
    Memory(IoBuffer),
    /// The next bytes are in the bounce buffer, after those of earlier vectors.
    Bounce(u64),
}

/// A copy between the block's memory and the bounce buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BounceCopy {
    pub(super) memory: IoBuffer,
    /// Bytes from the beginning of the bounce buffer.
    pub(super) offset: u64,
}

/// One request of a block.
#[derive(Clone, Debug, Default)]
pub(super) struct Cut {
    pub(super) vectors: SmallVec<[Vector; 4]>,
    pub(super) copies: SmallVec<[BounceCopy; 2]>,
    /// The bytes of the bounce buffer.
    pub(super) bounce: u64,
    /// The bytes at the end of the bounce buffer that are no part of the block.
    pub(super) padding: u64,
    /// The bytes of the request.
    pub(super) bytes: u64,
}

impl Cut {
    /// Cuts the next request at `cursor`, which is at a multiple of the granule, and moves the cursor
    /// to its end.
    pub(super) fn next(buffers: &[IoBuffer], cursor: &mut Cursor, limits: &CutLimits) -> Self {
        let mut cut = Self::default();
        while let Some((address, left)) = cursor.rest(buffers) {
            let room = limits.request.saturating_sub(cut.bytes);
            if room == 0 || cut.vectors.len() >= MAX_VECTORS {
                break;
            }
            let whole = (left - left % limits.granule).min(room);
            if whole > 0 && address.get().is_multiple_of(limits.memory_alignment) {
                cut.vectors.extend(cursor.take(buffers, whole).map(Vector::Memory));
                cut.bytes += whole;
                continue;
            }
            let bounce_room = limits.bounce.saturating_sub(cut.bounce);
            if bounce_room == 0 {
                break;
            }
            cut.gather(buffers, cursor, whole.min(bounce_room).max(limits.granule));
        }
        cut
    }

    /// Takes the next `bytes` bytes through the bounce buffer. At the end of the block it pads them.
    fn gather(&mut self, buffers: &[IoBuffer], cursor: &mut Cursor, bytes: u64) {
        let mut missing = bytes;
        while missing > 0 {
            let Some(memory) = cursor.take(buffers, missing) else { break };
            let offset = self.bounce + bytes - missing;
            missing -= memory.length.get();
            self.copies.push(BounceCopy { memory, offset });
        }
        self.padding = missing;
        self.bounce += bytes;
        self.bytes += bytes;
        match self.vectors.last_mut() {
            Some(Vector::Bounce(before)) => *before += bytes,
            _ => self.vectors.push(Vector::Bounce(bytes)),
        }
    }

    /// The buffers of the request, with the bounce buffer at `bounce`.
    pub(super) fn resolve(&self, bounce: Option<HostAddress>, resolved: &mut Vec<IoBuffer>) {
        resolved.clear();
        let mut used = 0;
        resolved.extend(self.vectors.iter().filter_map(|vector| match *vector {
            Vector::Memory(buffer) => Some(buffer),
            Vector::Bounce(bytes) => {
                let address = bounce?.checked_add(ByteCount::new(used))?;
                used += bytes;
                Some(IoBuffer { address, length: ByteCount::new(bytes) })
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::{NonNull, without_provenance_mut};

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const LIMITS: CutLimits =
        CutLimits { granule: 4096, memory_alignment: 512, request: 16384, bounce: 8192 };

    fn buffer(address: usize, length: u64) -> IoBuffer {
        let pointer: *mut u8 = without_provenance_mut(address);
        let address = HostAddress::new(NonNull::new(pointer).unwrap());
        IoBuffer { address, length: ByteCount::new(length) }
    }

    fn cuts(buffers: &[IoBuffer], limits: &CutLimits) -> Vec<Cut> {
        let total: u64 = buffers.iter().map(|buffer| buffer.length.get()).sum();
        let mut cursor = Cursor::default();
        let mut cuts = Vec::new();
        while cursor.position < total {
            cuts.push(Cut::next(buffers, &mut cursor, limits));
        }
        cuts
    }

    #[test]
    fn an_aligned_block_goes_directly_and_only_its_last_page_does_not() {
        let found = cuts(&[buffer(0x1000, 8192 + 5)], &LIMITS);
        assert_eq!(found.len(), 1);
        let whole = Vector::Memory(buffer(0x1000, 8192));
        assert_eq!(found[0].vectors.as_slice(), [whole, Vector::Bounce(4096)]);
        let copy = BounceCopy { memory: buffer(0x3000, 5), offset: 0 };
        assert_eq!(found[0].copies.as_slice(), [copy]);
        assert_eq!((found[0].padding, found[0].bytes), (4091, 12288));
    }

    #[test]
    fn a_page_that_two_buffers_share_is_gathered() {
        let found =
            cuts(&[buffer(0x1000, 4096 + 100), buffer(0x9000 + 3996, 3996 + 4096)], &LIMITS);
        assert_eq!(found.len(), 1);
        let first = Vector::Memory(buffer(0x1000, 4096));
        // The rest of the second buffer begins at 0x9000 + 2 × 3996, which is unaligned.
        assert_eq!(found[0].vectors.as_slice(), [first, Vector::Bounce(8192)]);
        assert_eq!(found[0].copies.len(), 3);
        assert_eq!(found[0].padding, 0);
    }

    proptest! {
        /// Each byte of the block is in one request, once, in order, directly only where that is
        /// allowed, and within the limits.
        #[test]
        fn every_byte_is_cut_once(
            spans in vec((0_usize..3, 0_u64..20_000), 1..12),
            request in 1_u64..6,
            bounce in 1_u64..6,
        ) {
            let steps = [0, 512, 77];
            let mut buffers = Vec::new();
            for (index, &(step, length)) in spans.iter().enumerate() {
                buffers.push(buffer((index + 1) * 0x10_0000 + steps[step], length));
            }
            let limits = CutLimits { request: request * 4096, bounce: bounce * 4096, ..LIMITS };
            let expected: Vec<(u64, u64)> =
                buffers.iter().map(|b| (b.address.get(), b.length.get())).collect();
            let mut found: Vec<(u64, u64)> = Vec::new();
            let mut add = |memory: IoBuffer| match found.last_mut() {
                Some((address, length)) if *address + *length == memory.address.get() => {
                    *length += memory.length.get();
                }
                _ => found.push((memory.address.get(), memory.length.get())),
            };
            let all = cuts(&buffers, &limits);
            for (number, cut) in all.iter().enumerate() {
                prop_assert!(cut.bytes > 0 && cut.bytes <= limits.request);
                prop_assert!(cut.bounce <= limits.bounce);
                prop_assert!(cut.padding == 0 || number + 1 == all.len());
                prop_assert!(cut.padding < 4096);
                let mut copies = cut.copies.iter().peekable();
                let mut bounced = 0;
                for vector in &cut.vectors {
                    match vector {
                        Vector::Memory(memory) => {
                            prop_assert_eq!(memory.address.get() % 512, 0);
                            prop_assert_eq!(memory.length.get() % 4096, 0);
                            add(*memory);
                        }
                        Vector::Bounce(bytes) => {
                            prop_assert_eq!(bytes % 4096, 0);
                            bounced += bytes;
                            while let Some(copy) = copies.next_if(|copy| copy.offset < bounced) {
                                add(copy.memory);
                            }
                        }
                    }
                }
                prop_assert_eq!(bounced, cut.bounce);
                let copied: u64 = cut.copies.iter().map(|copy| copy.memory.length.get()).sum();
                prop_assert_eq!(copied + cut.padding, cut.bounce);
            }
            let expected: Vec<_> = expected.into_iter().filter(|(_, length)| *length > 0).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
