//! Registration of memory with an agent's backends.

mod allocator;
mod descriptor;
mod device;
mod table;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use smallvec::SmallVec;
use terrane_core::{
    AgentName, Alignment, BackendOutcome, Limits, Memory, Register, RegisterError, Registration,
    RegistrationRecord, Span,
};

pub use allocator::RegisteredAllocator;
pub use descriptor::Descriptor;
pub(crate) use table::Table;

use crate::agent::Backend;
use crate::error::SharedCause;
use crate::{Agent, Demand, FileAccess, Refusal, process};
use table::{Asked, Held};

/// Some of an agent's backends, each with its demand, as [`Agent::registrar`] returns them.
///
/// It keeps the agent alive, as do the registrations that it makes.
#[derive(Clone, Debug)]
pub struct Registrar {
    agent: Agent,
    /// The backends' indices in the agent, with their demands.
    chosen: Vec<(usize, Demand)>,
}

impl Registrar {
    pub(crate) fn new(agent: Agent, chosen: Vec<(usize, Demand)>) -> Self {
        Self { agent, chosen }
    }

    /// The agent whose backends these are.
    #[must_use]
    pub fn agent(&self) -> &Agent {
        &self.agent
    }
}

impl Register for Registrar {
    fn agent(&self) -> &AgentName {
        self.agent.name()
    }

    /// As for [`Agent`], for these backends alone.
    fn limits(&self) -> Limits {
        limits(&self.agent, self.chosen.iter().copied())
    }

    unsafe fn register_span(&self, memory: &dyn Memory) -> Result<Registration, RegisterError> {
        register(&self.agent, self.chosen.iter().copied(), &Span::of(memory))
    }
}

impl Register for Agent {
    fn agent(&self) -> &AgentName {
        self.name()
    }

    /// Whole pages if a backend bypasses the page cache ([`FileAccess::Direct`]); no limits
    /// otherwise.
    fn limits(&self) -> Limits {
        limits(self, all(self))
    }

    unsafe fn register_span(&self, memory: &dyn Memory) -> Result<Registration, RegisterError> {
        register(self, all(self), &Span::of(memory))
    }
}

/// A backend's index in the agent, and its demand.
type Chosen = (usize, Demand);

fn all(agent: &Agent) -> impl Iterator<Item = Chosen> {
    agent.created().iter().map(|backend| backend.demand).enumerate()
}

fn limits(agent: &Agent, chosen: impl Iterator<Item = Chosen>) -> Limits {
    let mut backends = chosen.filter_map(|(place, _)| agent.created().get(place));
    // The limits of direct I/O are known only for each file, and are at most a page.
    if backends.any(|backend| backend.file_access == FileAccess::Direct) {
        Limits { alignment: Alignment::PAGE, granule: Alignment::PAGE, ..Limits::NONE }
    } else {
        Limits::NONE
    }
}

fn register(
    agent: &Agent,
    chosen: impl Iterator<Item = Chosen>,
    span: &Span,
) -> Result<Registration, RegisterError> {
    let ask = |(place, demand)| {
        let backend: &Backend = agent.created().get(place)?;
        Some(Asked { place, backend, demand, answer: descriptor(backend, span) })
    };
    let mut asked: SmallVec<[Asked<'_>; 2]> = chosen.filter_map(ask).collect();
    // From here on, an early return drops `held`, which undoes the registrations.
    let held = Held::new(agent, &mut asked);
    let (name, mut accepted, mut takes_kind) = (agent.name().clone(), false, false);
    for Asked { backend, demand, answer, .. } in &mut asked {
        let Err(refusal) = answer else {
            (accepted, takes_kind) = (true, true);
            continue;
        };
        *refusal = device::explain(*refusal, &backend.name, span.kind);
        takes_kind |= !refusal.is_by_kind();
        if *demand == Demand::Required {
            let (backend, source) = (backend.name.clone(), Box::new(*refusal));
            return Err(RegisterError::RequiredBackend { agent: name, backend, source });
        }
    }
    if !takes_kind {
        return Err(RegisterError::UnsupportedKind { agent: name, kind: span.kind });
    }
    let outcomes = asked.iter().map(|asked| BackendOutcome {
        backend: asked.backend.name.clone(),
        refusal: asked.answer.err().map(|refusal| Arc::new(refusal) as SharedCause),
    });
    let backends = outcomes.collect();
    if accepted {
        let record = RegistrationRecord { agent: name, span: *span, backends };
        Ok(Registration::new(record, held))
    } else {
        Err(RegisterError::Refused { agent: name, span: *span, backends })
    }
}

/// The descriptor of a span for a backend, unless the backend takes no such memory.
fn descriptor(backend: &Backend, span: &Span) -> Result<Descriptor, Refusal> {
    process::check()?;
    let memory = Descriptor::memory_of(span)?;
    if !backend.memory.contains(&memory) {
        return Err(Refusal::MemoryType { memory });
    }
    Descriptor::of(span, backend.file_access)
}
