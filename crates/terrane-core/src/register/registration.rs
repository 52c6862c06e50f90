//! A registration in force, and its record.

use std::fmt;
use std::sync::Arc;

use crate::memory::span::Span;
use crate::register::names::{AgentName, BackendName};

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
    /// The result of each backend, in the order in which they were tried.
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
