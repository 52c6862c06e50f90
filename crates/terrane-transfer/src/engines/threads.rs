//! The threads of engines, and how they end.

use std::cell::Cell;
use std::thread::{self, JoinHandle};

use terrane_core::OsError;

thread_local! {
    /// Whether the thread is one of an engine, whichever it is.
    static IS_ENGINES: Cell<bool> = const { Cell::new(false) };
}

/// Starts a thread of an engine.
pub(crate) fn spawn(
    name: String,
    serve: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, OsError> {
    let marked = move || {
        IS_ENGINES.set(true);
        serve();
    };
    thread::Builder::new()
        .name(name)
        .spawn(marked)
        .map_err(|error| OsError::from_io("clone", &error))
}

/// Waits for an engine's threads, which have been told to end, unless this is an engine's thread.
///
/// The last reference to an engine may go with a job that waited for another, on the thread that
/// ended that one. A thread cannot wait for itself; nor can two engines wait for each other's
/// threads, each on its own. What is not waited for ends by itself, once it has served what was
/// submitted.
pub(crate) fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    if IS_ENGINES.get() {
        return;
    }
    for thread in threads {
        // A thread that panicked has ended all the same.
        let _ = thread.join();
    }
}
