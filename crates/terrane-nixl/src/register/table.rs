//! Which descriptors are registered, each of them once.
//!
//! What the bindings deregister is a descriptor, and they do so with every backend at once, whichever
//! it was registered with. NIXL compares descriptors by their numbers, so that of two registrations
//! of one span the first to go would take backends from the other. Therefore a descriptor that
//! several registrations hold is registered once, and deregistered when the last of them goes.
//!
//! NIXL answers a registration with several backends by "one of them accepted". Which ones did is
//! asked of it afterwards, one by one. It answers that by any registration that covers the
//! descriptor, so where there is an older one, the backends are asked to register one by one.

use std::collections::HashMap;
use std::sync::PoisonError;

use super::Descriptor;
use crate::{Agent, Refusal, Status};

/// What is registered with an agent.
///
/// Its lock is taken before the one in the bindings, and never within it.
#[derive(Debug, Default)]
pub(crate) struct Table(pub(super) HashMap<Descriptor, Entry>);

#[derive(Debug, Default)]
pub(super) struct Entry {
    /// How many registrations hold it.
    users: usize,
    /// The backends that have it, by their places among the agent's.
    backends: Vec<usize>,
    /// Deregister when they drop: each takes the descriptor from all backends that have it, so that
    /// the others find nothing left to do. There are several where backends came one by one.
    pub(super) handles: Vec<nixl_sys::RegistrationHandle>,
}

/// What one backend is to register: its place among the agent's, and the descriptor, or why it need
/// not be asked.
pub(crate) type Wanted = (usize, Result<Descriptor, Refusal>);

/// The descriptors that one registration holds. Dropping it lets go of them.
pub(crate) struct Held {
    agent: Agent,
    descriptors: Vec<Descriptor>,
}

impl Held {
    /// Registers what is wanted. The answers are in the same order.
    pub(crate) fn new(agent: &Agent, wanted: &[Wanted]) -> (Self, Vec<Result<(), Refusal>>) {
        let mut descriptors: Vec<Descriptor> = Vec::new();
        let mut answers: Vec<_> = wanted.iter().map(|(_, wanted)| wanted.map(|_| ())).collect();
        let mut table = agent.table().lock().unwrap_or_else(PoisonError::into_inner);
        for (_, descriptor) in wanted {
            let Ok(descriptor) = *descriptor else { continue };
            if descriptors.contains(&descriptor) {
                continue;
            }
            let same = |(_, other): &&Wanted| *other == Ok(descriptor);
            let backends: Vec<_> =
                wanted.iter().filter(same).map(|(backend, _)| *backend).collect();
            let refusals = table.hold(agent, descriptor, &backends);
            for ((backend, other), answer) in wanted.iter().zip(&mut answers) {
                if *other == Ok(descriptor)
                    && let Some(refusal) = refusals.get(backend)
                {
                    *answer = Err(*refusal);
                }
            }
            if refusals.len() < backends.len() {
                descriptors.push(descriptor);
            }
        }
        drop(table);
        (Self { agent: agent.clone(), descriptors }, answers)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut table = self.agent.table().lock().unwrap_or_else(PoisonError::into_inner);
        for descriptor in self.descriptors.drain(..) {
            table.let_go(&descriptor);
        }
    }
}

impl Table {
    /// Registers a descriptor for one more user, with those of `backends` that do not have it. If
    /// any has it then, the user holds it. Answers with the backends that refused.
    fn hold(
        &mut self,
        agent: &Agent,
        descriptor: Descriptor,
        backends: &[usize],
    ) -> HashMap<usize, Refusal> {
        let missing: Vec<_> =
            backends.iter().copied().filter(|b| !self.has(&descriptor, *b)).collect();
        let covered = missing.iter().any(|backend| self.covers(&descriptor, *backend));
        let groups: Vec<&[usize]> =
            if covered { missing.chunks(1).collect() } else { vec![missing.as_slice()] };
        let mut refusals = HashMap::new();
        let entry = self.0.entry(descriptor).or_default();
        for group in groups.into_iter().filter(|group| !group.is_empty()) {
            match ask_to_register(agent, &descriptor, group) {
                Ok((handle, accepted)) => {
                    let refused = group.iter().filter(|backend| !accepted.contains(backend));
                    refusals.extend(refused.map(|b| (*b, Refusal::Status(Status::Backend))));
                    entry.backends.extend(accepted);
                    entry.handles.push(handle);
                }
                Err(status) => {
                    refusals.extend(group.iter().map(|b| (*b, Refusal::Status(status))));
                }
            }
        }
        if refusals.len() < backends.len() {
            entry.users += 1;
        } else if entry.users == 0 {
            self.0.remove(&descriptor);
        }
        refusals
    }

    /// One user less. The last of them deregisters, under the table's lock: a handle that finds
    /// nothing left to do must not find what somebody registers meanwhile.
    fn let_go(&mut self, descriptor: &Descriptor) {
        let Some(entry) = self.0.get_mut(descriptor) else { return };
        entry.users = entry.users.saturating_sub(1);
        if entry.users > 0 {
            return;
        }
        let handles = self.0.remove(descriptor).map(|entry| entry.handles).unwrap_or_default();
        for mut handle in handles {
            // NIXL's own answer is lost in the bindings. What they tell of is that they could not
            // ask it, for want of memory.
            if let Err(error) = handle.deregister() {
                tracing::error!(%error, ?descriptor, "memory could not be deregistered");
            }
        }
    }

    /// Whether a backend has this very descriptor.
    fn has(&self, descriptor: &Descriptor, backend: usize) -> bool {
        self.0.get(descriptor).is_some_and(|entry| entry.backends.contains(&backend))
    }

    /// Whether what a backend has of a span, of any byte of it, is among these descriptors. Then what
    /// NIXL finds for the span is in force for as long as those are.
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

/// Asks NIXL to register a descriptor with some backends, none of which has one that covers it if
/// they are several. Answers with the backends that accepted, one at least.
fn ask_to_register(
    agent: &Agent,
    descriptor: &Descriptor,
    backends: &[usize],
) -> Result<(nixl_sys::RegistrationHandle, Vec<usize>), Status> {
    let options = only(agent, backends)?;
    let failed = |error| Status::of(&error);
    let handle = agent.raw().register_memory(descriptor, Some(&options)).map_err(failed)?;
    let accepted = match backends {
        [alone] => vec![*alone],
        several => {
            several.iter().copied().filter(|b| is_registered(agent, descriptor, *b)).collect()
        }
    };
    if accepted.is_empty() { Err(Status::Backend) } else { Ok((handle, accepted)) }
}

/// Whether a backend has a descriptor that covers this one, as NIXL says.
pub(super) fn is_registered(agent: &Agent, descriptor: &Descriptor, backend: usize) -> bool {
    let Ok(options) = only(agent, &[backend]) else { return false };
    let Ok(mut list) = nixl_sys::XferDescList::new(descriptor.memory.into_raw()) else {
        return false;
    };
    list.add_desc(descriptor.address, descriptor.length, descriptor.device);
    // Prepared for the agent's own side, which has no name, and released at once: the agent is alive.
    agent.raw().prepare_xfer_dlist("", &list, Some(&options)).is_ok()
}

/// Options that name some backends and nothing else.
fn only(agent: &Agent, backends: &[usize]) -> Result<nixl_sys::OptArgs, Status> {
    let failed = |error| Status::of(&error);
    let mut options = nixl_sys::OptArgs::new().map_err(failed)?;
    for backend in backends {
        let backend = agent.created().get(*backend).ok_or(Status::NotFound)?;
        options.add_backend(&backend.raw).map_err(failed)?;
    }
    Ok(options)
}
