//! The processors of threads.

use std::fs;

use anyhow::{Context as _, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Two processors that share no core: one for the thread that transfers, and one for the threads of
/// agents.
///
/// NIXL's threads share locks, and possibly the core and its caches, with the thread that
/// transfers. The scheduler's choice of processors changes the time of a transfer by a tenth as
/// long as the threads live. With fixed processors, all compared agents have the same conditions.
#[derive(Debug, Clone, Copy)]
pub struct Processors {
    transfers: CpuSet,
    agents: CpuSet,
}

impl Processors {
    /// Selects the first processor that this process may use, and the next one on another core,
    /// preferably of the same package.
    ///
    /// Fails if there is no other core, or if threads cannot be pinned.
    pub fn apart() -> Result<Self> {
        let allowed = sched_getaffinity(None).context("asking which processors may be used")?;
        let mut usable = (0..CpuSet::MAX_CPU).filter(|number| allowed.is_set(*number));
        let first = usable.next().context("no processor may be used")?;
        let others: Vec<usize> =
            usable.filter(|&other| Core::of(other) != Core::of(first)).collect();
        let is_near = |other: &&usize| Core::of(**other).package == Core::of(first).package;
        let second = others.iter().find(is_near).or(others.first());
        let &second = second.context("no processor of a second core may be used")?;
        let apart = Self { transfers: only(first), agents: only(second) };
        // Some sandboxes forbid it. The check happens before any measurement.
        for processors in [&apart.agents, &apart.transfers, &allowed] {
            sched_setaffinity(None, processors).context("putting a thread on a processor")?;
        }
        Ok(apart)
    }

    /// Runs `agents` on the agents' processor, where its new threads stay. This thread then moves
    /// to the other processor.
    pub fn start<T>(&self, agents: impl FnOnce() -> Result<T>) -> Result<T> {
        sched_setaffinity(None, &self.agents)?;
        let agents = agents();
        sched_setaffinity(None, &self.transfers)?;
        agents
    }
}

/// A core, which several processors may share.
#[derive(PartialEq, Eq)]
struct Core {
    package: String,
    core: String,
}

impl Core {
    /// Returns the core of a processor. If the system reports none, returns a core of its own for
    /// each processor.
    fn of(processor: usize) -> Self {
        let read = |what| {
            fs::read_to_string(format!("/sys/devices/system/cpu/cpu{processor}/topology/{what}"))
                .ok()
        };
        Self {
            package: read("physical_package_id").unwrap_or_default(),
            core: read("core_id").unwrap_or_else(|| processor.to_string()),
        }
    }
}

fn only(processor: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(processor);
    set
}
