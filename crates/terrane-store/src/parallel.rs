//! Work that several threads share.

use std::panic::resume_unwind;
use std::sync::Mutex;
use std::thread;

use terrane_core::sync::lock;

/// Calls `work` on this thread and `threads - 1` others named `name`, and returns all results. If the
/// system starts fewer threads, those do the work.
pub(crate) fn on_threads<T: Send>(
    threads: usize,
    name: &str,
    work: impl Fn() -> T + Sync,
) -> Vec<T> {
    thread::scope(|scope| {
        let mut others = Vec::new();
        for _ in 1..threads {
            match thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, &work) {
                Ok(thread) => others.push(thread),
                Err(error) => {
                    tracing::debug!(%error, name, "work runs on fewer threads");
                    break;
                }
            }
        }
        let mut results = vec![work()];
        let others = others.into_iter().map(|thread| thread.join());
        results.extend(others.map(|result| result.unwrap_or_else(|panic| resume_unwind(panic))));
        results
    })
}

/// Calls `each` with every item, on threads as [`on_threads`]. Each thread begins with a state of its
/// own. Returns the states.
pub(crate) fn fold<I, S: Send>(
    (threads, name): (usize, &str),
    items: impl Iterator<Item = I> + Send,
    begin: impl Fn() -> S + Sync,
    each: impl Fn(&mut S, I) + Sync,
) -> Vec<S> {
    let items = Mutex::new(items);
    on_threads(threads, name, || {
        let mut state = begin();
        loop {
            // The guard ends with the statement, before the work on the item.
            let next = lock(&items).next();
            let Some(item) = next else { return state };
            each(&mut state, item);
        }
    })
}
