//! The one gate to the system calls that the standard library does not offer.
//!
//! Nothing outside this module names a function of `libc`; it turns results into
//! [`OsError`](terrane_core::OsError)s and adds no policy.

pub(crate) mod event;
pub(crate) mod file;
pub(crate) mod memory;

use terrane_core::OsError;

/// The outcome of a call that answers −1 on failure and something non-negative otherwise.
fn check(operation: &'static str, result: impl TryInto<usize>) -> Result<usize, OsError> {
    result.try_into().map_err(|_| OsError::last(operation))
}
