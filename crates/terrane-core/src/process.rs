//! The process to which a value belongs.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The process that owns a value, as opposed to processes forked from it.
///
/// A forked child has a copy of all memory, but only the thread that called `fork`. A value that
/// depends on other threads cannot work there. A lock that another thread held at the fork stays
/// locked. Such a value records its process and does nothing in any other process: it takes no lock
/// and joins no thread. Methods that can fail return [`ForkedProcess`].
///
/// ```
/// use terrane_core::OwnerProcess;
///
/// let owner = OwnerProcess::current();
/// assert!(owner.is_current());
/// assert_eq!(owner.check(), Ok(()));
/// ```
///
/// It detects the C library's `fork`, called from any language. It does not detect a raw `clone`
/// system call or `vfork`. After `vfork`, a child may only call `exec` or exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OwnerProcess(u64);

impl OwnerProcess {
    /// The current process.
    #[must_use]
    pub fn current() -> Self {
        Self(generation())
    }

    /// Whether the owner is the current process. The check costs one load.
    #[inline]
    #[must_use]
    pub fn is_current(self) -> bool {
        self.0 == generation()
    }

    /// Fails in a process that was forked from the owner.
    ///
    /// # Errors
    ///
    /// Returns [`ForkedProcess`] in such a process.
    #[inline]
    pub fn check(self) -> Result<(), ForkedProcess> {
        if self.is_current() { Ok(()) } else { Err(ForkedProcess) }
    }
}

/// A value was used in a process that was forked from the value's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error(
    "the value was created before this process was forked, and its threads do not exist here; \
     create it after the fork"
)]
pub struct ForkedProcess;

/// The number of forks since the process that first called this.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// A number that differs between a process and every process forked from it.
#[inline]
fn generation() -> u64 {
    static COUNTS: OnceLock<bool> = OnceLock::new();
    if *COUNTS.get_or_init(count_forks) {
        // Relaxed: the count changes only while the process has a single thread.
        FORKS.load(Ordering::Relaxed)
    } else {
        std::process::id().into()
    }
}

/// Registers a handler with the C library that counts forks in the child. Returns whether that
/// succeeded.
///
/// The process id would also work, but reading it needs a system call of up to a microsecond.
#[cfg(all(unix, not(miri)))]
fn count_forks() -> bool {
    use std::ffi::c_int;

    type Handler = Option<unsafe extern "C" fn()>;

    // SAFETY: declared as in POSIX's `pthread.h`.
    unsafe extern "C" {
        fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
    }

    extern "C" fn forked() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }

    // SAFETY: the handler only adds to an atomic number, which is allowed after a fork.
    let result = unsafe { pthread_atfork(None, None, Some(forked)) };
    result == 0
}

#[cfg(not(all(unix, not(miri))))]
fn count_forks() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_owns_what_it_makes() {
        let owner = OwnerProcess::current();
        assert_eq!(owner, OwnerProcess::current());
        assert!(owner.is_current());
        let elsewhere = OwnerProcess(owner.0.wrapping_add(1));
        assert_eq!(elsewhere.check(), Err(ForkedProcess));
    }
}
