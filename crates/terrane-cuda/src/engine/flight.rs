//! Jobs whose last work is on a stream.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_transfer::{Attend, CopyFailure, CopyJob, LayerSignals, Progress};

use super::abandoned::{Abandoned, Lost};
use super::calibration::Direction;
use super::choice::Corrections;
use super::feeder::Desk;
use super::lists::BlockLists;
use super::options::CopyPath;
use super::reach::Reach;
use super::scratch::Scratch;
use super::streams::{Lanes, MOST_QUESTIONS, Naps, Rest};
use crate::driver::BesideCaptures;
use crate::error::CudaError;
use crate::event::{Event, Timing};
use crate::kernels::Kernels;

/// A job whose last work is on a stream. The first thread, of the engine or of the caller, that
/// sees its end event complete takes the job out and finishes it.
pub(super) struct Flight {
    /// The event after the last work. If threads cannot sleep until it completes, the job's first
    /// stream carries it.
    end: Event,
    /// The event after the work before that, if the whole job takes long.
    before_end: Option<Event>,
    /// The predicted end, if it is known.
    due: Option<Range<Instant>>,
    /// The thread that ends the job takes it out. No foreign code runs while it is locked.
    cargo: Mutex<Option<Cargo>>,
    /// The receiver of arrived layers. Reporting runs foreign code, which may wait for this same
    /// job.
    signals: Option<LayerSignals>,
    /// Layers to report, with the event after each, in their order.
    layers: Box<[(Range<u32>, Event)]>,
    /// The number of reported layers. Only the reporting thread changes it.
    told: AtomicUsize,
    telling: AtomicBool,
}

/// The resources that a job needs until it has ended.
pub(super) struct Cargo {
    /// The streams drop first, so that the rest outlives the work on them.
    pub(super) lanes: Lanes,
    /// A buffer that failed work may still use.
    pub(super) scratch: Option<(Scratch, Arc<Desk>)>,
    pub(super) lists: Option<BlockLists>,
    pub(super) job: Box<CopyJob>,
    pub(super) count: Arc<Count>,
    pub(super) ends: [Arc<Reach>; 2],
    pub(super) lesson: Option<Lesson>,
    /// The kernels must stay loaded while they run, even if the engine drops.
    pub(super) kernels: Option<Kernels>,
}

/// The data for corrections of the calibration.
pub(super) struct Lesson {
    pub(super) corrections: Arc<Corrections>,
    pub(super) direction: Direction,
    pub(super) path: CopyPath,
    pub(super) predicted: Duration,
}

impl Flight {
    pub(super) fn new(
        cargo: Cargo,
        end: Event,
        before_end: Option<Event>,
        layers: VecDeque<(Range<u32>, Event)>,
        due: Option<Range<Instant>>,
    ) -> Arc<Self> {
        let signals = cargo.job.layers().cloned();
        Arc::new(Self {
            end,
            before_end,
            due,
            cargo: Mutex::new(Some(cargo)),
            signals,
            layers: Vec::from(layers).into(),
            told: AtomicUsize::new(0),
            telling: AtomicBool::new(false),
        })
    }

    /// Lets a thread that waits for the job poll it before it sleeps.
    pub(super) fn invite(self: &Arc<Self>) {
        if let Some(cargo) = &*self.lock() {
            let attendant: Arc<dyn Attend> = self.clone();
            cargo.job.attend(attendant);
        }
    }

    /// Whether it should end soon, and its end event is polled.
    pub(super) fn is_short(&self) -> bool {
        self.end.is_only_asked() && self.layers.is_empty()
    }

    /// Whether the end event is pending, and no layer is left to report.
    pub(super) fn is_pending(&self) -> bool {
        self.is_short() && matches!(self.end.is_complete(), Ok(false))
    }

    /// Polls whether the job has ended, and finishes it if so. Returns whether it has ended.
    pub(super) fn look(&self) -> bool {
        // On an error it is unknown whether the work has ended. The engine's own thread waits for
        // it.
        self.try_look().unwrap_or(false)
    }

    /// Like [`look`](Self::look), with errors.
    ///
    /// # Errors
    ///
    /// The reason why it is unknown whether the job has ended.
    pub(super) fn try_look(&self) -> Result<bool, CudaError> {
        if self.end.is_complete()? {
            if let Some(cargo) = self.take() {
                cargo.finish(Ok(()));
            }
            return Ok(true);
        }
        self.tell_layers();
        Ok(false)
    }

    /// Waits for the end, and finishes the job. Returns the job if it is unknown whether it has
    /// ended.
    pub(super) fn see_through(self: &Arc<Self>) -> Option<Failed> {
        // The failure of an event is also the failure of the end.
        let told = self.told.load(Ordering::Relaxed);
        for (_, event) in self.layers.get(told..).unwrap_or_default() {
            if event.wait().is_err() {
                break;
            }
            self.tell_layers();
        }
        if let Some(before) = &self.before_end {
            // From here on the wait is short, and waking up would take as long.
            if before.wait().is_ok() {
                self.invite();
                let begun = Instant::now();
                while begun.elapsed() < LAST_SPIN {
                    if self.look() {
                        return None;
                    }
                    std::hint::spin_loop();
                }
            }
        }
        let ended = self.await_end();
        let cargo = self.take()?;
        match ended {
            Ok(()) => {
                cargo.finish(Ok(()));
                None
            }
            // The streams are queried whether any work still runs.
            Err(error) => Some(Failed::new(Box::new(cargo), engine_failure(error))),
        }
    }

    /// Sleeps until the end, or until another thread has finished the job.
    ///
    /// # Errors
    ///
    /// The errors of the driver.
    fn await_end(&self) -> Result<(), CudaError> {
        if !self.end.is_only_asked() {
            return self.end.wait();
        }
        let behind = match self.lock().as_ref().map(|cargo| cargo.lanes.first()) {
            None => return Ok(()),
            // The stream belongs to the job until the job is taken out, and that is locked.
            Some(stream) => stream.map(|stream| {
                let behind = Event::new(self.end.context(), Timing::Off)?;
                behind.record(stream).map(|()| behind)
            }),
        };
        match behind {
            Some(Ok(behind)) => {
                behind.wait()?;
                // Now the next user of the buffer can see the end.
                self.end.is_complete().map(|_| ())
            }
            // A missing event says nothing about the end.
            Some(Err(_)) | None => self.end.wait(),
        }
    }

    /// Like [`see_through`](Self::see_through), for a failed end event.
    pub(super) fn give_up(&self, error: CudaError) -> Option<Failed> {
        let cargo = self.take()?;
        Some(Failed::new(Box::new(cargo), engine_failure(error)))
    }

    /// Reports the layers that have arrived. If another thread, or this thread further up its
    /// stack, is already reporting, that call continues with them.
    fn tell_layers(&self) {
        let Some(signals) = &self.signals else { return };
        while self.arrived().is_some() {
            if self.telling.swap(true, Ordering::Acquire) {
                return;
            }
            while let Some((number, layers)) = self.arrived() {
                self.told.store(number + 1, Ordering::Relaxed);
                signals.done(layers.clone());
            }
            // A thread that was turned away before this has left a layer. One more check finds it.
            self.telling.store(false, Ordering::Release);
        }
    }

    /// The next layers to report, if they have arrived.
    fn arrived(&self) -> Option<(usize, &Range<u32>)> {
        let told = self.told.load(Ordering::Relaxed);
        let (layers, event) = self.layers.get(told)?;
        matches!(event.is_complete(), Ok(true)).then_some((told, layers))
    }

    /// Takes the job; only the first caller gets it.
    fn take(&self) -> Option<Cargo> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Cargo>> {
        self.cargo.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The time for which a thread polls for an end that is near, before it sleeps.
const LAST_SPIN: Duration = Duration::from_micros(500);

impl Attend for Flight {
    fn poll(&self) {
        if self.end.context().driver().is_of_parent() {
            return;
        }
        // It runs on callers' threads, while other threads of the caller may be capturing.
        let beside = BesideCaptures::new(self.end.context().driver());
        self.look();
        drop(beside);
    }

    fn due(&self) -> Option<Range<Instant>> {
        self.due.clone()
    }
}

impl Cargo {
    /// Finishes the job, which has no more work on the device.
    pub(super) fn finish(self, result: Result<(), CopyFailure>) {
        let Self { mut lanes, scratch, lists, job, count, ends, lesson, kernels } = self;
        lanes.at_rest();
        if result.is_ok() {
            count.complete();
            if let Some(lesson) = lesson {
                let (bytes, took) = (job.plan().bytes().get(), job.running_for());
                let Lesson { corrections, direction, path, predicted } = lesson;
                corrections.learn(direction, path, bytes, predicted, took);
            }
        }
        // The streams are free for others before the caller is told of the end.
        drop((lanes, lists));
        if let Some((scratch, desk)) = scratch {
            desk.give_back(Some(scratch));
        }
        job.finish(result);
        drop((ends, kernels));
    }

    /// Ends a job whose work may never come to rest. `lost` keeps the resources that the device may
    /// use.
    fn abandon(self, failure: CopyFailure, lost: &Lost) {
        let Self { lanes, scratch, lists, job, count: _, ends, lesson: _, kernels } = self;
        let remains = job.give_up(failure);
        lost.keep(Abandoned { lanes, scratch, lists, remains, ends, kernels });
    }
}

/// A failed job that may still have work on the device.
pub(super) struct Failed {
    cargo: Box<Cargo>,
    failure: CopyFailure,
    /// The number of times that the driver has not said whether it has.
    unknown: u32,
}

impl Failed {
    pub(super) fn new(cargo: Box<Cargo>, failure: CopyFailure) -> Self {
        Self { cargo, failure, unknown: 0 }
    }

    /// Finishes the job if none of its work is on the device, and returns it otherwise. If the
    /// driver has given no answer for long, the job ends all the same, and the resources that the
    /// device may use are kept.
    pub(super) fn look(mut self, lost: &Lost) -> Option<Self> {
        match self.cargo.lanes.rest() {
            Rest::Come => {
                self.cargo.finish(Err(self.failure));
                None
            }
            Rest::NotYet => Some(Self { unknown: 0, ..self }),
            Rest::Unknown(_) if self.unknown < MOST_QUESTIONS => {
                Some(Self { unknown: self.unknown + 1, ..self })
            }
            Rest::Unknown(error) => {
                tracing::error!(%error, "the driver does not say whether a transfer still runs");
                self.cargo.abandon(self.failure, lost);
                None
            }
        }
    }

    /// Retries until the job has ended.
    pub(super) fn see_through(self, lost: &Lost) {
        let mut naps = Naps::default();
        let mut left = self.look(lost);
        while let Some(failed) = left {
            naps.take();
            left = failed.look(lost);
        }
    }
}

/// The predicted end of a job with this remaining time, as far as it is known, and the time to fall
/// asleep and wake up. `None` if the end is far off.
pub(super) fn due(left: Range<Duration>) -> Option<Range<Instant>> {
    const FAR: Duration = Duration::from_millis(5);
    const EARLY: Duration = Duration::from_micros(100);
    const LATE: Duration = Duration::from_micros(250);
    /// The tolerance of a prediction for a short job. A thread that wakes too early polls for this
    /// time. A thread that wakes too late has lost it.
    const DOUBT: Duration = Duration::from_micros(400);
    if left.end > FAR {
        return None;
    }
    let (now, start, end) = (Instant::now(), left.start, left.end);
    let doubt = (start / 8).max((start / 2).min(DOUBT));
    Some(now + (start - doubt).saturating_sub(EARLY)..now + end + end / 8 + LATE)
}

pub(super) fn engine_failure(error: CudaError) -> CopyFailure {
    CopyFailure::Engine { source: Box::new(error) }
}

/// The progress of a job. Several threads report it, and it ends at all of the job's bytes.
#[derive(Debug)]
pub(super) struct Count {
    progress: Arc<Progress>,
    /// The bytes of the whole job. Parts that are copied twice count once.
    all: u64,
    /// `None` once the job has ended.
    counted: Mutex<Option<u64>>,
}

impl Count {
    pub(super) fn new(job: &CopyJob) -> Arc<Self> {
        let (progress, all) = (Arc::clone(job.progress()), job.plan().bytes().get());
        Arc::new(Self { progress, all, counted: Mutex::new(Some(0)) })
    }

    pub(super) fn add(&self, bytes: u64) {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(so_far) = &mut *counted {
            let bytes = bytes.min(self.all - *so_far);
            *so_far += bytes;
            self.progress.add(ByteCount::new(bytes));
        }
    }

    fn complete(&self) {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(so_far) = counted.take() {
            self.progress.add(ByteCount::new(self.all - so_far));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_copied_twice_counts_once() {
        let progress = Arc::new(Progress::default());
        let counted = Mutex::new(Some(0));
        let count = Count { progress: Arc::clone(&progress), all: 100, counted };
        count.add(60);
        count.add(60);
        assert_eq!(progress.copied(), ByteCount::new(100));
        count.complete();
        count.add(60);
        assert_eq!(progress.copied(), ByteCount::new(100));
    }
}
