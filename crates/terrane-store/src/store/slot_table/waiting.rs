//! Jobs that wait for slots.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

use terrane_core::convert::to_usize;
use terrane_core::sync::lock;

use crate::slab::Priority;
use crate::store::job::control::JobControl;
use crate::store::job::one_shot::OneShot;
use crate::store::job::result::NoRoom;
use crate::store::slot_table::{MUST_BE_WRITTEN, SlotTable, SlotTableState};

/// The time between two checks of slots that jobs wait for and orphaned copies claim. The end of
/// such a copy wakes no thread.
pub(crate) const BETWEEN_CHECKS: Duration = Duration::from_millis(10);

/// The slots that a waiting job receives.
pub(super) type Grant = OneShot<Result<Vec<u32>, NoRoom>>;

/// A job that waits for slots. On drop it leaves the queue, and frees slots that were granted
/// meanwhile.
pub(super) struct WaitingForSlots {
    pub(super) table: Arc<SlotTable>,
    pub(super) arrival: u64,
    pub(super) grant: Arc<Grant>,
}

impl Drop for WaitingForSlots {
    fn drop(&mut self) {
        let mut state = lock(&self.table.state);
        let found = state.waiters.keys().find(|(_, number)| *number == self.arrival).copied();
        let waiter = found.and_then(|key| state.waiters.remove(&key));
        drop(state);
        if waiter.is_some() {
            self.table.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        let unused = self.grant.take();
        if let Some(Ok(slots)) = unused {
            self.table.free(slots);
        } else if waiter.is_some() {
            // The next one may fit.
            self.table.retry_for_waiters();
        }
    }
}

impl SlotTable {
    /// The highest priority of a job that waits.
    pub(crate) fn waiting_priority(&self) -> Option<Priority> {
        lock(&self.state).waiters.keys().next().map(|(Reverse(priority), _)| *priority)
    }

    /// The number of jobs that wait.
    pub(crate) fn waiters(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Grants slots whose orphaned copies have ended, as long as jobs wait while copies claim slots.
    pub(crate) async fn check_claims(&self, control: &JobControl) {
        loop {
            let paused = control.pause(BETWEEN_CHECKS).await;
            let continues = {
                let mut state = lock(&self.state);
                state.is_checking = paused.is_ok() && state.needs_check();
                state.is_checking
            };
            // Last: a snapshot may have freed the slots, and wakes no job.
            self.retry();
            if !continues {
                return;
            }
        }
    }

    /// Ends the wait of jobs that need slots of dirty blocks, because the slower tier cannot take
    /// those. The others wait for slots that jobs use. No lock may be held.
    pub(crate) fn refuse_waiters(&self) {
        let mut woken = Vec::new();
        let mut state = lock(&self.state);
        let marks = self.dirty.iter().take(to_usize(state.limit.into()));
        let dirty = marks.filter(|mark| mark.load(Ordering::Acquire) == MUST_BE_WRITTEN).count();
        let slots = state.slots().saturating_sub(dirty);
        for (_, waiter) in state.waiters.extract_if(.., |_, waiter| waiter.count > slots) {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            let too_small = NoRoom::TierTooSmall { requested: waiter.count, slots };
            woken.extend(waiter.grant.put(Err(too_small)));
        }
        drop(state);
        woken.into_iter().for_each(Waker::wake);
        self.retry();
    }

    /// The store does not check the claimed slots, because it closes.
    pub(crate) fn end_check(&self) {
        lock(&self.state).is_checking = false;
    }
}

impl SlotTableState {
    /// Whether a check has to begin now.
    pub(super) fn begin_check(&mut self) -> bool {
        let begins = !self.is_checking && self.needs_check();
        self.is_checking |= begins;
        begins
    }

    fn needs_check(&self) -> bool {
        !self.waiters.is_empty() && !self.claimed.is_empty()
    }
}
