//! Jobs whose last work is on a stream.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use terrane_core::sync::lock;
use terrane_transfer::{LayerSignals, WaiterProgress};

use crate::driver::capture::RelaxedCaptureMode;
use crate::engine::complete::failed_job::{FailedJob, engine_failure};
use crate::engine::submit::submission::Submission;
use crate::error::CudaError;
use crate::runtime::event::{Event, Timing};

/// A job whose last work is on a stream. The first thread, of the engine or of the caller, that
/// sees its end event complete takes the job out and finishes it.
pub(crate) struct InFlight {
    /// The event after the last work. If threads cannot sleep on it, it is recorded on the job's
    /// first stream.
    end: Event,
    /// The event after the work before that, if the whole job takes long.
    before_end: Option<Event>,
    /// The predicted end, if it is known.
    due: Option<DueTime>,
    /// The thread that ends the job takes it out. No foreign code runs while it is locked.
    submission: Mutex<Option<Box<Submission>>>,
    /// The receiver of arrived layers. Reporting runs foreign code, which may wait for this same
    /// job.
    signals: Option<LayerSignals>,
    /// Layers to report, with the event after each, in their order.
    layers: Box<[(Range<u32>, Event)]>,
    /// The number of reported layers. Only the reporting thread changes it.
    reported: AtomicUsize,
    reporting: AtomicBool,
}

impl InFlight {
    pub(crate) fn new(
        submission: Box<Submission>,
        end: Event,
        before_end: Option<Event>,
        layers: Vec<(Range<u32>, Event)>,
        due: Option<DueTime>,
    ) -> Arc<Self> {
        let signals = submission.job().layers().cloned();
        Arc::new(Self {
            end,
            before_end,
            due,
            submission: Mutex::new(Some(submission)),
            signals,
            layers: layers.into(),
            reported: AtomicUsize::new(0),
            reporting: AtomicBool::new(false),
        })
    }

    /// Lets a thread that waits for the job poll it before the thread sleeps.
    pub(crate) fn invite(self: &Arc<Self>) {
        if let Some(submission) = &*self.lock() {
            let attendant: Arc<dyn WaiterProgress> = self.clone();
            submission.job().invite_waiters(attendant);
        }
    }

    /// Whether it should end soon, and its end event is polled.
    pub(crate) fn is_short(&self) -> bool {
        self.end.cannot_be_slept_on() && self.layers.is_empty()
    }

    /// Whether the end event is pending, and no layer is left to report.
    pub(crate) fn is_pending(&self) -> bool {
        self.is_short() && matches!(self.end.is_complete(), Ok(false))
    }

    /// Polls whether the job has ended, and finishes it if so. Returns whether it has ended.
    pub(crate) fn check(&self) -> bool {
        // On an error it is unknown whether the work has ended. The engine's own thread waits for
        // the end.
        self.try_check().unwrap_or(false)
    }

    /// Like [`check`](Self::check), with errors.
    ///
    /// # Errors
    ///
    /// The reason why it is unknown whether the job has ended.
    pub(crate) fn try_check(&self) -> Result<bool, CudaError> {
        if self.end.is_complete()? {
            if let Some(submission) = self.take() {
                self.finish(submission);
            }
            return Ok(true);
        }
        self.report_layers();
        Ok(false)
    }

    /// Waits for the end, and finishes the job. Returns the job if it is unknown whether it has
    /// ended.
    pub(crate) fn run_to_end(self: &Arc<Self>) -> Option<FailedJob> {
        // The failure of an event is also the failure of the end.
        let reported = self.reported.load(Ordering::Relaxed);
        for (_, event) in self.layers.get(reported..).unwrap_or_default() {
            if event.wait().is_err() {
                break;
            }
            self.report_layers();
        }
        if let Some(before) = &self.before_end {
            // The remaining wait is about as long as a wake-up, so the thread polls.
            if before.wait().is_ok() {
                self.invite();
                let begun = Instant::now();
                while begun.elapsed() < LAST_SPIN {
                    if self.check() {
                        return None;
                    }
                    std::hint::spin_loop();
                }
            }
        }
        let ended = self.await_end();
        let submission = self.take()?;
        match ended {
            Ok(()) => {
                self.finish(submission);
                None
            }
            // The streams are queried whether any work still runs.
            Err(error) => Some(FailedJob::new(submission, engine_failure(error))),
        }
    }

    /// Sleeps until the end, or until another thread has finished the job.
    ///
    /// # Errors
    ///
    /// The errors of the driver.
    fn await_end(&self) -> Result<(), CudaError> {
        if !self.end.cannot_be_slept_on() {
            return self.end.wait();
        }
        // The event is created, and drops, outside the lock: a failed drop runs foreign code.
        let behind = Event::new(self.end.context(), Timing::Off);
        let recorded = match self.lock().as_ref().map(|submission| submission.stream()) {
            None => return Ok(()),
            // The stream belongs to the job until the job is taken out. The lock prevents that.
            Some(stream) => {
                stream.zip(behind.as_ref().ok()).map(|(stream, behind)| behind.record(stream))
            }
        };
        match (recorded, behind) {
            (Some(Ok(())), Ok(behind)) => behind.wait(),
            // A missing event proves nothing about the end.
            _ => self.end.wait(),
        }
    }

    /// Like [`run_to_end`](Self::run_to_end), for a failed end event.
    pub(crate) fn give_up(&self, error: CudaError) -> Option<FailedJob> {
        Some(FailedJob::new(self.take()?, engine_failure(error)))
    }

    /// Reports the layers that have arrived. If another thread, or an outer call on this thread, is
    /// already reporting, that call reports them.
    fn report_layers(&self) {
        let Some(signals) = &self.signals else { return };
        while self.arrived().is_some() {
            if self.reporting.swap(true, Ordering::Acquire) {
                return;
            }
            while let Some((number, layers)) = self.arrived() {
                self.reported.store(number + 1, Ordering::Relaxed);
                signals.done(layers.clone());
            }
            // A thread that found the reporter busy may have left a layer. One more check finds it.
            self.reporting.store(false, Ordering::Release);
        }
    }

    /// The next layers to report, if they have arrived.
    fn arrived(&self) -> Option<(usize, &Range<u32>)> {
        let reported = self.reported.load(Ordering::Relaxed);
        let (layers, event) = self.layers.get(reported)?;
        matches!(event.is_complete(), Ok(true)).then_some((reported, layers))
    }

    /// Finishes the job, whose end event is complete.
    fn finish(&self, submission: Box<Submission>) {
        // The next user of the buffer need not query the event.
        self.end.mark_complete();
        submission.finish(Ok(()));
    }

    /// Takes the job; only the first caller gets it.
    fn take(&self) -> Option<Box<Submission>> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<Submission>>> {
        lock(&self.submission)
    }
}

/// The time for which a thread polls for an end that is near, before the thread sleeps.
const LAST_SPIN: Duration = Duration::from_micros(500);

impl WaiterProgress for InFlight {
    fn poll(&self) {
        if self.end.context().driver().is_of_parent() {
            return;
        }
        // The mode is changed once, not at each query of an event.
        let _relaxed = RelaxedCaptureMode::new(self.end.context().driver());
        self.check();
    }

    fn expected_end(&self) -> Option<Range<Instant>> {
        self.due.as_ref().map(DueTime::range)
    }
}

/// The predicted end of a job. The range is computed on demand, because few jobs need it.
#[derive(Debug)]
pub(crate) struct DueTime {
    predicted_at: Instant,
    /// The remaining time, counted from then.
    left: Range<Duration>,
}

impl DueTime {
    /// The end of a job with this time left from `now` on; `None` if the end is far off.
    pub(crate) fn after(now: Instant, left: Range<Duration>) -> Option<Self> {
        const FAR: Duration = Duration::from_millis(5);
        (left.end <= FAR).then_some(Self { predicted_at: now, left })
    }

    /// The predicted end, with a margin for falling asleep and waking up.
    fn range(&self) -> Range<Instant> {
        const EARLY: Duration = Duration::from_micros(100);
        const LATE: Duration = Duration::from_micros(250);
        /// The tolerance of a prediction for a short job. A thread that wakes too early polls for
        /// this time. A thread that wakes too late has delayed the end.
        const TOLERANCE: Duration = Duration::from_micros(400);
        let (now, start, end) = (self.predicted_at, self.left.start, self.left.end);
        let doubt = (start / 8).max((start / 2).min(TOLERANCE));
        now + (start - doubt).saturating_sub(EARLY)..now + end + end / 8 + LATE
    }
}
