//! The work of the thread that submits a job: the whole job, if that takes a few driver calls, or
//! its beginning.

use std::sync::Arc;

use crossbeam_channel::Sender;
use terrane_transfer::CopyJob;

use super::DeviceEngine;
use super::calibration::Direction;
use super::feeder::{Desk, Feed, Gated};
use super::flight::{Failed, due, engine_failure};
use super::order::{Gate, Pending};
use super::quote::PathDecision;
use super::watch::Task;
use super::work::Work;
use crate::error::CudaError;

impl DeviceEngine {
    /// Starts a job.
    ///
    /// # Errors
    ///
    /// The job, and the reason why it must end. None of its work has been submitted.
    pub(super) fn dispatch(&self, job: Box<CopyJob>) -> Result<(), (Box<CopyJob>, CudaError)> {
        let decision = job.decision::<PathDecision>().map(|found| (found.direction, found.path));
        let ends = match self.reach(job.plan()) {
            Ok(ends) => ends,
            Err(error) => return Err((job, error)),
        };
        let (Ok((direction, path)), Some(ends)) = (decision, ends) else {
            let device = self.shared.context.device().id;
            return Err((job, CudaError::NotReached { device }));
        };
        let shared = &*self.shared;
        let pending = match Pending::of(job.terms().device_order, &shared.context, &shared.peers) {
            Ok(pending) => pending,
            Err(error) => return Err((job, error)),
        };
        let mut work = Work::new(shared, job, direction, path, ends);
        match pending {
            Some(pending) => self.submit_later(direction, work, pending),
            None if work.job().plan().bytes().is_zero() => {
                self.watch(Task::Drained(work.into_cargo(None)));
            }
            None if work.is_small(shared) && work.is_equipped(shared) => {
                self.submit_now(work, true, None)
            }
            None => self.feed(direction, Box::new(work)),
        }
        Ok(())
    }

    /// Makes a job begin when its order is satisfied.
    fn submit_later(&self, direction: Direction, mut work: Work, pending: Pending) {
        let shared = &*self.shared;
        let is_empty = work.job().plan().bytes().is_zero();
        let waited = || -> Result<Option<Gate>, CudaError> {
            if !is_empty && work.is_small(shared) && work.is_equipped(shared) {
                // The whole job is then on the device, and begins without waking a thread.
                if let Some(stream) = shared.streams.take_to_wait()? {
                    return work.wait_on(stream, &pending).map(|()| None);
                }
            }
            pending.into_gate(&shared.context, &shared.gate_streams).map(Some)
        };
        match waited() {
            Ok(None) => self.submit_now(work, false, None),
            Ok(Some(gate)) if is_empty => {
                work.end_with(gate);
                self.submit_now(work, false, None);
            }
            Ok(Some(gate)) => {
                let (predicted, work) = (work.job().predicted(), Box::new(work));
                let (Some((queue, desk)), Some(gates)) = (self.feeder(direction), &self.gates)
                else {
                    return;
                };
                let (queue, desk) = (queue.clone(), Arc::clone(desk));
                let gated = Box::new(Gated { gate, work, predicted, queue, desk });
                gates.send(Task::Gate(gated));
            }
            Err(error) => {
                let failed = Failed::new(work.into_cargo(None), engine_failure(error));
                self.watch(Task::Drain(failed));
            }
        }
    }

    /// Submits all of a small job. It begins at once, or when the device reaches it. Its buffer, if
    /// any, returns to the desk.
    fn submit_now(&self, mut work: Work, at_once: bool, desk: Option<&Arc<Desk>>) {
        work.in_one_go();
        work.job().start();
        let predicted = work.job().predicted();
        let due = if at_once { due(predicted..predicted) } else { None };
        loop {
            match work.step(&self.shared) {
                Ok(Some(part)) => drop(desk.map(|desk| desk.lend(part))),
                Ok(None) => break,
                Err(failure) => {
                    return self.watch(Task::Drain(Failed::new(work.into_cargo(desk), failure)));
                }
            }
        }
        match work.into_flight(&self.shared, predicted, due) {
            Ok(flight) => {
                flight.invite();
                self.watch(Task::End(flight));
            }
            Err(cargo) => self.watch(Task::Drained(cargo)),
        }
    }

    fn feeder(&self, direction: Direction) -> Option<&(Sender<Feed>, Arc<Desk>)> {
        let [to_device, to_host, between] = self.feeders.as_ref()?;
        Some(match direction {
            Direction::ToDevice => to_device,
            Direction::ToHost => to_host,
            Direction::WithinDevice | Direction::ToPeer | Direction::FromPeer => between,
        })
    }

    fn feed(&self, direction: Direction, work: Box<Work>) {
        let Some((queue, desk)) = self.feeder(direction) else { return };
        let predicted = work.job().predicted();
        let (seat, is_idle) = desk.enter();
        let mut feed = Feed { work, predicted, begun: None, seat };
        if is_idle && feed.work.needs_scratch() {
            let taken = desk.scratch().take_free();
            if let Some(scratch) = taken {
                feed.work.put_scratch(scratch);
                if feed.work.fits_one_buffer() {
                    // Waking the feeder would take as long as the submit.
                    feed.work.in_one_part();
                    return self.submit_now(*feed.work, true, Some(desk));
                }
                // The wire stays busy while the feeder wakes.
                feed = match self.begin(feed, desk) {
                    Some(feed) => feed,
                    None => return,
                };
            }
        }
        // If the threads have ended, the job drops here, and its caller is told.
        drop(queue.send(feed));
    }

    /// Submits the first part of a staged job, which has a buffer. Returns the job, unless that
    /// failed.
    fn begin(&self, mut feed: Feed, desk: &Arc<Desk>) -> Option<Feed> {
        feed.work.job().start();
        match feed.work.step(&self.shared) {
            Ok(begun) => {
                feed.begun = begun.map(|chunk| desk.lend(chunk));
                desk.give_back(feed.work.take_scratch());
                Some(feed)
            }
            Err(failure) => {
                let cargo = feed.work.into_cargo(Some(desk));
                self.watch(Task::Drain(Failed::new(cargo, failure)));
                None
            }
        }
    }

    pub(super) fn watch(&self, task: Task) {
        if let Some(watchers) = &self.watchers {
            watchers.send(task);
        }
    }
}
