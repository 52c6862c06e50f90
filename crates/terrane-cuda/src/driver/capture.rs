//! Captures of streams into graphs, which calls of other threads can invalidate.

use std::cell::Cell;
use std::ffi::c_uint;
use std::marker::PhantomData;

use crate::driver::Driver;
use crate::driver::functions::Functions;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_uint = 2;

thread_local! {
    static THREAD: Cell<ThreadMode> = const { Cell::new(ThreadMode { holders: 0, before: None }) };
}

/// The state of a thread's capture mode.
#[derive(Clone, Copy)]
struct ThreadMode {
    /// The number of live values of [`RelaxedCaptureMode`] of this thread.
    holders: u32,
    /// The mode before the first of them; `None` if it was not changed.
    before: Option<c_uint>,
}

/// While a value lives, the calls of its thread neither invalidate a capture of another thread, nor
/// fail because of one.
///
/// By default, the driver refuses some calls while any thread captures in the global mode, which is
/// the default mode. These calls query or synchronise an event or a stream, or allocate, free or
/// register memory. The refused call invalidates the capture. A query of a captured stream or event
/// is refused in every mode.
///
/// [`Context::bound`](crate::Context) has one for each call. A thread that makes many calls may
/// have its own around them: only the first value changes the mode. The last one that drops
/// restores it, in whatever order they drop.
#[derive(Debug)]
pub(crate) struct RelaxedCaptureMode {
    driver: Driver,
    /// Not `Send`: the mode belongs to the thread.
    _thread: PhantomData<*const ()>,
}

impl RelaxedCaptureMode {
    #[inline]
    pub(crate) fn new(driver: Driver) -> Self {
        let ThreadMode { holders, mut before } = THREAD.get();
        if holders == 0 && !driver.is_of_parent() {
            before = exchange(driver.functions(), RELAXED).filter(|before| *before != RELAXED);
        }
        THREAD.set(ThreadMode { holders: holders + 1, before });
        Self { driver, _thread: PhantomData }
    }
}

impl Drop for RelaxedCaptureMode {
    #[inline]
    fn drop(&mut self) {
        let ThreadMode { holders, mut before } = THREAD.get();
        let is_last = holders <= 1;
        if is_last
            && let Some(before) = before.take()
            && !self.driver.is_of_parent()
        {
            exchange(self.driver.functions(), before);
        }
        THREAD.set(ThreadMode { holders: holders.saturating_sub(1), before });
    }
}

/// Sets the thread's mode, and returns the previous one; `None` if the driver has no modes.
fn exchange(functions: &Functions, mode: c_uint) -> Option<c_uint> {
    let mut exchanged = mode;
    // SAFETY: one number is read and written.
    let code = unsafe { functions.cuThreadExchangeStreamCaptureMode?(&raw mut exchanged) };
    (code == 0).then_some(exchanged)
}
