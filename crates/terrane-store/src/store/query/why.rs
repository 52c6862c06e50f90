//! Why a key is, or is not, in the store.

use std::fmt;

use crate::store::query::presence::TierId;

/// The reason for the state of a key, as far as the store remembers it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// Tiers have the block.
    Present {
        /// The tiers, the fastest first.
        tiers: Vec<TierId>,
        /// The length in bytes.
        length: u32,
        /// Whether a lease pins it.
        is_pinned: bool,
    },
    /// A put writes the block.
    Writing,
    /// The block was evicted lately.
    Evicted,
    /// The bytes on disk differed from the checksum of the block.
    Corrupt,
    /// The device could not read the block.
    Unreadable,
    /// The key was removed lately, or the store was cleared.
    Removed,
    /// The store has not seen the key, or has forgotten it.
    NeverSeen,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Present { tiers, length, is_pinned } => {
                write!(f, "present, {length} bytes, in")?;
                for (number, tier) in tiers.iter().enumerate() {
                    let separator = if number == 0 { "" } else { "," };
                    write!(f, "{separator} {tier}")?;
                }
                f.write_str(if *is_pinned { "; pinned by a lease" } else { "" })
            }
            Self::Writing => f.write_str("absent; a put writes it now"),
            Self::Evicted => f.write_str("absent; it was evicted lately"),
            Self::Corrupt => f.write_str("absent; its bytes on disk were damaged"),
            Self::Unreadable => f.write_str("absent; the disk could not read it"),
            Self::Removed => f.write_str("absent; it was removed"),
            Self::NeverSeen => f.write_str("absent; the store does not remember it"),
        }
    }
}
