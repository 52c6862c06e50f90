//! Transfers that start together.

use std::fmt;

use super::{Prepared, TransferManager};
use crate::completion::set::CompletionSet;
use crate::error::TransferError;
use crate::hazard::ticket::Ticket;
use crate::transfer::Transfer;

impl TransferManager {
    /// Starts several transfers together, such as one for each cache group of a model. Each owns
    /// its guard, as in [`submit`](Self::submit).
    ///
    /// All are planned and checked, and their blocks are claimed, before any is started. If one is
    /// refused, none is started, no block stays claimed, and all guards are returned. Members of a
    /// set have no order between them, so a member that conflicts with another one is refused.
    ///
    /// Started members succeed or fail on their own. A set of no transfers succeeds at once.
    ///
    /// ```
    /// # use terrane_transfer::{Endpoint, Transfer, TransferManager};
    /// # fn example(manager: &TransferManager, groups: [[Endpoint; 2]; 2], next: Transfer)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// let transfers = groups.iter().map(|[device, host]| {
    ///     (Transfer::new(device, host).blocks(&[3, 4], &[0, 1]), ())
    /// });
    /// let set = manager.submit_all(transfers)?;
    /// let then = manager.submit(next.after(&set.ticket()), ())?;
    /// for outcome in set.wait().outcomes {
    ///     println!("{}", outcome.result?);
    /// }
    /// then.wait().result?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`RejectedSet`] names the transfer that was refused, and the cause.
    pub fn submit_all<G: Send + 'static>(
        &self,
        transfers: impl IntoIterator<Item = (Transfer, G)>,
    ) -> Result<CompletionSet<G>, RejectedSet<G>> {
        let (transfers, guards): (Vec<Transfer>, Vec<G>) = transfers.into_iter().unzip();
        let mut members = Unstarted(Vec::with_capacity(transfers.len()));
        for (index, transfer) in transfers.into_iter().enumerate() {
            match self.prepare(transfer) {
                Ok(prepared) => members.0.push(prepared),
                Err(cause) => {
                    let other = conflicting(&members.0, &cause);
                    drop(members);
                    return Err(RejectedSet { guards, index, cause, other });
                }
            }
        }
        let tickets: Box<[Ticket]> = members.0.iter().map(|each| each.ticket().clone()).collect();
        let started = std::mem::take(&mut members.0).into_iter().zip(guards);
        Ok(CompletionSet::start(tickets, started.map(|(each, guard)| each.start(guard))))
    }
}

/// Members with claims. Dropping them cancels them, even if an engine panics in `quote`.
struct Unstarted(Vec<Prepared>);

impl Drop for Unstarted {
    fn drop(&mut self) {
        self.0.drain(..).for_each(Prepared::cancel);
    }
}

/// The member that conflicts with this one, if any.
fn conflicting(members: &[Prepared], cause: &TransferError) -> Option<usize> {
    let TransferError::Conflict { conflicts } = cause else { return None };
    let holds = |member: &Prepared| conflicts.iter().any(|it| it.holder == member.ticket().id());
    members.iter().position(holds)
}

/// A set in which one transfer was refused: all guards, and the cause. Nothing was copied.
pub struct RejectedSet<G> {
    /// The guards of all transfers, in the order in which they were submitted.
    pub guards: Vec<G>,
    /// The transfer that was refused, counted from 0.
    pub index: usize,
    /// The cause.
    pub cause: TransferError,
    /// The transfer of the same set that it conflicts with, if a conflict is the cause.
    pub other: Option<usize>,
}

terrane_core::debug_fields!(RejectedSet<G> { index, cause, other });

impl<G> fmt::Display for RejectedSet<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let index = self.index;
        match self.other {
            Some(other) => write!(
                f,
                "transfer {index} of the set conflicts with transfer {other} of the set, and members \
                 have no order; submit one of them apart, after the other"
            ),
            None => write!(f, "transfer {index} of the set: {}", self.cause),
        }
    }
}

/// Drops the guards and returns the cause.
impl<G> From<RejectedSet<G>> for TransferError {
    fn from(rejected: RejectedSet<G>) -> Self {
        rejected.cause
    }
}

impl<G> std::error::Error for RejectedSet<G> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.source()
    }
}
