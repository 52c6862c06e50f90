//! Events: marks in streams. Creating an event costs more than using it, so contexts keep idle
//! events.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{ptr, thread};

use cudarc::driver::sys::{CUevent, CUstream};
use terrane_core::convert::to_u64;
use terrane_core::sync::{lock, unpoisoned};
use terrane_core::{ByteCount, DeviceId};

use crate::driver::functions::Functions;
use crate::error::{CudaError, check_ready};
use crate::runtime::context::Context;
use crate::runtime::stream::{Stream, of_this_thread};

/// `CU_EVENT_BLOCKING_SYNC`: a waiting thread sleeps.
const BLOCKING_SYNC: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: cheaper to record.
const DISABLE_TIMING: u32 = 2;

/// The number of idle events of each kind that a context keeps. Creating and destroying an event
/// costs about 2 µs, and an idle event occupies about a hundred bytes.
const MOST_IDLE: usize = 1024;

/// Whether an event stores the time at which the stream reached it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Timing {
    /// Without timing, which is cheaper.
    #[default]
    Off,
    /// With timing.
    On,
}

/// A mark in a stream. Its context keeps the driver's event for reuse after the drop.
///
/// A clone is another handle to the same event. The driver's event returns to the context when the
/// last clone and the last transfer with its [order](Self::order) have dropped it.
#[derive(Clone)]
pub struct Event(Arc<SharedEvent>);

/// The event that clones and orders share.
pub(crate) struct SharedEvent {
    raw: RawEvent,
    context: Context,
    kind: EventKind,
    state: AtomicU8,
}

/// The purpose of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EventKind {
    /// Threads can sleep until it completes. Its completion interrupts a processor.
    Waited,
    /// The same, with timing.
    Timed,
    /// Threads query it, and streams wait for it. It is recorded once.
    Queried,
}

/// The event is not recorded, and counts as complete.
const UNRECORDED: u8 = 0;
/// The event is recorded in a stream.
const RECORDED: u8 = 1;
/// Recording failed, so the event proves nothing.
const BROKEN: u8 = 2;
/// All work before the mark is known to have run. The event will not be recorded again.
const COMPLETE: u8 = 3;

impl Event {
    /// Creates an event that has not been recorded, and so counts as complete.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub fn new(context: &Context, timing: Timing) -> Result<Self, CudaError> {
        let kind = if timing == Timing::On { EventKind::Timed } else { EventKind::Waited };
        Self::with_kind(context, kind, UNRECORDED)
    }

    /// Creates an event after all work submitted to `stream` so far. Threads can query it and
    /// streams can wait for it.
    ///
    /// Its completion interrupts no processor, so recording and completion together are a
    /// microsecond faster. After a query has found it complete, the driver is not queried again. A
    /// thread that waits for it polls.
    ///
    /// # Errors
    ///
    /// As for [`record`](Self::record).
    pub(crate) fn queried_after(stream: &Stream) -> Result<Self, CudaError> {
        let event = Self::with_kind(stream.context(), EventKind::Queried, BROKEN)?;
        event.record_on(stream.raw())?;
        Ok(event)
    }

    /// An event in this state, which is not recorded.
    fn with_kind(context: &Context, kind: EventKind, state: u8) -> Result<Self, CudaError> {
        context.driver().check_process()?;
        let raw = match context.idle_events().take(kind) {
            Some(raw) => raw,
            None => RawEvent::create(context, kind)?,
        };
        let (context, state) = (context.clone(), AtomicU8::new(state));
        Ok(Self(Arc::new(SharedEvent { raw, context, kind, state })))
    }

    /// Whether threads cannot sleep until it completes.
    pub(crate) fn cannot_be_slept_on(&self) -> bool {
        self.0.kind == EventKind::Queried
    }

    /// Records the event after all work submitted to `stream` so far.
    ///
    /// # Errors
    ///
    /// [`CudaError::WrongContext`] if the stream belongs to another device, [`CudaError::Driver`],
    /// [`CudaError::ContextLost`]. After an error the event proves nothing until it is recorded
    /// again.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // Set before the call: a concurrent query must not report that all work has run.
        self.0.state.store(BROKEN, Ordering::SeqCst);
        self.0.context.check_stream(stream)?;
        self.record_on(stream.raw())
    }

    /// Records the event after all work that the calling thread has submitted so far to its
    /// per-thread default stream (`CU_STREAM_PER_THREAD`) of the event's context.
    ///
    /// # Errors
    ///
    /// As for [`record`](Self::record).
    pub fn record_on_thread_stream(&self) -> Result<(), CudaError> {
        self.0.state.store(BROKEN, Ordering::SeqCst);
        self.record_on(of_this_thread())
    }

    /// Records the event on a stream of its context. The state is `BROKEN` until then.
    fn record_on(&self, stream: CUstream) -> Result<(), CudaError> {
        self.0.context.bound(|functions| {
            // SAFETY: event and stream are alive, and of one context, which is current.
            unsafe { functions.cuEventRecord(self.0.raw.0, stream) }
        })?;
        self.0.state.store(RECORDED, Ordering::SeqCst);
        Ok(())
    }

    /// Makes later work of the calling thread's per-thread default stream (`CU_STREAM_PER_THREAD`)
    /// of `context` run after the work that the event marks, without blocking. An event that was
    /// never recorded delays nothing.
    ///
    /// # Errors
    ///
    /// As for [`Stream::wait_for`].
    pub fn delay_thread_stream(&self, context: &Context) -> Result<(), CudaError> {
        if !self.is_recorded()? {
            return Ok(());
        }
        context.bound(|functions| {
            // SAFETY: the event is alive, and the context of the stream is current.
            unsafe { functions.cuStreamWaitEvent(of_this_thread(), self.0.raw.0, 0) }
        })
    }

    /// The context of the event.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Whether all work before the mark has run. Never blocks.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotRecorded`] if the last record failed, [`CudaError::Driver`],
    /// [`CudaError::ContextLost`].
    pub fn is_complete(&self) -> Result<bool, CudaError> {
        if !self.is_outstanding()? {
            return Ok(true);
        }
        let is_complete = self.0.context.bound(|functions| {
            // SAFETY: the event is alive.
            check_ready("cuEventQuery", unsafe { (functions.cuEventQuery)(self.0.raw.0) })
        })?;
        if is_complete && self.cannot_be_slept_on() {
            self.0.state.store(COMPLETE, Ordering::SeqCst);
        }
        Ok(is_complete)
    }

    /// Blocks, asleep, until all work before the mark has run.
    ///
    /// # Errors
    ///
    /// As for [`is_complete`](Self::is_complete).
    pub fn wait(&self) -> Result<(), CudaError> {
        if self.cannot_be_slept_on() {
            return self.poll_until(Duration::MAX).map(|_| ());
        }
        if !self.is_outstanding()? {
            return Ok(());
        }
        // SAFETY: the event is alive.
        self.0.context.bound(|functions| unsafe { functions.cuEventSynchronize(self.0.raw.0) })
    }

    /// Blocks until all work before the mark has run, or `timeout` has passed. Returns whether the
    /// work has run.
    ///
    /// The driver has no wait with a timeout, so the call polls the event. It polls without a pause
    /// for some microseconds. Then it sleeps between polls; the sleeps grow with the time waited,
    /// up to a tenth of a millisecond.
    ///
    /// # Errors
    ///
    /// As for [`is_complete`](Self::is_complete).
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool, CudaError> {
        if Instant::now().checked_add(timeout).is_none() {
            return self.wait().map(|()| true);
        }
        self.poll_until(timeout)
    }

    /// Polls until the event is complete, or `timeout` has passed.
    fn poll_until(&self, timeout: Duration) -> Result<bool, CudaError> {
        const SPIN: Duration = Duration::from_micros(20);
        const LONGEST_SLEEP: Duration = Duration::from_micros(100);
        let started = Instant::now();
        loop {
            if self.is_complete()? {
                return Ok(true);
            }
            let waited = started.elapsed();
            let Some(left) = timeout.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Ok(false);
            };
            if waited < SPIN {
                std::hint::spin_loop();
            } else {
                thread::sleep((waited / 4).min(LONGEST_SLEEP).min(left));
            }
        }
    }

    /// The device time from `earlier` to this event, accurate to about half a microsecond.
    ///
    /// # Errors
    ///
    /// [`CudaError::NoTiming`] if either event was created without timing or was not recorded.
    /// [`CudaError::Driver`] if the device has not reached both yet.
    pub fn elapsed_since(&self, earlier: &Self) -> Result<Duration, CudaError> {
        for event in [self, earlier] {
            if event.0.kind != EventKind::Timed || !event.is_recorded()? {
                return Err(CudaError::NoTiming);
            }
        }
        let mut milliseconds = 0_f32;
        self.0.context.bound(|functions| {
            // SAFETY: both events are alive; one number is written.
            unsafe {
                functions.cuEventElapsedTime(&raw mut milliseconds, earlier.0.raw.0, self.0.raw.0)
            }
        })?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }

    /// The driver's handle, a `CUevent`, for other libraries. It is valid for as long as this value
    /// lives. Other libraries must not destroy it.
    #[must_use]
    pub fn handle(&self) -> *mut c_void {
        self.0.raw.0.cast()
    }

    /// The device of the event.
    pub(crate) fn device(&self) -> DeviceId {
        self.0.context.device().id
    }

    /// Whether the event is recorded in a stream.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotRecorded`] if its last record failed.
    pub(crate) fn is_recorded(&self) -> Result<bool, CudaError> {
        Ok(self.state()? != UNRECORDED)
    }

    /// Whether the driver must be queried to know if the event is complete.
    ///
    /// # Errors
    ///
    /// As for [`is_recorded`](Self::is_recorded).
    fn is_outstanding(&self) -> Result<bool, CudaError> {
        Ok(self.state()? == RECORDED)
    }

    fn state(&self) -> Result<u8, CudaError> {
        match self.0.state.load(Ordering::SeqCst) {
            BROKEN => Err(CudaError::NotRecorded),
            state => Ok(state),
        }
    }

    /// Marks an event that is never recorded again as complete, because later work is known to have
    /// run. The driver is not queried again.
    pub(crate) fn mark_complete(&self) {
        self.0.state.store(COMPLETE, Ordering::SeqCst);
    }

    /// Marks the event as broken after a record that was not attempted.
    pub(crate) fn mark_broken(&self) {
        self.0.state.store(BROKEN, Ordering::SeqCst);
    }

    pub(crate) fn shared(&self) -> &Arc<SharedEvent> {
        &self.0
    }
}

impl Drop for SharedEvent {
    fn drop(&mut self) {
        if self.context.driver().is_of_parent() {
            return;
        }
        // The driver has stored the mark for waiting streams, so the event can be recorded again at
        // once.
        if let Some(surplus) = self.context.idle_events().keep(self.raw, self.kind) {
            self.context.counters().events.subtract(ByteCount::ZERO);
            self.context.bound_in_drop(|functions| surplus.destroy(functions));
        }
    }
}

terrane_core::debug_fields!(Event, |it| { handle: it.0.raw.0,
    device: it.0.context.device().id,
    kind: it.0.kind });

/// A driver event that its owner must destroy.
#[derive(Clone, Copy)]
pub(crate) struct RawEvent(CUevent);

// SAFETY: the driver accepts an event's handle on any thread, and synchronises its calls.
unsafe impl Send for RawEvent {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawEvent {}

impl RawEvent {
    fn create(context: &Context, kind: EventKind) -> Result<Self, CudaError> {
        let flags = match kind {
            EventKind::Waited => BLOCKING_SYNC | DISABLE_TIMING,
            EventKind::Timed => BLOCKING_SYNC,
            EventKind::Queried => DISABLE_TIMING,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the function writes one handle.
        context.bound(|functions| unsafe { functions.cuEventCreate(&raw mut raw, flags) })?;
        context.counters().events_created.fetch_add(1, Ordering::Relaxed);
        context.counters().events.add(ByteCount::ZERO);
        Ok(Self(raw))
    }

    /// Destroys the event, which is no longer in use.
    pub(crate) fn destroy(self, functions: &Functions) -> Result<(), CudaError> {
        // SAFETY: an event is destroyed when its context ends, or when the context has enough idle
        // events. In both cases its last user has returned it.
        unsafe { functions.cuEventDestroy_v2(self.0) }
    }
}

/// The idle events of a context, by their kind.
#[derive(Default)]
pub(crate) struct IdleEvents([Mutex<Vec<RawEvent>>; 3]);

impl IdleEvents {
    fn of(&self, kind: EventKind) -> MutexGuard<'_, Vec<RawEvent>> {
        lock(&self.0[kind as usize])
    }

    fn take(&self, kind: EventKind) -> Option<RawEvent> {
        self.of(kind).pop()
    }

    /// Keeps an event, or returns it if there are enough idle events.
    fn keep(&self, event: RawEvent, kind: EventKind) -> Option<RawEvent> {
        let mut idle = self.of(kind);
        if idle.len() >= MOST_IDLE {
            return Some(event);
        }
        idle.push(event);
        None
    }

    pub(crate) fn count(&self) -> u64 {
        to_u64(self.0.iter().map(|idle| lock(idle).len()).sum())
    }

    /// Takes all events, for the context's end.
    pub(crate) fn take_all(&mut self) -> Vec<RawEvent> {
        self.0.iter_mut().flat_map(|idle| std::mem::take(unpoisoned(idle.get_mut()))).collect()
    }
}
