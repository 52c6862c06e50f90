//! The registered descriptors, each registered only once.
//!
//! The bindings deregister a descriptor with every backend at once, including backends that another
//! registration uses. NIXL compares descriptors by their numbers. With two registrations of one
//! span, the first drop would deregister the backends of the other. Therefore a descriptor of
//! several registrations is registered once, and deregistered when the last of them drops.
//!
//! For a registration with several backends, NIXL reports only that one of them accepted. The table
//! then queries each backend. NIXL answers such a query from any registration that covers the
//! descriptor. If an older one covers it, the table registers with each backend separately.

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
/// Its lock is taken before the bindings' lock, and never within it.
#[derive(Debug, Default)]
pub(crate) struct RegistrationTable(pub(super) FxHashMap<Descriptor, Entry>);

#[derive(Debug, Default)]
pub(super) struct Entry {
    /// The number of registrations that use it.
    users: usize,
    /// The backends that have it, by their indices in the agent.
    backends: SmallVec<[usize; 2]>,
    /// The handles deregister when they drop. Each removes the descriptor from all backends that
    /// have it, so the others find none. There are several if backends were added one by one.
    pub(super) handles: SmallVec<[nixl_sys::RegistrationHandle; 1]>,
}

/// A backend with which to register, and the outcome.
pub(super) struct BackendAttempt<'a> {
    /// Its index in the agent.
    pub(super) index: usize,
    pub(super) backend: &'a Backend,
    pub(super) requirement: BackendRequirement,
    /// The descriptor to register, which is registered later; or the refusal.
    pub(super) outcome: Result<Descriptor, Refusal>,
}

impl BackendAttempt<'_> {
    fn is_for(&self, descriptor: &Descriptor) -> bool {
        self.outcome.as_ref() == Ok(descriptor)
    }
}

impl RegistrationTable {
    /// Registers a descriptor for one more user, with the requested backends that do not have it.
    /// Returns true if any backend then has it, and the user with it.
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

    /// Removes one user. The last one deregisters under the table's lock: a handle must not
    /// deregister another thread's new registration. Returns the error if that failed.
    pub(super) fn release(&mut self, descriptor: &Descriptor) -> Option<nixl_sys::NixlError> {
        let entry = self.0.get_mut(descriptor)?;
        entry.users = entry.users.saturating_sub(1);
        if entry.users > 0 {
            return None;
        }
        let handles = self.0.remove(descriptor).map(|entry| entry.handles).unwrap_or_default();
        // The bindings drop NIXL's own status. They fail only if they could not call NIXL, for lack
        // of memory.
        handles.into_iter().filter_map(|mut handle| handle.deregister().err()).last()
    }

    /// Whether these descriptors include everything that a backend has of any byte of the span. If
    /// so, NIXL's result for the span is valid as long as they are registered.
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
    /// Registers a descriptor with those backends of a group that need it and do not have it. In a
    /// group of several, none may have a descriptor that covers it. Records refusals.
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
    // Prepared for the agent itself, which has an empty name. Released at once, while the agent
    // lives.
    agent.prepare_xfer_dlist("", &list, Some(backend.options())).is_ok()
}
