//! The engine's streams: one or two for each transfer, so that none waits for another's work.

use std::sync::{Arc, Mutex, PoisonError};

use smallvec::SmallVec;
use terrane_core::ByteCount;
use terrane_transfer::{DeviceOrder, StreamHandle};

use super::options::DeviceEngineOptions;
use super::packing::index;
use crate::context::Context;
use crate::error::CudaError;
use crate::event::{Event, Timing};
use crate::stream::{Stream, StreamPriority};

/// Streams that are made when they are first needed, and kept.
#[derive(Debug)]
pub(super) struct StreamPool {
    context: Context,
    priority: StreamPriority,
    most: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    idle: Vec<Arc<Stream>>,
    all: Vec<Arc<Stream>>,
    next_shared: usize,
}

impl StreamPool {
    pub(super) fn new(context: &Context, options: &DeviceEngineOptions) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            priority: options.priority,
            most: index(options.streams.get()),
            kept: Mutex::default(),
        })
    }

    /// A stream with nothing on it, or, if there are enough already, one with another transfer's
    /// work.
    ///
    /// # Errors
    ///
    /// Those of making one.
    pub(super) fn take(self: &Arc<Self>) -> Result<StreamLease, CudaError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let lease = |stream, is_shared| StreamLease { stream, pool: Arc::clone(self), is_shared };
        if let Some(idle) = kept.idle.pop() {
            return Ok(lease(idle, false));
        }
        if kept.all.len() < self.most || kept.all.is_empty() {
            let stream = Arc::new(Stream::with_priority(&self.context, self.priority)?);
            kept.all.push(Arc::clone(&stream));
            return Ok(lease(stream, false));
        }
        let number = kept.next_shared % kept.all.len();
        kept.next_shared = number + 1;
        match kept.all.get(number) {
            Some(stream) => Ok(lease(Arc::clone(stream), true)),
            None => Err(CudaError::UnknownStream { number: ByteCount::from_usize(number).get() }),
        }
    }
}

/// A stream of the engine's, given back when it drops. What it has been given to do goes on.
#[derive(Debug)]
pub(super) struct StreamLease {
    stream: Arc<Stream>,
    pool: Arc<StreamPool>,
    is_shared: bool,
}

impl std::ops::Deref for StreamLease {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for StreamLease {
    fn drop(&mut self) {
        if !self.is_shared {
            let mut kept = self.pool.kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.idle.push(Arc::clone(&self.stream));
        }
    }
}

/// The streams of one job. Dropped while something of the job may be on them, they are waited for:
/// whatever becomes of a job, panics included, what it uses is declared behind them, and outlives
/// what has been submitted.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    streams: SmallVec<[StreamLease; 2]>,
    is_used: bool,
}

impl Lanes {
    pub(super) fn new(streams: SmallVec<[StreamLease; 2]>) -> Self {
        Self { streams, is_used: false }
    }

    /// Says that something of the job is about to be submitted.
    pub(super) fn begin(&mut self) {
        self.is_used = true;
    }

    /// Says that nothing of the job is on the device any more.
    pub(super) fn at_rest(&mut self) {
        self.is_used = false;
    }

    /// Waits for what has been submitted, if anything has.
    pub(super) fn come_to_rest(&mut self) {
        if std::mem::take(&mut self.is_used) {
            for stream in &self.streams {
                // A stream that fails has nothing that runs any more.
                let _ = stream.synchronize();
            }
        }
    }
}

impl std::ops::Deref for Lanes {
    type Target = [StreamLease];

    fn deref(&self) -> &[StreamLease] {
        &self.streams
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.come_to_rest();
    }
}

/// Makes what is submitted to `streams` from now on run after `order`, without waiting for it.
///
/// # Errors
///
/// Those of the driver, also if the stream is not one of the primary context of its device.
pub(super) fn obey(
    order: DeviceOrder,
    context: &Context,
    streams: &[&Stream],
) -> Result<(), CudaError> {
    let event = match order {
        DeviceOrder::AfterStream(handle) => record_on(handle, context)?,
        DeviceOrder::AfterEvent(handle) => {
            // The driver's handle, as a pointer again.
            let raw = std::ptr::with_exposed_provenance_mut(address(handle.raw()));
            for stream in streams {
                // SAFETY: whoever made the handle promised that it is live until the transfer has
                // ended, which it has not.
                unsafe { stream.wait_for_handle(raw) }?;
            }
            return Ok(());
        }
        // Everything else is ready as it is: the host knows that it has finished.
        _ => return Ok(()),
    };
    streams.iter().try_for_each(|stream| stream.wait_for(&event))
}

/// An event behind everything that somebody else's stream has been given so far.
fn record_on(handle: StreamHandle, context: &Context) -> Result<Event, CudaError> {
    let foreign;
    let context = if handle.device() == context.device().id {
        context
    } else {
        foreign = Context::primary(handle.device())?;
        &foreign
    };
    let raw = std::ptr::with_exposed_provenance_mut(address(handle.raw()));
    // SAFETY: whoever made the handle promised that it is live until the transfer has ended, and
    // the borrowed stream goes before this function returns.
    let stream = unsafe { Stream::borrow(context, raw, ()) }?;
    let event = Event::new(context, Timing::Off)?;
    event.record(&stream)?;
    Ok(event)
}

fn address(raw: u64) -> usize {
    ByteCount::new(raw).to_usize()
}
