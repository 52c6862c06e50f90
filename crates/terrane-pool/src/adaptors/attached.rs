//! Memory of an upstream, with the state that an adaptor undoes on drop.

use std::fmt;

use terrane_core::Memory;

/// Memory of an upstream, together with values that an adaptor attached to it.
///
/// It behaves as the upstream's memory in every respect. On drop, `Before` drops first, then the
/// memory, then `After`. So a log records "free" before the address can be reused, and a budget
/// counts bytes until they are freed.
pub struct Attached<M, Before, After = ()> {
    // Fields drop in this order.
    _before: Before,
    memory: M,
    _after: After,
}

impl<M, Before> Attached<M, Before> {
    /// Attaches a value to `memory` that drops before it.
    pub(crate) fn before(before: Before, memory: M) -> Self {
        Self { _before: before, memory, _after: () }
    }
}

impl<M, After> Attached<M, (), After> {
    /// Attaches a value to `memory` that drops after it.
    pub(crate) fn after(memory: M, after: After) -> Self {
        Self { _before: (), memory, _after: after }
    }
}

impl<M, Before, After> Attached<M, Before, After> {
    /// The upstream's memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }
}

// SAFETY: every method returns the memory's value. The memory is neither moved nor dropped before
// `self`.
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
