//! The contract of everything that registers memory for transfer.

use std::fmt;
use std::sync::Arc;

use crate::{BoxedCause, Limits, Memory, Registered, RegistrationFailed, Span, StorageKind};

/// Something with which memory is registered before it can be reached from elsewhere: an agent
/// with its backends.
///
/// Users call [`register`](Self::register), which takes the memory by value; backends implement
/// [`register_span`](Self::register_span).
pub trait Register {
    /// The agent in whose name memory is registered.
    fn agent(&self) -> &AgentName;

    /// What this registrar demands of regions, asked once, before planning.
    fn limits(&self) -> Limits;

    /// Registers the span of `memory` with the agent's backends.
    ///
    /// The outcome of each backend is in the record: a backend that refused while another
    /// accepted says so there. With no backend accepting, the call fails.
    ///
    /// # Safety
    ///
    /// The memory must stay alive until the returned [`Registration`] has dropped: a peer may
    /// write to it until then. [`register`](Self::register) sees to that.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]; then nothing is registered.
    unsafe fn register_span(&self, memory: &dyn Memory) -> Result<Registration, RegisterError>;

    /// Registers `memory` and holds both together, so that deregistration comes first and
    /// release after it.
    ///
    /// # Errors
    ///
    /// [`RegistrationFailed`] gives the memory back together with the cause.
    fn register<M: Memory>(&self, memory: M) -> Result<Registered<M>, RegistrationFailed<M>>
    where
        Self: Sized,
    {
        Registered::new(self, memory)
    }
}

/// A registration that is in force. Dropping it deregisters.
pub struct Registration(Box<InForce<dyn Send + Sync>>);

struct InForce<H: ?Sized> {
    record: RegistrationRecord,
    /// Whatever deregisters when it drops.
    _handle: H,
}

impl Registration {
    /// A registration described by `record`, which `handle` ends when it drops.
    #[must_use]
    pub fn new(record: RegistrationRecord, handle: impl Send + Sync + 'static) -> Self {
        Self(Box::new(InForce { record, _handle: handle }))
    }

    /// What was registered, with whom.
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

/// What was registered, with whom, and what each backend said.
#[derive(Clone, Debug)]
pub struct RegistrationRecord {
    /// The agent that owns the registration.
    pub agent: AgentName,
    /// The span that is registered.
    pub span: Span,
    /// What each backend said, in the order in which they were asked.
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

/// What one backend said to a registration.
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
    /// None of the agent's backends takes memory of this kind.
    #[error(
        "no backend of agent {agent} registers {kind} memory; \
         add a backend that does, or leave the memory unregistered"
    )]
    UnsupportedKind {
        /// The agent.
        agent: AgentName,
        /// The kind that nobody takes.
        kind: StorageKind,
    },
    /// Every backend that was asked refused.
    #[error("agent {agent} could not register {} of {} memory: {}", .span.length, .span.kind, refusals(.backends))]
    Refused {
        /// The agent.
        agent: AgentName,
        /// The span.
        span: Span,
        /// What each backend said.
        backends: Vec<BackendOutcome>,
    },
    /// A backend that the caller requires refused, so the others were undone.
    #[error("agent {agent}: backend {backend} is required, and refused")]
    RequiredBackend {
        /// The agent.
        agent: AgentName,
        /// The backend that is required.
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
        /// What the agent said.
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
