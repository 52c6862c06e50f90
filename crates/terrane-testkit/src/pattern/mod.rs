//! Bytes that identify their position.
//!
//! Every byte of the pattern depends on the seed, the block, the layer, the outer and the offset
//! within the piece. The indices are not interchangeable. So verification detects K in the place of
//! V, exchanged blocks and layers, a shifted piece and a wrong seed. A single byte distinguishes
//! two positions with a probability of 255/256, so a few bytes are practically certain.

mod access;
mod fill;
mod verify;

pub(crate) use access::pointer;
pub use access::{InProcess, PieceAccess, Unreachable};
pub use fill::PatternError;
pub use verify::{Mismatch, Verification};

use std::num::NonZeroUsize;

use crate::random::{STEP, mix};

/// One piece of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The block.
    pub block: u32,
    /// The layer.
    pub layer: u32,
    /// The outer: 0 for K, 1 for V.
    pub outer: u32,
}

/// A pattern of bytes over the pieces of a layout.
///
/// ```
/// use terrane_testkit::pattern::{Pattern, Piece};
///
/// let pattern = Pattern::new(42);
/// let key = Piece { block: 3, layer: 1, outer: 0 };
/// let mut bytes = [0; 64];
/// pattern.write(key, 0, &mut bytes);
/// assert_eq!(pattern.mismatches(key, 0, &bytes), 0);
/// let value = Piece { outer: 1, ..key };
/// assert!(pattern.mismatches(value, 0, &bytes) > 48);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    seed: u64,
    threads: NonZeroUsize,
}

impl Pattern {
    /// Creates the pattern of this seed, on one thread.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed, threads: NonZeroUsize::MIN }
    }

    /// The same pattern, filled and verified by this many threads.
    #[must_use]
    pub const fn threads(self, threads: NonZeroUsize) -> Self {
        Self { threads, ..self }
    }

    /// The byte at `offset` of a piece.
    #[must_use]
    pub const fn byte(&self, piece: Piece, offset: u64) -> u8 {
        byte_of(self.key(piece), offset)
    }

    /// Writes the pattern at `offset` of a piece.
    pub fn write(&self, piece: Piece, offset: u64, bytes: &mut [u8]) {
        let key = self.key(piece);
        let (head, index, words, tail) = split_mut(offset, bytes);
        let mut at = offset;
        for byte in head {
            *byte = byte_of(key, at);
            at += 1;
        }
        let mut state = state_of(key, index);
        for word in words.iter_mut() {
            *word = finish(state).to_le_bytes();
            state = state.wrapping_add(STEP);
        }
        at += length(words.as_flattened());
        for byte in tail {
            *byte = byte_of(key, at);
            at += 1;
        }
    }

    /// The number of bytes that differ from the pattern at `offset` of a piece.
    #[must_use]
    pub fn mismatches(&self, piece: Piece, offset: u64, bytes: &[u8]) -> u64 {
        let key = self.key(piece);
        let (head, index, words, tail) = split(offset, bytes);
        let mut state = state_of(key, index);
        let mut differences = 0;
        for word in words {
            differences |= u64::from_le_bytes(*word) ^ finish(state);
            state = state.wrapping_add(STEP);
        }
        let odd_ends = [(offset, head), (offset + length(bytes) - length(tail), tail)];
        let slow = |(at, bytes): (u64, &[u8])| -> u64 {
            (at..).zip(bytes).map(|(at, &byte)| u64::from(byte != byte_of(key, at))).sum()
        };
        if differences == 0 { odd_ends.into_iter().map(slow).sum() } else { slow((offset, bytes)) }
    }

    /// The first byte that differs from the pattern, counted from the start of `bytes`.
    #[must_use]
    pub fn first_mismatch(&self, piece: Piece, offset: u64, bytes: &[u8]) -> Option<usize> {
        let key = self.key(piece);
        (offset..).zip(bytes).position(|(at, &byte)| byte != byte_of(key, at))
    }

    /// The three indices are mixed one after the other, so that they are not interchangeable.
    const fn key(&self, piece: Piece) -> u64 {
        let Piece { block, layer, outer } = piece;
        let key = mix(self.seed.wrapping_add(STEP));
        let key = mix(key.wrapping_add(widen(block)).wrapping_add(STEP));
        let key = mix(key.wrapping_add(widen(layer)).wrapping_add(STEP));
        mix(key.wrapping_add(widen(outer)).wrapping_add(STEP))
    }
}

const WORD: u64 = 8;

const fn state_of(key: u64, word: u64) -> u64 {
    key.wrapping_add(word.wrapping_mul(STEP))
}

/// Half a finaliser: one multiplication per word, for several GB/s. Every byte of the result still
/// depends on many bits of the state.
const fn finish(state: u64) -> u64 {
    let product = (state ^ (state >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    product ^ (product >> 29)
}

const fn byte_of(key: u64, offset: u64) -> u8 {
    let [byte, ..] = (finish(state_of(key, offset / WORD)) >> (offset % WORD * 8)).to_le_bytes();
    byte
}

type Split<'a> = (&'a [u8], u64, &'a [[u8; 8]], &'a [u8]);
type SplitMut<'a> = (&'a mut [u8], u64, &'a mut [[u8; 8]], &'a mut [u8]);

/// The bytes before the first whole word, the number of that word, the words, and the rest.
fn split(offset: u64, bytes: &[u8]) -> Split<'_> {
    let (head, rest) = bytes.split_at(head(offset, bytes));
    let (words, tail) = rest.as_chunks();
    (head, offset.div_ceil(WORD), words, tail)
}

fn split_mut(offset: u64, bytes: &mut [u8]) -> SplitMut<'_> {
    let (head, rest) = bytes.split_at_mut(head(offset, bytes));
    let (words, tail) = rest.as_chunks_mut();
    (head, offset.div_ceil(WORD), words, tail)
}

fn head(offset: u64, bytes: &[u8]) -> usize {
    let to_word = offset.next_multiple_of(WORD) - offset;
    bytes.len().min(usize::try_from(to_word).expect("less than a word"))
}

pub(crate) fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).expect("a length fits in 64 bits")
}

/// `u64::from` is not `const`.
const fn widen(index: u32) -> u64 {
    index as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: Piece = Piece { block: 5, layer: 2, outer: 1 };

    #[test]
    fn whole_words_and_odd_ends_agree_with_single_bytes() {
        let pattern = Pattern::new(3);
        for offset in 0..20_u64 {
            for length in 0..40_usize {
                let mut bytes = vec![0; length];
                pattern.write(PIECE, offset, &mut bytes);
                let expected: Vec<_> =
                    (offset..).take(length).map(|at| pattern.byte(PIECE, at)).collect();
                assert_eq!(bytes, expected, "offset {offset}, length {length}");
                assert_eq!(pattern.mismatches(PIECE, offset, &bytes), 0);
                if let Some(last) = bytes.last_mut() {
                    *last ^= 1;
                    assert_eq!(pattern.mismatches(PIECE, offset, &bytes), 1);
                    assert_eq!(pattern.first_mismatch(PIECE, offset, &bytes), Some(length - 1));
                }
            }
        }
    }

    #[test]
    fn every_misplaced_piece_is_detected() {
        let pattern = Pattern::new(3);
        let mut bytes = [0; 256];
        pattern.write(PIECE, 0, &mut bytes);
        let Piece { block, layer, outer } = PIECE;
        let elsewhere = [
            ("next block", Piece { block: block + 1, ..PIECE }),
            ("next layer", Piece { layer: layer + 1, ..PIECE }),
            ("K for V", Piece { outer: 1 - outer, ..PIECE }),
            ("block and layer exchanged", Piece { block: layer, layer: block, outer }),
            ("layer and outer exchanged", Piece { block, layer: outer, outer: layer }),
            ("block up, layer down", Piece { block: block + 1, layer: layer - 1, outer }),
        ];
        for (what, piece) in elsewhere {
            assert!(pattern.mismatches(piece, 0, &bytes) > 230, "{what}");
        }
        for shift in [1, 2, 7, 8, 16, 64, 4096] {
            assert!(pattern.mismatches(PIECE, shift, &bytes) > 230, "shifted by {shift}");
        }
        assert!(Pattern::new(4).mismatches(PIECE, 0, &bytes) > 230, "wrong seed");
        assert!(pattern.mismatches(PIECE, 0, &[0; 256]) > 230, "never written");
    }
}
