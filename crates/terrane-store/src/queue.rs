//! Completion queues, which receive the outcomes of jobs, with a descriptor for event loops.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};
use terrane_core::OwnerProcess;
use terrane_core::sync::{lock, wait_until};

use crate::QueueError;

/// Receives values as jobs end, in the order of their ends.
///
/// Each job takes a place of the queue when it is submitted, and keeps it until its value has been
/// taken. So a queue that no thread drains refuses further jobs, and its memory is bounded.
///
/// [`as_fd`](AsFd::as_fd) returns an event descriptor that is readable while the queue has values:
/// for `poll`, `epoll` and asyncio. Do not read from it; [`try_take`](Self::try_take) clears it.
///
/// Cloning it shares the queue. In a forked process the queue of its parent is empty and takes no job.
#[derive(Clone)]
pub struct CompletionQueue<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    /// A forked process shares the descriptor, so it must not clear it.
    owner: OwnerProcess,
    state: Mutex<State<T>>,
    arrived: Condvar,
    /// Its counter is 1 while there are values, and 0 otherwise.
    event: OwnedFd,
    capacity: usize,
}

struct State<T> {
    values: VecDeque<T>,
    /// The jobs that have not ended.
    jobs: usize,
}

/// A place in a queue, for one job. Dropping it frees the place without a value.
pub struct QueuePlace<T> {
    shared: Arc<Shared<T>>,
    is_delivered: bool,
}

impl<T> CompletionQueue<T> {
    /// A queue for this many jobs and values together.
    ///
    /// # Errors
    ///
    /// [`QueueError::NoCapacity`] if `capacity` is zero; [`QueueError::NoDescriptor`] if the process has
    /// no descriptor left.
    pub fn new(capacity: usize) -> Result<Self, QueueError> {
        if capacity == 0 {
            return Err(QueueError::NoCapacity);
        }
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(|cause| QueueError::NoDescriptor { errno: cause.raw_os_error() })?;
        let state = Mutex::new(State { values: VecDeque::new(), jobs: 0 });
        let (owner, arrived) = (OwnerProcess::current(), Condvar::new());
        Ok(Self { shared: Arc::new(Shared { owner, state, arrived, event, capacity }) })
    }

    /// The number of jobs and values that the queue has room for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.shared.capacity
    }

    /// The number of values that wait to be taken.
    #[must_use]
    pub fn len(&self) -> usize {
        if self.shared.owner.is_current() { lock(&self.shared.state).values.len() } else { 0 }
    }

    /// Whether the queue belongs to this process.
    pub(crate) fn is_own(&self) -> bool {
        self.shared.owner.is_current()
    }

    /// Whether no value waits to be taken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes a place for one job.
    ///
    /// # Errors
    ///
    /// [`QueueError::Full`] if jobs and values reach the capacity; [`QueueError::Forked`].
    pub fn reserve(&self) -> Result<QueuePlace<T>, QueueError> {
        self.shared.owner.check()?;
        let mut state = lock(&self.shared.state);
        let (jobs, values) = (state.jobs, state.values.len());
        if jobs + values >= self.shared.capacity {
            return Err(QueueError::Full { capacity: self.shared.capacity, jobs, values });
        }
        state.jobs += 1;
        Ok(QueuePlace { shared: Arc::clone(&self.shared), is_delivered: false })
    }

    /// Takes the oldest value; `None` if there is none.
    pub fn try_take(&self) -> Option<T> {
        if !self.shared.owner.is_current() {
            return None;
        }
        self.shared.take(&mut lock(&self.shared.state))
    }

    /// Moves all values into `taken`, the oldest first, and returns their number.
    pub fn take_all(&self, taken: &mut Vec<T>) -> usize {
        if !self.shared.owner.is_current() {
            return 0;
        }
        let mut state = lock(&self.shared.state);
        let count = state.values.len();
        taken.extend(state.values.drain(..));
        if count > 0 {
            self.shared.clear();
        }
        count
    }

    /// Blocks until there is a value, and takes it; until `deadline` if one is stated. Returns
    /// `None` at the deadline, and at once if the queue has neither jobs nor values.
    pub fn wait(&self, deadline: Option<Instant>) -> Option<T> {
        if !self.shared.owner.is_current() {
            return None;
        }
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(value) = self.shared.take(&mut state) {
                return Some(value);
            }
            if state.jobs == 0 {
                return None;
            }
            state = wait_until(&self.shared.arrived, state, deadline).ok()?;
        }
    }
}

impl<T> Shared<T> {
    fn take(&self, state: &mut State<T>) -> Option<T> {
        let value = state.values.pop_front()?;
        if state.values.is_empty() {
            self.clear();
        }
        Some(value)
    }

    /// Wakes a thread that waits for a value. After the last job it wakes all of them: no further
    /// value comes.
    fn wake(&self, is_last: bool) {
        if is_last {
            self.arrived.notify_all();
        } else {
            self.arrived.notify_one();
        }
    }

    /// Makes the descriptor unreadable, under the lock.
    fn clear(&self) {
        // The counter is 1, so the read neither fails nor blocks.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}

impl<T> QueuePlace<T> {
    /// Delivers the value of the job that has the place.
    pub fn deliver(mut self, value: T) {
        self.is_delivered = true;
        if !self.shared.owner.is_current() {
            return;
        }
        let mut state = lock(&self.shared.state);
        state.jobs -= 1;
        if state.values.is_empty() {
            // The counter is 0, so the write neither fails nor blocks.
            let _ = rustix::io::write(&self.shared.event, &1_u64.to_ne_bytes());
        }
        state.values.push_back(value);
        let is_last = state.jobs == 0;
        drop(state);
        self.shared.wake(is_last);
    }
}

impl<T> Drop for QueuePlace<T> {
    fn drop(&mut self) {
        if self.is_delivered || !self.shared.owner.is_current() {
            return;
        }
        let mut state = lock(&self.shared.state);
        state.jobs -= 1;
        let is_last = state.jobs == 0;
        drop(state);
        if is_last {
            self.shared.wake(is_last);
        }
    }
}

impl<T> AsFd for CompletionQueue<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }
}

impl<T> fmt::Debug for CompletionQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.shared.owner.is_current() {
            return f.debug_struct("CompletionQueue").finish_non_exhaustive();
        }
        let state = lock(&self.shared.state);
        let (jobs, values) = (state.jobs, state.values.len());
        drop(state);
        f.debug_struct("CompletionQueue")
            .field("jobs", &jobs)
            .field("values", &values)
            .field("capacity", &self.shared.capacity)
            .finish_non_exhaustive()
    }
}

terrane_core::debug_fields!(QueuePlace<T> {});
