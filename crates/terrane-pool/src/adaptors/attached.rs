//! An upstream's memory with what an adaptor has to undo when it goes.

use std::fmt;

use terrane_core::Memory;

/// Memory of an upstream together with what an adaptor attached to it.
///
/// It is the upstream's memory in every respect. On drop, `Before` goes first, the memory after
/// it and `After` last: a log says "free" before the address can be handed out again, and a
/// budget counts bytes until they are really back.
pub struct Attached<M, Before, After = ()> {
    // Fields drop in this order.
    _before: Before,
    memory: M,
    after: After,
}

impl<M, Before> Attached<M, Before> {
    /// `memory`, with something that drops before it.
    pub(crate) fn before(before: Before, memory: M) -> Self {
        Self { _before: before, memory, after: () }
    }
}

impl<M, After> Attached<M, (), After> {
    /// `memory`, with something that drops after it.
    pub(crate) fn after(memory: M, after: After) -> Self {
        Self { _before: (), memory, after }
    }
}

impl<M, Before, After> Attached<M, Before, After> {
    /// The upstream's memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// What drops after the memory.
    pub(crate) fn last(&self) -> &After {
        &self.after
    }
}

// SAFETY: every answer is that of the memory, which is neither moved nor dropped before `self`.
unsafe impl<M, Before, After> Memory for Attached<M, Before, After>
where
    M: Memory,
    Before: Send + Sync + 'static,
    After: Send + Sync + 'static,
{
    terrane_core::delegate_memory!(self, self.memory);
}

impl<M: fmt::Debug, Before, After> fmt::Debug for Attached<M, Before, After> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}
