//! The process that uses NIXL, as opposed to its forked children.
//!
//! A forked process has none of NIXL's threads, and NIXL's locks that another thread held stay
//! locked. So once the parent has had an agent, the child calls no NIXL function. Objects of the
//! parent drop there without effect. The parent's registrations belong only to the parent's NIXL,
//! so nothing is lost.

use std::sync::OnceLock;

use terrane_core::{ForkedProcess, OwnerProcess};

/// The process that built the first agent.
static OWNER: OnceLock<OwnerProcess> = OnceLock::new();

/// Fails in a process that was forked from the one that built the first agent. The first caller
/// counts as that one.
pub(crate) fn check() -> Result<(), ForkedProcess> {
    OWNER.get_or_init(OwnerProcess::current).check()
}

/// Whether this process was forked from one that had built an agent.
pub(crate) fn is_forked() -> bool {
    OWNER.get().is_some_and(|owner| !owner.is_current())
}
