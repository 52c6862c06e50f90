//! The only module with system calls that the standard library lacks.
//!
//! No other module calls a function of `libc`. This module converts results to
//! [`OsError`](terrane_core::OsError)s and adds no policy.

pub(crate) mod event;
pub(crate) mod file;
pub(crate) mod memory;
pub(crate) mod ring;

use terrane_core::OsError;

/// The result of a call that returns −1 on failure and a non-negative value otherwise.
fn check(operation: &'static str, result: impl TryInto<usize>) -> Result<usize, OsError> {
    result.try_into().map_err(|_| OsError::last(operation))
}
