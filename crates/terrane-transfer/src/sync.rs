//! The synchronisation primitives of this crate: the standard library's, or the model checker's
//! under `--cfg loom`.

#[cfg(loom)]
pub(crate) use loom::{
    hint::spin_loop,
    sync::{Condvar, Mutex, MutexGuard},
    thread::yield_now,
};

#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    sync::{Condvar, Mutex, MutexGuard},
    thread::yield_now,
    thread_local as per_thread,
};

use std::time::{Duration, Instant};

use terrane_core::sync::unpoisoned;

/// The model checker's thread-locals, whose macro does not take constants.
#[cfg(loom)]
macro_rules! per_thread {
    ($(static $name:ident: $type:ty = const { $value:expr };)*) => {
        loom::thread_local! { $(static $name: $type = $value;)* }
    };
}
#[cfg(loom)]
pub(crate) use per_thread;

/// Locks a mutex, even if it is poisoned. Every critical section of this crate leaves its data
/// consistent at each step. Only foreign code (a guard's drop, a waker) panics, and it runs outside
/// of critical sections.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// Waits on `condition`, and ignores poisoning like [`lock`].
pub(crate) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    unpoisoned(condition.wait(guard))
}

/// Like [`wait`], but at most for `most`, if it is set. The model checker has no clock, so its wait
/// has no limit.
pub(crate) fn wait_at_most<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    most: Option<Duration>,
) -> MutexGuard<'a, T> {
    match most.filter(|_| !cfg!(loom)) {
        Some(most) => unpoisoned(condition.wait_timeout(guard, most)).0,
        None => wait(condition, guard),
    }
}

/// A time span that starts at its first check. Under the model checker, which has no clock, a span
/// lasts one check.
pub(crate) struct Countdown {
    span: Duration,
    begun: Option<Instant>,
}

impl Countdown {
    pub(crate) fn new(span: Duration) -> Self {
        Self { span, begun: None }
    }

    /// A span that has started, and ends at `end`.
    pub(crate) fn until(end: Instant) -> Self {
        let now = Instant::now();
        let span = if cfg!(loom) { Duration::ZERO } else { end.saturating_duration_since(now) };
        Self { span, begun: Some(now) }
    }

    /// Whether time remains at `now`.
    pub(crate) fn has_time_left(&mut self, now: Instant) -> bool {
        if cfg!(loom) {
            return !std::mem::take(&mut self.span).is_zero();
        }
        now.saturating_duration_since(*self.begun.get_or_insert(now)) < self.span
    }
}
