//! The threads that submit large jobs, a part at a time.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use terrane_core::ByteCount;
use terrane_transfer::CopyFailure;

use super::Shared;
use super::flight::{Failed, due, engine_failure};
use super::order::Gate;
use super::scratch::{Scratch, ScratchPool, Taken};
use super::watch::{Task, Watchers};
use super::work::{Chunk, Work};
use crate::error::CudaError;

/// A job for a feeder.
pub(super) struct Feed {
    pub(super) work: Box<Work>,
    pub(super) predicted: Duration,
    /// The first part, if it is already on the device.
    pub(super) begun: Option<Chunk>,
    /// The job's place in the count of jobs.
    pub(super) seat: Seat,
}

/// State shared by a feeder and the threads that bring it jobs.
#[derive(Debug)]
pub(super) struct Desk {
    pub(super) scratch: Mutex<ScratchPool>,
    /// Jobs that were brought, and are not completely submitted.
    jobs: AtomicUsize,
    /// The same for all desks of the engine.
    of_all: Arc<AtomicUsize>,
}

impl Desk {
    pub(super) fn new(shared: &Shared, of_all: &Arc<AtomicUsize>) -> Arc<Self> {
        let scratch = Mutex::new(ScratchPool::new(&shared.context, &shared.options));
        Arc::new(Self { scratch, jobs: AtomicUsize::new(0), of_all: Arc::clone(of_all) })
    }

    /// Counts a job in. Returns whether it is the only one here.
    pub(super) fn enter(self: &Arc<Self>) -> (Seat, bool) {
        // Relaxed, here and below: hints.
        self.of_all.fetch_add(1, Ordering::Relaxed);
        let is_only = self.jobs.fetch_add(1, Ordering::Relaxed) == 0;
        (Seat(Arc::clone(self)), is_only)
    }

    /// Whether no desk has another job: traffic in the other direction shares the wire.
    fn is_alone(&self) -> bool {
        self.of_all.load(Ordering::Relaxed) <= 1
    }

    pub(super) fn scratch(&self) -> MutexGuard<'_, ScratchPool> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the buffer that a part uses until its event.
    pub(super) fn lend(&self, mut chunk: Chunk) -> Chunk {
        if let Some(mut scratch) = chunk.scratch.take() {
            scratch.in_use_until(Arc::clone(&chunk.event));
            self.scratch().lend(scratch);
        }
        chunk
    }

    /// Takes back an unused buffer.
    pub(super) fn give_back(&self, scratch: Option<Scratch>) {
        if let Some(scratch) = scratch {
            self.scratch().give_back(scratch);
        }
    }
}

/// A job's place at a desk. Its drop counts the job out.
#[derive(Debug)]
pub(super) struct Seat(Arc<Desk>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.jobs.fetch_sub(1, Ordering::Relaxed);
        self.0.of_all.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A job that goes to a feeder when it may begin. Until then it holds no stream, no buffer, and no
/// seat.
pub(super) struct Gated {
    pub(super) gate: Gate,
    pub(super) work: Box<Work>,
    pub(super) predicted: Duration,
    pub(super) queue: Sender<Feed>,
    pub(super) desk: Arc<Desk>,
}

impl Gated {
    /// Hands the job to its feeder.
    pub(super) fn go_on(self) {
        let Self { gate, work, predicted, queue, desk } = self;
        drop(gate);
        let (seat, _) = desk.enter();
        // If the feeder has ended, the job drops here.
        drop(queue.send(Feed { work, predicted, begun: None, seat }));
    }

    /// Ends the job, without any submitted work.
    pub(super) fn cancel(self, error: CudaError) {
        self.work.into_cargo(None).finish(Err(engine_failure(error)));
    }
}

/// The thread of one direction. It takes a part of each of its jobs in turn, so that a short job
/// does not wait for the end of a long one. It keeps a bounded number of parts on the device.
pub(super) struct Feeder {
    shared: Arc<Shared>,
    jobs: Receiver<Feed>,
    watchers: Watchers,
    desk: Arc<Desk>,
    turns: VecDeque<Feed>,
    /// Parts on the device, in the order of their submission.
    pending: VecDeque<Chunk>,
}

impl Feeder {
    pub(super) fn new(
        shared: Arc<Shared>,
        desk: Arc<Desk>,
        jobs: Receiver<Feed>,
        watchers: Watchers,
    ) -> Self {
        let (turns, pending) = (VecDeque::new(), VecDeque::new());
        Self { shared, jobs, watchers, desk, turns, pending }
    }

    /// Serves jobs until no source of jobs is left, and all jobs are submitted.
    pub(super) fn serve(mut self) {
        loop {
            let was_idle = self.turns.is_empty();
            if was_idle {
                match self.jobs.recv() {
                    Ok(feed) => self.turns.push_back(feed),
                    Err(_) => break,
                }
            }
            self.turns.extend(self.jobs.try_iter());
            let Some(feed) = self.turns.pop_front() else { continue };
            // Only foreign code can panic, such as a subscriber to traces. The thread must continue
            // with other jobs. This job drops, which waits for its submitted work.
            let turn = catch_unwind(AssertUnwindSafe(|| self.turn(feed, was_idle)));
            if let Ok(Some(feed)) = turn {
                self.turns.push_back(feed);
            }
        }
        // The buffers are freed with the desk, when nothing uses them any more.
        while self.retire_oldest() {}
    }

    /// Submits a part of a job. Returns the job if parts are left.
    fn turn(&mut self, mut feed: Feed, was_idle: bool) -> Option<Feed> {
        if was_idle {
            self.retire_ended();
            let is_first = self.pending.is_empty() && self.turns.is_empty();
            feed.work.teach(is_first && self.desk.is_alone());
        }
        self.pending.extend(feed.begun.take());
        if let Some(failure) = feed.work.job().reason_to_stop() {
            self.fail(feed, failure);
            return None;
        }
        feed.work.job().start();
        if let Err(error) = self.make_room(&mut feed.work) {
            self.fail(feed, engine_failure(error));
            return None;
        }
        let shared = &*self.shared;
        let work = &mut feed.work;
        // The context is bound once for all driver calls of a part.
        let mut stepped = None;
        let bound = shared.context.bound(|_| {
            stepped = Some(work.step(shared));
            Ok(())
        });
        let stepped = match (bound, stepped) {
            (Ok(()), Some(stepped)) => stepped,
            (Err(error), _) => Err(engine_failure(error)),
            (Ok(()), None) => Ok(None),
        };
        match stepped {
            Ok(Some(chunk)) => {
                self.pending.push_back(self.desk.lend(chunk));
                if !feed.work.is_submitted() {
                    return Some(feed);
                }
                // At once, not when another part fits: waiting threads must learn of the end while
                // it is far off.
                self.all_submitted(feed);
                None
            }
            Ok(None) => {
                self.desk.give_back(feed.work.take_scratch());
                self.all_submitted(feed);
                None
            }
            Err(failure) => {
                self.fail(feed, failure);
                None
            }
        }
    }

    fn all_submitted(&self, mut feed: Feed) {
        if !self.desk.is_alone() {
            feed.work.teach(false);
        }
        let due = self.due(&feed);
        let Feed { work, predicted, seat, .. } = feed;
        drop(seat);
        let task = match work.into_flight(&self.shared, predicted, due) {
            Ok(flight) => {
                flight.invite();
                Task::End(flight)
            }
            Err(cargo) => Task::Drained(cargo),
        };
        // Watchers exist as long as feeders exist.
        self.watchers.send(task);
    }

    /// The predicted end of the parts on the device, if the job is alone there.
    fn due(&self, feed: &Feed) -> Option<Range<Instant>> {
        let job = feed.work.job();
        if !self.turns.is_empty() || job.layers().is_some() {
            return None;
        }
        let all: u64 = self.pending.iter().map(|part| part.bytes).sum();
        // The progress of the first part is unknown.
        let first = self.pending.front().map_or(0, |part| part.bytes);
        let time = |bytes: u64| {
            let share = bytes as f64 / job.plan().bytes().get().max(1) as f64;
            Duration::try_from_secs_f64(feed.predicted.as_secs_f64() * share.min(1.0)).ok()
        };
        due(time(all - first)?..time(all)?)
    }

    /// Finishes a failed job once its submitted parts complete.
    fn fail(&mut self, feed: Feed, failure: CopyFailure) {
        let Feed { work, seat, .. } = feed;
        drop(seat);
        // Not on this thread, where other jobs wait for their turn. The wait may be long, and
        // finishing a job runs foreign code. Watchers exist as long as feeders exist.
        let failed = Failed::new(work.into_cargo(Some(&self.desk)), failure);
        self.watchers.send(Task::Drain(failed));
        self.retire_ended();
    }

    /// Waits until another part may be submitted. Gives the job a buffer for it, if it needs one.
    ///
    /// # Errors
    ///
    /// No memory is left for a buffer, and the job cannot continue without one.
    fn make_room(&mut self, work: &mut Work) -> Result<(), CudaError> {
        self.retire_ended();
        let most = ByteCount::new(self.shared.options.scratch_buffers.get().max(2).into());
        while self.pending.len() >= most.to_usize() {
            self.retire_oldest();
        }
        while work.needs_scratch() {
            let taken = self.desk.scratch().take();
            let made = match taken {
                Some(Taken::Free(scratch)) => Ok(Some(scratch)),
                Some(Taken::ToMake(maker)) => maker.make(),
                None => Ok(None),
            };
            match made {
                Ok(Some(scratch)) => {
                    work.put_scratch(scratch);
                    break;
                }
                Ok(None) => self.await_scratch(work)?,
                Err(error) if error.is_device_lost() => return Err(error),
                Err(error) => {
                    tracing::debug!(%error, "no memory for a buffer; the transfer goes without");
                    work.do_without_scratch(&self.shared)?;
                }
            }
        }
        Ok(())
    }

    /// Waits for the buffer that becomes free first.
    ///
    /// # Errors
    ///
    /// As for [`do_without_scratch`](Work::do_without_scratch).
    fn await_scratch(&self, work: &mut Work) -> Result<(), CudaError> {
        let next = self.desk.scratch().next_event();
        match next.map(|event| event.wait()) {
            Some(Ok(())) => {}
            Some(Err(_)) => {
                // They drop without the lock.
                let broken = self.desk.scratch().take_broken();
                drop(broken);
            }
            // A failed job holds it.
            None => return work.do_without_scratch(&self.shared),
        }
        Ok(())
    }

    /// Removes the parts that have ended.
    fn retire_ended(&mut self) {
        while let Some(chunk) = self.pending.front() {
            // The job's end also reports the failure.
            if matches!(chunk.event.is_complete(), Ok(false)) {
                return;
            }
            self.retire_oldest();
        }
    }

    /// Waits for the oldest part. Returns whether there was one.
    fn retire_oldest(&mut self) -> bool {
        let Some(chunk) = self.pending.pop_front() else { return false };
        if chunk.event.wait().is_ok() {
            chunk.count.add(chunk.bytes);
        }
        true
    }
}
