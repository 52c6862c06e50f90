//! Whether blocks can be read and written, and why not.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use terrane_core::sync::lock;

use crate::error::StoreError;
use crate::slab::request::{SlabFailure, SlabHealth};

const GOOD: u8 = 0;
const READ_ONLY: u8 = 1;
const OFF: u8 = 2;

/// The health of the slab files. It only gets worse. The first reason of each step is kept.
#[derive(Debug)]
pub(super) struct HealthState {
    /// The step of `health`, so that a good state costs one load.
    step: AtomicU8,
    health: Mutex<SlabHealth>,
}

impl HealthState {
    pub(super) fn new() -> Self {
        Self { step: AtomicU8::new(GOOD), health: Mutex::new(SlabHealth::Good) }
    }

    pub(super) fn get(&self) -> SlabHealth {
        lock(&self.health).clone()
    }

    /// No block is written from now on.
    pub(super) fn make_read_only(&self, reason: StoreError) {
        self.worsen(READ_ONLY, SlabHealth::ReadOnly(Arc::new(reason)));
    }

    /// No block is read or written from now on.
    pub(super) fn turn_off(&self, reason: StoreError) {
        self.worsen(OFF, SlabHealth::Off(Arc::new(reason)));
    }

    fn worsen(&self, step: u8, health: SlabHealth) {
        let mut current = lock(&self.health);
        if self.step.load(Ordering::Relaxed) < step {
            self.step.store(step, Ordering::Relaxed);
            *current = health;
            drop(current);
            tracing::debug!(step, "the slab files are degraded");
        }
    }

    /// Why a block cannot be read or written now.
    pub(super) fn refusal(&self, is_write: bool) -> Option<SlabFailure> {
        if self.step.load(Ordering::Relaxed) == GOOD {
            return None;
        }
        match self.get() {
            SlabHealth::Good => None,
            SlabHealth::ReadOnly(reason) => is_write.then_some(SlabFailure::ReadOnly(reason)),
            SlabHealth::Off(reason) => Some(SlabFailure::Refused(reason)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_only_gets_worse_and_keeps_its_first_reason() {
        let state = HealthState::new();
        assert!(state.refusal(true).is_none());
        state.make_read_only(StoreError::ReadOnly);
        state.make_read_only(StoreError::Closed);
        assert!(matches!(state.get(), SlabHealth::ReadOnly(reason)
            if matches!(*reason, StoreError::ReadOnly)));
        assert!(matches!(state.refusal(true), Some(SlabFailure::ReadOnly(_))));
        assert!(state.refusal(false).is_none());
        state.turn_off(StoreError::Closed);
        state.make_read_only(StoreError::ReadOnly);
        assert!(matches!(state.get(), SlabHealth::Off(_)));
        assert!(matches!(state.refusal(false), Some(SlabFailure::Refused(_))));
    }
}
