//! The health of the slab files: whether blocks can be read and written, and why not.

use std::sync::{Arc, OnceLock};

use crate::error::StoreError;
use crate::slab::request::SlabFailure;

/// The health of the slab files. It only gets worse. The first reason of each step is kept.
#[derive(Debug, Default)]
pub(super) struct HealthState {
    read_only: OnceLock<Arc<StoreError>>,
    off: OnceLock<Arc<StoreError>>,
}

impl HealthState {
    /// No block is written from now on.
    pub(super) fn make_read_only(&self, reason: StoreError) {
        worsen(&self.read_only, reason);
    }

    /// No block is read or written from now on.
    pub(super) fn turn_off(&self, reason: StoreError) {
        worsen(&self.off, reason);
    }

    /// Why a block cannot be read or written now.
    pub(super) fn refusal(&self, is_write: bool) -> Option<SlabFailure> {
        if let Some(reason) = self.off.get() {
            return Some(SlabFailure::Refused(Arc::clone(reason)));
        }
        let reason = self.read_only.get().filter(|_| is_write)?;
        Some(SlabFailure::ReadOnly(Arc::clone(reason)))
    }
}

fn worsen(step: &OnceLock<Arc<StoreError>>, reason: StoreError) {
    if step.set(Arc::new(reason)).is_ok() {
        tracing::debug!(reason = ?step.get(), "the slab files are degraded");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_only_gets_worse_and_keeps_its_first_reason() {
        let state = HealthState::default();
        assert!(state.refusal(true).is_none());
        state.make_read_only(StoreError::ReadOnly);
        state.make_read_only(StoreError::Closed);
        assert!(matches!(state.refusal(true), Some(SlabFailure::ReadOnly(reason))
            if matches!(*reason, StoreError::ReadOnly)));
        assert!(state.refusal(false).is_none());
        state.turn_off(StoreError::Closed);
        state.make_read_only(StoreError::ReadOnly);
        assert!(matches!(state.refusal(true), Some(SlabFailure::Refused(_))));
        assert!(matches!(state.refusal(false), Some(SlabFailure::Refused(_))));
    }
}
