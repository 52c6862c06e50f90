//! Resources of failed jobs, kept while the driver does not say whether the device still uses them.

use std::mem::{self, ManuallyDrop};
use std::sync::{Arc, Mutex, PoisonError};
use std::sync::atomic::{AtomicUsize, Ordering};

use terrane_transfer::Remains;

use crate::engine::resources::block_lists::BlockLists;
use crate::engine::resources::device_mapping::Reach;
use crate::engine::resources::job_streams::{Lanes, Rest};
use crate::engine::resources::scratch::Scratch;
use crate::engine::submit::direction_queue::Desk;
use crate::kernels::Kernels;

/// All resources of an abandoned job that the device may still use.
pub(crate) struct Abandoned {
    pub(crate) lanes: Lanes,
    /// The buffer, with the desk that it returns to.
    pub(crate) scratch: Option<(Scratch, Arc<Desk>)>,
    pub(crate) lists: Option<BlockLists>,
    /// The memory at both ends, and the claims on its blocks.
    pub(crate) remains: Remains,
    pub(crate) ends: [Arc<Reach>; 2],
    pub(crate) kernels: Option<Kernels>,
}

impl Abandoned {
    /// Releases the resources, once the device uses none of them.
    fn let_go(self) {
        let Self { lanes, scratch, lists, remains, ends, kernels } = self;
        drop((lanes, lists));
        if let Some((scratch, desk)) = scratch {
            desk.give_back(Some(scratch));
        }
        drop((remains, ends, kernels));
    }
}

/// The abandoned jobs of an engine, which are checked from time to time.
#[derive(Default)]
pub(crate) struct Lost {
    all: Mutex<Vec<Abandoned>>,
    /// Their number, for callers that only check whether there are any.
    count: AtomicUsize,
}

impl Lost {
    pub(crate) fn keep(&self, abandoned: Abandoned) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.all.lock().unwrap_or_else(PoisonError::into_inner).push(abandoned);
    }

    /// Releases the jobs that have come to rest meanwhile.
    pub(crate) fn ask_again(&self) {
        // Relaxed: a job that is added just now is checked the next time.
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        // Queried without the lock, because the drops run foreign code.
        let all = mem::take(&mut *self.all.lock().unwrap_or_else(PoisonError::into_inner));
        for mut abandoned in all {
            self.count.fetch_sub(1, Ordering::Relaxed);
            match abandoned.lanes.rest() {
                Rest::Come => abandoned.let_go(),
                Rest::NotYet | Rest::Unknown(_) => self.keep(abandoned),
            }
        }
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        self.ask_again();
        // The device may still write to this memory, so it is never freed.
        let all = mem::take(&mut *self.all.lock().unwrap_or_else(PoisonError::into_inner));
        let _leaked = ManuallyDrop::new(all);
    }
}
