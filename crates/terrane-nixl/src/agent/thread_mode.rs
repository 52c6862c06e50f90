//! The thread modes of agents.

/// Which locks NIXL takes within an agent.
///
/// NIXL's default is a third mode without locks. It is not offered: a registration is `Send`, and
/// deregisters on the thread that drops it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ThreadMode {
    /// One lock for every call on the agent (`NIXL_THREAD_SYNC_STRICT`).
    #[default]
    Strict,
    /// A lock that transfers share and changes hold exclusively (`NIXL_THREAD_SYNC_RW`). A backend
    /// must then accept calls from several threads at once. UCX and POSIX do; an agent with any
    /// other backend is refused.
    ///
    /// With the bindings of 1.5.1, transfers still do not run in parallel. The bindings hold their
    /// own lock during each call, so only one thread at a time posts, polls or registers. The mode
    /// affects NIXL's own threads, which share the lock.
    ReadWrite,
}
