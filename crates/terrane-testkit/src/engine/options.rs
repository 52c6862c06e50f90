//! The options and the faults of a simulated engine.

use std::fmt;
use std::num::NonZeroUsize;
use std::time::Duration;

use terrane_core::StorageKind;

/// The behaviour of a [`SimulatedEngine`](super::SimulatedEngine). By default: one thread,
/// everything in order, no delays, all pairs of host and device kinds.
#[derive(Clone)]
pub struct SimulatedEngineOptions {
    pub(super) name: &'static str,
    pub(super) predicted: Duration,
    pub(super) threads: NonZeroUsize,
    pub(super) seed: u64,
    pub(super) reorder_runs: bool,
    pub(super) reorder_jobs: bool,
    pub(super) longest_delay: Duration,
    pub(super) serves: fn(StorageKind, StorageKind) -> bool,
}

impl Default for SimulatedEngineOptions {
    fn default() -> Self {
        Self {
            name: "simulated",
            predicted: Duration::from_millis(1),
            threads: NonZeroUsize::MIN,
            seed: 0,
            reorder_runs: false,
            reorder_jobs: false,
            longest_delay: Duration::ZERO,
            serves: |_, _| true,
        }
    }
}

impl SimulatedEngineOptions {
    /// The engine's name in explanations and errors.
    #[must_use]
    pub fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// The time that it predicts for every plan. Managers choose between engines by it.
    #[must_use]
    pub fn predicting(self, predicted: Duration) -> Self {
        Self { predicted, ..self }
    }

    /// The number of threads. Each executes one job at a time.
    #[must_use]
    pub fn threads(self, threads: NonZeroUsize) -> Self {
        Self { threads, ..self }
    }

    /// Executes jobs, and the runs of each job, in an order that the seed determines.
    #[must_use]
    pub fn reordering(self, seed: u64) -> Self {
        Self { seed, reorder_runs: true, reorder_jobs: true, ..self }
    }

    /// Waits before each run, for a random time up to this.
    #[must_use]
    pub fn delaying(self, longest: Duration) -> Self {
        Self { longest_delay: longest, ..self }
    }

    /// Supports only those pairs of source and destination kinds for which `serves` is true.
    #[must_use]
    pub fn serving(self, serves: fn(StorageKind, StorageKind) -> bool) -> Self {
        Self { serves, ..self }
    }
}

impl fmt::Debug for SimulatedEngineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedEngineOptions")
            .field("name", &self.name)
            .field("threads", &self.threads)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

/// A fault of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// This number of runs is copied, and the next one fails half-way.
    ShortCopy {
        /// The number of runs that are copied. It is at most one less than the plan's runs.
        after_runs: usize,
    },
    /// The engine fails as a whole, before it copies anything.
    Engine,
    /// The job is dropped without an outcome, after half of its runs.
    DropJob,
    /// The copy never ends. The engine keeps the job, and its thread continues with others, until
    /// the test [orphans it](super::SimulatedEngine::orphan_hung).
    Hang,
}

/// The error of a simulated engine with an injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("injected fault: {0:?}")]
pub struct InjectedFault(pub Fault);
