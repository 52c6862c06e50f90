//! The files of a store with their path, and the catalog's error for a failed call.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;
use terrane_core::OsError;

use crate::disk::error::CatalogError;
use crate::disk::files::lock;
use crate::disk::files::{Files, OpenFile, OpenMode};

/// The files of a store, and the path of their directory for messages.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    pub files: Arc<dyn Files>,
    pub path: PathBuf,
}

impl Folder {
    pub(crate) fn open(
        &self,
        name: &str,
        mode: OpenMode,
    ) -> Result<Box<dyn OpenFile>, CatalogError> {
        self.files.open(name, mode).map_err(|error| self.failure(name, error))
    }

    pub(crate) fn list(&self) -> Result<Vec<String>, CatalogError> {
        self.files.list().map_err(|error| failure(&self.path, error))
    }

    /// The error for a failed call on the file `name`.
    pub(crate) fn failure(&self, name: &str, source: OsError) -> CatalogError {
        failure(&self.path.join(name), source)
    }
}

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
