//! Agents.

mod builder;
mod create;
mod environment;
mod ios;
mod name;
mod options;

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use terrane_core::{AgentName, BackendName};

pub use builder::{AgentBuilder, ThreadMode};
pub(crate) use ios::{Ios, TakenIos};
pub(crate) use options::naming;

use crate::backend::{Demand, FileAccess};
use crate::notifications::Mailbox;
use crate::peers::Peers;
use crate::register::{Registrar, Table};
use crate::{MemoryType, NixlError, process};
use name::ClaimedName;
use options::Options;

/// A NIXL agent with its backends.
///
/// Cloning it shares it. The agent ends with the last of its clones and of the registrations made
/// with it, whichever thread drops that.
///
/// As a [`Register`](terrane_core::Register) it asks every backend, each as its configuration
/// demands; [`registrar`](Self::registrar) chooses others.
#[derive(Clone)]
pub struct Agent(Arc<Inner>);

// `Agent` is `Send` and `Sync` because `nixl_sys::Agent` says so of itself. It says so for every
// agent, while NIXL takes no lock in its default mode, and the bindings let some calls run side by
// side. An agent is built here with one of the modes in which NIXL locks, and in no other.
struct Inner(ManuallyDrop<Parts>);

struct Parts {
    // Fields drop in this order: the agent ends, and its name is free.
    peers: Peers,
    mailbox: Mailbox,
    table: Mutex<Table>,
    backends: Vec<Backend>,
    raw: nixl_sys::Agent,
    name: ClaimedName,
    telemetry: bool,
    listens: bool,
    threads: ThreadMode,
}

impl Deref for Inner {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // NIXL would wait for threads that a forked process does not have.
        if !process::is_forked() {
            // SAFETY: it is dropped here alone, once, and not used any more.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}

/// A backend of an agent.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) name: BackendName,
    pub(crate) raw: nixl_sys::Backend,
    options: Options,
    /// The types of memory that it says it takes.
    pub(crate) memory: Vec<MemoryType>,
    pub(crate) demand: Demand,
    pub(crate) file_access: FileAccess,
    /// How much it can have in flight, where that has an end.
    pub(crate) ios: Option<Arc<Ios>>,
    /// Whether a request in flight that fails has ended as a whole.
    pub(crate) fails_at_the_end: bool,
}

impl Backend {
    /// Options that name this backend and nothing else.
    pub(crate) fn options(&self) -> &nixl_sys::OptArgs {
        self.options.raw()
    }

    /// Options that name this backend, and carry a message with the request.
    pub(crate) fn telling(&self, message: &[u8]) -> Result<nixl_sys::OptArgs, nixl_sys::NixlError> {
        options::telling(&self.raw, message)
    }
}

impl Agent {
    /// The agent's name.
    #[must_use]
    pub fn name(&self) -> &AgentName {
        self.0.name.get()
    }

    /// Which locks NIXL takes within the agent.
    #[must_use]
    pub fn thread_mode(&self) -> ThreadMode {
        self.0.threads
    }

    /// The names of its backends, in the order in which they are asked.
    pub fn backends(&self) -> impl Iterator<Item = &BackendName> {
        self.0.backends.iter().map(|backend| &backend.name)
    }

    /// The types of memory that a backend says it takes; `None` if the agent has no such backend.
    #[must_use]
    pub fn memory_types(&self, backend: &BackendName) -> Option<&[MemoryType]> {
        self.0.backends.iter().find(|b| b.name == *backend).map(|b| b.memory.as_slice())
    }

    /// A registrar that asks these backends of the agent, in this order, and no other.
    ///
    /// ```no_run
    /// use terrane_nixl::{AgentBuilder, BackendConfig, Demand};
    ///
    /// let ucx = BackendConfig::new("UCX");
    /// let agent = AgentBuilder::unnamed().backend(ucx).backend(BackendConfig::new("GDS")).build()?;
    /// // For the layout on the disk, GDS or nothing.
    /// let disk = agent.registrar([("GDS", Demand::Required)])?;
    /// # Ok::<(), terrane_nixl::NixlError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`NixlError::NoSuchBackend`], or [`NixlError::DuplicateBackend`] for one that is named
    /// twice.
    pub fn registrar<N: Into<BackendName>>(
        &self,
        backends: impl IntoIterator<Item = (N, Demand)>,
    ) -> Result<Registrar, NixlError> {
        let mut chosen: Vec<(usize, Demand)> = Vec::new();
        for (backend, demand) in backends {
            let backend = backend.into();
            let Some(index) = self.0.backends.iter().position(|b| b.name == backend) else {
                let (agent, available) = (self.name().clone(), self.backends().cloned().collect());
                return Err(NixlError::NoSuchBackend { agent, backend, available });
            };
            if chosen.iter().any(|(taken, _)| *taken == index) {
                return Err(NixlError::DuplicateBackend { backend });
            }
            chosen.push((index, demand));
        }
        Ok(Registrar::new(self.clone(), chosen))
    }

    /// The agent of the bindings.
    ///
    /// Whoever keeps something of it keeps a clone of this agent as well, so that the agent's name
    /// stays taken. `get_plugin_params` and `create_backend` are not to be called: a plugin that one
    /// agent loads for the first unloads under the backend that another creates meanwhile.
    pub(crate) fn raw(&self) -> &nixl_sys::Agent {
        &self.0.raw
    }

    /// Whether NIXL keeps the times of requests.
    pub(crate) fn has_telemetry(&self) -> bool {
        self.0.telemetry
    }

    /// Whether peers can have NIXL load and forget metadata, without a word to anybody here.
    pub(crate) fn listens(&self) -> bool {
        self.0.listens
    }

    pub(crate) fn created(&self) -> &[Backend] {
        &self.0.backends
    }

    pub(crate) fn mailbox(&self) -> &Mailbox {
        &self.0.mailbox
    }

    pub(crate) fn peer_table(&self) -> &Peers {
        &self.0.peers
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
            .field("threads", &self.0.threads)
            .field("backends", &backends)
            .finish_non_exhaustive()
    }
}
