//! Changes of the number of slots.

use terrane_core::sync::lock;

use crate::error::StoreError;
use crate::slab::Slabs;
use crate::store::room::{Aftermath, CLEAN, Room};

impl Room {
    /// Sets the number of slots that are used, and evicts the blocks beyond it.
    pub(crate) fn resize(&self, slots: u32) {
        let mut after = Aftermath::default();
        let mut state = lock(&self.state);
        let before = std::mem::replace(&mut state.limit, slots);
        if slots < before {
            let free = std::mem::take(&mut state.free);
            free.into_iter().for_each(|slot| state.put_back(slot));
            for slot in slots..before {
                if let Some(key) = self.index.evict(slot) {
                    self.policy.remove(slot);
                    self.set_mark(&self.dirty, slot, CLEAN);
                    after.evicted.push(key);
                    state.put_back(slot);
                }
            }
        } else {
            let retired = std::mem::take(&mut state.retired);
            retired.into_iter().rev().for_each(|slot| state.put_back(slot));
        }
        drop(state);
        self.settle(after);
        self.retry();
    }

    /// Frees the disk blocks of the slots beyond the limit that no block or job has.
    pub(crate) fn punch(&self, slabs: &Slabs) -> Result<(), StoreError> {
        let retired: Vec<u32> = lock(&self.state).retired.iter().copied().collect();
        for run in retired.chunk_by(|before, after| before + 1 == *after) {
            if let (Some(&first), Some(&last)) = (run.first(), run.last()) {
                slabs.punch(self.group, first..last + 1)?;
            }
        }
        Ok(())
    }

    pub(crate) fn limit(&self) -> u32 {
        lock(&self.state).limit
    }
}
