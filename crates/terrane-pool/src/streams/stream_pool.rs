//! Streams that are created once and leased.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

use terrane_core::BoxedCause;

use crate::streams::fence::StreamId;
use crate::sync::{AtomicUsize, Mutex, Ordering};

/// A source of streams: a device's driver, or a simulation of it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not make streams",
    label = "it does not implement `StreamSource`",
    note = "`CudaStreams` of `terrane-cuda` makes the streams of a device"
)]
pub trait StreamSource: Send + Sync + fmt::Debug {
    /// Creates a stream.
    ///
    /// # Errors
    ///
    /// [`StreamError`], if the driver cannot create a stream.
    fn create(&self) -> Result<StreamId, StreamError>;

    /// Destroys a stream from [`create`](Self::create). Work that was submitted to it still runs.
    fn destroy(&self, stream: StreamId);
}

/// The error of a stream that could not be created.
#[derive(Debug, thiserror::Error)]
#[error("stream {index} of a pool of {count} could not be created; request fewer streams")]
pub struct StreamError {
    /// The index of the stream, from 0.
    pub index: usize,
    /// The number of streams requested.
    pub count: usize,
    /// The driver's error.
    #[source]
    pub source: BoxedCause,
}

/// A fixed number of streams, which are created with the pool and destroyed with it.
///
/// For work that must only run concurrently with other work, use [`any`](Self::any), which returns
/// the streams in turn. For work that must not queue behind other work, [lease](Self::lease) a
/// stream. Do not mix the two, because `any` may return a leased stream. Cloning returns another
/// handle to the same pool.
#[derive(Clone, Debug)]
pub struct StreamPool(Arc<Streams>);

#[derive(Debug)]
struct Streams {
    source: Arc<dyn StreamSource>,
    /// Never empty.
    all: Vec<StreamId>,
    next: AtomicUsize,
    /// Streams that are not leased, the latest returned last.
    free: Mutex<Vec<StreamId>>,
}

impl StreamPool {
    /// Creates a pool of `count` streams.
    ///
    /// # Errors
    ///
    /// [`StreamError`] for the first stream that could not be created. The streams before it have
    /// been destroyed.
    pub fn new(source: Arc<dyn StreamSource>, count: NonZeroUsize) -> Result<Self, StreamError> {
        let (next, free) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let mut streams = Streams { source, all: Vec::new(), next, free };
        for index in 0..count.get() {
            match streams.source.create() {
                Ok(stream) => streams.all.push(stream),
                Err(error) => {
                    return Err(StreamError { index, count: count.get(), source: error.source });
                }
            }
        }
        *streams.free.lock() = streams.all.iter().rev().copied().collect();
        Ok(Self(Arc::new(streams)))
    }

    /// Returns the streams in turn, without a lock.
    #[must_use]
    pub fn any(&self) -> StreamId {
        let turn = self.0.next.fetch_add(1, Ordering::Relaxed) % self.0.all.len();
        self.0.all.get(turn).copied().unwrap_or(StreamId::new(0))
    }

    /// Leases a stream exclusively; `None` if all are leased. The stream returns to the pool when
    /// the lease drops. Earlier work on it runs before the work of its next owner.
    #[must_use]
    pub fn lease(&self) -> Option<StreamLease> {
        let stream = self.0.free.lock().pop()?;
        Some(StreamLease { streams: Arc::clone(&self.0), stream })
    }

    /// Returns every stream.
    #[must_use]
    pub fn streams(&self) -> &[StreamId] {
        &self.0.all
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        for &stream in &self.all {
            self.source.destroy(stream);
        }
    }
}

/// An exclusive lease of a stream of a [`StreamPool`]. It keeps the pool's streams alive.
#[derive(Debug)]
pub struct StreamLease {
    streams: Arc<Streams>,
    stream: StreamId,
}

impl StreamLease {
    /// Returns the stream.
    #[must_use]
    pub fn id(&self) -> StreamId {
        self.stream
    }
}

impl Drop for StreamLease {
    fn drop(&mut self) {
        self.streams.free.lock().push(self.stream);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Numbers its streams, and creates at most this many.
    #[derive(Debug)]
    struct Numbered {
        most: usize,
        live: Mutex<Vec<StreamId>>,
    }

    impl StreamSource for Numbered {
        fn create(&self) -> Result<StreamId, StreamError> {
            let mut live = self.live.lock();
            let (index, count) = (live.len(), self.most);
            if index == count {
                return Err(StreamError { index, count, source: "no more".into() });
            }
            let stream = StreamId::new(100 + index as u64);
            live.push(stream);
            Ok(stream)
        }

        fn destroy(&self, stream: StreamId) {
            self.live.lock().retain(|&other| other != stream);
        }
    }

    fn source(most: usize) -> Arc<Numbered> {
        Arc::new(Numbered { most, live: Mutex::new(Vec::new()) })
    }

    const THREE: NonZeroUsize = NonZeroUsize::new(3).unwrap();

    #[test]
    fn streams_rotate_or_are_leased_and_are_destroyed_with_the_last_handle() {
        let source = source(3);
        let pool = StreamPool::new(Arc::clone(&source) as _, THREE).unwrap();
        let turns: Vec<_> = (0..4).map(|_| pool.any().get()).collect();
        assert_eq!(turns, [100, 101, 102, 100]);
        let leases = [(); 3].map(|()| pool.lease().unwrap());
        assert_eq!(leases.each_ref().map(|lease| lease.id().get()), [100, 101, 102]);
        assert!(pool.lease().is_none());
        drop(pool);
        assert_eq!(source.live.lock().len(), 3, "leases keep the streams");
        drop(leases);
        assert_eq!(source.live.lock().len(), 0);
    }

    #[test]
    fn a_failure_destroys_what_was_made() {
        let source = source(2);
        let error = StreamPool::new(Arc::clone(&source) as _, THREE).unwrap_err();
        assert_eq!((error.index, error.count), (2, 3));
        assert_eq!(source.live.lock().len(), 0);
    }
}
