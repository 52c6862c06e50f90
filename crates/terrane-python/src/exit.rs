//! Open stores, which are closed when the interpreter exits.

use std::sync::{Mutex, Weak};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use terrane_core::sync::lock;
use terrane_store::Store;

use crate::memory::release_ended;

/// The time that jobs in flight have when the interpreter exits, or when a store is freed. Then they are
/// cancelled.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

static OPEN: Mutex<Vec<Weak<Store>>> = Mutex::new(Vec::new());

/// Adds a store.
pub(crate) fn note(store: Weak<Store>) {
    let mut open = lock(&OPEN);
    open.retain(|store| store.strong_count() > 0);
    open.push(store);
}

/// Closes the stores that are open. Python calls it before it frees anything, so the memory of jobs in
/// flight is valid until they have ended.
#[pyfunction]
fn close_all(py: Python<'_>) {
    let open = std::mem::take(&mut *lock(&OPEN));
    py.detach(|| {
        let deadline = Instant::now() + PATIENCE;
        for store in open.iter().filter_map(Weak::upgrade) {
            store.close(deadline);
        }
    });
    release_ended(py);
}

/// Registers [`close_all`] with Python.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let close_all = wrap_pyfunction!(close_all, module)?;
    module.py().import("atexit")?.call_method1("register", (close_all,))?;
    Ok(())
}
