//! The process that uses NIXL, as opposed to its forked children.
//!
//! A forked process has none of NIXL's threads, and locks that another thread of the parent held
//! stay locked. So if the parent has built an agent, the child calls no NIXL function. The parent's
//! objects drop there without effect. Nothing is lost, because the registrations belong only to the
//! parent's NIXL.

use std::sync::OnceLock;

use terrane_core::{ForkedProcess, OwnerProcess};

/// The process that built the first agent.
static OWNER: OnceLock<OwnerProcess> = OnceLock::new();

/// Fails in a process that was forked from the one that built the first agent. The first caller
/// counts as that process.
pub(crate) fn check() -> Result<(), ForkedProcess> {
    OWNER.get_or_init(OwnerProcess::current).check()
}

/// Whether this process was forked from one that had built an agent.
pub(crate) fn is_forked() -> bool {
    OWNER.get().is_some_and(|owner| !owner.is_current())
}
