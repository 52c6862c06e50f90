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
}

struct ArrivalsState {
    /// The number of requests that have not ended.
    left: usize,
    /// The number of results that the task has not taken.
    untaken: usize,
    /// The owner of the memory and the slots of the requests. The requests keep it through their sink,
    /// even if the task is dropped by a panic.
    ///
    /// It drops before the task gets the last result. So the I/O thread never frees memory of a
    /// caller after the end of the job. If the memory is Python's, that thread would wait for the
    /// GIL.
    keeps: Option<Arc<dyn Any + Send + Sync>>,
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
        self.release_incomplete(&[]);
    }

    /// Releases a hold whose holder did not write these blocks completely.
    pub(crate) fn release_incomplete(&self, blocks: &[u32]) {
        let hold = lock(&self.hold).take();
        if let Some(hold) = hold {
            hold.end_incomplete(blocks);
        }
    }
}

impl Arrivals {
    /// For so many requests, whose memory and slots `keeps` owns.
    pub(crate) fn new(requests: usize, keeps: Arc<dyn Any + Send + Sync>) -> Self {
        let (arrived, task) = (Vec::new(), None);
        let (left, untaken, keeps) = (requests, requests, Some(keeps));
        let state = ArrivalsState { left, untaken, keeps, arrived, task };
        Self { state: Mutex::new(state) }
    }

    /// Waits for one result or more. `None` once the task has taken all.
    pub(crate) async fn next(&self) -> Option<Vec<Arrived>> {
        poll_fn(|context| {
            let latest = context.waker().clone();
            let mut state = lock(&self.state);
            if !state.arrived.is_empty() || state.untaken == 0 {
                let arrived = std::mem::take(&mut state.arrived);
                state.untaken -= arrived.len();
                drop(state);
                return Poll::Ready((!arrived.is_empty()).then_some(arrived));
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
        let unused = {
            let mut state = lock(&self.state);
            state.left = state.left.saturating_sub(1);
            if state.left == 0 { state.keeps.take() } else { None }
        };
        drop(unused);
        lock(&self.state).arrived.push((index, result));
    }

    fn results_end(&self) {
        let task = lock(&self.state).task.take();
        if let Some(task) = task {
            task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    struct Counts(AtomicUsize);

    impl Wake for Counts {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_task_is_woken_once_for_several_results() {
        let arrivals = Arrivals::new(3, Arc::new(()));
        let woken = Arc::new(Counts(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&woken));
        let mut next = pin!(arrivals.next());
        let mut context = Context::from_waker(&waker);
        assert!(next.as_mut().poll(&mut context).is_pending());
        for index in 0..3 {
            arrivals.block_ended(index, Err(SlabFailure::Cancelled));
        }
        assert_eq!(woken.0.load(Ordering::SeqCst), 0);
        arrivals.results_end();
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
        let Poll::Ready(Some(arrived)) = next.poll(&mut context) else {
            panic!("three results are there")
        };
        assert_eq!(arrived.iter().map(|&(index, _)| index).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(matches!(pin!(arrivals.next()).poll(&mut context), Poll::Ready(None)));
    }

    #[test]
    fn the_memory_of_requests_is_dropped_before_the_last_result_arrives() {
        let keeps = Arc::new(());
        let arrivals = Arrivals::new(2, Arc::clone(&keeps) as Arc<dyn Any + Send + Sync>);
        let arrived = || lock(&arrivals.state).arrived.len();
        arrivals.block_ended(0, Err(SlabFailure::Cancelled));
        assert_eq!((arrived(), Arc::strong_count(&keeps)), (1, 2));
        arrivals.block_ended(1, Err(SlabFailure::Cancelled));
        assert_eq!((arrived(), Arc::strong_count(&keeps)), (2, 1));
    }
}
