//! The end of a job, after its last work on the device.

use std::sync::Arc;

use terrane_transfer::CopyFailure;

use crate::engine::complete::in_flight::{DueTime, InFlight};
use crate::engine::complete::orphans::{Orphan, Orphans};
use crate::engine::resources::job_streams::StreamState;
use crate::engine::submit::submission::{NEAR, Submission};
use crate::runtime::event::Event;
use crate::runtime::stream::Stream;

impl Submission {
    /// The job in flight, whose chunks are all submitted. The error is a job without any work.
    pub(crate) fn into_in_flight(
        mut self: Box<Self>,
        due: Option<DueTime>,
    ) -> Result<Arc<InFlight>, Box<Self>> {
        let Some((end, _)) = self.marks.pop() else { return Err(self) };
        let is_far = |(_, bytes): &&(Event, u64)| self.submitted - bytes >= NEAR;
        let before_end = self.marks.iter().rev().find(is_far).map(|(event, _)| event.clone());
        let layers = std::mem::take(&mut self.layers);
        Ok(InFlight::new(self, end, before_end, layers, due))
    }

    /// Queries whether any work of the job may still be on the device. Never blocks.
    pub(crate) fn state(&mut self) -> StreamState {
        self.streams.state()
    }

    /// The stream with the end of a job that is submitted at once.
    pub(crate) fn stream(&self) -> Option<&Stream> {
        self.streams.first().map(|stream| &**stream)
    }

    /// Finishes the job, which has no more work on the device.
    pub(crate) fn finish(self: Box<Self>, result: Result<(), CopyFailure>) {
        let Self { mut streams, scratch, lists, sums, job, count, sampled, marks, .. } = *self;
        let Self { direction, path, ends, kernels, .. } = *self;
        streams.mark_idle();
        if result.is_ok() {
            // The next users of the buffers need not query these events.
            marks.iter().for_each(|(event, _)| event.mark_complete());
            match count {
                Some(count) => count.complete(),
                None => job.progress().add(job.plan().bytes()),
            }
            // The calibration predicts copies without checksums.
            if let Some(corrections) = sampled.filter(|_| sums.is_none()) {
                let (bytes, took) = (job.plan().bytes().get(), job.running_for());
                corrections.record(direction, path, bytes, job.predicted(), took);
            }
        }
        if let Some(sums) = sums.filter(|_| result.is_ok()) {
            sums.set(&job);
        }
        // The streams return to the pool before the caller is notified.
        drop((streams, lists));
        if let Some((scratch, queue)) = scratch {
            queue.give_back(scratch);
        }
        job.finish(result);
        drop((ends, kernels));
    }

    /// Ends a job whose work may never complete. `orphans` keeps the resources that the device may
    /// use.
    pub(crate) fn orphan(self: Box<Self>, failure: CopyFailure, orphans: &Orphans) {
        let Self { streams, scratch, lists, sums, job, ends, kernels, .. } = *self;
        let orphaned = job.orphan(failure);
        orphans.keep(Orphan { streams, scratch, lists, sums, orphaned, ends, kernels });
    }
}
