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
use crate::quiet::quietly;
use crate::{Agent, Demand, Refusal, Status, process};

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
        if process::is_forked() {
            return held;
        }
        let mut table = agent.table().lock().unwrap_or_else(PoisonError::into_inner);
        quietly(|| {
            for index in 0..asked.len() {
                let asked_for = asked.get(index).map(|asked| asked.answer);
                let Some(Ok(descriptor)) = asked_for else { continue };
                if !held.descriptors.contains(&descriptor) && table.hold(agent, &descriptor, asked)
                {
                    held.descriptors.push(descriptor);
                }
            }
        });
        drop(table);
        held
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The parent of a forked process goes on with what it has registered.
        if process::is_forked() {
            return;
        }
        let mut failed: SmallVec<[_; 1]> = SmallVec::new();
        let mut table = self.agent.table().lock().unwrap_or_else(PoisonError::into_inner);
        quietly(|| {
            for descriptor in &self.descriptors {
                failed.extend(table.let_go(descriptor).map(|error| (descriptor, error)));
            }
        });
        drop(table);
        // Not under the lock: what listens may register memory.
        for (descriptor, error) in failed {
            tracing::error!(%error, ?descriptor, "memory could not be deregistered");
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
    /// nothing left to do must not find what somebody registers meanwhile. Returns why that failed.
    fn let_go(&mut self, descriptor: &Descriptor) -> Option<nixl_sys::NixlError> {
        let entry = self.0.get_mut(descriptor)?;
        entry.users = entry.users.saturating_sub(1);
        if entry.users > 0 {
            return None;
        }
        let handles = self.0.remove(descriptor).map(|entry| entry.handles).unwrap_or_default();
        // NIXL's own answer is lost in the bindings. They fail only where they could not ask it, for
        // want of memory.
        handles.into_iter().filter_map(|mut handle| handle.deregister().err()).last()
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
