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

/// A job whose last work is on a stream. Whoever first sees that its end event has happened, a
/// thread of the engine or of the caller, takes the job out and finishes it.
pub(super) struct Flight {
    /// Behind the last of the work. If threads cannot sleep until it happens, the first of the job's
    /// streams has it.
    end: Arc<Event>,
    /// Behind the work before that, if the whole takes long.
    before_end: Option<Arc<Event>>,
    /// When it should happen, if that is known.
    due: Option<Range<Instant>>,
    /// Taken out by who ends the job. Nothing foreign runs while it is locked.
    cargo: Mutex<Option<Cargo>>,
    /// Where layers are told of. That runs foreign code, which may wait for this very job.
    signals: Option<LayerSignals>,
    /// Layers that are to be told of, with the event behind each, in their order.
    layers: Box<[(Range<u32>, Arc<Event>)]>,
    /// How many of them have been told of. Only who is telling changes it.
    told: AtomicUsize,
    telling: AtomicBool,
}

/// What a job needs until it has ended.
pub(super) struct Cargo {
    /// The first to drop, so that the rest outlives what is on them.
    pub(super) lanes: Lanes,
    /// A buffer that work which failed may still use.
    pub(super) scratch: Option<(Scratch, Arc<Desk>)>,
    pub(super) lists: Option<BlockLists>,
    pub(super) job: Box<CopyJob>,
    pub(super) count: Arc<Count>,
    pub(super) ends: [Arc<Reach>; 2],
    pub(super) lesson: Option<Lesson>,
    /// They must not be unloaded while they run, whatever becomes of the engine.
    pub(super) kernels: Option<Kernels>,
}

/// What can be learned of a job.
pub(super) struct Lesson {
    pub(super) corrections: Arc<Corrections>,
    pub(super) direction: Direction,
    pub(super) path: CopyPath,
    pub(super) predicted: Duration,
}

impl Flight {
    pub(super) fn new(
        cargo: Cargo,
        end: Arc<Event>,
        before_end: Option<Arc<Event>>,
        layers: VecDeque<(Range<u32>, Arc<Event>)>,
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

    /// Lets threads that wait for the job look for themselves.
    pub(super) fn invite(self: &Arc<Self>) {
        if let Some(cargo) = &*self.lock() {
            let attendant: Arc<dyn Attend> = self.clone();
            cargo.job.attend(attendant);
        }
    }

    /// Whether it should end soon, and has an end that is asked for.
    pub(super) fn is_short(&self) -> bool {
        self.end.is_only_asked() && self.layers.is_empty()
    }

    /// Whether the end has not happened, and nothing else is to be told of.
    pub(super) fn is_pending(&self) -> bool {
        self.is_short() && matches!(self.end.is_complete(), Ok(false))
    }

    /// Looks whether the job has ended, and finishes it if so. Answers whether it has.
    pub(super) fn look(&self) -> bool {
        // Whether the work has ended is not known if that fails. The engine's own thread waits for it.
        self.try_look().unwrap_or(false)
    }

    /// As [`look`](Self::look).
    ///
    /// # Errors
    ///
    /// Why it is not known whether the job has ended.
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

    /// Waits for the end, and finishes the job; gives it back if it is not known whether it has
    /// ended.
    pub(super) fn see_through(self: &Arc<Self>) -> Option<Failed> {
        // The failure of an event is that of the end, too.
        let told = self.told.load(Ordering::Relaxed);
        for (_, event) in self.layers.get(told..).unwrap_or_default() {
            if event.wait().is_err() {
                break;
            }
            self.tell_layers();
        }
        if let Some(before) = &self.before_end {
            // From here on it does not take long, and to be woken takes as long.
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
            // Of the streams it is found out whether anything still runs.
            Err(error) => Some(Failed::new(Box::new(cargo), engine_failure(error))),
        }
    }

    /// Sleeps until the end, or until somebody else has finished the job.
    ///
    /// # Errors
    ///
    /// Those of the driver.
    fn await_end(&self) -> Result<(), CudaError> {
        if !self.end.is_only_asked() {
            return self.end.wait();
        }
        let behind = match self.lock().as_ref().map(|cargo| cargo.lanes.first()) {
            None => return Ok(()),
            // For as long as the job has not been taken out, and that is locked, the stream is its own.
            Some(stream) => stream.map(|stream| {
                let behind = Event::new(self.end.context(), Timing::Off)?;
                behind.record(stream).map(|()| behind)
            }),
        };
        match behind {
            Some(Ok(behind)) => {
                behind.wait()?;
                // Now it is known to whoever asks for the buffer next.
                self.end.is_complete().map(|_| ())
            }
            // That there is no such event says nothing about the end.
            Some(Err(_)) | None => self.end.wait(),
        }
    }

    /// As [`see_through`](Self::see_through), where the end event fails.
    pub(super) fn give_up(&self, error: CudaError) -> Option<Failed> {
        let cargo = self.take()?;
        Some(Failed::new(Box::new(cargo), engine_failure(error)))
    }

    /// Tells of the layers that have arrived, unless another thread is at it, or this one further up
    /// its stack: then it goes on with them when it comes back.
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
            // Who was turned away before this has left a layer that is found by looking once more.
            self.telling.store(false, Ordering::Release);
        }
    }

    /// The next layers to tell of, if they have arrived.
    fn arrived(&self) -> Option<(usize, &Range<u32>)> {
        let told = self.told.load(Ordering::Relaxed);
        let (layers, event) = self.layers.get(told)?;
        matches!(event.is_complete(), Ok(true)).then_some((told, layers))
    }

    /// The job, for whoever comes first.
    fn take(&self) -> Option<Cargo> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Cargo>> {
        self.cargo.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long a thread looks for an end that is near before it goes to sleep.
const LAST_SPIN: Duration = Duration::from_micros(500);

impl Attend for Flight {
    fn poll(&self) {
        if self.end.context().driver().is_of_parent() {
            return;
        }
        // It runs on threads of callers, beside whatever others of theirs are capturing.
        let beside = BesideCaptures::new(self.end.context().driver());
        self.look();
        drop(beside);
    }

    fn due(&self) -> Option<Range<Instant>> {
        self.due.clone()
    }
}

impl Cargo {
    /// Finishes the job, of which nothing is on the device any more.
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
        // Others may use the streams before the caller hears of the end.
        drop((lanes, lists));
        if let Some((scratch, desk)) = scratch {
            desk.give_back(Some(scratch));
        }
        job.finish(result);
        drop((ends, kernels));
    }

    /// Ends a job that has not come to rest, and perhaps never will. What the device may use is
    /// kept by `lost`.
    fn abandon(self, failure: CopyFailure, lost: &Lost) {
        let Self { lanes, scratch, lists, job, count: _, ends, lesson: _, kernels } = self;
        let remains = job.give_up(failure);
        lost.keep(Abandoned { lanes, scratch, lists, remains, ends, kernels });
    }
}

/// A job that has failed, and of which work may be on the device.
pub(super) struct Failed {
    cargo: Box<Cargo>,
    failure: CopyFailure,
    /// How often the driver has not said whether any is.
    unknown: u32,
}

impl Failed {
    pub(super) fn new(cargo: Box<Cargo>, failure: CopyFailure) -> Self {
        Self { cargo, failure, unknown: 0 }
    }

    /// Finishes the job if nothing of it is on the device any more, and gives it back otherwise. If
    /// the driver has not said so for long, it ends all the same, and what the device may use stays.
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

    /// Does so again and again.
    pub(super) fn see_through(self, lost: &Lost) {
        let mut naps = Naps::default();
        let mut left = self.look(lost);
        while let Some(failed) = left {
            naps.take();
            left = failed.look(lost);
        }
    }
}

/// When a job should end that takes so long from now on, as far as that can be said, and what it
/// takes to fall asleep and to be woken; `None` if that is far off.
pub(super) fn due(left: Range<Duration>) -> Option<Range<Instant>> {
    const FAR: Duration = Duration::from_millis(5);
    const EARLY: Duration = Duration::from_micros(100);
    const LATE: Duration = Duration::from_micros(250);
    /// What a prediction for a short job may be wrong by. Who wakes too early looks for so long; who
    /// wakes too late has lost it.
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

/// The progress of a job, which several threads report and which ends at all of its bytes.
#[derive(Debug)]
pub(super) struct Count {
    progress: Arc<Progress>,
    /// Of the whole job. Parts that are copied twice count once.
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
