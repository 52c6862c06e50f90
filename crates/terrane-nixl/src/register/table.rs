//! The registered descriptors, each registered once.
//!
//! The bindings deregister a descriptor with every backend at once, including backends that another
//! registration uses. NIXL compares descriptors by their numbers. If one span had two
//! registrations, the first to drop would take backends from the other. Therefore a descriptor that
//! several registrations hold is registered once, and deregistered when the last of them drops.
//!
//! NIXL answers a registration with several backends by "one of them accepted". The table then
//! queries each backend. NIXL answers such a query from any registration that covers the
//! descriptor. Where an older one covers it, the backends are asked to register one by one.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::descriptor::Descriptor;
use super::refusal::Refusal;
use crate::agent::backend::Backend;
use crate::agent::config::BackendRequirement;
use crate::agent::options::naming;
use crate::bindings::status::Status;

/// The registrations of an agent.
///
/// Its lock is taken before the one in the bindings, and never within it.
#[derive(Debug, Default)]
pub(crate) struct RegistrationTable(pub(super) FxHashMap<Descriptor, Entry>);

#[derive(Debug, Default)]
pub(super) struct Entry {
    /// How many registrations hold it.
    users: usize,
    /// The backends that have it, by their indices in the agent.
    backends: SmallVec<[usize; 2]>,
    /// They deregister when they drop. Each removes the descriptor from all backends that have it,
    /// so the others find nothing left. There are several where backends were added one by one.
    pub(super) handles: SmallVec<[nixl_sys::RegistrationHandle; 1]>,
}

/// A backend that is asked to register, and the outcome.
pub(super) struct BackendAttempt<'a> {
    /// Its index in the agent.
    pub(super) index: usize,
    pub(super) backend: &'a Backend,
    pub(super) requirement: BackendRequirement,
    /// The descriptor to register, and later registered; or the refusal.
    pub(super) outcome: Result<Descriptor, Refusal>,
}

impl BackendAttempt<'_> {
    fn is_for(&self, descriptor: &Descriptor) -> bool {
        self.outcome.as_ref() == Ok(descriptor)
    }
}

impl RegistrationTable {
    /// Registers a descriptor for one more user, with the requested backends that do not have it.
    /// Returns true if any backend then has it; the user then holds it.
    pub(super) fn hold(
        &mut self,
        agent: &nixl_sys::Agent,
        descriptor: &Descriptor,
        attempts: &mut [BackendAttempt<'_>],
    ) -> bool {
        let is_covered = |attempt: &BackendAttempt<'_>| {
            attempt.is_for(descriptor) && self.covers(descriptor, attempt.index)
        };
        let one_by_one = attempts.iter().any(is_covered);
        let entry = self.0.entry(*descriptor).or_default();
        let group = if one_by_one { 1 } else { attempts.len().max(1) };
        for group in attempts.chunks_mut(group) {
            entry.register(agent, descriptor, group);
        }
        let is_held = attempts.iter().any(|attempt| attempt.is_for(descriptor));
        if is_held {
            entry.users += 1;
        } else if entry.users == 0 {
            self.0.remove(descriptor);
        }
        is_held
    }

    /// Removes one user. The last of them deregisters under the table's lock: a handle that finds
    /// nothing left must not find another thread's new registration. Returns why that failed.
    pub(super) fn release(&mut self, descriptor: &Descriptor) -> Option<nixl_sys::NixlError> {
        let entry = self.0.get_mut(descriptor)?;
        entry.users = entry.users.saturating_sub(1);
        if entry.users > 0 {
            return None;
        }
        let handles = self.0.remove(descriptor).map(|entry| entry.handles).unwrap_or_default();
        // The bindings drop NIXL's own status. They fail only if they could not call it, for lack
        // of memory.
        handles.into_iter().filter_map(|mut handle| handle.deregister().err()).last()
    }

    /// Whether these descriptors include everything that a backend has of any byte of the span. If
    /// so, NIXL's answer for the span holds as long as they are registered.
    pub(crate) fn has_only(&self, own: &[Descriptor], span: &Descriptor, backend: usize) -> bool {
        let mut entries = self.0.iter();
        entries.all(|(other, entry)| {
            !entry.backends.contains(&backend) || !other.overlaps(span) || own.contains(other)
        })
    }

    /// Whether a backend has a descriptor that covers this one.
    fn covers(&self, descriptor: &Descriptor, backend: usize) -> bool {
        let mut entries = self.0.iter();
        entries.any(|(other, entry)| other.covers(descriptor) && entry.backends.contains(&backend))
    }
}

impl Entry {
    /// Registers a descriptor with the backends of a group that are asked for it and do not have
    /// it. In a group of several, none may have one that covers it. Records refusals.
    fn register(
        &mut self,
        agent: &nixl_sys::Agent,
        descriptor: &Descriptor,
        group: &mut [BackendAttempt<'_>],
    ) {
        let is_missing = |attempt: &&mut BackendAttempt<'_>| {
            attempt.is_for(descriptor) && !self.backends.contains(&attempt.index)
        };
        let mut missing: SmallVec<[&mut BackendAttempt<'_>; 2]> =
            group.iter_mut().filter(is_missing).collect();
        let register =
            |options: &nixl_sys::OptArgs| agent.register_memory(descriptor, Some(options));
        let registered = match missing.as_slice() {
            [] => return,
            [alone] => register(alone.backend.options()),
            several => naming(several.iter().map(|attempt| &attempt.backend.raw))
                .and_then(|options| register(&options)),
        };
        let is_alone = missing.len() == 1;
        for attempt in &mut missing {
            let refused = match &registered {
                Err(error) => Some(Status::of(error)),
                Ok(_) if is_alone || is_registered(agent, descriptor, attempt.backend) => None,
                Ok(_) => Some(Status::Backend),
            };
            match refused {
                Some(status) => attempt.outcome = Err(Refusal::Status(status)),
                None => self.backends.push(attempt.index),
            }
        }
        // Kept even if no backend accepted: its drop removes the descriptor from every backend.
        if let Ok(handle) = registered {
            self.handles.push(handle);
        }
    }
}

/// Whether NIXL reports that a backend has a descriptor that covers this one.
pub(super) fn is_registered(
    agent: &nixl_sys::Agent,
    descriptor: &Descriptor,
    backend: &Backend,
) -> bool {
    let Ok(mut list) = nixl_sys::XferDescList::new(descriptor.memory.into_raw()) else {
        return false;
    };
    list.add_desc(descriptor.address, descriptor.length, descriptor.device);
    // Prepared for the agent's own side, which has no name. Released at once, while the agent
    // lives.
    agent.prepare_xfer_dlist("", &list, Some(backend.options())).is_ok()
}
