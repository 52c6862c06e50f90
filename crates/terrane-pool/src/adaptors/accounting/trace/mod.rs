//! Logs the allocations of an upstream, as CSV that RMM's tools read.
//!
//! The columns are those of RMM's `logging_resource_adaptor`
//! (`cpp/src/mr/detail/logging_resource_adaptor_impl.cpp`):
//! `Thread,Time,Action,Pointer,Size,Stream`. The actions are `allocate`, `allocate failure` and
//! `free`, the time is `%H:%M:%S.%f`, and the size is the one requested. [`TraceReader`] reads such
//! a log.

mod event;
mod reader;
mod sink;

use std::io::Write;

use terrane_core::{Allocate, AllocateError, ByteCount, Memory, RegionRequest, delegate_allocate};

use crate::adaptors::attached::Attached;
pub use event::{TraceAction, TraceError, TraceEvent, TraceTime};
pub use reader::TraceReader;
pub use sink::TraceSink;

/// An upstream whose allocations and frees are written to a [`TraceSink`].
///
/// If writing the log fails, the allocation still succeeds. The sink keeps the error.
#[derive(Debug)]
pub struct Trace<A, W: Write> {
    upstream: A,
    sink: TraceSink<W>,
    stream: u64,
}

/// Memory from [`Trace`].
pub type Traced<M, W> = Attached<M, TracedBlock<W>>;

impl<A: Allocate, W: Write + Send + 'static> Trace<A, W> {
    /// Logs the allocations of `upstream` to `sink`, on the default stream.
    #[must_use]
    pub fn new(upstream: A, sink: TraceSink<W>) -> Self {
        Self { upstream, sink, stream: 0 }
    }

    /// Sets the number in the column of streams.
    #[must_use]
    pub fn on_stream(self, stream: u64) -> Self {
        Self { stream, ..self }
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other caller.
unsafe impl<A: Allocate, W: Write + Send + 'static> Allocate for Trace<A, W> {
    type Memory = Traced<A::Memory, W>;

    delegate_allocate!(self, self.upstream);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let (size, stream) = (request.bytes, self.stream);
        match self.upstream.allocate(request) {
            Ok(memory) => {
                let pointer = memory.location().position().start;
                self.sink.write(TraceAction::Allocate, pointer, size, stream);
                let sink = self.sink.clone();
                Ok(Attached::before(TracedBlock { sink, pointer, size, stream }, memory))
            }
            Err(error) => {
                self.sink.write(TraceAction::AllocateFailure, 0, size, stream);
                Err(error)
            }
        }
    }
}

/// A live block of a trace. Dropping it writes the row of its free, before the upstream can reuse
/// the address.
#[derive(Debug)]
pub struct TracedBlock<W: Write> {
    sink: TraceSink<W>,
    pointer: u64,
    size: ByteCount,
    stream: u64,
}

impl<W: Write> Drop for TracedBlock<W> {
    fn drop(&mut self) {
        self.sink.write(TraceAction::Free, self.pointer, self.size, self.stream);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    #[test]
    fn a_written_log_is_read_unchanged() {
        let capacity = ByteCount::new(100);
        let upstream = Simulated::new(SimulatedOptions { capacity, ..SimulatedOptions::default() });
        let sink = TraceSink::new(Vec::new());
        let source = Trace::new(upstream, sink.clone()).on_stream(7);
        let held = source.allocate(&RegionRequest::new(ByteCount::new(60))).unwrap();
        source.allocate(&RegionRequest::new(ByteCount::new(61))).unwrap_err();
        let pointer = held.location().position().start;
        drop((held, source));

        let log = sink.finish().unwrap().unwrap();
        let text = str::from_utf8(&log).unwrap();
        assert!(text.starts_with("Thread,Time,Action,Pointer,Size,Stream\n"), "{text}");
        let events: Result<Vec<_>, _> = TraceReader::new(&*log).unwrap().collect();
        let events: Vec<_> =
            events.unwrap().iter().map(|e| (e.action, e.pointer, e.size.get(), e.stream)).collect();
        assert_eq!(
            events,
            [
                (TraceAction::Allocate, pointer, 60, 7),
                (TraceAction::AllocateFailure, 0, 61, 7),
                (TraceAction::Free, pointer, 60, 7),
            ]
        );
    }

    #[derive(Clone, Debug)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_last_handle_writes_the_remaining_rows() {
        let log = Shared(Arc::default());
        let upstream = Simulated::new(SimulatedOptions::default());
        let source = Trace::new(upstream, TraceSink::new(log.clone()));
        let held = source.allocate(&RegionRequest::new(ByteCount::new(1))).unwrap();
        drop(source);
        assert!(log.0.lock().unwrap().is_empty());
        drop(held);
        assert_eq!(TraceReader::new(&**log.0.lock().unwrap()).unwrap().count(), 2);
    }

    #[derive(Debug)]
    struct FullDisk;

    impl Write for FullDisk {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
    }

    #[test]
    fn a_log_that_cannot_be_written_refuses_no_memory_and_says_so() {
        let sink = TraceSink::new(FullDisk);
        let source = Trace::new(Simulated::new(SimulatedOptions::default()), sink.clone());
        for _ in 0..1000 {
            source.allocate(&RegionRequest::new(ByteCount::new(1))).unwrap();
        }
        assert!(matches!(sink.flush(), Err(TraceError::Write { .. })));
        assert!(sink.lost_rows() > 0);
    }
}
