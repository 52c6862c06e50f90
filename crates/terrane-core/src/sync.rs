//! Locks that ignore poisoning.
//!
//! A mutex is poisoned when a thread panics while it holds the lock. Terrane's guarded values are
//! consistent at any time, so other threads can continue to use them.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, poisoned or not.
///
/// ```
/// use std::sync::Mutex;
/// use terrane_core::sync::lock;
///
/// let count = Mutex::new(1);
/// *lock(&count) += 1;
/// assert_eq!(*lock(&count), 2);
/// ```
#[inline]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// Returns the guard or the value of a result, poisoned or not. It serves waits on a condition
/// variable, and other kinds of locks.
#[inline]
pub fn unpoisoned<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_works_after_a_panic_under_it() {
        let mutex = Mutex::new(7);
        let panicked = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let _guard = mutex.lock().unwrap();
                panic!("a test panics under a lock");
            });
            thread.join()
        });
        assert!(panicked.is_err() && mutex.is_poisoned());
        assert_eq!(*lock(&mutex), 7);
        assert_eq!(unpoisoned(mutex.into_inner()), 7);
    }
}
