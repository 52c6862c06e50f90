//! Transfers that the engine's thread and waiting threads advance, one thread at a time.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use terrane_core::sync::attempted;
use terrane_transfer::{CopyJob, WaiterProgress};

use super::orphaned::OrphanedRequests;
use super::{NixlTransfer, TransferProgress};
use crate::bindings::process;
use crate::engine::context::EngineContext;
use crate::engine::route::ReservedRoute;
use crate::engine::thread::queue::Queue;

/// The time for which the engine's thread leaves a new transfer to the submitting thread, which
/// usually waits next. Otherwise the engine's thread would wake, copy, and then have to wake the
/// waiting thread. If it woke on the submitter's processor, the submitter could not even begin to
/// wait.
///
/// It is longer than the time from a submission to a wait, and as long as a wake-up.
pub(in crate::engine) const SUBMITTER_WINDOW: Duration = Duration::from_micros(100);

/// The interval at which the engine's thread polls a transfer that another thread advances. A
/// thread that waits for the end stays until then, or reports that it stops. It stops without a
/// report only if it unwinds.
const RECHECK: Duration = Duration::from_millis(20);

/// The same interval if a thread may wait only for a layer, and stops without a report once the
/// layer is complete.
const RECHECK_LAYERS: Duration = Duration::from_millis(1);

/// A transfer that the first available thread advances: a waiting thread or, after the [submitter's
/// window](SUBMITTER_WINDOW), the engine's thread.
///
/// The lock is held while NIXL posts and polls, and while the job is finished, which runs foreign
/// code. So no thread ever waits for the lock. If it is locked, another thread advances the
/// transfer, or an outer call on this thread does.
pub(in crate::engine) struct SharedTransfer {
    state: Mutex<State>,
    /// Until this time, only the submitting thread advances it.
    window_end: Instant,
    /// A thread that does not wait here has requested the engine's thread, which ends the window.
    is_requested: AtomicBool,
    /// The time for which the engine's thread leaves it to another thread.
    recheck: Duration,
    context: Arc<EngineContext>,
    /// Dangling once the engine's thread has ended.
    queue: Weak<Queue>,
}

enum State {
    Active(Box<NixlTransfer>),
    /// The engine's thread polls the requests of an orphaned transfer.
    Ended(Option<Box<OrphanedRequests>>),
}

/// The result of advancing a transfer on the engine's thread.
pub(in crate::engine) enum AdvanceResult {
    /// Only the submitting thread advances it until this time.
    LeftToSubmitter(Instant),
    /// Another thread advances it. The engine's thread retries after this delay, in case that
    /// thread has stopped.
    AdvancedByOtherThread(Duration),
    Unchanged,
    /// A request was posted or has ended.
    Changed,
    /// The transfer has ended, and these requests have not.
    Ended(Option<Box<OrphanedRequests>>),
}

impl SharedTransfer {
    /// Creates a transfer that has not started. Threads that wait for the job can advance it from
    /// now on.
    pub(in crate::engine) fn new(
        job: CopyJob,
        reserved: ReservedRoute,
        context: &Arc<EngineContext>,
        queue: &Arc<Queue>,
    ) -> Arc<Self> {
        let recheck = if job.options().layer_by_layer { RECHECK_LAYERS } else { RECHECK };
        let transfer = NixlTransfer::new(job, reserved, &context.options, &context.prepared);
        let shared = Arc::new(Self {
            state: Mutex::new(State::Active(Box::new(transfer))),
            window_end: Instant::now() + SUBMITTER_WINDOW,
            is_requested: AtomicBool::new(false),
            recheck,
            context: Arc::clone(context),
            queue: Arc::downgrade(queue),
        });
        // No other thread has a reference yet.
        if let Ok(state) = shared.state.try_lock()
            && let State::Active(transfer) = &*state
        {
            transfer.let_waiters_advance(shared.clone());
        }
        shared
    }

    /// The time until which only the submitting thread advances it, unless another thread has
    /// requested the engine's thread.
    pub(in crate::engine) fn window_end(&self) -> Option<Instant> {
        // A thread that requests this later also wakes the engine's thread later.
        (!self.is_requested.load(Ordering::Relaxed)).then_some(self.window_end)
    }

    /// Advances the transfer on the engine's thread, unless another thread does so now.
    pub(in crate::engine) fn advance_on_engine(&self, now: Instant) -> AdvanceResult {
        // A relaxed load suffices: a thread that requests this one then wakes it, under a lock that
        // this thread takes before it advances.
        if let Some(until) = self.window_end().filter(|until| now < *until) {
            return AdvanceResult::LeftToSubmitter(until);
        }
        let Some((mut state, changed)) = self.advance() else {
            return AdvanceResult::AdvancedByOtherThread(self.recheck);
        };
        match &mut *state {
            State::Active(_) if changed => AdvanceResult::Changed,
            State::Active(_) => AdvanceResult::Unchanged,
            State::Ended(orphaned) => AdvanceResult::Ended(orphaned.take()),
        }
    }

    /// Advances the transfer and returns whether anything has changed; `None` if another thread
    /// advances it.
    fn advance(&self) -> Option<(MutexGuard<'_, State>, bool)> {
        if process::is_forked() {
            return None;
        }
        // After a panic, the state can still be advanced, or has ended.
        let mut state = attempted(self.state.try_lock())?;
        let State::Active(transfer) = &mut *state else { return Some((state, false)) };
        let orphaned = match transfer.advance(&self.context.agent, &self.context.rates) {
            TransferProgress::Unchanged => return Some((state, false)),
            TransferProgress::Changed => return Some((state, true)),
            TransferProgress::Ended => None,
            TransferProgress::Orphaned(orphaned) => Some(orphaned),
        };
        *state = State::Ended(orphaned);
        Some((state, true))
    }

    /// Makes the engine's thread advance the transfer.
    fn request_engine_thread(&self) {
        if process::is_forked() {
            return;
        }
        self.is_requested.store(true, Ordering::Relaxed);
        if let Some(queue) = self.queue.upgrade() {
            queue.wake();
        }
    }
}

impl WaiterProgress for SharedTransfer {
    /// Does not poll, because polling a request may copy for as long as there are bytes to copy. A
    /// caller that only polls does not wait, so the engine's thread starts.
    fn poll(&self) {
        if !self.is_requested.load(Ordering::Relaxed) {
            self.request_engine_thread();
        }
    }

    fn poll_blocking(&self) -> bool {
        self.advance().is_some_and(|(_, changed)| changed)
    }

    /// The caller is about to sleep, so the engine's thread takes over.
    fn expected_end(&self) -> Option<Range<Instant>> {
        self.request_engine_thread();
        None
    }
}
