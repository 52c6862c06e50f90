//! The native store behind a `Store` of Python, until it is closed.

use std::mem::ManuallyDrop;
use std::sync::{Arc, PoisonError, RwLock, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use terrane_core::OwnerProcess;
use terrane_core::sync::lock;
use terrane_store::{Store, StoreError};

use crate::manager::end_transfers;
use crate::memory::{leak_remaining, release_ended};
use crate::process::PerProcess;

/// The time that jobs in flight have when the interpreter exits, or when a store is freed. After it, they are
/// cancelled.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The time that cancelled jobs have at interpreter exit. A job that waits for a stream may never end.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(2);

/// The open stores.
static OPEN: PerProcess<Vec<Weak<OpenStore>>> = PerProcess::new();

/// A store that can be closed while other threads use it. Closing it frees its directory for other processes.
///
/// In a forked child it does nothing, because another thread may have held its lock at the fork, and the store's
/// threads are the parent's.
pub(crate) struct OpenStore {
    store: RwLock<Option<Store>>,
    owner: OwnerProcess,
}

impl OpenStore {
    /// Registers the store. [`close_all`] closes it when the interpreter exits.
    pub(crate) fn new(store: Store) -> Arc<Self> {
        let open =
            Arc::new(Self { store: RwLock::new(Some(store)), owner: OwnerProcess::current() });
        let mut all = lock(OPEN.get());
        all.retain(|store| store.strong_count() > 0);
        all.push(Arc::downgrade(&open));
        open
    }

    /// The store, unless it is closed or belongs to the parent process.
    pub(crate) fn get(&self) -> Option<Store> {
        if !self.owner.is_current() {
            return None;
        }
        self.store.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The store, unless it is closed.
    ///
    /// # Errors
    ///
    /// [`StoreError::Forked`] in a forked child.
    pub(crate) fn owned(&self) -> Result<Option<Store>, StoreError> {
        self.owner.check()?;
        Ok(self.get())
    }

    /// The store.
    ///
    /// # Errors
    ///
    /// [`StoreError::Forked`] in a forked child, and [`StoreError::Closed`] if it is closed.
    pub(crate) fn require(&self) -> Result<Store, StoreError> {
        self.owned()?.ok_or(StoreError::Closed)
    }

    /// Closes the store, and returns the number of jobs that were cancelled. It waits for jobs.
    pub(crate) fn close(&self, deadline: Instant) -> usize {
        if !self.owner.is_current() {
            return 0;
        }
        let store = self.store.write().unwrap_or_else(PoisonError::into_inner).take();
        store.map_or(0, |store| store.close(deadline).left)
    }
}

impl Drop for OpenStore {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            // On drop, the native store would close under locks that another thread may have held at the fork. So it
            // is never dropped in a child.
            let store = self.store.get_mut().unwrap_or_else(PoisonError::into_inner);
            let _ = ManuallyDrop::new(store.take());
        }
    }
}

/// Closes the open stores, and ends transfers. Python calls this before it frees any object, so the memory of jobs in
/// flight is valid until they have ended.
///
/// Jobs that do not end in time continue. Their memory is then never freed.
#[pyfunction]
fn close_all(py: Python<'_>) {
    let open = std::mem::take(&mut *lock(OPEN.get()));
    py.detach(|| {
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        let limit = deadline + CANCEL_TIMEOUT;
        let stores = open.iter().filter_map(Weak::upgrade);
        let closing: Vec<_> = stores.map(|store| close_on_a_thread(store, deadline)).collect();
        let are_closed = closing.into_iter().all(|end| is_ended(&end, limit));
        if !end_transfers(deadline, limit) || !are_closed {
            leak_remaining();
        }
    });
    release_ended(py);
}

/// Closes a store on a new thread, because closing waits without a limit for requests in a device. The channel is
/// closed at the end.
fn close_on_a_thread(store: Arc<OpenStore>, deadline: Instant) -> mpsc::Receiver<()> {
    let (end, ended) = mpsc::channel();
    let close = {
        let store = Arc::clone(&store);
        move || {
            store.close(deadline);
            drop(end);
        }
    };
    if thread::Builder::new().name(String::from("terrane-close")).spawn(close).is_err() {
        // The system cannot start another thread.
        store.close(deadline);
    }
    ended
}

/// Whether the other end of the channel is closed before `limit`.
fn is_ended(end: &mpsc::Receiver<()>, limit: Instant) -> bool {
    let remaining = limit.saturating_duration_since(Instant::now());
    end.recv_timeout(remaining) == Err(mpsc::RecvTimeoutError::Disconnected)
}

/// Registers [`close_all`] with Python.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let close_all = wrap_pyfunction!(close_all, module)?;
    module.py().import("atexit")?.call_method1("register", (close_all,))?;
    Ok(())
}
