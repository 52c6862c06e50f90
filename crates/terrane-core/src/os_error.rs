//! Errors of the operating system, as plain data.

use std::{fmt, io};

/// A system call that failed, with its code.
///
/// Unlike [`std::io::Error`], it can be copied, compared and stored in a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OsError {
    /// The call, as its manual page names it: `"mmap"`, `"statx"`.
    pub operation: &'static str,
    /// The value of `errno`.
    pub code: i32,
}

impl OsError {
    /// Creates an error of `operation` with this `errno`.
    #[must_use]
    pub const fn new(operation: &'static str, code: i32) -> Self {
        Self { operation, code }
    }

    /// Creates an error of `operation` from the current `errno`.
    #[must_use]
    pub fn last(operation: &'static str) -> Self {
        Self::from_io(operation, &io::Error::last_os_error())
    }

    /// Creates an error of `operation` from the code of an [`std::io::Error`]; the code is 0 if it
    /// has none.
    #[must_use]
    pub fn from_io(operation: &'static str, error: &io::Error) -> Self {
        Self { operation, code: error.raw_os_error().unwrap_or(0) }
    }

    /// The [`std::io::ErrorKind`] of the code.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        io::Error::from_raw_os_error(self.code).kind()
    }
}

impl fmt::Display for OsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, io::Error::from_raw_os_error(self.code))
    }
}

impl std::error::Error for OsError {}
