//! Redirects UCX's log.
//!
//! UCX logs to standard output, where programs write their results. It reads `UCX_LOG_FILE` when it
//! is loaded. A variable cannot be set safely in a process with threads, so this module changes
//! UCX's option afterwards.

use std::ffi::{CStr, c_char, c_int};
use std::mem::ManuallyDrop;
use std::sync::Mutex;

use libloading::os::unix::Library;
use terrane_core::sync::lock;

use super::loader;

/// The file name prefix of the library that logs.
const LIBRARY: &str = "libucs";

/// Locked while UCX is loaded, so that only one thread finds it not loaded before.
static LOADING: Mutex<()> = Mutex::new(());

/// Loads UCX by `load`, and redirects its log to standard error. A UCX that was loaded before is
/// unchanged, because its threads may be logging. It is also unchanged if `UCX_LOG_FILE` is set.
pub(super) fn loading<E>(
    load: impl FnOnce() -> Result<ManuallyDrop<Library>, E>,
) -> Result<ManuallyDrop<Library>, E> {
    let _held = lock(&LOADING);
    #[expect(
        clippy::disallowed_methods,
        reason = "UCX's own variable, as `Plugin::check` documents"
    )]
    let is_chosen = std::env::var_os("UCX_LOG_FILE").is_some();
    let is_new = !loader::is_loaded(LIBRARY);
    let library = load()?;
    if is_new && !is_chosen {
        to_standard_error(&library);
    }
    Ok(library)
}

/// Reopens the log of a UCX that is not in use yet, as if `UCX_LOG_FILE` were `stderr`.
fn to_standard_error(plugin: &Library) -> Option<()> {
    const OPTION: &CStr = c"LOG_FILE";
    const DESTINATION: &CStr = c"stderr";
    type Set = unsafe extern "C" fn(*const c_char, *const c_char) -> c_int;
    type Call = unsafe extern "C" fn();
    // SAFETY: UCX declares it with this signature: the name of a global option and its value, as
    // texts.
    let set = unsafe { plugin.get::<Set>(b"ucs_global_opts_set_value") }.ok()?;
    // SAFETY: UCX declares it without arguments and result.
    let close = unsafe { plugin.get::<Call>(b"ucs_log_cleanup") }.ok()?;
    // SAFETY: as above.
    let open = unsafe { plugin.get::<Call>(b"ucs_log_init") }.ok()?;
    // SAFETY: both texts end with NUL, and UCX copies the value. No other thread uses UCX yet: this
    // thread has just loaded it, and holds the lock under which this crate loads it.
    let is_set = unsafe { set(OPTION.as_ptr(), DESTINATION.as_ptr()) } == 0;
    if is_set {
        // SAFETY: UCX opened its log when it was loaded, and no thread logs, as above.
        unsafe { close() };
        // SAFETY: the log is closed, as UCX requires before it is opened.
        unsafe { open() };
    }
    Some(())
}
