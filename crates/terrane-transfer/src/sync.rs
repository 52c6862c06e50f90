//! The synchronisation primitives of this crate: the standard library's, or the model checker's
//! under `--cfg loom`.

#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

#[cfg(not(loom))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard},
    thread_local as per_thread,
};

use std::sync::PoisonError;

/// The model checker's thread-locals, whose macro does not take constants.
#[cfg(loom)]
macro_rules! per_thread {
    ($(static $name:ident: $type:ty = const { $value:expr };)*) => {
        loom::thread_local! { $(static $name: $type = $value;)* }
    };
}
#[cfg(loom)]
pub(crate) use per_thread;

/// Locks, also after a panic elsewhere: every critical section of this crate leaves its data
/// consistent at each step, and only foreign code (a guard's drop, a waker) panics, outside them.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits on `condition`, as [`lock`] locks.
pub(crate) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
