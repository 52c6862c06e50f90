//! Queued jobs that the engine's thread has not taken yet.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::sync::{lock, unpoisoned};
use terrane_transfer::CopyJob;

use crate::engine::error::RequestError;
use crate::engine::transfer::shared::SharedTransfer;

/// The queue between submitting threads and the engine's thread.
#[derive(Default)]
pub(in crate::engine) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<QueuedJob>,
    /// Another thread has requested a poll of all transfers.
    is_woken: bool,
    /// The engine has dropped.
    is_closed: bool,
    /// The engine's thread has ended, and accepts no more jobs.
    has_stopped: bool,
    /// The time at which the sleeping engine's thread wakes by itself.
    wakes_at: Option<Instant>,
}

/// A job that a submitting thread has queued.
pub(in crate::engine) enum QueuedJob {
    Transfer(Arc<SharedTransfer>),
    /// The transfer is no longer possible.
    Refused(CopyJob, RequestError),
}

/// The jobs and signals that the engine's thread has taken from the queue.
pub(super) struct QueueContents {
    pub(super) jobs: VecDeque<QueuedJob>,
    pub(super) is_woken: bool,
    pub(super) is_closed: bool,
}

impl Queue {
    pub(in crate::engine) fn push(&self, job: QueuedJob) {
        let mut state = self.lock();
        if state.has_stopped {
            drop(state);
            // Dropping a job reports to its waiting threads that its engine has stopped.
            return drop(job);
        }
        // The thread is not woken if it wakes by itself within the submitter's window.
        let is_soon_enough = match (&job, state.wakes_at) {
            (QueuedJob::Transfer(transfer), Some(wakes_at)) => {
                transfer.window_end().is_some_and(|window_end| wakes_at <= window_end)
            }
            _ => false,
        };
        state.jobs.push_back(job);
        drop(state);
        if !is_soon_enough {
            self.changed.notify_one();
        }
    }

    /// Makes the engine's thread poll all transfers.
    pub(in crate::engine) fn wake(&self) {
        self.lock().is_woken = true;
        self.changed.notify_one();
    }

    /// Records that the engine has dropped, so no more jobs are submitted.
    pub(in crate::engine) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_one();
    }

    /// Drops the queued jobs, and makes `push` drop later ones.
    fn stop(&self) {
        let mut state = self.lock();
        state.has_stopped = true;
        let dropped_jobs = std::mem::take(&mut state.jobs);
        drop(state);
        drop(dropped_jobs);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes the queued jobs. Waits for them at most this long; `None` has no limit. A close ends
    /// the wait, unless the caller knows of it.
    pub(super) fn take(&self, delay: Option<Duration>, knows_of_close: bool) -> QueueContents {
        let nothing = |state: &mut State| {
            state.jobs.is_empty() && !state.is_woken && (knows_of_close || !state.is_closed)
        };
        let mut state = self.lock();
        state = match delay {
            Some(Duration::ZERO) => {
                drop(state);
                thread::yield_now();
                self.lock()
            }
            Some(delay) if nothing(&mut state) => {
                state.wakes_at = Instant::now().checked_add(delay);
                let waited = self.changed.wait_timeout(state, delay);
                let mut state = unpoisoned(waited).0;
                state.wakes_at = None;
                state
            }
            Some(_) => state,
            None => unpoisoned(self.changed.wait_while(state, nothing)),
        };
        let jobs = std::mem::take(&mut state.jobs);
        let is_woken = std::mem::take(&mut state.is_woken);
        QueueContents { jobs, is_woken, is_closed: state.is_closed }
    }
}

/// Stops the queue when the engine's thread ends or unwinds, so that no thread waits for it.
pub(super) struct CloseOnDrop(pub(super) Arc<Queue>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}
