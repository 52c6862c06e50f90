//! Agents.

mod builder;
mod name;

use std::fmt;
use std::sync::{Arc, Mutex};

use terrane_core::{AgentName, BackendName};

pub use builder::{AgentBuilder, ThreadMode};

use crate::MemoryType;
use crate::backend::{Demand, FileAccess};
use crate::register::Table;
use name::ClaimedName;

/// A NIXL agent with its backends.
///
/// Cloning it shares it. The agent ends with the last of its clones, registrations and transfers.
#[derive(Clone)]
pub struct Agent(Arc<Inner>);

struct Inner {
    // Fields drop in this order: the name is free once the agent has ended.
    table: Mutex<Table>,
    backends: Vec<Backend>,
    raw: nixl_sys::Agent,
    name: ClaimedName,
    telemetry: bool,
}

/// A backend of an agent.
pub(crate) struct Backend {
    pub(crate) name: BackendName,
    pub(crate) raw: nixl_sys::Backend,
    /// The types of memory that it says it takes.
    pub(crate) memory: Vec<MemoryType>,
    pub(crate) demand: Demand,
    pub(crate) file_access: FileAccess,
}

impl Agent {
    /// The agent's name.
    #[must_use]
    pub fn name(&self) -> &AgentName {
        self.0.name.get()
    }

    /// The names of its backends, in the order in which they were created.
    pub fn backends(&self) -> impl Iterator<Item = &BackendName> {
        self.0.backends.iter().map(|backend| &backend.name)
    }

    /// The agent of the bindings. Whoever keeps something of it keeps a clone of this agent too.
    #[allow(dead_code, reason = "for the modules that transfer")]
    pub(crate) fn raw(&self) -> &nixl_sys::Agent {
        &self.0.raw
    }

    /// Whether NIXL keeps the times of requests.
    pub(crate) fn has_telemetry(&self) -> bool {
        self.0.telemetry
    }

    pub(crate) fn created(&self) -> &[Backend] {
        &self.0.backends
    }

    pub(crate) fn table(&self) -> &Mutex<Table> {
        &self.0.table
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let backends: Vec<_> = self.backends().collect();
        f.debug_struct("Agent")
            .field("name", self.name())
            .field("backends", &backends)
            .finish_non_exhaustive()
    }
}
