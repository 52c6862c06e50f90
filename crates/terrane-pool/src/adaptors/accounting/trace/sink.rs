//! The log that contains the rows of a trace.

use std::io::{self, Write};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrane_core::ByteCount;

use super::event::{COLUMNS, TraceAction, TraceError, TraceTime};
use crate::sync::{Mutex, yield_now};

/// A log that several upstreams may share. Cloning returns another handle to it.
///
/// Rows are buffered, and written about 64 KiB at a time. [`flush`](Self::flush) and
/// [`finish`](Self::finish) write the remaining rows and report lost ones. Dropping the last handle
/// writes them too, and reports nothing. The writer is called without a lock, because it may use memory that is
/// traced; it must not call `flush`, which waits until no thread is writing.
pub struct TraceSink<W: Write>(Arc<Mutex<Log<W>>>);

struct Log<W: Write> {
    /// Rows that are not yet written.
    rows: Vec<u8>,
    count: u64,
    /// `None` while a thread writes with it.
    writer: Option<W>,
    lost_rows: u64,
    /// The first failure that has not been reported yet.
    failure: Option<io::Error>,
}

/// The writer and the rows that a thread takes out of a log, to write the rows without the lock.
struct Chunk<W> {
    writer: W,
    rows: Vec<u8>,
    count: u64,
}

/// A writer that is returned to the log after the write, even after a panic.
struct Lent<'log, W: Write> {
    log: &'log Mutex<Log<W>>,
    writer: Option<W>,
}

impl<W: Write> Drop for Lent<'_, W> {
    fn drop(&mut self) {
        self.log.lock().writer = self.writer.take();
    }
}

impl<W: Write> Log<W> {
    /// Takes all unwritten rows, unless a thread is writing.
    fn take(&mut self) -> Option<Chunk<W>> {
        let writer = self.writer.take()?;
        let (rows, count) = (mem::take(&mut self.rows), mem::take(&mut self.count));
        Some(Chunk { writer, rows, count })
    }
}

impl<W: Write> Drop for Log<W> {
    fn drop(&mut self) {
        if let Some(mut writer) = self.writer.take().filter(|_| !self.rows.is_empty()) {
            let _ = writer.write_all(&self.rows).and_then(|()| writer.flush());
        }
    }
}

/// The bytes of rows that are written at a time.
const CHUNK: usize = 1 << 16;

impl<W: Write> TraceSink<W> {
    /// Creates a log that is written to `writer`. It begins with the line of columns.
    #[must_use]
    pub fn new(writer: W) -> Self {
        let rows = format!("{}\n", COLUMNS.join(",")).into_bytes();
        let log = Log { rows, count: 0, writer: Some(writer), lost_rows: 0, failure: None };
        Self(Arc::new(Mutex::new(log)))
    }

    pub(super) fn write(&self, action: TraceAction, pointer: u64, size: ByteCount, stream: u64) {
        let (thread, action, size) = (thread_number(), action.as_str(), size.get());
        let mut log = self.0.lock();
        // Under the lock, so that times increase from row to row.
        let time = TraceTime::now();
        // No field needs quotes, and writing to a vector does not fail.
        let row = format!("{thread},{time},{action},{pointer:#x},{size},{stream:#x}\n");
        log.rows.extend_from_slice(row.as_bytes());
        log.count += 1;
        if log.rows.len() < CHUNK {
            return;
        }
        // While another thread writes, the rows stay for a later write.
        let Some(chunk) = log.take() else { return };
        drop(log);
        self.write_out(chunk, false);
    }

    /// Writes all buffered rows. Waits until no other thread is writing.
    ///
    /// # Errors
    ///
    /// [`TraceError::Write`] if writing fails, or if rows were lost since the last call.
    pub fn flush(&self) -> Result<(), TraceError> {
        let chunk = loop {
            if let Some(chunk) = self.0.lock().take() {
                break chunk;
            }
            yield_now();
        };
        self.write_out(chunk, true);
        let mut log = self.0.lock();
        let lost_rows = log.lost_rows;
        log.failure.take().map_or(Ok(()), |source| Err(TraceError::Write { lost_rows, source }))
    }

    fn write_out(&self, Chunk { writer, rows, count }: Chunk<W>, flushes: bool) {
        let mut lent = Lent { log: &self.0, writer: Some(writer) };
        let Some(writer) = &mut lent.writer else { return };
        let written = writer.write_all(&rows);
        let lost = if written.is_err() { count } else { 0 };
        let flushed = if flushes { writer.flush() } else { Ok(()) };
        let mut failure = written.and(flushed).err();
        let mut log = self.0.lock();
        log.lost_rows += lost;
        if log.failure.is_none() {
            log.failure = failure.take();
        }
    }

    /// Returns the number of rows that are not in the log because they could not be written.
    #[must_use]
    pub fn lost_rows(&self) -> u64 {
        self.0.lock().lost_rows
    }

    /// Writes all buffered rows. Returns the writer if this is the last handle: no upstream traces
    /// to it, and no memory of such an upstream is live.
    ///
    /// # Errors
    ///
    /// [`TraceError::Write`] as from [`flush`](Self::flush).
    pub fn finish(self) -> Result<Option<W>, TraceError> {
        self.flush()?;
        Ok(Arc::into_inner(self.0).and_then(|log| log.into_inner().writer.take()))
    }
}

impl<W: Write> Clone for TraceSink<W> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

terrane_core::debug_fields!(TraceSink<W: Write>, |it| { lost_rows: it.lost_rows() });

/// Returns a number for this thread, from 1 on in the order of the first rows.
///
/// The standard library does not expose the system's number of a thread.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    // While a thread ends, its thread-local number may already be destroyed.
    NUMBER.try_with(|number| *number).unwrap_or(0)
}
