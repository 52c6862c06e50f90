//! A context's streams and events, as a pool uses them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use terrane_core::sync::unpoisoned;
use terrane_pool::{Fence, FenceError, FenceSource, StreamError, StreamId, StreamSource};

use crate::error::CudaError;
use crate::runtime::context::Context;
use crate::runtime::event::{Event, Timing};
use crate::runtime::stream::{Stream, StreamPriority};

/// The streams of one context by number, and fences over its events.
///
/// A number is assigned once in a process. It is refused if its stream was removed, or if it
/// belongs to other `CudaStreams`; it never names another stream. A clone is another handle to the
/// same streams.
#[derive(Clone, Debug)]
pub struct CudaStreams(Arc<Registry>);

#[derive(Debug)]
struct Registry {
    context: Context,
    priority: StreamPriority,
    streams: RwLock<BTreeMap<StreamId, Stream>>,
}

impl CudaStreams {
    /// Creates an empty set of streams of this context. Streams that it creates have the default
    /// priority.
    #[must_use]
    pub fn new(context: &Context) -> Self {
        Self::with_priority(context, StreamPriority::Default)
    }

    /// Creates an empty set of streams of this context. Streams that it creates have this priority.
    #[must_use]
    pub fn with_priority(context: &Context, priority: StreamPriority) -> Self {
        Self(Arc::new(Registry { context: context.clone(), priority, streams: RwLock::default() }))
    }

    /// Assigns a number to a stream that was created elsewhere, or is borrowed.
    ///
    /// # Errors
    ///
    /// [`CudaError::WrongContext`] if the stream belongs to another device; [`CudaError::Forked`].
    pub fn add(&self, stream: Stream) -> Result<StreamId, CudaError> {
        self.0.context.check_stream(&stream)?;
        self.0.context.driver().check_process()?;
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = StreamId::new(NEXT.fetch_add(1, Ordering::Relaxed));
        unpoisoned(self.0.streams.write()).insert(id, stream);
        Ok(id)
    }

    /// Removes a stream: its number is no longer valid. The stream, if present, is destroyed when
    /// its last user drops it. In a process that was forked from the streams' process, nothing is
    /// removed.
    pub fn remove(&self, id: StreamId) -> Option<Stream> {
        self.0.context.driver().check_process().ok()?;
        unpoisoned(self.0.streams.write()).remove(&id)
    }

    /// Returns the stream with a number.
    ///
    /// # Errors
    ///
    /// [`CudaError::UnknownStream`], [`CudaError::Forked`].
    pub fn get(&self, id: StreamId) -> Result<Stream, CudaError> {
        self.0.context.driver().check_process()?;
        let streams = unpoisoned(self.0.streams.read());
        streams.get(&id).cloned().ok_or(CudaError::UnknownStream { number: id.get() })
    }

    /// The context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }
}

impl StreamSource for CudaStreams {
    fn create(&self) -> Result<StreamId, StreamError> {
        let created = Stream::with_priority(&self.0.context, self.0.priority);
        created.and_then(|stream| self.add(stream)).map_err(|error| StreamError {
            index: 0,
            count: 1,
            source: Box::new(error),
        })
    }

    fn destroy(&self, stream: StreamId) {
        drop(self.remove(stream));
    }
}

impl FenceSource for CudaStreams {
    fn create(&self) -> Result<Arc<dyn Fence>, FenceError> {
        let event =
            Event::new(&self.0.context, Timing::Off).map_err(failed("creating an event"))?;
        Ok(Arc::new(CudaFence { event, streams: self.clone() }))
    }
}

/// An event that finds streams by their number.
#[derive(Debug)]
struct CudaFence {
    event: Event,
    streams: CudaStreams,
}

impl Fence for CudaFence {
    fn record(&self, stream: StreamId) -> Result<(), FenceError> {
        let stream = self.streams.get(stream).inspect_err(|_| self.event.mark_broken());
        stream.and_then(|stream| self.event.record(&stream)).map_err(failed("recording an event"))
    }

    fn is_complete(&self) -> Result<bool, FenceError> {
        self.event.is_complete().map_err(failed("querying an event"))
    }

    fn wait(&self, timeout: Duration) -> Result<bool, FenceError> {
        self.event.wait_timeout(timeout).map_err(failed("waiting for an event"))
    }

    fn delay(&self, stream: StreamId) -> Result<bool, FenceError> {
        let stream = self.streams.get(stream);
        let delayed = stream.and_then(|stream| stream.wait_for(&self.event));
        delayed.map(|()| true).map_err(failed("delaying a stream"))
    }
}

fn failed(operation: &'static str) -> impl Fn(CudaError) -> FenceError {
    move |error| FenceError { operation, source: Box::new(error) }
}
