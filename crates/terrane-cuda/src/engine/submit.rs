//! What the thread that submits a job does of it: all, if that takes a few calls of the driver, or
//! its beginning.

use std::sync::Arc;
use std::time::Duration;

use terrane_transfer::{CopyJob, DeviceOrder};

use super::DeviceEngine;
use super::calibration::Direction;
use super::feeder::{Desk, Feed};
use super::flight::{Failed, due, engine_failure};
use super::options::CopyPath;
use super::streams::obey;
use super::watch::Task;
use super::work::Work;
use crate::error::CudaError;
use crate::event::{Event, Timing};
use crate::stream::Stream;

impl DeviceEngine {
    /// Puts a job on its way.
    ///
    /// # Errors
    ///
    /// The job, and why it has to end; nothing of it has been submitted.
    pub(super) fn dispatch(&self, job: CopyJob) -> Result<(), Box<(CopyJob, CudaError)>> {
        let plan = job.plan();
        let found = self.direction(plan).zip(CopyPath::from_name(job.path()));
        let ends = match self.reach(plan) {
            Ok(ends) => ends,
            Err(error) => return Err(Box::new((job, error))),
        };
        let (Some((direction, path)), Some(ends)) = (found, ends) else {
            let device = self.shared.context.device().id;
            return Err(Box::new((job, CudaError::NotReached { device })));
        };
        let order = job.terms().device_order;
        let mut work = Work::new(&self.shared, job, direction, path, ends)?;
        let gate = match self.order(order, &work) {
            Ok(gate) => gate,
            Err(error) => {
                let failed = Failed::new(work.into_cargo(None), engine_failure(error));
                self.watch(Task::Drain(failed));
                return Ok(());
            }
        };
        if work.job().plan().bytes().is_zero() {
            work.end_with(gate);
            self.submit_now(work, false, None);
        } else if work.is_small(&self.shared) {
            self.submit_now(work, gate.is_none(), None);
        } else {
            let predicted = work.job().predicted();
            self.feed(direction, Box::new(work), predicted, gate);
        }
        Ok(())
    }

    /// Makes the job's streams run after what its terms say. Answers an event behind that, unless
    /// it is known to have happened.
    fn order(&self, order: Option<DeviceOrder>, work: &Work) -> Result<Option<Event>, CudaError> {
        let Some(order @ (DeviceOrder::AfterStream(_) | DeviceOrder::AfterEvent(_))) = order else {
            return Ok(None);
        };
        let streams: smallvec::SmallVec<[&Stream; 2]> =
            work.streams().iter().map(|stream| &**stream).collect();
        obey(order, &self.shared.context, &streams)?;
        let Some(first) = streams.first() else { return Ok(None) };
        let gate = Event::new(&self.shared.context, Timing::Off)?;
        gate.record(first)?;
        Ok(if gate.is_complete()? { None } else { Some(gate) })
    }

    /// Submits all of a small job, which begins at once or when the device comes to it.
    /// A buffer that it has comes back to the desk.
    fn submit_now(&self, mut work: Work, at_once: bool, desk: Option<&Arc<Desk>>) {
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

    fn feed(
        &self,
        direction: Direction,
        work: Box<Work>,
        predicted: Duration,
        gate: Option<Event>,
    ) {
        let Some([to_device, to_host, between]) = &self.feeders else { return };
        let (queue, desk) = match direction {
            Direction::ToDevice => to_device,
            Direction::ToHost => to_host,
            Direction::WithinDevice | Direction::BetweenDevices => between,
        };
        let (seat, is_idle) = desk.enter();
        let mut feed = Feed { work, predicted, begun: None, seat };
        if is_idle && gate.is_none() && feed.work.needs_scratch() {
            let taken = desk.scratch().take_free();
            if let Some(scratch) = taken {
                feed.work.put_scratch(scratch);
                if feed.work.fits_one_buffer() {
                    // To wake the feeder would take as long as to do it.
                    feed.work.in_one_part();
                    return self.submit_now(*feed.work, true, Some(desk));
                }
                // The wire need not be idle while the feeder wakes.
                feed = match self.begin(feed, desk) {
                    Some(feed) => feed,
                    None => return,
                };
            }
        }
        // Should the threads be gone, the job drops here, and its caller is told.
        match gate {
            None => drop(queue.send(feed)),
            // It would hold buffers and a place in the queue while it waits for the device.
            Some(gate) => {
                if let Some(gates) = &self.gates {
                    let _ = gates.send(Task::Gate(gate, feed, queue.clone()));
                }
            }
        }
    }

    /// Submits the first part of a staged job, which has a buffer. Gives the job back, unless that
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
            // Should the watchers be gone, the job drops here, and its caller is told.
            let _ = watchers.send(task);
        }
    }
}
