//! What failed jobs leave behind while nobody can say whether the device still uses it.

use std::mem::{self, ManuallyDrop};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use terrane_transfer::Remains;

use super::feeder::Desk;
use super::lists::BlockLists;
use super::reach::Reach;
use super::scratch::Scratch;
use super::streams::{Lanes, Rest};
use crate::kernels::Kernels;

/// All that the device may still use of a job that was given up.
pub(super) struct Abandoned {
    pub(super) lanes: Lanes,
    /// With the desk that it goes back to.
    pub(super) scratch: Option<(Scratch, Arc<Desk>)>,
    pub(super) lists: Option<BlockLists>,
    /// The memory at both ends, and the claims on its blocks.
    pub(super) remains: Remains,
    pub(super) ends: [Arc<Reach>; 2],
    pub(super) kernels: Option<Kernels>,
}

impl Abandoned {
    /// Lets go of it, once nothing of it is on the device.
    fn let_go(self) {
        let Self { lanes, scratch, lists, remains, ends, kernels } = self;
        drop((lanes, lists));
        if let Some((scratch, desk)) = scratch {
            desk.give_back(Some(scratch));
        }
        drop((remains, ends, kernels));
    }
}

/// Such things of an engine, which are asked after from time to time.
#[derive(Default)]
pub(super) struct Lost {
    all: Mutex<Vec<Abandoned>>,
    /// As many as there are, for whoever only wants to know whether there are any.
    count: AtomicUsize,
}

impl Lost {
    pub(super) fn keep(&self, abandoned: Abandoned) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.all.lock().unwrap_or_else(PoisonError::into_inner).push(abandoned);
    }

    /// Lets go of what has come to rest meanwhile.
    pub(super) fn ask_again(&self) {
        // Relaxed: what is kept just now is asked after the next time.
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        // Asked without the lock, as what drops runs foreign code.
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
        // Memory that the device may write to is nobody's any more, for good: nobody drops it.
        let all = mem::take(&mut *self.all.lock().unwrap_or_else(PoisonError::into_inner));
        let _leaked = ManuallyDrop::new(all);
    }
}
