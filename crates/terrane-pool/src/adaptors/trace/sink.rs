//! Where the rows of a trace go.

use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrane_core::ByteCount;

use super::event::{COLUMNS, TraceAction, TraceError, TraceTime};
use crate::sync::Mutex;

/// A log that several upstreams may share. Cloning gives another handle to it.
///
/// Rows are buffered; [`flush`](Self::flush) and [`finish`](Self::finish) write them out and say
/// whether any were lost.
pub struct TraceSink<W: Write>(Arc<Mutex<Log<W>>>);

struct Log<W: Write> {
    rows: csv::Writer<W>,
    lost_rows: u64,
    /// The first failure that was not reported yet.
    failure: Option<io::Error>,
}

impl<W: Write> TraceSink<W> {
    /// A log that is written to `writer`, beginning with the line of columns.
    #[must_use]
    pub fn new(writer: W) -> Self {
        let mut log = Log { rows: csv::Writer::from_writer(writer), lost_rows: 0, failure: None };
        log.write(&COLUMNS);
        Self(Arc::new(Mutex::new(log)))
    }

    pub(super) fn write(&self, action: TraceAction, pointer: u64, size: ByteCount, stream: u64) {
        let thread = thread_number().to_string();
        let (pointer, size) = (format!("{pointer:#x}"), size.get().to_string());
        let stream = format!("{stream:#x}");
        let mut log = self.0.lock();
        // Under the lock, so that times rise from row to row.
        let time = TraceTime::now().to_string();
        log.write(&[&thread, &time, action.as_str(), &pointer, &size, &stream]);
    }

    /// Writes out what is buffered.
    ///
    /// # Errors
    ///
    /// [`TraceError::Write`] if that fails, or if rows were lost since the last call.
    pub fn flush(&self) -> Result<(), TraceError> {
        let mut log = self.0.lock();
        if let Err(error) = log.rows.flush() {
            log.fail(error);
        }
        let lost_rows = log.lost_rows;
        log.failure.take().map_or(Ok(()), |source| Err(TraceError::Write { lost_rows, source }))
    }

    /// Rows that are not in the log because they could not be written.
    #[must_use]
    pub fn lost_rows(&self) -> u64 {
        self.0.lock().lost_rows
    }

    /// Writes out what is buffered, and gives the writer back if this is the last handle: no
    /// upstream traces to it any more, and no memory from one is live.
    ///
    /// # Errors
    ///
    /// [`TraceError::Write`] as from [`flush`](Self::flush).
    pub fn finish(self) -> Result<Option<W>, TraceError> {
        self.flush()?;
        let Some(log) = Arc::into_inner(self.0) else { return Ok(None) };
        // It has just been flushed, so that taking it apart writes nothing more.
        Ok(log.into_inner().rows.into_inner().ok())
    }
}

impl<W: Write> Clone for TraceSink<W> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<W: Write> fmt::Debug for TraceSink<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceSink").field("lost_rows", &self.lost_rows()).finish_non_exhaustive()
    }
}

impl<W: Write> Log<W> {
    fn write(&mut self, row: &[&str; COLUMNS.len()]) {
        if let Err(error) = self.rows.write_record(row) {
            self.lost_rows += 1;
            self.fail(error.into());
        }
    }

    fn fail(&mut self, error: io::Error) {
        self.failure.get_or_insert(error);
    }
}

/// A number for this thread, from 1 on in the order of the first rows.
///
/// The standard library does not tell the system's number for a thread.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    // A thread that is ending has none any more.
    NUMBER.try_with(|number| *number).unwrap_or(0)
}
