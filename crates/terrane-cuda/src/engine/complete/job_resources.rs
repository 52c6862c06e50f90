//! The resources that a job needs until it has ended.

use std::sync::Arc;
use std::time::Duration;

use terrane_transfer::calibration::{CopyPath, Direction};
use terrane_transfer::{CopyFailure, CopyJob};

use crate::engine::checksums::job_sums::JobSums;
use crate::engine::complete::orphans::{Orphan, Orphans};
use crate::engine::complete::progress::JobProgress;
use crate::engine::path::choice::Corrections;
use crate::engine::resources::block_lists::BlockLists;
use crate::engine::resources::device_mapping::DeviceMapping;
use crate::engine::resources::job_streams::JobStreams;
use crate::engine::resources::scratch::Scratch;
use crate::engine::submit::direction_queue::DirectionQueue;
use crate::kernels::Kernels;

/// The resources that a job needs until it has ended.
pub(crate) struct JobResources {
    /// The streams drop first, so that the rest outlives the work on them.
    pub(crate) streams: JobStreams,
    /// A buffer that failed work may still use.
    pub(crate) scratch: Option<(Scratch, Arc<DirectionQueue>)>,
    pub(crate) lists: Option<BlockLists>,
    /// The checksums that kernels compute.
    pub(crate) sums: Option<Box<JobSums>>,
    pub(crate) job: CopyJob,
    /// The count of the chunks that have ended; `None` if no chunk was counted.
    pub(crate) count: Option<Arc<JobProgress>>,
    pub(crate) ends: [Arc<DeviceMapping>; 2],
    pub(crate) sample: Option<PathSample>,
    /// The kernels must stay loaded while they run, even if the engine drops.
    pub(crate) kernels: Option<Kernels>,
}

impl JobResources {
    /// Finishes the job, which has no more work on the device.
    pub(crate) fn finish(self, result: Result<(), CopyFailure>) {
        let Self { mut streams, scratch, lists, sums, job, count, ends, sample, kernels } = self;
        streams.mark_idle();
        if result.is_ok() {
            match count {
                Some(count) => count.complete(),
                None => job.progress().add(job.plan().bytes()),
            }
            if let Some(sample) = sample {
                let (bytes, took) = (job.plan().bytes().get(), job.running_for());
                let PathSample { corrections, direction, path, predicted } = sample;
                corrections.record(direction, path, bytes, predicted, took);
            }
        }
        if let Some(sums) = sums.filter(|_| result.is_ok()) {
            sums.set(&job);
        }
        // The streams return to the pool before the caller is notified.
        drop((streams, lists));
        if let Some((scratch, queue)) = scratch {
            queue.give_back(Some(scratch));
        }
        job.finish(result);
        drop((ends, kernels));
    }

    /// Ends a job whose work may never complete. `orphans` keeps the resources that the device may
    /// use.
    pub(crate) fn orphan(self, failure: CopyFailure, orphans: &Orphans) {
        let Self { streams, scratch, lists, sums, job, count: _, ends, sample: _, kernels } = self;
        let orphaned = job.orphan(failure);
        orphans.keep(Orphan { streams, scratch, lists, sums, orphaned, ends, kernels });
    }
}

/// A measured transfer, which corrects the calibration.
pub(crate) struct PathSample {
    pub(crate) corrections: Arc<Corrections>,
    pub(crate) direction: Direction,
    pub(crate) path: CopyPath,
    pub(crate) predicted: Duration,
}
