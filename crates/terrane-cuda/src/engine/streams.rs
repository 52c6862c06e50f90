//! The engine's streams: one or two for each transfer, so that none waits for another's work.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use smallvec::SmallVec;
use terrane_core::ByteCount;
use terrane_transfer::{DeviceOrder, StreamHandle};

use super::options::DeviceEngineOptions;
use super::packing::index;
use crate::context::Context;
use crate::driver::DriverCode;
use crate::error::{CudaError, check_ready};
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

    /// Asks whether anything of the job may still be on the device. Never blocks.
    pub(super) fn rest(&mut self) -> Rest {
        if !self.is_used {
            return Rest::Come;
        }
        for stream in &self.streams {
            match stream.is_idle() {
                Ok(true) => {}
                Ok(false) => return Rest::NotYet,
                // Nothing runs in a context that is lost.
                Err(error) if error.is_device_lost() => break,
                // Another error is one of the question, and says nothing about the work.
                Err(error) => return Rest::Unknown(error),
            }
        }
        self.is_used = false;
        Rest::Come
    }

    /// Waits for what has been submitted, if anything has, however long that takes.
    ///
    /// # Errors
    ///
    /// Why nobody knows whether it has ended, after having asked again and again.
    pub(super) fn come_to_rest(&mut self) -> Result<(), CudaError> {
        let mut naps = Naps::default();
        let mut unknown = 0;
        loop {
            match self.rest() {
                Rest::Come => return Ok(()),
                Rest::NotYet => unknown = 0,
                Rest::Unknown(error) if unknown == MOST_QUESTIONS => return Err(error),
                Rest::Unknown(_) => unknown += 1,
            }
            naps.take();
        }
    }
}

/// Whether a job's work has left the device.
#[derive(Debug)]
pub(super) enum Rest {
    /// It has.
    Come,
    /// It has not.
    NotYet,
    /// The driver does not say.
    Unknown(CudaError),
}

/// How often a driver that does not say is asked: with the naps between, for some seconds.
pub(super) const MOST_QUESTIONS: u32 = 256;

/// Sleeps between questions, which become longer.
#[derive(Debug, Default)]
pub(super) struct Naps(u32);

impl Naps {
    pub(super) fn take(&mut self) {
        const FIRST: Duration = Duration::from_micros(20);
        const LONGEST_DOUBLING: u32 = 9;
        std::thread::sleep(FIRST * (1 << self.0));
        self.0 = (self.0 + 1).min(LONGEST_DOUBLING);
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
        // What drops after this is the device's until it has come to rest, and has nowhere else to
        // go: for as long as the driver does not say, it stays here.
        while self.come_to_rest().is_err() {}
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
            // SAFETY: whoever made the handle promised that it is live until the transfer has
            // ended, which it has not.
            if unsafe { has_happened(raw, context) }? {
                return Ok(());
            }
            for stream in streams {
                // SAFETY: as above.
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
    if stream.is_captured()? {
        return Err(CudaError::Captured { what: "stream" });
    }
    let event = Event::new(context, Timing::Off)?;
    event.record(&stream)?;
    Ok(event)
}

/// Whether somebody else's event has happened.
///
/// # Errors
///
/// [`CudaError::Captured`] if it marks a place in a graph, those of the driver.
///
/// # Safety
///
/// The handle is a live event.
unsafe fn has_happened(event: *mut c_void, context: &Context) -> Result<bool, CudaError> {
    context.bound(|functions| {
        // SAFETY: the event is alive, as the caller promised.
        let code = unsafe { (functions.cuEventQuery)(event.cast()) };
        if DriverCode::new(code).is_of_capture() {
            return Err(CudaError::Captured { what: "event" });
        }
        check_ready("cuEventQuery", code)
    })
}

fn address(raw: u64) -> usize {
    ByteCount::new(raw).to_usize()
}
