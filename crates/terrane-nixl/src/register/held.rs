//! The descriptors of a registration.

use smallvec::SmallVec;
use terrane_core::sync::lock;

use super::descriptor::Descriptor;
use super::table::BackendAttempt;
use crate::agent::Agent;
use crate::bindings::process;
use crate::bindings::without_tracing::without_tracing;

/// The descriptors of one registration. Dropping it releases them.
pub(super) struct HeldDescriptors {
    agent: Agent,
    descriptors: SmallVec<[Descriptor; 1]>,
}

impl HeldDescriptors {
    /// Registers the requested descriptors, and records refusals.
    pub(super) fn new(agent: &Agent, attempts: &mut [BackendAttempt<'_>]) -> Self {
        let mut held = Self { agent: agent.clone(), descriptors: SmallVec::new() };
        if process::is_forked() {
            return held;
        }
        let mut table = lock(agent.registrations());
        without_tracing(|| {
            for index in 0..attempts.len() {
                let requested = attempts.get(index).map(|attempt| attempt.outcome);
                let Some(Ok(descriptor)) = requested else { continue };
                if !held.descriptors.contains(&descriptor)
                    && table.hold(agent.raw(), &descriptor, attempts)
                {
                    held.descriptors.push(descriptor);
                }
            }
        });
        drop(table);
        held
    }
}

impl Drop for HeldDescriptors {
    fn drop(&mut self) {
        // The parent of a forked process continues to use its registrations.
        if process::is_forked() {
            return;
        }
        let mut failed: SmallVec<[_; 1]> = SmallVec::new();
        let mut table = lock(self.agent.registrations());
        without_tracing(|| {
            for descriptor in &self.descriptors {
                failed.extend(table.release(descriptor).map(|error| (descriptor, error)));
            }
        });
        drop(table);
        // Outside the lock: a log subscriber may register memory.
        for (descriptor, error) in failed {
            tracing::error!(%error, ?descriptor, "memory could not be deregistered");
        }
    }
}
