//! A job's place among those that wait for slots.

use std::future::poll_fn;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use terrane_core::sync::lock;

use crate::store::result::NoRoom;
use crate::store::room::Room;

/// What a job that waits receives.
#[derive(Default)]
pub(super) struct Grant {
    pub(super) result: Option<Result<Vec<u32>, NoRoom>>,
    pub(super) task: Option<Waker>,
}

/// A job that waits for slots. Dropping it gives up the place, and the slots if they came.
pub(super) struct WaitingForRoom {
    pub(super) room: Arc<Room>,
    pub(super) arrival: u64,
    pub(super) grant: Arc<Mutex<Grant>>,
}

impl WaitingForRoom {
    pub(super) async fn granted(&self) -> Result<Vec<u32>, NoRoom> {
        poll_fn(|context| {
            let latest = context.waker().clone();
            let mut grant = lock(&self.grant);
            if let Some(result) = grant.result.take() {
                drop(grant);
                return Poll::Ready(result);
            }
            let before = grant.task.replace(latest);
            drop(grant);
            drop(before);
            Poll::Pending
        })
        .await
    }
}

impl Drop for WaitingForRoom {
    fn drop(&mut self) {
        let mut state = lock(&self.room.state);
        let found = state.waiters.keys().find(|(_, number)| *number == self.arrival).copied();
        let waiter = found.and_then(|key| state.waiters.remove(&key));
        drop(state);
        if waiter.is_some() {
            self.room.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        let unused = lock(&self.grant).result.take();
        if let Some(Ok(slots)) = unused {
            self.room.free(slots);
        } else if waiter.is_some() {
            // The next one may fit.
            self.room.retry_for_waiters();
        }
    }
}
