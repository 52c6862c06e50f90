//! Which process a value belongs to.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The process that owns a value, as opposed to processes that are forked from it.
///
/// A forked child has a copy of all memory, but only the thread that called `fork`. A value whose
/// work is done by other threads cannot work there, and a lock that another thread held at the fork
/// stays locked. So such a value records its process, and does nothing in any other one: it takes no
/// lock, joins no thread, and returns [`ForkedProcess`] where it can fail.
///
/// ```
/// use terrane_core::OwnerProcess;
///
/// let owner = OwnerProcess::current();
/// assert!(owner.is_current());
/// assert_eq!(owner.check(), Ok(()));
/// ```
///
/// The C library's `fork` is noticed, whichever language calls it. A raw `clone` system call is not,
/// nor is `vfork`, after which a child may do nothing but `exec` and exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OwnerProcess(u64);

impl OwnerProcess {
    /// The process that this code runs in.
    #[must_use]
    pub fn current() -> Self {
        Self(generation())
    }

    /// Whether this code runs in that process. It costs one load.
    #[inline]
    #[must_use]
    pub fn is_current(self) -> bool {
        self.0 == generation()
    }

    /// Fails in a process that was forked from that one.
    ///
    /// # Errors
    ///
    /// [`ForkedProcess`].
    #[inline]
    pub fn check(self) -> Result<(), ForkedProcess> {
        if self.is_current() { Ok(()) } else { Err(ForkedProcess) }
    }
}

/// A value was used in a process that was forked from the value's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error(
    "this process was forked from the one that made the value, and has none of its threads; make \
     another one after the fork"
)]
pub struct ForkedProcess;

/// How many forks lie between the process that first asked and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// A number that a process shares with none that is forked from it.
#[inline]
fn generation() -> u64 {
    static COUNTS: OnceLock<bool> = OnceLock::new();
    if *COUNTS.get_or_init(count_forks) {
        // Relaxed: it changes only while the process has a single thread.
        FORKS.load(Ordering::Relaxed)
    } else {
        std::process::id().into()
    }
}

/// Has the C library count forks in the child. Says whether it does.
///
/// The number of the process would do as well, but asking for it takes a system call, which is up
/// to a microsecond.
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
