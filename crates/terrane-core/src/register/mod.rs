//! The contract of registrars, which register memory for transfer.

pub(crate) mod names;
pub(crate) mod registered;
pub(crate) mod registration;

use crate::BoxedCause;
use crate::allocate::limits::Limits;
use crate::location::storage_kind::StorageKind;
use crate::memory::Memory;
use crate::memory::span::Span;
use crate::register::names::{AgentName, BackendName};
use crate::register::registered::{Registered, RegistrationFailed};
use crate::register::registration::{BackendOutcome, Registration};

/// A registrar of memory: an agent with its backends. Memory must be registered before other agents
/// can access it.
///
/// Users call [`register`](Self::register), which takes the memory by value. Backends implement
/// [`register_span`](Self::register_span).
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not register memory",
    label = "it does not implement `Register`",
    note = "`Agent` of `terrane-nixl` registers memory; a layout that is not registered is built with `unregistered()`"
)]
pub trait Register {
    /// The agent that registers the memory.
    fn agent(&self) -> &AgentName;

    /// The limits on regions. Planning reads them once.
    fn limits(&self) -> Limits;

    /// Registers the span of `memory` with the agent's backends.
    ///
    /// The record has the result of each backend, including refusals. If no backend accepts, the
    /// call fails.
    ///
    /// # Safety
    ///
    /// The memory must stay alive until the returned [`Registration`] has dropped, because a peer
    /// may write to it until then. [`register`](Self::register) ensures that.
    ///
    /// # Errors
    ///
    /// Returns [`RegisterError`] on failure. A failed call registers nothing.
    unsafe fn register_span(&self, memory: &dyn Memory) -> Result<Registration, RegisterError>;

    /// Registers `memory` and returns it with its registration. On drop, the registration ends
    /// before the memory is freed.
    ///
    /// # Errors
    ///
    /// [`RegistrationFailed`] with the memory and the cause.
    fn register<M: Memory>(&self, memory: M) -> Result<Registered<M>, RegistrationFailed<M>>
    where
        Self: Sized,
    {
        Registered::new(self, memory)
    }
}

/// Why a registration failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// None of the agent's backends supports memory of this kind.
    #[error(
        "no backend of agent {agent} registers {kind} memory; \
         add a backend that does, or leave the memory unregistered"
    )]
    UnsupportedKind {
        /// The agent.
        agent: AgentName,
        /// The unsupported kind.
        kind: StorageKind,
    },
    /// All backends that were tried refused.
    #[error("every backend of agent {agent} refused {} of {} memory: {}", .span.length, .span.kind, refusals(.backends))]
    Refused {
        /// The agent.
        agent: AgentName,
        /// The span.
        span: Span,
        /// The result of each backend.
        backends: Vec<BackendOutcome>,
    },
    /// A required backend refused, so the other registrations were undone.
    #[error(
        "backend {backend} of agent {agent} refused the memory, and is required; see the cause, or do \
         not require it"
    )]
    RequiredBackend {
        /// The agent.
        agent: AgentName,
        /// The required backend.
        backend: BackendName,
        /// Why it refused.
        #[source]
        source: BoxedCause,
    },
}

fn refusals(backends: &[BackendOutcome]) -> String {
    let refusals: Vec<_> = backends
        .iter()
        .filter_map(|o| o.refusal.as_ref().map(|why| format!("{} ({why})", o.backend)))
        .collect();
    refusals.join(", ")
}
