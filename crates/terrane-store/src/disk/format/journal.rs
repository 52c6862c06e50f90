//! The journal: records one after the other, a batch with one write.

use std::sync::Arc;

use terrane_core::OsError;
use terrane_core::convert::to_u64;

use crate::disk::files::{Files, OpenFile, OpenMode};
use crate::disk::format::names;

/// The journal that records are added to. Its session created it: the tail of a journal from an
/// earlier session may be torn, and stays as it is.
#[derive(Debug)]
pub(crate) struct Journal {
    pub number: u64,
    pub file: Arc<dyn OpenFile>,
    pub length: u64,
}

impl Journal {
    /// Creates journal `number`, empty. Its name is not yet durable.
    pub(crate) fn create(files: &dyn Files, number: u64, mode: OpenMode) -> Result<Self, OsError> {
        let file = files.open(&names::journal(number), mode)?;
        // A journal that could not be begun in this session.
        if file.length()? > 0 {
            file.set_length(0)?;
        }
        Ok(Self { number, file: Arc::from(file), length: 0 })
    }

    /// Adds whole records.
    pub(crate) fn append(&mut self, records: &[u8]) -> Result<(), OsError> {
        self.file.write_at(records, self.length)?;
        self.length += to_u64(records.len());
        Ok(())
    }
}
