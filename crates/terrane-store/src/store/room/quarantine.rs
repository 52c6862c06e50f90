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
    /// Counts a damage of a slot whose block was just removed from the index. The slot is not free
    /// yet, because the pin keeps it. Returns whether the slot is now quarantined: no job gets it until
    /// the store is opened again.
    pub(crate) fn note_damage(&self, pin: &PinnedSlot, damage: Damage) -> bool {
        let by = if damage == Damage::Unreadable { MOST_DAMAGES } else { 1 };
        let mut state = lock(&self.state);
        let damages = state.damages.entry(pin.block.slot).or_insert(0);
        *damages = damages.saturating_add(by);
        *damages >= MOST_DAMAGES
    }
}
