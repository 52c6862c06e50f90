//! The threads of engines, and how they end.
//!
//! The last reference to an engine may go with a job that waited for another, on whatever thread
//! ended that one. If that is an engine's thread, it must not wait for others: not for itself, and
//! not for another engine's, which may wait for it in turn. Engines in other crates that start
//! their threads with [`spawn`] and end them with [`join`] keep that rule.
//!
//! A forked process has none of its parent's threads. An engine that drops there [leaves](leave)
//! them.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::thread::{self, JoinHandle};

use terrane_core::OsError;

use crate::sync::per_thread;

per_thread! {
    // Whether the thread finishes jobs: it is one of an engine, whichever it is, or helps one.
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

/// Waits for an engine's threads, which have been told to end, unless this is a thread that
/// finishes jobs. What is not waited for ends by itself, once it has served what was submitted.
pub fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    if FINISHES_JOBS.with(Cell::get) {
        return;
    }
    for thread in threads {
        // A thread that panicked has ended all the same.
        let _ = thread.join();
    }
}

/// Leaves to the parent what an engine shares with its threads, in a process that was forked from
/// the [engine's](terrane_core::OwnerProcess): the threads are not there to be joined, and what
/// they held at the fork stays as it was.
pub fn leave<T>(shared: T) {
    let _ = ManuallyDrop::new(shared);
}

/// Runs what may finish jobs on a thread of a caller.
pub(crate) fn finishing(run: impl FnOnce()) {
    /// Back to what it was, also if a panic passes through.
    struct Restore(bool);

    impl Drop for Restore {
        fn drop(&mut self) {
            FINISHES_JOBS.with(|flag| flag.set(self.0));
        }
    }

    let _restore = Restore(FINISHES_JOBS.with(|flag| flag.replace(true)));
    run();
}
