//! The process that uses NIXL, as opposed to those that are forked from it.
//!
//! A forked process has none of NIXL's threads, and locks of NIXL's that another thread held stay
//! locked. So nothing of NIXL is called there once the parent has had an agent, and what the parent
//! made is forgotten as it drops. The parent's registrations are with the parent's NIXL alone, so nothing
//! is lost by that.

use std::sync::OnceLock;

use terrane_core::{ForkedProcess, OwnerProcess};

/// The process that built the first agent.
static OWNER: OnceLock<OwnerProcess> = OnceLock::new();

/// Fails in a process that was forked from the one that built the first agent; the first to ask
/// builds it.
pub(crate) fn check() -> Result<(), ForkedProcess> {
    OWNER.get_or_init(OwnerProcess::current).check()
}

/// Whether this process was forked from one that had built an agent.
pub(crate) fn is_forked() -> bool {
    OWNER.get().is_some_and(|owner| !owner.is_current())
}
