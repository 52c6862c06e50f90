//! Agents.

pub(crate) mod backend;
pub(crate) mod builder;
pub(crate) mod config;
mod create;
mod environment;
pub(crate) mod io_limit;
mod name;
pub(crate) mod options;

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use terrane_core::{AgentName, BackendName, Requirement};

use crate::bindings::memory_type::MemoryType;
use crate::bindings::process;
use crate::peers::notifications::Notification;
use crate::peers::table::PeerTable;
use crate::register::table::RegistrationTable;
use backend::Backend;
use name::ClaimedName;

/// A NIXL agent with its backends.
///
/// Clones share the agent. It ends when its last clone and its last registration have dropped, on
/// any thread.
///
/// As a [`Register`](terrane_core::Register), it uses every backend, with each one's configured
/// requirement. [`registrar`](Self::registrar) selects backends.
#[derive(Clone)]
pub struct Agent(Arc<Inner>);

// `Agent` is `Send` and `Sync` because `nixl_sys::Agent` is. The bindings declare this for every
// agent, although NIXL takes no lock in its default mode and the bindings run some calls in
// parallel. This crate creates agents only in a mode in which NIXL locks.
struct Inner(ManuallyDrop<AgentState>);

struct AgentState {
    // Fields drop in this order: the agent ends first, then its name becomes free.
    peers: PeerTable,
    /// Notifications that have arrived and were not returned yet. Their number is not limited.
    notifications: Mutex<Vec<Notification>>,
    registrations: Mutex<RegistrationTable>,
    backends: Vec<Backend>,
    raw: nixl_sys::Agent,
    name: ClaimedName,
    telemetry: bool,
    metadata_checks: Requirement,
}

impl Deref for Inner {
    type Target = AgentState;

    fn deref(&self) -> &AgentState {
        &self.0
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // NIXL would wait for threads that do not exist in a forked process.
        if !process::is_forked() {
            // SAFETY: dropped only here, once, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}

impl Agent {
    /// The agent's name.
    #[must_use]
    pub fn name(&self) -> &AgentName {
        self.0.name.get()
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

    /// The agent of the bindings.
    ///
    /// Keep a clone of this agent with anything that you create from it, so that the agent's name
    /// stays reserved. Do not call `get_plugin_params` or `create_backend`: a plugin that one agent
    /// loads can be unloaded while another agent creates its backend.
    pub(crate) fn raw(&self) -> &nixl_sys::Agent {
        &self.0.raw
    }

    /// Whether NIXL keeps request times.
    pub(crate) fn has_telemetry(&self) -> bool {
        self.0.telemetry
    }

    /// Whether imports must check metadata before NIXL reads it.
    pub(crate) fn metadata_checks(&self) -> Requirement {
        self.0.metadata_checks
    }

    /// Its backends, in the order in which registrations try them.
    pub(crate) fn created_backends(&self) -> &[Backend] {
        &self.0.backends
    }

    /// Its notifications that were not returned yet.
    pub(crate) fn pending_notifications(&self) -> &Mutex<Vec<Notification>> {
        &self.0.notifications
    }

    pub(crate) fn peer_table(&self) -> &PeerTable {
        &self.0.peers
    }

    /// Its registrations.
    pub(crate) fn registrations(&self) -> &Mutex<RegistrationTable> {
        &self.0.registrations
    }
}

terrane_core::debug_fields!(Agent, |it| { name: it.name(),
    backends: it.backends().collect::<Vec<_>>() });
