//! Registers memory with all of an agent's backends, or with selected ones.

use std::sync::Arc;

use smallvec::SmallVec;
use terrane_core::{
    AgentName, Alignment, BackendName, BackendOutcome, Limits, Memory, Register, RegisterError,
    Registration, RegistrationRecord, Span,
};

use super::descriptor::Descriptor;
use super::held::HeldDescriptors;
use super::refusal::Refusal;
use super::table::BackendAttempt;
use super::ucx_modules;
use crate::agent::Agent;
use crate::agent::backend::Backend;
use crate::agent::config::{BackendRequirement, FileAccess};
use crate::bindings::process;
use crate::error::{NixlError, SharedCause};

/// Some of an agent's backends, and whether registrations require each of them; from
/// [`Agent::registrar`].
///
/// It keeps the agent alive, and so do its registrations.
#[derive(Clone, Debug)]
pub struct Registrar {
    agent: Agent,
    /// The backends' indices in the agent, with whether registrations require them.
    chosen: Vec<(usize, BackendRequirement)>,
}

impl Registrar {
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

impl Agent {
    /// Returns a registrar that uses only these backends, in this order.
    ///
    /// ```no_run
    /// use terrane_nixl::{AgentBuilder, BackendConfig, BackendRequirement};
    ///
    /// let ucx = BackendConfig::new("UCX");
    /// let agent = AgentBuilder::unnamed().backend(ucx).backend(BackendConfig::new("GDS")).build()?;
    /// // For the layout on the disk, GDS or nothing.
    /// let disk = agent.registrar([("GDS", BackendRequirement::Required)])?;
    /// # Ok::<(), terrane_nixl::NixlError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`NixlError::NoSuchBackend`], or [`NixlError::DuplicateBackend`] for one that is named
    /// twice.
    pub fn registrar<N: Into<BackendName>>(
        &self,
        backends: impl IntoIterator<Item = (N, BackendRequirement)>,
    ) -> Result<Registrar, NixlError> {
        let mut chosen: Vec<(usize, BackendRequirement)> = Vec::new();
        for (backend, requirement) in backends {
            let backend = backend.into();
            let Some(index) = self.created_backends().iter().position(|b| b.name == backend) else {
                let (agent, available) = (self.name().clone(), self.backends().cloned().collect());
                return Err(NixlError::NoSuchBackend { agent, backend, available });
            };
            if chosen.iter().any(|(taken, _)| *taken == index) {
                return Err(NixlError::DuplicateBackend { backend });
            }
            chosen.push((index, requirement));
        }
        Ok(Registrar { agent: self.clone(), chosen })
    }
}

impl Register for Agent {
    fn agent(&self) -> &AgentName {
        self.name()
    }

    /// Whole pages if a backend uses direct I/O ([`FileAccess::Direct`]); no limits otherwise.
    fn limits(&self) -> Limits {
        limits(self, all(self))
    }

    unsafe fn register_span(&self, memory: &dyn Memory) -> Result<Registration, RegisterError> {
        register(self, all(self), &Span::of(memory))
    }
}

/// A backend's index in the agent, and whether registrations require it.
type Chosen = (usize, BackendRequirement);

fn all(agent: &Agent) -> impl Iterator<Item = Chosen> {
    agent.created_backends().iter().map(|backend| backend.requirement).enumerate()
}

fn limits(agent: &Agent, chosen: impl Iterator<Item = Chosen>) -> Limits {
    let mut backends = chosen.filter_map(|(index, _)| agent.created_backends().get(index));
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
    let attempt = |(index, requirement)| {
        let backend: &Backend = agent.created_backends().get(index)?;
        Some(BackendAttempt { index, backend, requirement, outcome: descriptor(backend, span) })
    };
    let mut attempts: SmallVec<[BackendAttempt<'_>; 2]> = chosen.filter_map(attempt).collect();
    // From here on, an early return drops `held`, which undoes the registrations.
    let registered = HeldDescriptors::new(agent, &mut attempts);
    let (name, mut accepted, mut takes_kind) = (agent.name().clone(), false, false);
    for BackendAttempt { backend, requirement, outcome, .. } in &mut attempts {
        let Err(refusal) = outcome else {
            (accepted, takes_kind) = (true, true);
            continue;
        };
        *refusal = ucx_modules::explain(*refusal, &backend.name, span.kind);
        takes_kind |= !refusal.is_by_kind();
        if *requirement == BackendRequirement::Required {
            let (backend, source) = (backend.name.clone(), Box::new(*refusal));
            return Err(RegisterError::RequiredBackend { agent: name, backend, source });
        }
    }
    if !takes_kind {
        return Err(RegisterError::UnsupportedKind { agent: name, kind: span.kind });
    }
    let outcomes = attempts.iter().map(|attempt| BackendOutcome {
        backend: attempt.backend.name.clone(),
        refusal: attempt.outcome.err().map(|refusal| Arc::new(refusal) as SharedCause),
    });
    let backends = outcomes.collect();
    if accepted {
        let record = RegistrationRecord { agent: name, span: *span, backends };
        Ok(Registration::new(record, registered))
    } else {
        Err(RegisterError::Refused { agent: name, span: *span, backends })
    }
}

/// The descriptor of a span for a backend, unless the backend does not support such memory.
fn descriptor(backend: &Backend, span: &Span) -> Result<Descriptor, Refusal> {
    process::check()?;
    let memory = Descriptor::memory_of(span)?;
    if !backend.memory.contains(&memory) {
        return Err(Refusal::MemoryType { memory });
    }
    Descriptor::of(span, backend.file_access)
}
