//! The builder of agents.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use terrane_core::{AgentName, Requirement};

use super::config::BackendConfig;
use super::{Agent, AgentState, Inner, create, name};
use crate::bindings::process;
use crate::bindings::status::Status;
use crate::error::NixlError;
use crate::peers::table::PeerTable;
use crate::probe::probe;
use crate::register::table::RegistrationTable;

/// The default interval of a progress thread: the shortest that UCX supports.
const PROGRESS_DELAY: Duration = Duration::from_millis(1);

/// Builds an [`Agent`].
///
/// Each option is passed to NIXL, or refused by `build`. None is ignored.
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct AgentBuilder {
    pub(super) name: AgentName,
    pub(super) progress: Option<Duration>,
    pub(super) telemetry: bool,
    pub(super) metadata_checks: Requirement,
    pub(super) backends: Vec<BackendConfig>,
}

impl AgentBuilder {
    /// Creates a builder for an agent of this name, which must be unique among the agents that
    /// exchange metadata. The agent has no backend yet. Its backends will have a progress thread,
    /// which polls when data arrives and at least every millisecond.
    pub fn new(name: impl Into<AgentName>) -> Self {
        Self {
            name: name.into(),
            progress: Some(PROGRESS_DELAY),
            telemetry: false,
            metadata_checks: Requirement::Required,
            backends: Vec::new(),
        }
    }

    /// Like [`new`](Self::new), with a name that is unique across processes.
    pub fn unnamed() -> Self {
        Self::new(name::unique())
    }

    /// The agent's name.
    #[must_use]
    pub fn name(&self) -> &AgentName {
        &self.name
    }

    /// The agent's backends.
    pub fn backends(&self) -> &[BackendConfig] {
        &self.backends
    }

    /// Replaces the agent's name.
    pub fn named(self, name: impl Into<AgentName>) -> Self {
        Self { name: name.into(), ..self }
    }

    /// Sets whether backends have a progress thread, and the longest time between two of its polls.
    /// The time is rounded up to whole microseconds. The default is a millisecond.
    ///
    /// UCX rounds the time to whole milliseconds, and polls at once when data arrives.
    ///
    /// With `Duration::ZERO`, NIXL's own default, the thread never sleeps. It then occupies a
    /// processor for the agent's lifetime, and contends for a lock with threads that transfer. Peers
    /// that write by messages get an answer some microseconds sooner. Transfers of many pieces take
    /// longer.
    ///
    /// With `None`, requests of peers wait until this agent polls the status of a transfer.
    pub fn progress_thread(self, delay: Option<Duration>) -> Self {
        Self { progress: delay, ..self }
    }

    /// Sets whether NIXL measures each transfer for the
    /// [report](terrane_transfer::Report::engine_times).
    ///
    /// NIXL also reads `NIXL_TELEMETRY_ENABLE` itself, but only for its own exporters. Reports have
    /// times only if this option is set.
    pub fn telemetry(self, telemetry: bool) -> Self {
        Self { telemetry, ..self }
    }

    /// Sets whether imports must check peers' metadata before NIXL reads it. The default is
    /// [`Requirement::Required`].
    ///
    /// The checks need a NIXL that writes metadata in the form of NIXL 1.5. With any other NIXL,
    /// imports fail with [`ImportError::UnknownForm`](crate::ImportError::UnknownForm) if the
    /// checks are required. If they are [preferred](Requirement::Preferred), NIXL loads the
    /// metadata unchecked, as it always does with [`Requirement::Off`]. [`Agent::capabilities`]
    /// reports whether imports are checked.
    ///
    /// NIXL trusts metadata: forged metadata can crash the process. Without checks, the name of a
    /// process that hangs cannot be reused. [`Agent::import_foreign`] always checks.
    pub fn metadata_checks(self, checks: Requirement) -> Self {
        Self { metadata_checks: checks, ..self }
    }

    /// Adds a backend. Registrations try the backends in the order in which they were added.
    pub fn backend(mut self, backend: BackendConfig) -> Self {
        self.backends.push(backend);
        self
    }

    /// Creates the agent and its backends.
    ///
    /// # Errors
    ///
    /// [`NixlError`]. Then no agent and no backend exists, and the name is free.
    pub fn build(self) -> Result<Agent, NixlError> {
        create::check_combination(&self.backends)?;
        let config = self.config()?;
        // Before any lock that the parent of a forked process may have held.
        process::check()?;
        let installation = probe()?;
        let name = name::ClaimedName::claim(self.name)?;
        let raw = nixl_sys::Agent::new_configured(name.get().as_str(), &config);
        let raw = raw.map_err(|error| {
            let (name, status) = (name.get().clone(), Status::of(&error));
            NixlError::Agent { name, status }
        })?;
        let backends = create::backends(&raw, &installation, self.backends)?;
        Ok(Agent(Arc::new(Inner(ManuallyDrop::new(AgentState {
            peers: PeerTable::default(),
            notifications: Mutex::default(),
            registrations: Mutex::new(RegistrationTable::default()),
            backends,
            raw,
            name,
            telemetry: self.telemetry,
            metadata_checks: self.metadata_checks,
        })))))
    }

    /// The agent's options in NIXL's form.
    fn config(&self) -> Result<nixl_sys::AgentConfig, NixlError> {
        Ok(nixl_sys::AgentConfig {
            enable_prog_thread: self.progress.is_some(),
            // One lock for every call on the agent. By default NIXL takes none, but registrations
            // are deregistered on any thread.
            thread_sync: nixl_sys::ThreadSync::Strict,
            pthr_delay_us: microseconds(self.progress.unwrap_or_default())?,
            capture_telemetry: self.telemetry,
            // The number of workers, which the library's C interface does not forward, and no
            // listening thread: its connections could load and forget metadata unchecked.
            ..nixl_sys::AgentConfig::default()
        })
    }
}

fn microseconds(delay: Duration) -> Result<u64, NixlError> {
    u64::try_from(delay.as_nanos().div_ceil(1000))
        .map_err(|_| NixlError::DelayTooLong { seconds: delay.as_secs() })
}

#[cfg(test)]
mod tests {
    use nixl_sys::{AgentConfig, ThreadSync};

    use super::*;

    fn config(builder: AgentBuilder) -> AgentConfig {
        builder.config().unwrap()
    }

    #[test]
    fn options_are_passed_to_nixl() {
        let builder = || AgentBuilder::new("alpha");
        let default = config(builder());
        assert!(matches!(default.thread_sync, ThreadSync::Strict));
        assert_eq!((default.enable_prog_thread, default.pthr_delay_us), (true, 1000));
        assert!(!default.enable_listen_thread && !default.capture_telemetry);

        assert!(!config(builder().progress_thread(None)).enable_prog_thread);
        let delay = |delay| config(builder().progress_thread(Some(delay))).pthr_delay_us;
        let nanos = Duration::from_nanos;
        assert_eq!([delay(nanos(0)), delay(nanos(1)), delay(nanos(1000))], [0, 1, 1]);
        assert!(config(builder().telemetry(true)).capture_telemetry);
    }

    #[test]
    fn a_delay_that_nixl_cannot_represent_is_refused() {
        let delay = Some(Duration::MAX);
        let error = AgentBuilder::new("alpha").progress_thread(delay).config().unwrap_err();
        assert!(matches!(error, NixlError::DelayTooLong { .. }), "{error:?}");
    }
}
