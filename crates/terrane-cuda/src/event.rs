//! Events: marks in streams, which cost more to make than to use, and so are kept.

use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUevent, CUstream};
use terrane_core::{ByteCount, DeviceId};

use crate::context::Context;
use crate::driver::Functions;
use crate::error::{CudaError, check, check_ready};
use crate::stream::{Stream, of_this_thread};

/// `CU_EVENT_BLOCKING_SYNC`: a thread that waits sleeps.
const BLOCKING_SYNC: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: cheaper to record.
const DISABLE_TIMING: u32 = 2;

/// How many events a context keeps of each sort. Making and destroying one costs some 2 µs, and an
/// idle one some hundred bytes.
const MOST_IDLE: usize = 1024;

/// Whether an event keeps the time at which the stream came to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Timing {
    /// It does not, which makes it cheaper.
    #[default]
    Off,
    /// It does.
    On,
}

/// A mark in a stream, on loan from its context, which keeps it for the next user afterwards.
pub struct Event {
    raw: RawEvent,
    context: Context,
    sort: Sort,
    state: AtomicU8,
}

/// What an event is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    /// Threads sleep until it happens, for which the device has to interrupt a processor.
    Waited,
    /// The same, with the time.
    Timed,
    /// It is asked, and waited for by streams. It is recorded once.
    Asked,
}

/// The mark is nowhere yet, and counts as passed.
const NEW: u8 = 0;
/// The mark is in a stream.
const RECORDED: u8 = 1;
/// Recording failed, and the mark proves nothing.
const BROKEN: u8 = 2;
/// Everything before the mark is known to have run. It will not be recorded again.
const PASSED: u8 = 3;

impl Event {
    /// An event that has not been recorded, and so counts as passed.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`], [`CudaError::DeviceLost`].
    pub fn new(context: &Context, timing: Timing) -> Result<Self, CudaError> {
        let sort = if timing == Timing::On { Sort::Timed } else { Sort::Waited };
        Self::of_sort(context, sort)
    }

    /// An event behind everything that has been submitted to `stream` so far, for threads to ask and
    /// streams to wait for. The device interrupts no processor for it, so that it is recorded and
    /// passed sooner, by a microsecond together; and once it is known to have been passed, the driver
    /// is not asked again. A thread that waits for it all the same asks again and again.
    ///
    /// # Errors
    ///
    /// As for [`record`](Self::record).
    pub(crate) fn asked_behind(stream: &Stream) -> Result<Self, CudaError> {
        let event = Self::of_sort(stream.context(), Sort::Asked)?;
        event.record(stream)?;
        Ok(event)
    }

    fn of_sort(context: &Context, sort: Sort) -> Result<Self, CudaError> {
        context.driver().check_process()?;
        let raw = match context.idle_events().take(sort) {
            Some(raw) => raw,
            None => RawEvent::create(context, sort)?,
        };
        Ok(Self { raw, context: context.clone(), sort, state: AtomicU8::new(NEW) })
    }

    /// Whether no thread can sleep until it happens.
    pub(crate) fn is_only_asked(&self) -> bool {
        self.sort == Sort::Asked
    }

    /// Moves the mark behind everything that has been submitted to `stream` so far.
    ///
    /// # Errors
    ///
    /// [`CudaError::WrongContext`] if the stream is of another device, [`CudaError::Driver`],
    /// [`CudaError::DeviceLost`]. The event proves nothing then until it is recorded again.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // Before the call: who asks meanwhile must not be told that all has run.
        self.state.store(BROKEN, Ordering::SeqCst);
        if !self.context.same(stream.context()) {
            let device = self.context.device().id;
            return Err(CudaError::WrongContext { what: "stream", device });
        }
        self.record_on(stream.raw())
    }

    /// Moves the mark behind everything that the calling thread has submitted so far to its own
    /// default stream (`CU_STREAM_PER_THREAD`) of the event's context.
    ///
    /// # Errors
    ///
    /// As for [`record`](Self::record).
    pub fn record_on_thread_stream(&self) -> Result<(), CudaError> {
        self.state.store(BROKEN, Ordering::SeqCst);
        self.record_on(of_this_thread())
    }

    /// Records it on a stream of its context. The state is `BROKEN` until then.
    fn record_on(&self, stream: CUstream) -> Result<(), CudaError> {
        self.context.bound(|functions| {
            // SAFETY: event and stream are alive, and of one context, which is current.
            check("cuEventRecord", unsafe { (functions.cuEventRecord)(self.raw.0, stream) })
        })?;
        self.state.store(RECORDED, Ordering::SeqCst);
        Ok(())
    }

    /// Makes what the calling thread submits from now on to its own default stream
    /// (`CU_STREAM_PER_THREAD`) of `context` run after what the event marks, without blocking.
    /// An event that was never recorded delays nothing.
    ///
    /// # Errors
    ///
    /// As for [`Stream::wait_for`].
    pub fn delay_thread_stream(&self, context: &Context) -> Result<(), CudaError> {
        if !self.marks_something()? {
            return Ok(());
        }
        context.bound(|functions| {
            // SAFETY: the event is alive, and the context of the stream is current.
            let code = unsafe { (functions.cuStreamWaitEvent)(of_this_thread(), self.raw.0, 0) };
            check("cuStreamWaitEvent", code)
        })
    }

    /// The context that it belongs to.
    #[must_use]
    pub const fn context(&self) -> &Context {
        &self.context
    }

    /// Whether everything before the mark has run. Never blocks.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotRecorded`] if the last record failed, [`CudaError::Driver`],
    /// [`CudaError::DeviceLost`].
    pub fn is_complete(&self) -> Result<bool, CudaError> {
        if !self.is_outstanding()? {
            return Ok(true);
        }
        let is_complete = self.context.bound(|functions| {
            // SAFETY: the event is alive.
            check_ready("cuEventQuery", unsafe { (functions.cuEventQuery)(self.raw.0) })
        })?;
        if is_complete && self.is_only_asked() {
            self.state.store(PASSED, Ordering::SeqCst);
        }
        Ok(is_complete)
    }

    /// Blocks, asleep, until everything before the mark has run.
    ///
    /// # Errors
    ///
    /// As for [`is_complete`](Self::is_complete).
    pub fn wait(&self) -> Result<(), CudaError> {
        if self.is_only_asked() {
            return self.ask_for(Duration::MAX).map(|_| ());
        }
        if !self.is_outstanding()? {
            return Ok(());
        }
        self.context.bound(|functions| {
            // SAFETY: the event is alive.
            check("cuEventSynchronize", unsafe { (functions.cuEventSynchronize)(self.raw.0) })
        })
    }

    /// Blocks until everything before the mark has run, or `timeout` has passed; answers whether
    /// it has run.
    ///
    /// The driver knows no wait that ends, so the event is asked again and again: at once for some
    /// microseconds, then between naps that grow with the time waited, to a tenth of a millisecond
    /// at most.
    ///
    /// # Errors
    ///
    /// As for [`is_complete`](Self::is_complete).
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool, CudaError> {
        if Instant::now().checked_add(timeout).is_none() {
            return self.wait().map(|()| true);
        }
        self.ask_for(timeout)
    }

    /// Asks until the answer is yes, or `timeout` has passed.
    fn ask_for(&self, timeout: Duration) -> Result<bool, CudaError> {
        const SPIN: Duration = Duration::from_micros(20);
        const LONGEST_NAP: Duration = Duration::from_micros(100);
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
                thread::sleep((waited / 4).min(LONGEST_NAP).min(left));
            }
        }
    }

    /// How long the device took from `earlier` to this event, to about half a microsecond.
    ///
    /// # Errors
    ///
    /// [`CudaError::NoTiming`] if either was made without timing or was not recorded,
    /// [`CudaError::Driver`] if the device has not come to both yet.
    pub fn elapsed_since(&self, earlier: &Self) -> Result<Duration, CudaError> {
        for event in [self, earlier] {
            if event.sort != Sort::Timed || !event.marks_something()? {
                return Err(CudaError::NoTiming);
            }
        }
        let mut milliseconds = 0_f32;
        self.context.bound(|functions| {
            // SAFETY: both events are alive; one number is written.
            let code = unsafe {
                (functions.cuEventElapsedTime)(&raw mut milliseconds, earlier.raw.0, self.raw.0)
            };
            check("cuEventElapsedTime", code)
        })?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }

    /// The driver's handle, a `CUevent`, for other libraries. It is valid for as long as this value
    /// lives; destroying it is not theirs.
    #[must_use]
    pub const fn handle(&self) -> *mut c_void {
        self.raw.0.cast()
    }

    /// The device that it belongs to.
    pub(crate) fn device(&self) -> DeviceId {
        self.context.device().id
    }

    /// Whether the event is in a stream.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotRecorded`] if its last record failed.
    pub(crate) fn marks_something(&self) -> Result<bool, CudaError> {
        Ok(self.state()? != NEW)
    }

    /// Whether the driver has to be asked if the mark has been passed.
    ///
    /// # Errors
    ///
    /// As for [`marks_something`](Self::marks_something).
    fn is_outstanding(&self) -> Result<bool, CudaError> {
        Ok(self.state()? == RECORDED)
    }

    fn state(&self) -> Result<u8, CudaError> {
        match self.state.load(Ordering::SeqCst) {
            BROKEN => Err(CudaError::NotRecorded),
            state => Ok(state),
        }
    }

    /// After a record that could not even be tried: the event proves nothing.
    pub(crate) fn forget_mark(&self) {
        self.state.store(BROKEN, Ordering::SeqCst);
    }

    pub(crate) const fn raw(&self) -> CUevent {
        self.raw.0
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.driver().is_of_parent() {
            return;
        }
        // Streams that wait for it have taken note of what it marks, so that it can be recorded
        // elsewhere at once.
        if let Some(surplus) = self.context.idle_events().keep(self.raw, self.sort) {
            self.context.counters().events.subtract(ByteCount::ZERO);
            self.context.bound_in_drop(|functions| surplus.destroy(functions));
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("handle", &self.raw.0)
            .field("device", &self.context.device().id)
            .field("sort", &self.sort)
            .finish_non_exhaustive()
    }
}

/// An event of the driver's, that somebody has to destroy.
#[derive(Clone, Copy)]
pub(crate) struct RawEvent(CUevent);

// SAFETY: the driver takes an event's handle on any thread, and synchronises.
unsafe impl Send for RawEvent {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawEvent {}

impl RawEvent {
    fn create(context: &Context, sort: Sort) -> Result<Self, CudaError> {
        let flags = match sort {
            Sort::Waited => BLOCKING_SYNC | DISABLE_TIMING,
            Sort::Timed => BLOCKING_SYNC,
            Sort::Asked => DISABLE_TIMING,
        };
        let mut raw = ptr::null_mut();
        context.bound(|functions| {
            // SAFETY: the function writes one handle.
            check("cuEventCreate", unsafe { (functions.cuEventCreate)(&raw mut raw, flags) })
        })?;
        context.counters().events_created.fetch_add(1, Ordering::Relaxed);
        context.counters().events.add(ByteCount::ZERO);
        Ok(Self(raw))
    }

    /// Destroys the event, which nobody uses any more.
    pub(crate) fn destroy(self, functions: &Functions) -> Result<(), CudaError> {
        // SAFETY: an event is destroyed only by the context's end, or where none is kept; both
        // took it from its last user.
        check("cuEventDestroy_v2", unsafe { (functions.cuEventDestroy_v2)(self.0) })
    }
}

/// The events of a context that nobody uses just now.
#[derive(Default)]
pub(crate) struct IdleEvents {
    waited: Mutex<Vec<RawEvent>>,
    timed: Mutex<Vec<RawEvent>>,
    asked: Mutex<Vec<RawEvent>>,
}

impl IdleEvents {
    fn of(&self, sort: Sort) -> MutexGuard<'_, Vec<RawEvent>> {
        let idle = match sort {
            Sort::Waited => &self.waited,
            Sort::Timed => &self.timed,
            Sort::Asked => &self.asked,
        };
        idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, sort: Sort) -> Option<RawEvent> {
        self.of(sort).pop()
    }

    /// Keeps an event, or gives it back if there are enough.
    fn keep(&self, event: RawEvent, sort: Sort) -> Option<RawEvent> {
        let mut idle = self.of(sort);
        if idle.len() >= MOST_IDLE {
            return Some(event);
        }
        idle.push(event);
        None
    }

    pub(crate) fn count(&self) -> u64 {
        let sorts = [Sort::Waited, Sort::Timed, Sort::Asked];
        ByteCount::from_usize(sorts.map(|sort| self.of(sort).len()).iter().sum()).get()
    }

    /// All of them, for the context's end.
    pub(crate) fn take_all(&mut self) -> Vec<RawEvent> {
        let sorts = [&mut self.waited, &mut self.timed, &mut self.asked];
        let lists = sorts.map(|idle| idle.get_mut().unwrap_or_else(PoisonError::into_inner));
        lists.into_iter().flat_map(std::mem::take).collect()
    }
}
