//! Restricts this module to the first interpreter that imports it.

use std::sync::atomic::{AtomicI64, Ordering};

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;

/// No interpreter yet.
const NONE: i64 = -1;

static FIRST: AtomicI64 = AtomicI64::new(NONE);

/// Refuses a second interpreter of the process. Python before 3.12 does not refuse it, and then hangs at exit.
pub(crate) fn check(_py: Python<'_>) -> PyResult<()> {
    // SAFETY: the caller is attached to an interpreter.
    let interpreter = unsafe { ffi::PyInterpreterState_Get() };
    // SAFETY: the interpreter of the caller is alive.
    let number = unsafe { ffi::PyInterpreterState_GetID(interpreter) };
    // Relaxed: the GIL orders imports.
    match FIRST.compare_exchange(NONE, number, Ordering::Relaxed, Ordering::Relaxed) {
        Err(first) if first != number => Err(PyImportError::new_err(
            "terrane_kv is in use by another interpreter of this process; import it in one interpreter only",
        )),
        _ => Ok(()),
    }
}
