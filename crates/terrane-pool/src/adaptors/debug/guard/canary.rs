//! Canaries: guard bytes around a block that no correct program changes.

use std::sync::Arc;

use terrane_core::{
    Alignment, BoxedCause, ByteCount, Location, Memory, SizeOverflow, Span, StorageKind,
};

use crate::adaptors::debug::poison::Fill;
use crate::streams::fence::StreamId;

/// The canary bytes on each side of a block: more than the widest vector store.
pub(super) const WIDTH: usize = 64;

/// Writes and reads canaries, in the order of one stream.
#[derive(Clone, Debug)]
pub(super) struct CanaryAccess {
    pub(super) fill: Arc<dyn Fill>,
    pub(super) stream: StreamId,
}

impl CanaryAccess {
    pub(super) fn reaches(&self, kind: StorageKind) -> bool {
        self.fill.reaches(kind)
    }
}

/// The layout of a block with canaries in the memory that it is cut from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    /// The start of the block. One canary is directly before it.
    pub(super) offset: ByteCount,
    /// The length of the block. The other canary is directly after it.
    pub(super) length: ByteCount,
    /// The bytes of memory needed.
    pub(super) whole: ByteCount,
}

impl Frame {
    /// Creates the frame of a block of `length` bytes at multiples of `alignment`.
    pub(super) fn new(length: ByteCount, alignment: Alignment) -> Result<Self, SizeOverflow> {
        let offset = ByteCount::from_usize(WIDTH).align_up(alignment)?;
        let whole = offset.checked_add(length)?.checked_add(ByteCount::from_usize(WIDTH))?;
        Ok(Self { offset, length, whole })
    }

    /// Returns the block within the granted span, if that is long enough.
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
/// The owner must keep the memory alive while the methods run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Canaries {
    before: Location,
    after: Location,
    /// The seed of the bytes. It differs between blocks, so that a neighbour's canary does not
    /// match this block's canary.
    seed: u64,
}

/// The side of a block on which bytes were overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OverwrittenSide {
    /// Below its first byte.
    Before,
    /// Above its last byte.
    After,
}

terrane_core::display_names!(OverwrittenSide { Self::Before => "before", Self::After => "after" });

impl Canaries {
    /// Writes the canaries around the block that `frame` cuts out of `memory`. Returns `None` if
    /// the memory is too short.
    ///
    /// # Errors
    ///
    /// The cause, if the canaries could not be written.
    ///
    /// # Safety
    ///
    /// No other code accesses the canaries' bytes now, except earlier work on the stream of
    /// `access`. No other code may access them until the memory drops.
    pub(super) unsafe fn write(
        memory: &impl Memory,
        frame: &Frame,
        seed: u64,
        access: &CanaryAccess,
    ) -> Result<Option<Self>, BoxedCause> {
        let Some(canaries) = Self::around(memory, frame, seed) else { return Ok(None) };
        let bytes = canaries.bytes();
        for at in [canaries.before, canaries.after] {
            // SAFETY: both canaries are `WIDTH` bytes within the memory, which `whole` spans. The
            // caller promises that no other code accesses them.
            unsafe { access.fill.write(at, &bytes, access.stream) }?;
        }
        Ok(Some(canaries))
    }

    fn around(memory: &impl Memory, frame: &Frame, seed: u64) -> Option<Self> {
        let base = memory.location();
        if memory.length() < frame.whole {
            return None;
        }
        let width = ByteCount::from_usize(WIDTH);
        Some(Self {
            before: base.checked_add(frame.offset.checked_sub(width)?)?,
            after: base.checked_add(frame.offset.checked_add(frame.length).ok()?)?,
            seed,
        })
    }

    /// Returns the overwritten sides, each with the distance from the block of the nearest byte
    /// that changed. The distance of the byte next to the block is 0.
    ///
    /// # Errors
    ///
    /// The cause, if the canaries could not be read.
    ///
    /// # Safety
    ///
    /// The memory must be alive.
    pub(super) unsafe fn overwritten(
        &self,
        access: &CanaryAccess,
    ) -> Result<impl Iterator<Item = (OverwrittenSide, usize)> + use<>, BoxedCause> {
        let expected = self.bytes();
        let (mut before, mut after) = ([0; WIDTH], [0; WIDTH]);
        // SAFETY: the caller promises that the memory is alive. No correct program writes there.
        unsafe { access.fill.read(self.before, &mut before, access.stream) }?;
        // SAFETY: as above.
        unsafe { access.fill.read(self.after, &mut after, access.stream) }?;
        let changed =
            move |actual: [u8; WIDTH]| move |&index: &usize| actual[index] != expected[index];
        let below = (0..WIDTH)
            .rev()
            .find(changed(before))
            .map(|i| (OverwrittenSide::Before, WIDTH - 1 - i));
        let above = (0..WIDTH).find(changed(after)).map(|i| (OverwrittenSide::After, i));
        Ok(below.into_iter().chain(above))
    }

    /// Returns a pattern without runs of equal bytes and without zeros.
    fn bytes(&self) -> [u8; WIDTH] {
        let mut bytes = [0; WIDTH];
        let seed = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
        for ((byte, index), seed) in bytes.iter_mut().zip(1_u8..).zip(seed.iter().cycle()) {
            *byte = (seed ^ index.wrapping_mul(0x6D)) | 1;
        }
        bytes
    }
}
