//! Values that each process has for itself.

use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

use terrane_core::OwnerProcess;

/// A value behind a lock, separate for each process. A forked child starts with a new value, because another thread
/// may have held the parent's lock at the fork.
pub(crate) struct PerProcess<T> {
    /// Null, or a value that is never freed.
    current: AtomicPtr<Owned<T>>,
}

struct Owned<T> {
    owner: OwnerProcess,
    value: Mutex<T>,
}

impl<T: Default + Send + 'static> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self { current: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The value of this process.
    pub(crate) fn get(&self) -> &'static Mutex<T> {
        loop {
            let seen = self.current.load(Ordering::Acquire);
            // SAFETY: null, or a value that was published below, whole, and is never freed.
            let owned: Option<&'static Owned<T>> = unsafe { seen.as_ref() };
            if let Some(owned) = owned
                && owned.owner.is_current()
            {
                return &owned.value;
            }
            let owner = OwnerProcess::current();
            let fresh = Box::into_raw(Box::new(Owned { owner, value: Mutex::new(T::default()) }));
            let published =
                self.current.compare_exchange(seen, fresh, Ordering::AcqRel, Ordering::Acquire);
            if published.is_err() {
                // SAFETY: the value was created above, and was not published.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }
}
