//! Least recently used.

use std::sync::Mutex;

use terrane_core::sync::lock;

use super::EvictionPolicy;
use super::links::{Links, List};
use crate::KeyHash;

/// Evicts the block whose last use is the longest ago.
///
/// A hit takes a lock and moves the block in a list. [`S3Fifo`](super::S3Fifo) has cheaper hits, and
/// scans do not empty it.
#[derive(Debug)]
pub struct Lru {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    links: Links,
    used: List,
    /// Whether each slot has a block.
    present: Box<[bool]>,
}

impl Lru {
    /// The policy of a tier of this many slots.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        let present = vec![false; usize::try_from(slots).unwrap_or(usize::MAX)].into();
        Self { state: Mutex::new(State { links: Links::new(slots), used: List::new(), present }) }
    }
}

impl State {
    /// Takes the slot out of the list. Returns whether it was in it.
    fn take(&mut self, slot: u32) -> bool {
        let Some(present) = self.present_mut(slot) else { return false };
        if !std::mem::take(present) {
            return false;
        }
        self.used.remove(&mut self.links, slot);
        true
    }

    fn put(&mut self, slot: u32) {
        let Some(present) = self.present_mut(slot) else { return };
        *present = true;
        self.used.push(&mut self.links, slot);
    }

    fn present_mut(&mut self, slot: u32) -> Option<&mut bool> {
        usize::try_from(slot).ok().and_then(|slot| self.present.get_mut(slot))
    }
}

impl EvictionPolicy for Lru {
    fn insert(&self, slot: u32, _: KeyHash) {
        let mut state = lock(&self.state);
        state.take(slot);
        state.put(slot);
    }

    fn hit(&self, slot: u32) {
        let mut state = lock(&self.state);
        if state.take(slot) {
            state.put(slot);
        }
    }

    fn remove(&self, slot: u32) {
        lock(&self.state).take(slot);
    }

    fn evict(&self, take: &mut dyn FnMut(u32) -> Option<KeyHash>) -> Option<u32> {
        let mut state = lock(&self.state);
        // A block that cannot be taken is in use, so it becomes the newest.
        for _ in 0..state.used.len() {
            let slot = state.used.oldest()?;
            state.take(slot);
            if take(slot).is_some() {
                return Some(slot);
            }
            state.put(slot);
        }
        None
    }
}
