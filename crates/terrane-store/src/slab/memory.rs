//! The only code that accesses the bytes of blocks.

#![expect(unsafe_code, reason = "blocks are memory of the caller")]

use terrane_core::checksum::Crc64;
use terrane_core::{ByteCount, HostAddress};
use terrane_storage::IoBuffer;

use crate::slab::cut::{Cursor, Cut};

/// The direction of a copy between a block's memory and its bounce buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BounceDirection {
    IntoBounce,
    OutOfBounce,
}

/// Copies the bytes of a request that go through its bounce buffer. A copy into the buffer also zeroes
/// what is no part of the block.
///
/// # Safety
///
/// `bounce` is valid for `cut.bounce` bytes, and no request uses it. The memory of the cut is valid for
/// the copy.
pub(super) unsafe fn copy(cut: &Cut, bounce: HostAddress, direction: BounceDirection) {
    let at = |offset: u64| bounce.as_ptr().wrapping_add(ByteCount::new(offset).to_usize());
    for copy in &cut.copies {
        let (memory, bytes) = (copy.memory.address.as_ptr(), copy.memory.length.to_usize());
        let (from, to) = match direction {
            BounceDirection::IntoBounce => (memory, at(copy.offset)),
            BounceDirection::OutOfBounce => (at(copy.offset), memory),
        };
        // SAFETY: the caller guarantees both. The bounce buffer belongs to the I/O thread, so they do
        // not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }
    if direction == BounceDirection::IntoBounce && cut.padding > 0 {
        let padding = ByteCount::new(cut.padding).to_usize();
        // SAFETY: the padding is the end of the `cut.bounce` bytes.
        unsafe { at(cut.bounce - cut.padding).write_bytes(0, padding) };
    }
}

/// Adds the next `bytes` bytes of a block to its checksum.
///
/// # Safety
///
/// The buffers are valid for reads, initialized, and no other code writes them meanwhile.
pub(super) unsafe fn add_to_sum(
    sum: &mut Crc64,
    buffers: &[IoBuffer],
    cursor: &mut Cursor,
    bytes: u64,
) {
    let end = cursor.position + bytes;
    while cursor.position < end {
        let Some(next) = cursor.take(buffers, end - cursor.position) else { return };
        // SAFETY: the caller guarantees it.
        let bytes =
            unsafe { std::slice::from_raw_parts(next.address.as_ptr(), next.length.to_usize()) };
        sum.update(bytes);
    }
}
