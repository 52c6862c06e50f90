//! The uses of blocks by transfers, and which uses exclude each other.

use super::ticket::TransferId;
use crate::side::Side;

/// The access of a transfer to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// It reads the block.
    Read,
    /// It writes the block.
    Write,
}

impl Access {
    /// The end of a transfer that has this access.
    pub(crate) const fn side(self) -> Side {
        match self {
            Self::Read => Side::Source,
            Self::Write => Side::Destination,
        }
    }
}

terrane_core::display_names!(Access {
    Self::Read => "read",
    Self::Write => "written",
});

/// A block that another operation in flight reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockConflict {
    /// The end of the refused transfer that the block belongs to. A hold for reading counts as a
    /// source, and one for writing as a destination.
    pub side: Side,
    /// The block.
    pub block: u32,
    /// The access that the refused transfer requested.
    pub wanted: Access,
    /// The access of the other transfer or hold.
    pub held: Access,
    /// The other transfer or hold. Run [after](crate::Transfer::after) its ticket, or wait for it.
    pub holder: TransferId,
}
