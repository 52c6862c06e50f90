//! Controls of a running job: a cancellation, its deadline, a higher priority.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use terrane_core::sync::lock;
use terrane_transfer::Ticket;

use crate::slab::{JobId, Priority, Slabs};
use crate::store::job::executor::{Executor, Timer};
use crate::store::job::layers::LayerArrivals;
use crate::store::job::outcome::OutcomeCell;
use crate::store::job::result::BlockResult;

/// The controls of one job, and its outcome: the caller and the task share them.
pub(crate) struct JobControl {
    pub(crate) id: JobId,
    pub(crate) outcome: OutcomeCell,
    pub(crate) deadline: Option<Instant>,
    /// Set before the caller gets the job, if it asked for layers. Few jobs have it, and all allocate
    /// this value.
    layers: OnceLock<Box<LayerArrivals>>,
    executor: Executor,
    slabs: Option<Slabs>,
    is_cancelled: AtomicBool,
    priority: AtomicU8,
    state: Mutex<ControlState>,
}

/// The waits and copies of a job that a cancellation or a raise acts on.
#[derive(Default)]
struct ControlState {
    /// Wakes the task while it waits.
    task: Option<Waker>,
    /// Copies between endpoints in flight.
    tickets: SmallVec<[Ticket; 1]>,
    /// The queue that the job waits in, and its number there.
    waits: Option<JobWaits>,
}

/// A queue of jobs in the order of their priority.
pub(crate) trait PriorityQueue: Send + Sync {
    /// Raises the priority of the job with this number.
    fn raise(&self, arrival: u64, priority: Priority);
}

type JobWaits = (Arc<dyn PriorityQueue>, u64);

impl JobControl {
    pub(crate) fn new(
        (id, keys): (JobId, usize),
        deadline: Option<Instant>,
        priority: Priority,
        executor: &Executor,
        slabs: Option<&Slabs>,
    ) -> Self {
        Self {
            id,
            outcome: OutcomeCell::new(keys),
            deadline,
            layers: OnceLock::new(),
            executor: executor.clone(),
            slabs: slabs.cloned(),
            is_cancelled: AtomicBool::new(false),
            priority: AtomicU8::new(priority as u8),
            state: Mutex::default(),
        }
    }

    pub(crate) fn priority(&self) -> Priority {
        match self.priority.load(Ordering::Relaxed) {
            0 => Priority::Low,
            1 => Priority::Normal,
            _ => Priority::High,
        }
    }

    /// Whether the job has to stop now, and why.
    pub(crate) fn stopped(&self) -> Option<BlockResult> {
        if self.is_cancelled.load(Ordering::Acquire) {
            return Some(BlockResult::Cancelled);
        }
        let has_passed = self.deadline.is_some_and(|deadline| deadline <= Instant::now());
        has_passed.then_some(BlockResult::TimedOut)
    }

    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        let task = lock(&self.state).task.take();
        if let Some(slabs) = &self.slabs {
            slabs.cancel(self.id);
        }
        self.cancel_copies();
        if let Some(task) = task {
            task.wake();
        }
    }

    pub(crate) fn raise(&self, priority: Priority) {
        let before = self.priority.fetch_max(priority as u8, Ordering::Relaxed);
        if before >= priority as u8 {
            return;
        }
        if let Some(slabs) = &self.slabs {
            slabs.raise(self.id, priority);
        }
        let waits = lock(&self.state).waits.clone();
        if let Some((table, arrival)) = waits {
            table.raise(arrival, priority);
        }
    }

    /// Adds a copy that is cancelled with the job.
    pub(crate) fn add_ticket(&self, ticket: Ticket) {
        let mut state = lock(&self.state);
        if !state.tickets.is_empty() {
            state.tickets.retain(|ticket| !ticket.has_ended());
        }
        state.tickets.push(ticket);
        drop(state);
        // A cancellation that missed the ticket has set this before it read the tickets.
        if self.is_cancelled.load(Ordering::Acquire) {
            self.cancel_copies();
        }
    }

    fn cancel_copies(&self) {
        let tickets = lock(&self.state).tickets.clone();
        tickets.iter().for_each(Ticket::cancel);
    }

    /// Makes the job report its layers.
    pub(crate) fn report_layers(&self, layers: LayerArrivals) {
        // It is set once, before the job begins.
        let _ = self.layers.set(Box::new(layers));
    }

    pub(crate) fn layers(&self) -> Option<&LayerArrivals> {
        self.layers.get().map(|layers| &**layers)
    }

    pub(crate) fn set_waits(&self, waits: Option<JobWaits>) {
        let before = std::mem::replace(&mut lock(&self.state).waits, waits);
        drop(before);
    }

    /// Waits for this time, a cancellation or the deadline.
    pub(crate) async fn pause(&self, time: Duration) -> Result<(), BlockResult> {
        let ends = Instant::now() + time;
        let mut timer: Option<Timer> = None;
        let waited = poll_fn(|context| {
            if ends <= Instant::now() {
                return Poll::Ready(());
            }
            timer.get_or_insert_with(|| self.executor.timer(ends, context.waker().clone()));
            Poll::Pending
        });
        self.until(waited).await
    }

    /// Waits for a future, a cancellation or the deadline.
    pub(crate) async fn until<F: Future>(&self, future: F) -> Result<F::Output, BlockResult> {
        let mut future = pin!(future);
        let mut timer: Option<Timer> = None;
        poll_fn(|context| {
            if let Poll::Ready(output) = future.as_mut().poll(context) {
                return Poll::Ready(Ok(output));
            }
            let latest = context.waker().clone();
            let before = lock(&self.state).task.replace(latest);
            drop(before);
            if let Some(stopped) = self.stopped() {
                return Poll::Ready(Err(stopped));
            }
            if let (None, Some(deadline)) = (&timer, self.deadline) {
                timer = Some(self.executor.timer(deadline, context.waker().clone()));
            }
            Poll::Pending
        })
        .await
    }
}
