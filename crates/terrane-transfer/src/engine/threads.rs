//! The threads of engines, and their exit.
//!
//! A job that waited for another may have the last reference to its engine, and drop it on the
//! thread that ended the other job. An engine's thread must then join no threads: not itself, and
//! not another engine's, which may join it in turn. Engines in other crates that start their
//! threads with [`spawn`] and end them with [`join`] follow this rule.
//!
//! A forked process has none of its parent's threads. An engine that drops there [leaks](leave)
//! their state.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::thread::{self, JoinHandle};

use terrane_core::OsError;

use crate::sync::per_thread;

per_thread! {
    // Whether the thread finishes jobs: it is a thread of any engine, or polls one.
    static FINISHES_JOBS: Cell<bool> = const { Cell::new(false) };
}

/// Starts a thread of an engine.
///
/// # Errors
///
/// [`OsError`] if the system refuses.
pub fn spawn(
    name: String,
    serve: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, OsError> {
    let marked = move || {
        FINISHES_JOBS.with(|flag| flag.set(true));
        serve();
    };
    thread::Builder::new()
        .name(name)
        .spawn(marked)
        .map_err(|error| OsError::from_io("clone", &error))
}

/// Joins an engine's threads, which have been signalled to exit, unless this thread finishes jobs.
/// Threads that are not joined exit by themselves, once they have served what was submitted.
pub fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    if FINISHES_JOBS.with(Cell::get) {
        return;
    }
    for thread in threads {
        // A thread that panicked has exited too.
        let _ = thread.join();
    }
}

/// Leaks the state that an engine shares with its threads, in a process that was forked from the
/// [engine's](terrane_core::OwnerProcess). The threads do not exist there, and their state is that
/// of the moment of the fork.
pub fn leave<T>(shared: T) {
    let _ = ManuallyDrop::new(shared);
}

/// Runs code that may finish jobs on a caller's thread.
pub(crate) fn finishing(run: impl FnOnce()) {
    /// Restores the previous value, even if a panic unwinds.
    struct Restore(bool);

    impl Drop for Restore {
        fn drop(&mut self) {
            FINISHES_JOBS.with(|flag| flag.set(self.0));
        }
    }

    let _restore = Restore(FINISHES_JOBS.with(|flag| flag.replace(true)));
    run();
}
