//! Random changes of bytes, as by an unreliable network or an attacker.

use proptest::prelude::*;
use proptest::sample::{Index, select};

/// One change of some bytes. Positions are fractions of their length.
#[derive(Clone, Debug)]
pub enum Damage {
    /// Inverts the bits of one byte that are set in this mask.
    Flip(Index, u8),
    /// Removes all bytes from this position on.
    Cut(Index),
    /// Appends these bytes.
    Append(Vec<u8>),
    /// Inserts these bytes at this position.
    Insert(Index, Vec<u8>),
    /// Removes this many bytes at this position.
    Remove(Index, u8),
    /// Repeats this many bytes at this position.
    Repeat(Index, u8),
}

impl Damage {
    /// At most this many changes, one after the other.
    pub fn up_to(most: usize) -> impl Strategy<Value = Vec<Self>> {
        prop::collection::vec(Self::any(), 1..=most)
    }

    /// Any change.
    pub fn any() -> impl Strategy<Value = Self> {
        let index = any::<Index>;
        // Numbers at the ends of their ranges, as varints and as words.
        let edge = select(vec![
            vec![0],
            vec![0x80, 0],
            vec![0xff, 0xff, 0xff, 0xff, 0x0f],
            vec![0xff; 8],
            vec![0xff; 10],
            vec![0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1],
        ]);
        let some = prop_oneof![edge, prop::collection::vec(any::<u8>(), 1..40)];
        prop_oneof![
            (index(), 1_u8..).prop_map(|(at, bits)| Self::Flip(at, bits)),
            index().prop_map(Self::Cut),
            some.clone().prop_map(Self::Append),
            (index(), some).prop_map(|(at, bytes)| Self::Insert(at, bytes)),
            (index(), 1_u8..20).prop_map(|(at, count)| Self::Remove(at, count)),
            (index(), 1_u8..20).prop_map(|(at, count)| Self::Repeat(at, count)),
        ]
    }

    /// Applies the change to these bytes. Empty bytes do not change.
    pub fn apply(&self, bytes: &mut Vec<u8>) {
        let length = bytes.len();
        if length == 0 {
            return;
        }
        let end = |at: usize, count: u8| (at + usize::from(count)).min(length);
        match self {
            Self::Flip(at, bits) => bytes[at.index(length)] ^= bits,
            Self::Cut(at) => bytes.truncate(at.index(length)),
            Self::Append(more) => bytes.extend(more),
            Self::Insert(at, more) => {
                let at = at.index(length);
                bytes.splice(at..at, more.iter().copied());
            }
            Self::Remove(at, count) => {
                let at = at.index(length);
                bytes.drain(at..end(at, *count));
            }
            Self::Repeat(at, count) => {
                let at = at.index(length);
                let part = bytes[at..end(at, *count)].to_vec();
                bytes.splice(at..at, part);
            }
        }
    }
}
