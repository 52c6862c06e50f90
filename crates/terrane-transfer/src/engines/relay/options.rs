//! The options of the relay.

use terrane_core::ByteCount;

/// The engine's name in explanations and errors.
pub(super) const NAME: &str = "relay";

/// The options of a [`RelayEngine`](super::RelayEngine).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayOptions {
    /// The bytes of a slot. A slot must be as large as one layer of a block, and should be as large
    /// as a block.
    pub slot_bytes: ByteCount,
    /// The maximum number of slots, at least one. With fewer than two, hops take turns.
    pub slots: usize,
}

impl Default for RelayOptions {
    /// 8 slots of 16 MiB. A slot has room for several requests of a disk, and several slots are in
    /// flight.
    fn default() -> Self {
        Self { slot_bytes: ByteCount::mib(16), slots: 8 }
    }
}
