//! Locks that ignore poisoning.
//!
//! A mutex is poisoned when a thread panics while it holds the lock. Terrane's guarded values are
//! consistent at any time, so other threads can continue to use them.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError, TryLockError, TryLockResult};

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

/// Returns the guard of an attempt to lock, poisoned or not; `None` if another thread holds the lock.
#[inline]
pub fn attempted<T>(result: TryLockResult<T>) -> Option<T> {
    match result {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
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
        let guard = lock(&mutex);
        assert_eq!(*guard, 7);
        assert!(attempted(mutex.try_lock()).is_none());
        drop(guard);
        assert_eq!(attempted(mutex.try_lock()).as_deref(), Some(&7));
        assert_eq!(unpoisoned(mutex.into_inner()), 7);
    }
}
