//! Slots that damage their blocks.

use terrane_core::sync::lock;

use crate::store::slot_table::{MOST_DAMAGES, PinnedSlot, SlotTable};

impl SlotTable {
    /// Counts a damage of a slot whose block was just removed from the index. `pin` keeps the slot
    /// from being free yet. Returns whether the slot is now quarantined: no job gets it until the
    /// store is opened again. Corrupt bytes count once, and a slot that the device cannot read is
    /// quarantined at once.
    pub(crate) fn note_damage(&self, pin: &PinnedSlot, is_corrupt: bool) -> bool {
        let by = if is_corrupt { 1 } else { MOST_DAMAGES };
        let mut state = lock(&self.state);
        let damages = state.damages.entry(pin.block.slot).or_insert(0);
        *damages = damages.saturating_add(by);
        *damages >= MOST_DAMAGES
    }
}
