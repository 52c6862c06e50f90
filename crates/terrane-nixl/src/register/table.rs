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

use std::sync::PoisonError;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::Descriptor;
use crate::agent::{Backend, naming};
use crate::{Agent, Demand, Refusal, Status};

/// What is registered with an agent.
///
/// Its lock is taken before the one in the bindings, and never within it.
#[derive(Debug, Default)]
pub(crate) struct Table(pub(super) FxHashMap<Descriptor, Entry>);

#[derive(Debug, Default)]
pub(super) struct Entry {
    /// How many registrations hold it.
    users: usize,
    /// The backends that have it, by their places among the agent's.
    backends: SmallVec<[usize; 2]>,
    /// Deregister when they drop: each takes the descriptor from all backends that have it, so that
    /// the others find nothing left to do. There are several where backends came one by one.
    pub(super) handles: SmallVec<[nixl_sys::RegistrationHandle; 1]>,
}

/// A backend that is asked, and what comes of it.
pub(super) struct Asked<'a> {
    /// Its place among the agent's.
    pub(super) place: usize,
    pub(super) backend: &'a Backend,
    pub(super) demand: Demand,
    /// What it is to register, and then has; or why it does not.
    pub(super) answer: Result<Descriptor, Refusal>,
}

impl Asked<'_> {
    fn is_for(&self, descriptor: &Descriptor) -> bool {
        self.answer.as_ref() == Ok(descriptor)
    }
}

/// The descriptors that one registration holds. Dropping it lets go of them.
pub(super) struct Held {
    agent: Agent,
    descriptors: SmallVec<[Descriptor; 1]>,
}

impl Held {
    /// Registers what is asked for, and notes who refuses.
    pub(super) fn new(agent: &Agent, asked: &mut [Asked<'_>]) -> Self {
        let mut held = Self { agent: agent.clone(), descriptors: SmallVec::new() };
        let mut table = agent.table().lock().unwrap_or_else(PoisonError::into_inner);
        for index in 0..asked.len() {
            let Some(Ok(descriptor)) = asked.get(index).map(|asked| asked.answer) else { continue };
            if !held.descriptors.contains(&descriptor) && table.hold(agent, &descriptor, asked) {
                held.descriptors.push(descriptor);
            }
        }
        drop(table);
        held
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut table = self.agent.table().lock().unwrap_or_else(PoisonError::into_inner);
        for descriptor in &self.descriptors {
            table.let_go(descriptor);
        }
    }
}

impl Table {
    /// Registers a descriptor for one more user, with those that are asked for it and do not have it.
    /// If any has it then, the user holds it, as it answers.
    fn hold(&mut self, agent: &Agent, descriptor: &Descriptor, asked: &mut [Asked<'_>]) -> bool {
        let is_covered =
            |asked: &Asked<'_>| asked.is_for(descriptor) && self.covers(descriptor, asked.place);
        let one_by_one = asked.iter().any(is_covered);
        let entry = self.0.entry(*descriptor).or_default();
        let group = if one_by_one { 1 } else { asked.len().max(1) };
        for group in asked.chunks_mut(group) {
            entry.register(agent, descriptor, group);
        }
        let is_held = asked.iter().any(|asked| asked.is_for(descriptor));
        if is_held {
            entry.users += 1;
        } else if entry.users == 0 {
            self.0.remove(descriptor);
        }
        is_held
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

impl Entry {
    /// Asks NIXL to register a descriptor with those of a group that are asked for it and do not have
    /// it: none of them has one that covers it, if they are several. Notes who refuses.
    fn register(&mut self, agent: &Agent, descriptor: &Descriptor, group: &mut [Asked<'_>]) {
        let is_missing = |asked: &&mut Asked<'_>| {
            asked.is_for(descriptor) && !self.backends.contains(&asked.place)
        };
        let mut missing: SmallVec<[&mut Asked<'_>; 2]> =
            group.iter_mut().filter(is_missing).collect();
        let register =
            |options: &nixl_sys::OptArgs| agent.raw().register_memory(descriptor, Some(options));
        let registered = match missing.as_slice() {
            [] => return,
            [alone] => register(alone.backend.options()),
            several => naming(several.iter().map(|asked| &asked.backend.raw))
                .and_then(|options| register(&options)),
        };
        let is_alone = missing.len() == 1;
        for asked in &mut missing {
            let refused = match &registered {
                Err(error) => Some(Status::of(error)),
                Ok(_) if is_alone || is_registered(agent, descriptor, asked.backend) => None,
                Ok(_) => Some(Status::Backend),
            };
            match refused {
                Some(status) => asked.answer = Err(Refusal::Status(status)),
                None => self.backends.push(asked.place),
            }
        }
        // Kept even if nobody took anything: as it drops, it takes the descriptor from whoever has it.
        if let Ok(handle) = registered {
            self.handles.push(handle);
        }
    }
}

/// Whether a backend has a descriptor that covers this one, as NIXL says.
pub(super) fn is_registered(agent: &Agent, descriptor: &Descriptor, backend: &Backend) -> bool {
    let Ok(mut list) = nixl_sys::XferDescList::new(descriptor.memory.into_raw()) else {
        return false;
    };
    list.add_desc(descriptor.address, descriptor.length, descriptor.device);
    // Prepared for the agent's own side, which has no name, and released at once: the agent is alive.
    agent.raw().prepare_xfer_dlist("", &list, Some(backend.options())).is_ok()
}
