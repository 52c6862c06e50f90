//! Slots that damage their blocks.

use terrane_core::sync::lock;

use crate::store::room::{MOST_DAMAGES, PinnedSlot, Room};

/// How a block on disk was damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    /// Its bytes differ from its checksum.
    OtherBytes { expected: u64, found: u64 },
    /// The device cannot read its slot.
    Unreadable,
}

impl Room {
    /// Counts a damage of the slot of a block that has just left the index. The pin keeps the slot from
    /// the free ones until then. Returns whether no job gets the slot any more, until the store is
    /// opened again.
    pub(crate) fn note_damage(&self, pin: &PinnedSlot, damage: Damage) -> bool {
        let by = if damage == Damage::Unreadable { MOST_DAMAGES } else { 1 };
        let mut state = lock(&self.state);
        let damages = state.damages.entry(pin.block.slot).or_insert(0);
        *damages = damages.saturating_add(by);
        *damages >= MOST_DAMAGES
    }
}
