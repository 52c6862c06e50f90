//! The descriptors that registrations and transfers keep registered.

use std::sync::MutexGuard;

use smallvec::SmallVec;
use terrane_core::sync::lock;

use super::descriptor::Descriptor;
use super::table::{BackendAttempt, EntryUse, RegistrationTable};
use crate::agent::Agent;
use crate::bindings::process;
use crate::bindings::without_tracing::without_tracing;

/// The descriptors of one registration or of one transfer. Dropping it releases them.
pub(super) struct HeldDescriptors {
    agent: Agent,
    uses: SmallVec<[EntryUse; 2]>,
}

impl HeldDescriptors {
    /// Registers the requested descriptors, and records refusals.
    pub(super) fn new(agent: &Agent, attempts: &mut [BackendAttempt<'_>]) -> Self {
        let mut held = Self::none(agent);
        if process::is_forked() {
            return held;
        }
        let mut table = lock(agent.registrations());
        let mut done: SmallVec<[Descriptor; 2]> = SmallVec::new();
        without_tracing(|| {
            for index in 0..attempts.len() {
                let requested = attempts.get(index).map(|attempt| attempt.outcome);
                let Some(Ok(descriptor)) = requested else { continue };
                if !done.contains(&descriptor) {
                    done.push(descriptor);
                    held.uses.extend(table.hold(agent.raw(), &descriptor, attempts));
                }
            }
        });
        drop(table);
        held
    }

    fn none(agent: &Agent) -> Self {
        Self { agent: agent.clone(), uses: SmallVec::new() }
    }
}

impl Drop for HeldDescriptors {
    fn drop(&mut self) {
        // The parent of a forked process continues to use its registrations.
        if self.uses.is_empty() || process::is_forked() {
            return;
        }
        let mut failed: SmallVec<[_; 1]> = SmallVec::new();
        let mut table = lock(self.agent.registrations());
        without_tracing(|| {
            for used in &self.uses {
                failed.extend(table.release(used).map(|error| (used, error)));
            }
        });
        drop(table);
        // Outside the lock: a log subscriber may register memory.
        for (used, error) in failed {
            tracing::error!(%error, ?used, "memory could not be deregistered");
        }
    }
}

/// The registrations that the requests of a transfer may use. NIXL stores raw pointers to its data
/// of them in a request. Drop this value after the requests have ended.
#[derive(Default)]
pub(crate) struct TransferRegistrations {
    held: Option<HeldDescriptors>,
    /// The version of the table at which it held all of them.
    version: Option<u64>,
}

impl TransferRegistrations {
    /// Holds the entries that `overlapping` returns. No registration changes until the returned
    /// guard drops, so make NIXL look up the memory before that.
    pub(crate) fn hold<'a>(
        &mut self,
        agent: &'a Agent,
        overlapping: impl FnOnce(&RegistrationTable) -> Vec<Descriptor>,
    ) -> MutexGuard<'a, RegistrationTable> {
        let mut table = lock(agent.registrations());
        let version = table.version();
        if self.version != Some(version) {
            let held = self.held.get_or_insert_with(|| HeldDescriptors::none(agent));
            for entry in overlapping(&table) {
                if !held.uses.iter().any(|used| used.is_of_transfer(&entry)) {
                    held.uses.extend(table.hold_for_transfer(&entry));
                }
            }
            self.version = Some(version);
        }
        table
    }
}
