//! Waits for the end of a ticket's transfer.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
#[cfg(not(loom))]
use std::time::Instant;

use crate::hazard::ticket::{Dependent, Ticket, TransferId};
use crate::sync::{Condvar, Mutex, lock, wait_at_most};

/// The end of a ticket's transfer. The completion returns the full outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TicketEnd {
    /// All bytes are at the destination.
    Succeeded,
    /// The transfer failed, or belongs to the process that this one was forked from.
    Failed,
}

impl Ticket {
    /// Blocks the thread until the transfer has ended.
    ///
    /// The thread sleeps. A thread that waits for the [completion](crate::Completion::wait) also
    /// polls the engine, and so detects the end earlier.
    #[must_use = "the transfer may have failed"]
    pub fn wait(&self) -> TicketEnd {
        let waiter = self.waiter();
        let mut state = lock(&waiter.state);
        loop {
            if let Some(end) = state.end {
                return end;
            }
            state = wait_at_most(&waiter.changed, state, None);
        }
    }

    /// Blocks the thread until the transfer has ended or `deadline` has passed; `None` if the
    /// deadline passed first.
    #[cfg(not(loom))]
    #[must_use]
    pub fn wait_until(&self, deadline: Instant) -> Option<TicketEnd> {
        let waiter = self.waiter();
        let mut state = lock(&waiter.state);
        loop {
            if let Some(end) = state.end {
                return Some(end);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = wait_at_most(&waiter.changed, state, Some(left));
        }
    }

    fn waiter(&self) -> Arc<EndWaiter> {
        let waiter = Arc::new(EndWaiter::default());
        self.add_wait(&waiter);
        waiter
    }
}

impl IntoFuture for Ticket {
    type Output = TicketEnd;
    type IntoFuture = TicketFuture;

    fn into_future(self) -> TicketFuture {
        TicketFuture { waiter: self.waiter() }
    }
}

impl IntoFuture for &Ticket {
    type Output = TicketEnd;
    type IntoFuture = TicketFuture;

    fn into_future(self) -> TicketFuture {
        TicketFuture { waiter: self.waiter() }
    }
}

/// The end of a [`Ticket`]'s transfer as a future, for any runtime. It can be polled again after it
/// was ready.
#[must_use = "a future does nothing unless it is polled"]
pub struct TicketFuture {
    waiter: Arc<EndWaiter>,
}

impl Future for TicketFuture {
    type Output = TicketEnd;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<TicketEnd> {
        // Cloning or dropping a waker runs foreign code, so neither happens under the lock.
        let latest = context.waker().clone();
        let mut state = lock(&self.waiter.state);
        if let Some(end) = state.end {
            return Poll::Ready(end);
        }
        let replaced = state.waker.replace(latest);
        drop(state);
        drop(replaced);
        Poll::Pending
    }
}

terrane_core::debug_fields!(TicketFuture {});

/// Records the end of one ticket.
#[derive(Default)]
struct EndWaiter {
    state: Mutex<EndState>,
    changed: Condvar,
}

#[derive(Default)]
struct EndState {
    end: Option<TicketEnd>,
    waker: Option<Waker>,
}

impl Dependent for EndWaiter {
    fn predecessor_ended(&self, _: TransferId, succeeded: bool) {
        let mut state = lock(&self.state);
        state.end = Some(if succeeded { TicketEnd::Succeeded } else { TicketEnd::Failed });
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::task::Wake;

    use super::*;

    const MANY: usize = if cfg!(miri) { 1_000 } else { 100_000 };

    struct Unused;

    impl Wake for Unused {
        fn wake(self: Arc<Self>) {}
    }

    #[test]
    fn waits_that_reach_their_deadline_leave_nothing_at_the_ticket() {
        let ticket = Ticket::new([]);
        let past = Instant::now();
        for _ in 0..MANY {
            assert_eq!(ticket.wait_until(past), None);
        }
        assert!(ticket.dependents() < 100, "{} waits", ticket.dependents());
        ticket.end(true);
        assert_eq!(ticket.wait_until(past), Some(TicketEnd::Succeeded));
    }

    #[test]
    fn futures_that_drop_leave_nothing_at_the_ticket() {
        let ticket = Ticket::new([]);
        let waker = Arc::new(Unused);
        let polled = || {
            let mut future = Box::pin((&ticket).into_future());
            let shared = Waker::from(Arc::clone(&waker));
            assert!(future.as_mut().poll(&mut Context::from_waker(&shared)).is_pending());
            future
        };
        let mut kept = polled();
        for _ in 0..MANY {
            drop(polled());
        }
        assert_eq!(Arc::strong_count(&waker), 2, "the waker of the future that lives");
        assert!(ticket.dependents() < 100, "{} futures", ticket.dependents());
        // Those that live are notified.
        crate::hazard::notify::notify(ticket.end(true), ticket.id(), true);
        assert_eq!(Arc::strong_count(&waker), 1);
        let mut context = Context::from_waker(Waker::noop());
        assert_eq!(kept.as_mut().poll(&mut context), Poll::Ready(TicketEnd::Succeeded));
    }
}
