//! Captures of streams into graphs, which calls of other threads can invalidate.

use std::ffi::c_uint;
use std::marker::PhantomData;

use crate::driver::Driver;
use crate::driver::functions::Functions;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_uint = 2;

/// While this value lives, the calls of its thread neither invalidate a capture of another thread,
/// nor fail because of one.
///
/// By default, the driver refuses some calls while any thread captures in the global mode, which is
/// the default mode. These calls query or synchronise an event or a stream, or allocate. The
/// refused call invalidates the capture. The engine's calls only use its own streams, which are
/// part of no graph.
#[derive(Debug)]
pub(crate) struct RelaxedCaptureMode {
    driver: Driver,
    /// The thread's previous mode; `None` if it was not changed.
    before: Option<c_uint>,
    /// Not `Send`: the mode belongs to the thread.
    _thread: PhantomData<*const ()>,
}

impl RelaxedCaptureMode {
    pub(crate) fn new(driver: Driver) -> Self {
        let mode = if driver.is_of_parent() { None } else { exchange(driver.functions(), RELAXED) };
        let before = mode.filter(|before| *before != RELAXED);
        Self { driver, before, _thread: PhantomData }
    }
}

impl Drop for RelaxedCaptureMode {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            exchange(self.driver.functions(), before);
        }
    }
}

/// Sets the thread's mode, and returns the previous one; `None` if the driver has no modes.
fn exchange(functions: &Functions, mode: c_uint) -> Option<c_uint> {
    let mut exchanged = mode;
    // SAFETY: one number is read and written.
    let code = unsafe { functions.cuThreadExchangeStreamCaptureMode?(&raw mut exchanged) };
    (code == 0).then_some(exchanged)
}
