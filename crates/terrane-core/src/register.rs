//! The contract of everything that registers memory for transfer.

use std::fmt;
use std::sync::Arc;

use crate::{BoxedCause, Limits, Memory, Registered, RegistrationFailed, Span, StorageKind};

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
    /// Returns [`RegisterError`] on failure. Nothing is registered then.
    unsafe fn register_span(&self, memory: &dyn Memory) -> Result<Registration, RegisterError>;

    /// Registers `memory` and holds it with its registration. On drop, the registration ends before
    /// the memory is freed.
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

/// A registration in force. Dropping it deregisters.
pub struct Registration(Box<InForce<dyn Send + Sync>>);

struct InForce<H: ?Sized> {
    record: RegistrationRecord,
    /// The value that deregisters when it drops.
    _handle: H,
}

impl Registration {
    /// Creates a registration with this `record`. Dropping `handle` ends it.
    #[must_use]
    pub fn new(record: RegistrationRecord, handle: impl Send + Sync + 'static) -> Self {
        Self(Box::new(InForce { record, _handle: handle }))
    }

    /// The record: the agent, the span and the result of each backend.
    #[must_use]
    pub fn record(&self) -> &RegistrationRecord {
        &self.0.record
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registration").field(self.record()).finish()
    }
}

/// The agent, the span and the result of each backend of a registration.
#[derive(Clone, Debug)]
pub struct RegistrationRecord {
    /// The agent that owns the registration.
    pub agent: AgentName,
    /// The registered span.
    pub span: Span,
    /// The result of each backend, in the order in which they were asked.
    pub backends: Vec<BackendOutcome>,
}

impl RegistrationRecord {
    /// Whether `backend` accepted the span.
    #[must_use]
    pub fn accepted_by(&self, backend: &BackendName) -> bool {
        self.accepted().any(|name| name == backend)
    }

    /// The backends that accepted the span.
    pub fn accepted(&self) -> impl Iterator<Item = &BackendName> {
        self.backends.iter().filter(|outcome| outcome.refusal.is_none()).map(|o| &o.backend)
    }
}

/// The result of a registration with one backend.
#[derive(Clone, Debug)]
pub struct BackendOutcome {
    /// The backend.
    pub backend: BackendName,
    /// Why it refused; `None` if it accepted.
    pub refusal: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

macro_rules! name_type {
    ($(#[$documentation:meta])* $name:ident) => {
        $(#[$documentation])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(name: &str) -> Self {
                Self(name.into())
            }
        }

        impl From<String> for $name {
            fn from(name: String) -> Self {
                Self(name.into())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
    };
}

name_type! {
    /// The name of an agent, unique among the agents that exchange metadata.
    AgentName
}
name_type! {
    /// The name of one of an agent's backends, as the agent's library spells it: `"UCX"`,
    /// `"GDS_MT"`.
    BackendName
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
    /// Every backend that was asked refused.
    #[error("agent {agent} could not register {} of {} memory: {}", .span.length, .span.kind, refusals(.backends))]
    Refused {
        /// The agent.
        agent: AgentName,
        /// The span.
        span: Span,
        /// The result of each backend.
        backends: Vec<BackendOutcome>,
    },
    /// A required backend refused, so the other registrations were undone.
    #[error("agent {agent}: backend {backend} is required, and refused")]
    RequiredBackend {
        /// The agent.
        agent: AgentName,
        /// The required backend.
        backend: BackendName,
        /// Why it refused.
        #[source]
        source: BoxedCause,
    },
    /// The agent failed before any backend was asked.
    #[error("agent {agent} failed to register {} of {} memory", .span.length, .span.kind)]
    Agent {
        /// The agent.
        agent: AgentName,
        /// The span.
        span: Span,
        /// The error of the agent.
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
