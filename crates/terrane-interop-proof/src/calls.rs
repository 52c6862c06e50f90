//! The common parts of all functions of the interface: results and errors.

use std::cell::RefCell;
use std::ffi::c_char;

use terrane_core::BoxedCause;

thread_local! {
    /// The error of the last call on this thread.
    static ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs one call. Returns 0 if it succeeded, otherwise −1, and stores the error and its sources.
pub(crate) fn answer(body: impl FnOnce() -> Result<(), BoxedCause>) -> i32 {
    let Err(error) = body() else { return 0 };
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    ERROR.with_borrow_mut(|last| *last = text);
    -1
}

/// Drops a value that belongs to another library, on another thread if requested.
pub(crate) fn drop_value<T: Send + 'static>(value: T, elsewhere: bool) -> Result<(), BoxedCause> {
    if !elsewhere {
        drop(value);
        return Ok(());
    }
    let thread = std::thread::Builder::new().name("releases".to_owned());
    let thread = thread.spawn(move || drop(value))?;
    thread.join().map_err(|_| "the thread that released it panicked".into())
}

/// Writes the error of the last call on this thread to `buffer`, as a text that ends with a zero
/// byte. It is truncated to `capacity` bytes. Returns the length of the whole text.
/// # Safety
///
/// `buffer` is valid for writes of `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_error(buffer: *mut c_char, capacity: usize) -> usize {
    ERROR.with_borrow(|text| {
        let length = text.len().min(capacity.saturating_sub(1));
        if capacity > 0 {
            // SAFETY: both have that many bytes: `buffer` by the caller's promise, and the text by
            // the minimum.
            unsafe { text.as_ptr().copy_to_nonoverlapping(buffer.cast(), length) };
            // SAFETY: `length` is less than `capacity`.
            unsafe { buffer.wrapping_add(length).write(0) };
        }
        text.len()
    })
}
