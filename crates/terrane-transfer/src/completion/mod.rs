//! The caller's end of a transfer in flight.

pub(crate) mod end_sink;
pub(crate) mod layers;
pub(crate) mod progress;
pub(crate) mod set;
pub(crate) mod waiter_progress;

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
#[cfg(not(loom))]
use std::time::Instant;

use terrane_core::{ByteCount, OwnerProcess};

use crate::engine::finalizer::OutcomeSink;
use crate::error::TransferError;
use crate::explain::Report;
use crate::hazard::ticket::Ticket;
use crate::sync::{Condvar, Mutex, MutexGuard, lock, wait_at_most};
use layers::Layers;
use progress::CopyProgress;
use waiter_progress::{Invitation, WaiterPolling, WaiterProgress};

/// A transfer in flight.
///
/// Wait for it ([`wait`](Self::wait), [`wait_until`](Self::wait_until)), poll it
/// ([`has_ended`](Self::has_ended)), or `.await` it on any runtime. The transfer owns both ends and
/// the caller's guard until the copy has ended. So a completion that is dropped, leaked or
/// cancelled half-way frees nothing under a running copy: the copy continues, and the guard drops
/// after it.
///
/// If the engine invites waiting threads ([`WaiterProgress`]), a thread that waits polls the engine
/// for a while before it sleeps. A thread that calls `has_ended` polls it once. So the end of a
/// transfer may run on the caller's thread. It drops what the transfer owns, and starts transfers
/// that waited for it. These drops, and wakers, must not wait for another transfer
/// ([`TransferManager::submit`](crate::TransferManager::submit) explains why).
///
/// `completion.await` returns the guard and the result. Combinators that need futures, such as
/// `join_all`, get [`into_future`](IntoFuture::into_future). The completion itself is no future:
/// otherwise a transfer whose outcome has been returned could be awaited again, and would never be
/// ready.
///
/// ```
/// # use terrane_transfer::{Completion, Outcome, TransferError};
/// # async fn example(completion: Completion<Vec<u32>>) -> Result<(), TransferError> {
/// let ticket = completion.ticket(); // Its `cancel` stops the transfer.
/// let Outcome { guard, result } = completion.await;
/// match result {
///     Ok(report) => println!("{guard:?}: {report}"),
///     Err(TransferError::Cancelled { started, .. }) => println!("cancelled; {started}"),
///     Err(other) => return Err(other),
/// }
/// # drop(ticket);
/// # Ok(())
/// # }
/// ```
///
/// In a forked child, a completion of the parent reports at once that the transfer has ended, with
/// [`TransferError::LostByFork`].
#[must_use = "dropping a completion discards the result; the transfer continues"]
pub struct Completion<G> {
    shared: Arc<SharedCompletion<G>>,
    ticket: Ticket,
    progress: Arc<CopyProgress>,
    layers: Option<Layers>,
    spin: Duration,
}

/// How a transfer ended: the result and, in either case, the caller's guard.
#[must_use = "the result may be an error"]
pub struct Outcome<G> {
    /// The guard that the caller lent to the transfer.
    pub guard: G,
    /// The report of the copy, or the error.
    pub result: Result<Report, TransferError>,
}

// The guard need not be `Debug`: only the result is shown.
terrane_core::debug_fields!(Outcome<G> { result });

impl<G> Completion<G> {
    /// Whether the transfer has ended, successfully or not.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        if self.shared.is_lost() {
            return true;
        }
        self.shared.poll_engine();
        matches!(*lock(&self.shared.state), CompletionState::Ended(_))
    }

    /// The state of each layer so far, if the transfer is
    /// [`layer_by_layer`](crate::Transfer::layer_by_layer).
    #[must_use]
    pub fn layers(&self) -> Option<Layers> {
        self.layers.clone()
    }

    /// A ticket of the transfer, to run others after it.
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        self.ticket.clone()
    }

    /// The bytes copied so far. It grows in steps of the engine's own size.
    #[must_use]
    pub fn copied(&self) -> ByteCount {
        self.progress.copied()
    }

    /// Requests that the transfer stops; see [`Ticket::cancel`]. The outcome reports whether it
    /// did.
    ///
    /// A completion that is awaited or waited for is cancelled through its [ticket](Self::ticket).
    pub fn cancel(&self) {
        self.ticket.cancel();
    }

    /// Blocks the thread until the transfer has ended. An engine may [copy on this
    /// thread](crate::WaiterProgress::poll_blocking), which saves waking one of its own threads.
    pub fn wait(self) -> Outcome<G> {
        if let Some(lost) = self.shared.take_lost() {
            return lost;
        }
        let mut polling = WaiterPolling::blocking(self.spin);
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(outcome) = self.shared.take_outcome(&mut state) {
                return outcome;
            }
            state = self.shared.poll_or_sleep(state, &mut polling, None);
        }
    }

    /// Blocks the thread until the transfer has ended or `deadline` has passed.
    ///
    /// # Errors
    ///
    /// Returns the completion if the deadline passed first. The transfer continues; to make it fail
    /// by some time, set [`Transfer::deadline`](crate::Transfer::deadline).
    #[cfg(not(loom))]
    pub fn wait_until(self, deadline: Instant) -> Result<Outcome<G>, Self> {
        if let Some(lost) = self.shared.take_lost() {
            return Ok(lost);
        }
        let mut polling = WaiterPolling::new(self.spin);
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(outcome) = self.shared.take_outcome(&mut state) {
                return Ok(outcome);
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                drop(state);
                return Err(self);
            }
            state = self.shared.poll_or_sleep(state, &mut polling, Some(remaining));
        }
    }
}

terrane_core::debug_fields!(Completion<G>, |this| (this.ticket));

impl<G> IntoFuture for Completion<G> {
    type Output = Outcome<G>;
    type IntoFuture = CompletionFuture<G>;

    fn into_future(self) -> CompletionFuture<G> {
        CompletionFuture { shared: self.shared }
    }
}

/// A [`Completion`] as a future, for any runtime.
///
/// A separate type, so that a transfer whose outcome has been returned cannot be awaited again.
/// Dropping it does not cancel the transfer.
#[must_use = "a future does nothing unless it is polled; dropping it does not stop the transfer"]
pub struct CompletionFuture<G> {
    shared: Arc<SharedCompletion<G>>,
}

impl<G> Future for CompletionFuture<G> {
    type Output = Outcome<G>;

    /// Ready once. A poll after that returns pending.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome<G>> {
        self.shared.poll_outcome(context)
    }
}

terrane_core::debug_fields!(CompletionFuture<G> {});

/// State shared by the caller's end and the engine's end of a transfer.
struct SharedCompletion<G> {
    owner: OwnerProcess,
    /// `Some` until the caller's end takes it. The engine's end never locks it, so a forked process
    /// can lock it.
    guard: Mutex<Option<G>>,
    state: Mutex<CompletionState>,
    /// The transfer has ended, or there is an invitation to poll.
    changed: Condvar,
}

enum CompletionState {
    InFlight {
        waker: Option<Waker>,
        invitation: Option<Invitation>,
        /// Whether a thread sleeps. A notification is a system call even without a sleeping thread.
        has_sleeper: bool,
    },
    /// Boxed, because each submit creates this state.
    Ended(Box<Result<Report, TransferError>>),
    Taken,
}

impl<G> SharedCompletion<G> {
    /// Polls the engine once, if it invites waiting threads.
    fn poll_engine(&self) {
        let invitation = lock(&self.state).invitation();
        if let Some(invitation) = invitation {
            waiter_progress::poll(&invitation);
        }
    }

    /// Returns the outcome once, or registers the task's waker.
    fn poll_outcome(&self, context: &mut Context<'_>) -> Poll<Outcome<G>> {
        if let Some(lost) = self.take_lost() {
            return Poll::Ready(lost);
        }
        self.poll_engine();
        // Cloning or dropping a waker runs foreign code, so neither happens under the lock.
        let latest = context.waker().clone();
        let mut state = lock(&self.state);
        if let Some(outcome) = self.take_outcome(&mut state) {
            drop(state);
            return Poll::Ready(outcome);
        }
        let replaced = match &mut *state {
            CompletionState::InFlight { waker, .. } => waker.replace(latest),
            CompletionState::Ended(_) | CompletionState::Taken => Some(latest),
        };
        drop(state);
        drop(replaced);
        Poll::Pending
    }

    /// Polls the engine once, or sleeps until the state may have changed, at most for `most`.
    fn poll_or_sleep<'a>(
        &'a self,
        state: MutexGuard<'a, CompletionState>,
        polling: &mut WaiterPolling,
        most: Option<Duration>,
    ) -> MutexGuard<'a, CompletionState> {
        match state.invitation() {
            Some(invitation) if polling.continues(&invitation) => {
                drop(state);
                polling.poll(&invitation);
                lock(&self.state)
            }
            _ => self.sleep(state, polling.sleep_limit().into_iter().chain(most).min()),
        }
    }

    /// Sleeps until the state changes, or for `most`. At most one thread sleeps, because it owns
    /// the caller's end.
    fn sleep<'a>(
        &'a self,
        mut state: MutexGuard<'a, CompletionState>,
        most: Option<Duration>,
    ) -> MutexGuard<'a, CompletionState> {
        state.set_sleeper(true);
        let mut state = wait_at_most(&self.changed, state, most);
        state.set_sleeper(false);
        state
    }

    /// Whether this process was forked from the transfer's process. If so, the state must not be
    /// locked: a thread of the parent may hold the lock.
    fn is_lost(&self) -> bool {
        !self.owner.is_current()
    }

    /// The outcome in a forked process, if it has not been taken.
    fn take_lost(&self) -> Option<Outcome<G>> {
        if !self.is_lost() {
            return None;
        }
        let guard = lock(&self.guard).take()?;
        Some(Outcome { guard, result: Err(TransferError::LostByFork) })
    }

    /// The outcome, if there is one that has not been taken.
    fn take_outcome(&self, state: &mut CompletionState) -> Option<Outcome<G>> {
        let result = match std::mem::replace(state, CompletionState::Taken) {
            CompletionState::Ended(result) => result,
            other => {
                *state = other;
                return None;
            }
        };
        lock(&self.guard).take().map(|guard| Outcome { guard, result: *result })
    }
}

impl CompletionState {
    fn invitation(&self) -> Option<Invitation> {
        match self {
            Self::InFlight { invitation, .. } => invitation.clone(),
            Self::Ended(_) | Self::Taken => None,
        }
    }

    fn set_sleeper(&mut self, sleeps: bool) {
        if let Self::InFlight { has_sleeper, .. } = self {
            *has_sleeper = sleeps;
        }
    }
}

impl<G: Send> OutcomeSink for SharedCompletion<G> {
    fn invite_waiters(&self, progress: &Arc<dyn WaiterProgress>) {
        let mut state = lock(&self.state);
        if let CompletionState::InFlight { invitation: slot, has_sleeper, .. } = &mut *state {
            let has_sleeper = *has_sleeper;
            let invitation = Invitation::new(progress, slot.as_ref());
            let replaced = slot.replace(invitation);
            drop(state);
            if has_sleeper {
                // The thread polls from now on.
                self.changed.notify_all();
            }
            drop(replaced);
        }
    }

    fn publish(&self, result: Result<Report, TransferError>) {
        let result = Box::new(result);
        let mut state = lock(&self.state);
        match std::mem::replace(&mut *state, CompletionState::Taken) {
            CompletionState::InFlight { waker, invitation: _, has_sleeper } => {
                *state = CompletionState::Ended(result);
                drop(state);
                if has_sleeper {
                    self.changed.notify_all();
                }
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            other => *state = other,
        }
    }
}

/// Creates the two ends of a new transfer.
pub(crate) fn pair<G: Send + 'static>(
    ticket: Ticket,
    progress: Arc<CopyProgress>,
    layers: Option<Layers>,
    spin: Duration,
    guard: G,
) -> (Completion<G>, Arc<dyn OutcomeSink>) {
    let shared = Arc::new(SharedCompletion {
        owner: OwnerProcess::current(),
        guard: Mutex::new(Some(guard)),
        state: Mutex::new(CompletionState::InFlight {
            waker: None,
            invitation: None,
            has_sleeper: false,
        }),
        changed: Condvar::new(),
    });
    let sink = Arc::clone(&shared);
    (Completion { shared, ticket, progress, layers, spin }, sink)
}
