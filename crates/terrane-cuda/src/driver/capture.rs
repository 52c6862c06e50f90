//! Captures of streams into graphs, which calls of other threads can end.

use std::ffi::c_uint;
use std::marker::PhantomData;

use super::{Driver, Functions};

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_uint = 2;

/// Until this drops, the calls of its thread neither end a capture that another thread has begun,
/// nor fail because there is one.
///
/// By default a call that asks an event or a stream, waits for one, or allocates, is refused while
/// any thread captures in the global mode (which is the default, too), and the capture is lost.
/// What the engine asks concerns streams of its own alone, which no graph has a part in.
#[derive(Debug)]
pub(crate) struct BesideCaptures {
    driver: Driver,
    /// What the thread's mode was; `None` if it was not changed.
    before: Option<c_uint>,
    /// The mode is the thread's.
    _thread: PhantomData<*const ()>,
}

impl BesideCaptures {
    pub(crate) fn new(driver: Driver) -> Self {
        let mode = if driver.is_of_parent() { None } else { exchange(driver.functions(), RELAXED) };
        let before = mode.filter(|before| *before != RELAXED);
        Self { driver, before, _thread: PhantomData }
    }
}

impl Drop for BesideCaptures {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            exchange(self.driver.functions(), before);
        }
    }
}

/// Sets the thread's mode, and answers what it was; `None` where the driver has no such thing.
fn exchange(functions: &Functions, mode: c_uint) -> Option<c_uint> {
    let mut exchanged = mode;
    // SAFETY: one number is read and written.
    let code = unsafe { functions.cuThreadExchangeStreamCaptureMode?(&raw mut exchanged) };
    (code == 0).then_some(exchanged)
}
