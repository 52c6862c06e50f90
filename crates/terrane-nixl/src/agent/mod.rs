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
/// Clones share it. The agent ends when the last clone and the last registration made with it drop,
/// on any thread.
///
/// As a [`Register`](terrane_core::Register) it asks every backend, each with its configured
/// demand. [`registrar`](Self::registrar) chooses others.
#[derive(Clone)]
pub struct Agent(Arc<Inner>);

// `Agent` is `Send` and `Sync` because `nixl_sys::Agent` declares so. It declares so for every
// agent, although NIXL takes no lock in its default mode and the bindings run some calls in
// parallel. This crate builds agents only in the modes in which NIXL locks.
struct Inner(ManuallyDrop<Parts>);

struct Parts {
    // Fields drop in this order: the agent ends first, then its name is free.
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
        // NIXL would wait for threads that do not exist in a forked process.
        if !process::is_forked() {
            // SAFETY: it is dropped only here, once, and not used afterwards.
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
    /// The memory types that it declares.
    pub(crate) memory: Vec<MemoryType>,
    pub(crate) demand: Demand,
    pub(crate) file_access: FileAccess,
    /// The I/Os that it can have in flight; `None` if unlimited.
    pub(crate) ios: Option<Arc<Ios>>,
    /// Whether all I/Os of a request in flight have ended when it reports failure.
    pub(crate) fails_at_the_end: bool,
}

impl Backend {
    /// Options that name only this backend.
    pub(crate) fn options(&self) -> &nixl_sys::OptArgs {
        self.options.raw()
    }

    /// Options that name this backend and carry a notification with the request.
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

    /// The names of its backends, in the order in which registrations try them.
    pub fn backends(&self) -> impl Iterator<Item = &BackendName> {
        self.0.backends.iter().map(|backend| &backend.name)
    }

    /// The memory types that a backend declares; `None` if the agent has no such backend.
    #[must_use]
    pub fn memory_types(&self, backend: &BackendName) -> Option<&[MemoryType]> {
        self.0.backends.iter().find(|b| b.name == *backend).map(|b| b.memory.as_slice())
    }

    /// Returns a registrar that asks only these backends, in this order.
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
    /// Keep a clone of this agent with anything obtained from it, so that the agent's name stays
    /// taken. Do not call `get_plugin_params` or `create_backend`. A plugin that one agent loads
    /// first can unload under a backend that another creates meanwhile.
    pub(crate) fn raw(&self) -> &nixl_sys::Agent {
        &self.0.raw
    }

    /// Whether NIXL keeps request times.
    pub(crate) fn has_telemetry(&self) -> bool {
        self.0.telemetry
    }

    /// Whether peers can make NIXL load and forget metadata without notice to this process.
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
