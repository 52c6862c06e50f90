//! Sets of transfers that start together.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
#[cfg(not(loom))]
use std::time::Instant;

use terrane_core::ByteCount;

use crate::completion::layers::Layers;
use crate::completion::{Completion, Outcome};
use crate::error::TransferError;
use crate::hazard::notify::notify;
use crate::hazard::ticket::{Dependent, Ticket, TransferId};
use crate::sync::{Mutex, lock};

/// Ends the set's ticket when all members have ended.
struct SetEnd {
    ticket: Ticket,
    state: Mutex<SetState>,
}

struct SetState {
    remaining: usize,
    succeeded: bool,
}

/// Ends a set's ticket, and notifies its dependents. A second call changes nothing.
fn end_set(ticket: &Ticket, succeeded: bool) {
    notify(ticket.end(succeeded), ticket.id(), succeeded);
}

impl Dependent for SetEnd {
    fn predecessor_ended(&self, _: TransferId, succeeded: bool) {
        let mut state = lock(&self.state);
        state.succeeded &= succeeded;
        state.remaining -= 1;
        let ended = (state.remaining == 0).then_some(state.succeeded);
        drop(state);
        if let Some(succeeded) = ended {
            end_set(&self.ticket, succeeded);
        }
    }
}

/// Several transfers in flight, as one.
///
/// A set works like the [`Completion`] of one transfer. Dropping it lets its transfers continue.
/// Each guard drops when its transfer has ended.
#[must_use = "dropping a set discards the results; the transfers continue"]
pub struct CompletionSet<G> {
    members: Vec<Member<G>>,
    tickets: Box<[Ticket]>,
    ticket: Ticket,
}

/// The outcome of a transfer if the set has it; otherwise its completion.
type Member<G> = Result<Outcome<G>, Completion<G>>;

/// How each transfer of a set ended.
#[must_use = "the results may be errors"]
pub struct SetOutcome<G> {
    /// The guard and the result of each transfer, in the order of submission.
    pub outcomes: Vec<Outcome<G>>,
}

impl<G> SetOutcome<G> {
    /// Whether all transfers succeeded.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        self.first_error().is_none()
    }

    /// The first transfer that failed, counted from 0, and its error.
    #[must_use]
    pub fn first_error(&self) -> Option<(usize, &TransferError)> {
        let results = self.outcomes.iter().map(|outcome| outcome.result.as_ref().err());
        results.enumerate().find_map(|(index, error)| error.map(|error| (index, error)))
    }
}

impl<G> fmt::Debug for SetOutcome<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.outcomes).finish()
    }
}

impl<G> CompletionSet<G> {
    /// Creates the set of these tickets. The transfers start when `started` returns their
    /// completions.
    pub(crate) fn start(
        tickets: Box<[Ticket]>,
        started: impl Iterator<Item = Completion<G>>,
    ) -> Self {
        let ticket = Ticket::of_set(tickets.iter().cloned());
        let state = Mutex::new(SetState { remaining: tickets.len(), succeeded: true });
        let end = Arc::new(SetEnd { ticket: ticket.clone(), state });
        if tickets.is_empty() {
            end_set(&ticket, true);
        }
        tickets.iter().for_each(|member| member.add_dependent(end.clone()));
        Self { members: started.map(Err).collect(), tickets, ticket }
    }

    /// The number of transfers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there are no transfers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Whether all transfers have ended, successfully or not.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        // Each member is polled, because the query also polls the member's engine.
        let in_flight = self.members.iter().filter_map(|member| member.as_ref().err());
        if in_flight.filter(|completion| !completion.has_ended()).count() > 0 {
            return false;
        }
        // As in `wait`, the ticket ends before the caller learns that the set has ended.
        if has_ended(&self.tickets) {
            end_set(&self.ticket, self.tickets.iter().all(Ticket::has_succeeded));
        }
        true
    }

    /// Requests that all transfers stop; see [`Ticket::cancel`].
    pub fn cancel(&self) {
        self.ticket.cancel();
    }

    /// A ticket of the set, to run others after all of its transfers. It succeeds if all of them
    /// do.
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        self.ticket.clone()
    }

    /// A ticket of each transfer, in the order of submission.
    #[must_use]
    pub fn tickets(&self) -> &[Ticket] {
        &self.tickets
    }

    /// The layers of one transfer, if it exists, is in flight and is
    /// [layer-by-layer](crate::Transfer::layer_by_layer).
    #[must_use]
    pub fn layers(&self, transfer: usize) -> Option<Layers> {
        self.members.get(transfer)?.as_ref().err()?.layers()
    }

    /// The bytes copied so far. A failed transfer counts no bytes once
    /// [`wait_until`](Self::wait_until) has seen its end.
    #[must_use]
    pub fn copied(&self) -> ByteCount {
        let bytes = self.members.iter().map(|member| match member {
            Err(completion) => completion.copied().get(),
            Ok(Outcome { result: Ok(report), .. }) => report.explanation.bytes.get(),
            Ok(Outcome { result: Err(_), .. }) => 0,
        });
        ByteCount::new(bytes.sum())
    }

    /// Blocks the thread until all transfers have ended.
    pub fn wait(self) -> SetOutcome<G> {
        let members = self.members.into_iter();
        let outcomes = members.map(|member| member.unwrap_or_else(Completion::wait)).collect();
        let outcome = SetOutcome { outcomes };
        // The ticket ends before the caller learns that the set has ended. A member that was
        // cancelled while it waited ends its ticket later, and so does the set.
        if has_ended(&self.tickets) {
            end_set(&self.ticket, outcome.succeeded());
        }
        outcome
    }

    /// Blocks the thread until all transfers have ended or `deadline` has passed.
    ///
    /// # Errors
    ///
    /// Returns the set if the deadline passed first. The transfers continue.
    #[cfg(not(loom))]
    pub fn wait_until(self, deadline: Instant) -> Result<SetOutcome<G>, Self> {
        let Self { members, tickets, ticket } = self;
        let wait = |member: Member<G>| member.or_else(|completion| completion.wait_until(deadline));
        let members = members.into_iter().map(wait).collect();
        let set = Self { members, tickets, ticket };
        if set.members.iter().all(Result::is_ok) { Ok(set.wait()) } else { Err(set) }
    }
}

fn has_ended(members: &[Ticket]) -> bool {
    members.iter().all(Ticket::has_ended)
}

impl<G> fmt::Debug for CompletionSet<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionSet")
            .field("ticket", &self.ticket)
            .field("transfers", &self.tickets)
            .finish()
    }
}

impl<G> IntoFuture for CompletionSet<G> {
    type Output = SetOutcome<G>;
    type IntoFuture = CompletionSetFuture<G>;

    fn into_future(self) -> CompletionSetFuture<G> {
        CompletionSetFuture { ticket: self.ticket(), set: Some(self) }
    }
}

/// A [`CompletionSet`] as a future, for any runtime.
///
/// Dropping it before it is ready lets the transfers continue.
#[must_use = "a future does nothing unless it is polled; dropping it does not stop the transfers"]
pub struct CompletionSetFuture<G> {
    /// `None` after it was ready.
    set: Option<CompletionSet<G>>,
    ticket: Ticket,
}

/// Guards are moved, never pinned.
impl<G> Unpin for CompletionSetFuture<G> {}

impl<G> Future for CompletionSetFuture<G> {
    type Output = SetOutcome<G>;

    /// Ready once. A poll after that returns pending.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<SetOutcome<G>> {
        let this = self.get_mut();
        let members = this.set.iter_mut().flat_map(|set| &mut set.members);
        for member in members {
            if let Err(completion) = member
                && let Poll::Ready(outcome) = completion.shared.poll_outcome(context)
            {
                *member = Ok(outcome);
            }
        }
        match this.set.take_if(|set| set.members.iter().all(Result::is_ok)) {
            Some(set) => Poll::Ready(set.wait()),
            None => Poll::Pending,
        }
    }
}

terrane_core::debug_fields!(CompletionSetFuture<G> { ticket });

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Another thread ends the ticket of the last member, and then that of the set. A query may run
    /// between the two.
    #[test]
    fn a_set_that_has_ended_stays_ended() {
        let member = Ticket::new([]);
        let ticket = Ticket::of_set([member.clone()]);
        // A member that was cancelled while it waited has an outcome before its ticket ends.
        let outcome = Outcome { guard: (), result: Err(TransferError::EngineStopped) };
        let (members, tickets) = (vec![Ok(outcome)], [member.clone()].into());
        let set = CompletionSet { members, tickets, ticket };
        assert!(set.has_ended() && !set.ticket().has_ended());
        drop(member.end(false));
        assert!(set.has_ended() && set.ticket().has_ended());
    }
}
