//! The resources that a job needs until it has ended.

use std::sync::Arc;
use std::time::Duration;

use terrane_transfer::{CopyFailure, CopyJob};

use crate::engine::complete::orphans::{Abandoned, Lost};
use crate::engine::complete::progress::Count;
use crate::engine::path::{CopyPath, Direction};
use crate::engine::path::choice::Corrections;
use crate::engine::resources::block_lists::BlockLists;
use crate::engine::resources::device_mapping::Reach;
use crate::engine::resources::job_streams::Lanes;
use crate::engine::resources::scratch::Scratch;
use crate::engine::submit::direction_queue::Desk;
use crate::kernels::Kernels;

/// The resources that a job needs until it has ended.
pub(crate) struct Cargo {
    /// The streams drop first, so that the rest outlives the work on them.
    pub(crate) lanes: Lanes,
    /// A buffer that failed work may still use.
    pub(crate) scratch: Option<(Scratch, Arc<Desk>)>,
    pub(crate) lists: Option<BlockLists>,
    pub(crate) job: Box<CopyJob>,
    pub(crate) count: Arc<Count>,
    pub(crate) ends: [Arc<Reach>; 2],
    pub(crate) lesson: Option<Lesson>,
    /// The kernels must stay loaded while they run, even if the engine drops.
    pub(crate) kernels: Option<Kernels>,
}

impl Cargo {
    /// Finishes the job, which has no more work on the device.
    pub(crate) fn finish(self, result: Result<(), CopyFailure>) {
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
    pub(crate) fn abandon(self, failure: CopyFailure, lost: &Lost) {
        let Self { lanes, scratch, lists, job, count: _, ends, lesson: _, kernels } = self;
        let remains = job.give_up(failure);
        lost.keep(Abandoned { lanes, scratch, lists, remains, ends, kernels });
    }
}

/// The data for corrections of the calibration.
pub(crate) struct Lesson {
    pub(crate) corrections: Arc<Corrections>,
    pub(crate) direction: Direction,
    pub(crate) path: CopyPath,
    pub(crate) predicted: Duration,
}
