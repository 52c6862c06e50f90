//! How an agent is asked for.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use terrane_core::AgentName;

use super::{Agent, Backend, Inner, name};
use crate::register::Table;
use crate::{BackendConfig, MemoryType, NixlError, Status, probe};

/// Which locks NIXL takes within an agent.
///
/// NIXL has a third mode, without any lock, which is not offered: a registration drops on whichever
/// thread drops it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ThreadMode {
    /// One lock for all.
    #[default]
    Strict,
    /// A lock that readers share.
    ReadWrite,
}

/// Builds an [`Agent`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct AgentBuilder {
    name: AgentName,
    threads: ThreadMode,
    progress: Option<Duration>,
    listen: Option<u16>,
    telemetry: bool,
    backends: Vec<BackendConfig>,
}

impl AgentBuilder {
    /// An agent of this name, which has to be unique among the agents that exchange metadata.
    pub fn new(name: impl Into<AgentName>) -> Self {
        Self {
            name: name.into(),
            threads: ThreadMode::default(),
            progress: Some(Duration::ZERO),
            listen: None,
            telemetry: false,
            backends: Vec::new(),
        }
    }

    /// An agent with a name that no other has.
    pub fn unnamed() -> Self {
        Self::new(name::unique())
    }

    /// Which locks NIXL takes.
    pub fn thread_mode(self, threads: ThreadMode) -> Self {
        Self { threads, ..self }
    }

    /// Whether backends make progress on a thread of their own, and how long it rests in between.
    pub fn progress_thread(self, delay: Option<Duration>) -> Self {
        Self { progress: delay, ..self }
    }

    /// Listens for peers' metadata on this port.
    pub fn listen(self, port: u16) -> Self {
        Self { listen: Some(port), ..self }
    }

    /// Whether times of transfers are kept.
    pub fn telemetry(self, telemetry: bool) -> Self {
        Self { telemetry, ..self }
    }

    /// Adds a backend. Those added first are asked first.
    pub fn backend(mut self, backend: BackendConfig) -> Self {
        self.backends.push(backend);
        self
    }

    /// Creates the agent and its backends.
    ///
    /// # Errors
    ///
    /// [`NixlError`]; then there is neither agent nor backend.
    pub fn build(self) -> Result<Agent, NixlError> {
        probe()?;
        let name = name::ClaimedName::claim(self.name.clone())?;
        let config = nixl_sys::AgentConfig {
            enable_prog_thread: self.progress.is_some(),
            enable_listen_thread: self.listen.is_some(),
            listen_port: self.listen.map_or(nixl_sys::DEFAULT_COMM_PORT, i32::from),
            thread_sync: match self.threads {
                ThreadMode::Strict => nixl_sys::ThreadSync::Strict,
                ThreadMode::ReadWrite => nixl_sys::ThreadSync::Rw,
            },
            pthr_delay_us: self.progress.map_or(0, microseconds),
            capture_telemetry: self.telemetry,
            ..nixl_sys::AgentConfig::default()
        };
        let raw = nixl_sys::Agent::new_configured(name.get().as_str(), &config)
            .map_err(|e| NixlError::Agent { name: name.get().clone(), status: Status::of(&e) })?;
        let mut backends: Vec<Backend> = Vec::with_capacity(self.backends.len());
        for config in self.backends {
            if backends.iter().any(|backend| backend.name == config.name) {
                return Err(NixlError::DuplicateBackend { backend: config.name });
            }
            backends.push(create(&raw, config)?);
        }
        let table = Mutex::new(Table::default());
        Ok(Agent(Arc::new(Inner { table, backends, raw, name, telemetry: self.telemetry })))
    }
}

fn create(agent: &nixl_sys::Agent, config: BackendConfig) -> Result<Backend, NixlError> {
    let failed =
        |error| NixlError::Backend { backend: config.name.clone(), status: Status::of(&error) };
    let pairs = config.parameters.iter().map(|(key, value)| (key, value));
    let parameters = nixl_sys::Params::from(pairs).map_err(failed)?;
    let raw = agent.create_backend(config.name.as_str(), &parameters).map_err(failed)?;
    let (types, _) = agent.get_backend_params(&raw).map_err(failed)?;
    let count = types.len().map_err(failed)?;
    let mut memory = Vec::with_capacity(count);
    for index in 0..count {
        memory.extend(MemoryType::from_raw(types.get(index).map_err(failed)?));
    }
    let BackendConfig { name, demand, file_access, .. } = config;
    Ok(Backend { name, raw, memory, demand, file_access })
}

fn microseconds(delay: Duration) -> u64 {
    u64::try_from(delay.as_micros()).unwrap_or(u64::MAX)
}
