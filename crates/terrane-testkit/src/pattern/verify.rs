//! Verifies the pattern in the blocks of a layout.

use std::fmt;
use std::ops::Range;

use terrane_core::ByteCount;
use terrane_layout::PhysicalLayout;
use terrane_transfer::Endpoint;

use super::fill::in_steps;
use super::{InProcess, Pattern, PatternError, Piece, PieceAccess, length};

/// The result of a verification.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "check the result of the verification"]
pub struct Verification {
    /// The number of verified bytes.
    pub bytes: ByteCount,
    /// The number of wrong bytes.
    pub mismatches: u64,
    /// The first wrong byte.
    pub first: Option<Mismatch>,
}

/// A wrong byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Its piece.
    pub at: Piece,
    /// The piece whose bytes are expected.
    pub expected_piece: Piece,
    /// The position in the piece, in bytes.
    pub offset: u64,
    /// The expected value.
    pub expected: u8,
    /// The actual value.
    pub found: u8,
}

impl Verification {
    /// Whether every byte is correct.
    #[must_use]
    pub const fn is_clean(&self) -> bool {
        self.mismatches == 0
    }

    /// Panics with the first mismatch, if there is one.
    #[track_caller]
    pub fn assert_clean(&self, what: &str) {
        assert!(self.is_clean(), "{what}: {self}");
    }

    fn and(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.checked_add(other.bytes).expect("bytes in memory can be counted"),
            mismatches: self.mismatches + other.mismatches,
            first: self.first.or(other.first),
        }
    }
}

impl fmt::Display for Verification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.first {
            None => write!(f, "{} as expected", self.bytes),
            Some(first) => {
                write!(f, "{} bytes of {} differ, at first {first}", self.mismatches, self.bytes)
            }
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, expected_piece, offset, expected, found } = self;
        write!(
            f,
            "byte {offset} of block {} layer {} outer {}: expected {expected:#04x}, which is of \
             block {} layer {} outer {}, found {found:#04x}",
            at.block,
            at.layer,
            at.outer,
            expected_piece.block,
            expected_piece.layer,
            expected_piece.outer,
        )
    }
}

impl Pattern {
    /// Verifies that all blocks of a layout have the bytes of [`fill`](Self::fill).
    ///
    /// # Errors
    ///
    /// [`PatternError`] if the bytes could not be read.
    pub fn verify(&self, end: &Endpoint) -> Result<Verification, PatternError> {
        let blocks: Vec<u32> = (0..end.layout().geometry().num_blocks()).collect();
        self.verify_blocks(end, &blocks, &blocks, 0..end.layout().geometry().num_layers())
    }

    /// Verifies these layers of the n-th of `blocks` against the pattern of the n-th of
    /// `filled_as`. After a transfer, these are the ids of the destination and of the source.
    ///
    /// # Errors
    ///
    /// [`PatternError`] if the bytes could not be read.
    pub fn verify_blocks(
        &self,
        end: &Endpoint,
        blocks: &[u32],
        filled_as: &[u32],
        layers: Range<u32>,
    ) -> Result<Verification, PatternError> {
        self.verify_with(end, blocks, filled_as, layers, &InProcess)
    }

    /// Like [`verify_blocks`](Self::verify_blocks), through `access`.
    ///
    /// # Errors
    ///
    /// [`PatternError`] if the bytes could not be read.
    pub fn verify_with(
        &self,
        end: &Endpoint,
        blocks: &[u32],
        filled_as: &[u32],
        layers: Range<u32>,
        access: &impl PieceAccess,
    ) -> Result<Verification, PatternError> {
        assert_eq!(blocks.len(), filled_as.len(), "as many blocks as ids of their patterns");
        let _hold = end.hold_for_read(blocks)?;
        let pairs: Vec<_> = blocks.iter().copied().zip(filled_as.iter().copied()).collect();
        // SAFETY: the endpoint keeps the memory alive, and no transfer writes the blocks while they
        // are held.
        unsafe { self.verify_layout(end.layout(), &pairs, layers, access) }
    }

    /// Verifies blocks of a layout that is not an endpoint (yet): pairs of the block, and of the
    /// block whose pattern is expected.
    ///
    /// # Safety
    ///
    /// No code writes the blocks during the call.
    ///
    /// # Errors
    ///
    /// [`PatternError`] if the bytes could not be read.
    pub unsafe fn verify_layout(
        &self,
        layout: &PhysicalLayout,
        pairs: &[(u32, u32)],
        layers: Range<u32>,
        access: &impl PieceAccess,
    ) -> Result<Verification, PatternError> {
        let parts = self.in_parallel(pairs, |pairs| {
            let mut found = Verification::default();
            let mut buffer = vec![0; 64 << 10];
            for &(block, filled_as) in pairs {
                in_steps(
                    layout,
                    std::iter::once(block),
                    layers.clone(),
                    |at, location, offset, step| {
                        let bytes = &mut buffer[..step];
                        // SAFETY: the layout keeps the memory alive, and the caller excludes
                        // writers.
                        unsafe { access.read(location, bytes) }?;
                        found = found.and(self.compare(at, filled_as, offset, bytes));
                        Ok(())
                    },
                )?;
            }
            Ok(found)
        })?;
        Ok(parts.into_iter().fold(Verification::default(), Verification::and))
    }

    fn compare(&self, at: Piece, filled_as: u32, offset: u64, bytes: &[u8]) -> Verification {
        let expected_piece = Piece { block: filled_as, ..at };
        let mismatches = self.mismatches(expected_piece, offset, bytes);
        let first = || {
            let index = self.first_mismatch(expected_piece, offset, bytes)?;
            let offset = offset + length(&bytes[..index]);
            let expected = self.byte(expected_piece, offset);
            Some(Mismatch { at, expected_piece, offset, expected, found: bytes[index] })
        };
        Verification {
            bytes: ByteCount::from_usize(bytes.len()),
            mismatches,
            first: if mismatches == 0 { None } else { first() },
        }
    }
}
