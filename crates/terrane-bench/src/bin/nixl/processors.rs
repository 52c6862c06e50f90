//! On which processors threads run.

use std::fs;

use anyhow::{Context as _, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Two processors that share no core: one for the thread that transfers, and one for those that agents
/// start.
///
/// NIXL's threads share locks, and maybe the core and its caches, with the thread that transfers. Where
/// the scheduler puts them decides over a tenth of a transfer's time for as long as they live, by
/// chance; this way it is the same for all agents that are compared.
#[derive(Debug, Clone, Copy)]
pub struct Processors {
    transfers: CpuSet,
    agents: CpuSet,
}

impl Processors {
    /// The first one that this process may use, and the next one of the same package, or else of
    /// another.
    ///
    /// Fails where there is no other core, and where threads cannot be put on a processor.
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
        // Some sandboxes forbid it. That is found out before anything is measured, not at the first agents.
        for processors in [&apart.agents, &apart.transfers, &allowed] {
            sched_setaffinity(None, processors).context("putting a thread on a processor")?;
        }
        Ok(apart)
    }

    /// Runs `agents` on the agents' processor, where the threads that it starts stay. This thread then
    /// moves to the other processor.
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
    /// That of a processor, by its number; one of its own, where the system does not say.
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
