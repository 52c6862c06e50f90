//! The catalog's error for a failed call.

use std::path::Path;

use rustix::io::Errno;
use terrane_core::OsError;

use super::error::CatalogError;
use super::lock;

/// The error for a failed call on `file`.
pub(crate) fn failure(file: &Path, source: OsError) -> CatalogError {
    if source == lock::LOST {
        return CatalogError::ForkedDuringOpen;
    }
    let file = file.to_owned();
    match Errno::from_raw_os_error(source.code) {
        Errno::ACCESS | Errno::PERM | Errno::ROFS => CatalogError::NotPermitted { file, source },
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => CatalogError::NoSpace { file, source },
        _ => CatalogError::Io { file, source },
    }
}
