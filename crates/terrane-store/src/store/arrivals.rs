//! Results of disk requests, on their way from the I/O thread to the task of a job.

use std::any::Any;
use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use terrane_core::sync::lock;
use terrane_transfer::Hold;

use crate::slab::{SlabDone, SlabFailure, SlabSink};

/// The result of one request, by its index in the job.
pub(crate) type Arrived = (usize, Result<SlabDone, SlabFailure>);

/// Collects results until the task takes them.
pub(crate) struct Arrivals {
    state: Mutex<ArrivalsState>,
    /// The owner of the memory and the slots of the requests. The requests keep it through their sink,
    /// even if the task is dropped by a panic.
    _keeps: Arc<dyn Any + Send + Sync>,
}

#[derive(Default)]
struct ArrivalsState {
    arrived: Vec<Arrived>,
    task: Option<Waker>,
}

/// Keeps transfers from blocks that requests use.
///
/// The task releases it. After a panic in the task, it drops with the last request.
#[derive(Clone)]
pub(crate) struct SharedHold {
    hold: Arc<Mutex<Option<Hold>>>,
}

impl SharedHold {
    pub(crate) fn new(hold: Option<Hold>) -> Self {
        Self { hold: Arc::new(Mutex::new(hold)) }
    }

    pub(crate) fn release(&self) {
        let hold = lock(&self.hold).take();
        drop(hold);
    }
}

impl Arrivals {
    pub(crate) fn new(keeps: Arc<dyn Any + Send + Sync>) -> Self {
        Self { state: Mutex::default(), _keeps: keeps }
    }

    /// Waits for one result or more.
    pub(crate) async fn next(&self) -> Vec<Arrived> {
        poll_fn(|context| {
            let latest = context.waker().clone();
            let mut state = lock(&self.state);
            if !state.arrived.is_empty() {
                let arrived = std::mem::take(&mut state.arrived);
                drop(state);
                return Poll::Ready(arrived);
            }
            let before = state.task.replace(latest);
            drop(state);
            drop(before);
            Poll::Pending
        })
        .await
    }
}

impl SlabSink for Arrivals {
    fn block_ended(&self, index: usize, result: Result<SlabDone, SlabFailure>) {
        let task = {
            let mut state = lock(&self.state);
            state.arrived.push((index, result));
            state.task.take()
        };
        if let Some(task) = task {
            task.wake();
        }
    }
}
