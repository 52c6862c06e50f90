//! Locks that ignore poisoning.
//!
//! A mutex is poisoned when a thread panics while it holds the lock. Terrane's guarded values are
//! consistent at any time, so other threads can continue to use them.

use std::sync::{Condvar, LockResult, Mutex, MutexGuard, PoisonError, TryLockError, TryLockResult};
use std::time::Instant;

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

/// Waits for a notification, poisoned or not. The wait may end early, so the caller must check the
/// state again.
///
/// # Errors
///
/// Returns the guard, without a wait, if `deadline` has passed.
pub fn wait_until<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Option<Instant>,
) -> Result<MutexGuard<'a, T>, MutexGuard<'a, T>> {
    let Some(deadline) = deadline else { return Ok(unpoisoned(condition.wait(guard))) };
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(guard);
    }
    Ok(unpoisoned(condition.wait_timeout(guard, left)).0)
}

/// Returns the guard of an attempt to lock, poisoned or not; `None` if a thread holds the lock.
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

    #[test]
    fn a_wait_ends_at_its_deadline_and_with_a_notification() {
        let (mutex, condition) = (Mutex::new(false), Condvar::new());
        assert!(wait_until(&condition, lock(&mutex), Some(Instant::now())).is_err());
        let soon = Instant::now() + std::time::Duration::from_millis(1);
        let mut waited = Ok(lock(&mutex));
        while let Ok(state) = waited {
            waited = wait_until(&condition, state, Some(soon));
        }
        drop(waited);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                *lock(&mutex) = true;
                condition.notify_one();
            });
            let mut state = lock(&mutex);
            while !*state {
                state = wait_until(&condition, state, None).unwrap();
            }
        });
    }
}
