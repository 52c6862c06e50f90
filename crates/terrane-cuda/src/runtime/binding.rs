//! The context that a thread has bound for its calls.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::CUcontext;

use crate::driver::Driver;
use crate::driver::capture::RelaxedCaptureMode;
use crate::error::CudaError;

thread_local! {
    /// The context that this thread has bound, or null.
    static BOUND: Cell<CUcontext> = const { Cell::new(ptr::null_mut()) };
}

/// Whether this thread has bound the context. It is then current, and in the relaxed capture mode.
pub(super) fn is_bound(context: CUcontext) -> bool {
    BOUND.get() == context
}

/// A context that is current on this thread, and in the relaxed capture mode, until this value
/// drops.
///
/// Meanwhile, no other code changes the thread's current context without restoring it.
pub(super) struct Binding<'a> {
    driver: Driver,
    /// The count of failed drops.
    failed_drops: &'a AtomicU64,
    /// Whether the context was pushed on the thread's stack.
    is_pushed: bool,
    /// The context that was bound before, or null.
    outer: CUcontext,
    _relaxed: RelaxedCaptureMode,
}

impl<'a> Binding<'a> {
    /// Makes a retained context current.
    ///
    /// # Errors
    ///
    /// [`CudaError::Forked`], and the errors of the driver.
    #[inline(never)]
    pub(super) fn new(
        driver: Driver,
        context: CUcontext,
        failed_drops: &'a AtomicU64,
    ) -> Result<Self, CudaError> {
        driver.check_process()?;
        let functions = driver.functions();
        let relaxed = RelaxedCaptureMode::new(driver);
        let mut current = ptr::null_mut();
        // SAFETY: the function writes one handle.
        unsafe { functions.cuCtxGetCurrent(&raw mut current) }?;
        let is_pushed = current != context;
        if is_pushed {
            // SAFETY: the caller retains the context for as long as this value lives.
            unsafe { functions.cuCtxPushCurrent_v2(context) }?;
        }
        let outer = BOUND.replace(context);
        Ok(Self { driver, failed_drops, is_pushed, outer, _relaxed: relaxed })
    }
}

impl Drop for Binding<'_> {
    #[inline(never)]
    fn drop(&mut self) {
        BOUND.set(self.outer);
        if !self.is_pushed {
            return;
        }
        let mut popped = ptr::null_mut();
        // SAFETY: the function writes one handle. Pushes and pops are balanced, so the popped
        // context is the pushed one.
        if unsafe { self.driver.functions().cuCtxPopCurrent_v2(&raw mut popped) }.is_err() {
            // The failure is only counted: callers have locks under which no foreign code may run.
            self.failed_drops.fetch_add(1, Ordering::Relaxed);
        }
    }
}
