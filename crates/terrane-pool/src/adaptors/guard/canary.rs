//! Bytes around a block that nobody has business to change.

use std::ptr;

use terrane_core::{Alignment, ByteCount, HostAddress, Location, Memory, SizeOverflow, Span};

/// The bytes that are watched on each side of a block: more than the widest vector store.
pub(super) const WIDTH: usize = 64;

/// How a block with canaries lies in the memory that it is cut from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    /// Where the block begins. The canary is what lies just before.
    pub(super) offset: ByteCount,
    /// How long the block is. The other canary is what lies just behind.
    pub(super) length: ByteCount,
    /// How much memory it takes.
    pub(super) whole: ByteCount,
}

impl Frame {
    /// For a block of `length` bytes at multiples of `alignment`.
    pub(super) fn new(length: ByteCount, alignment: Alignment) -> Result<Self, SizeOverflow> {
        let offset = ByteCount::from_usize(WIDTH).align_up(alignment)?;
        let whole = offset.checked_add(length)?.checked_add(ByteCount::from_usize(WIDTH))?;
        Ok(Self { offset, length, whole })
    }

    /// The block within what was granted, if that is long enough.
    pub(super) fn cut(&self, granted: &Span) -> Option<Span> {
        let location = granted.location.checked_add(self.offset)?;
        (granted.length >= self.whole).then_some(Span {
            kind: granted.kind,
            location,
            length: self.length,
        })
    }
}

/// The canaries of one live block, by their addresses.
///
/// Whoever holds this owes that the memory is alive whenever its methods run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Canaries {
    before: HostAddress,
    after: HostAddress,
    /// What the bytes are made from, so that a neighbour's canary is not taken for this one's.
    seed: u64,
}

/// On which side of a block something was overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Below its first byte.
    Before,
    /// Above its last byte.
    After,
}

impl Canaries {
    /// Writes the canaries around the block that `frame` cuts out of `memory`; `None` if that is
    /// not the host's, or too short.
    ///
    /// # Safety
    ///
    /// Nobody else accesses the canaries' bytes now, and nobody is entitled to until the memory
    /// drops.
    pub(super) unsafe fn write(memory: &impl Memory, frame: &Frame, seed: u64) -> Option<Self> {
        let Location::Host(base) = memory.location() else { return None };
        if memory.length() < frame.whole {
            return None;
        }
        let width = ByteCount::from_usize(WIDTH);
        let canaries = Self {
            before: base.checked_add(frame.offset.checked_sub(width)?)?,
            after: base.checked_add(frame.offset.checked_add(frame.length).ok()?)?,
            seed,
        };
        for address in [canaries.before, canaries.after] {
            let bytes = canaries.bytes();
            // SAFETY: both are `WIDTH` bytes within the memory, which `whole` spans, and nobody
            // else accesses them.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), address.as_ptr(), WIDTH) };
        }
        Some(canaries)
    }

    /// The sides that were overwritten, each with the distance from the block of the nearest
    /// byte that changed: 0 for the neighbour of its first or last byte.
    ///
    /// # Safety
    ///
    /// The memory is alive.
    pub(super) unsafe fn overwritten(&self) -> impl Iterator<Item = (Side, usize)> + use<> {
        let expected = self.bytes();
        // SAFETY: by the caller's promise.
        let before = unsafe { read(self.before) };
        // SAFETY: by the caller's promise.
        let after = unsafe { read(self.after) };
        let changed =
            move |found: [u8; WIDTH]| move |&index: &usize| found[index] != expected[index];
        let below = (0..WIDTH).rev().find(changed(before)).map(|i| (Side::Before, WIDTH - 1 - i));
        let above = (0..WIDTH).find(changed(after)).map(|i| (Side::After, i));
        below.into_iter().chain(above)
    }

    /// Never a run of equal bytes, and never zeros.
    fn bytes(&self) -> [u8; WIDTH] {
        let mut bytes = [0; WIDTH];
        let seed = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
        for ((byte, index), seed) in bytes.iter_mut().zip(1_u8..).zip(seed.iter().cycle()) {
            *byte = (seed ^ index.wrapping_mul(0x6D)) | 1;
        }
        bytes
    }
}

/// # Safety
///
/// `WIDTH` bytes at `address` are readable.
unsafe fn read(address: HostAddress) -> [u8; WIDTH] {
    // SAFETY: they are readable by the caller's promise, and bytes need no alignment.
    unsafe { ptr::read(address.as_ptr().cast::<[u8; WIDTH]>()) }
}
