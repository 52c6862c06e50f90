//! The synchronisation primitives, which `--cfg loom` replaces with the model checker's.

#[cfg(loom)]
use loom as base;
#[cfg(not(loom))]
use std as base;

use base::cell::UnsafeCell;
use base::sync::Mutex as RawMutex;
pub(crate) use base::sync::MutexGuard;
pub(crate) use base::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub(crate) use base::thread::yield_now;
use terrane_core::sync::{attempted, unpoisoned};

/// A mutex whose data stays consistent when a holder panics, so poisoning is ignored.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(RawMutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(RawMutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        unpoisoned(self.0.lock())
    }

    pub(crate) fn into_inner(self) -> T {
        unpoisoned(self.0.into_inner())
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        attempted(self.0.try_lock())
    }
}

/// Interior mutability whose accesses the model checker sees.
#[derive(Debug)]
pub(crate) struct Cell<T>(UnsafeCell<T>);

impl<T> Cell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Passes the pointer to `access`. The caller must ensure that no other code accesses the value
    /// during the call.
    #[cfg(not(loom))]
    #[inline]
    pub(crate) fn with_mut<R>(&self, access: impl FnOnce(*mut T) -> R) -> R {
        access(self.0.get())
    }

    #[cfg(loom)]
    pub(crate) fn with_mut<R>(&self, access: impl FnOnce(*mut T) -> R) -> R {
        self.0.with_mut(access)
    }
}
