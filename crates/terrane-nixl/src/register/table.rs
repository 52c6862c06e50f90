//! Which descriptors are registered, each of them once.
//!
//! NIXL's bindings deregister a descriptor from every backend at once, whichever it was registered
//! with. So a descriptor that several registrations share is registered once, and deregistered when
//! the last of them goes.

use std::collections::HashMap;
use std::sync::PoisonError;

use terrane_core::BackendName;

use super::Descriptor;
use crate::agent::Backend;
use crate::{Agent, Refusal, Status};

/// What is registered with an agent.
#[derive(Debug, Default)]
pub(crate) struct Table(HashMap<Descriptor, Entry>);

#[derive(Debug, Default)]
struct Entry {
    /// The registrations that hold it.
    users: usize,
    /// The handles that deregister when they drop.
    handles: Vec<(BackendName, nixl_sys::RegistrationHandle)>,
}

/// The descriptors that one registration holds.
pub(crate) struct Held {
    agent: Agent,
    descriptors: Vec<Descriptor>,
}

impl Held {
    pub(crate) fn new(agent: &Agent) -> Self {
        Self { agent: agent.clone(), descriptors: Vec::new() }
    }

    pub(crate) fn register(
        &mut self,
        backend: &Backend,
        descriptor: Descriptor,
    ) -> Result<(), Refusal> {
        let refused = |error| Refusal::Status(Status::of(&error));
        let mut options = nixl_sys::OptArgs::new().map_err(refused)?;
        options.add_backend(&backend.raw).map_err(refused)?;
        let mut table = self.agent.table().lock().unwrap_or_else(PoisonError::into_inner);
        let registered =
            |entry: &Entry| entry.handles.iter().any(|(name, _)| *name == backend.name);
        if !table.0.get(&descriptor).is_some_and(registered) {
            let raw = self.agent.raw();
            let handle = raw.register_memory(&descriptor, Some(&options)).map_err(refused)?;
            let entry = table.0.entry(descriptor).or_default();
            entry.handles.push((backend.name.clone(), handle));
        }
        if !self.descriptors.contains(&descriptor) {
            table.0.entry(descriptor).or_default().users += 1;
            self.descriptors.push(descriptor);
        }
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Held while the handles drop, so that nobody registers the same descriptor meanwhile.
        let mut table = self.agent.table().lock().unwrap_or_else(PoisonError::into_inner);
        for descriptor in self.descriptors.drain(..) {
            if let Some(entry) = table.0.get_mut(&descriptor) {
                entry.users -= 1;
                if entry.users == 0 {
                    table.0.remove(&descriptor);
                }
            }
        }
    }
}
