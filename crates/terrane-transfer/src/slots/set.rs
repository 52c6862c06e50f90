//! Block ids with one owner.

use std::iter;
use std::ops::Deref;
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use super::{SharedSlots, SlotsError};
use crate::hazard::ticket::Ticket;

/// Block ids that belong to one owner; from [`Slots::take`](super::Slots::take).
///
/// It dereferences to the list of ids, so `&set` can be passed to
/// [`Transfer::blocks`](crate::Transfer::blocks) or
/// [`Endpoint::hold_for_write`](crate::Endpoint::hold_for_write). When it drops, the ids become
/// free once no transfer and no hold claims their blocks. It may be the guard of a transfer: its
/// ids then become free with the outcome.
#[must_use = "dropping the set frees its ids"]
pub struct SlotSet {
    shared: Arc<SharedSlots>,
    ids: SmallVec<[u32; 2]>,
}

impl SlotSet {
    pub(super) fn new(shared: &Arc<SharedSlots>, ids: SmallVec<[u32; 2]>) -> Self {
        Self { shared: Arc::clone(shared), ids }
    }

    /// Removes the ids from position `at` on, and returns them; an empty set if there are none.
    pub fn split_off(&mut self, at: usize) -> Self {
        let at = at.min(self.ids.len());
        let ids = self.ids.drain(at..).collect();
        Self::new(&self.shared, ids)
    }

    /// Moves all ids of `other` to the end of this set.
    ///
    /// # Errors
    ///
    /// [`SlotsError::OtherAllocator`] if they belong to another allocator. They then stay in
    /// `other`.
    pub fn append(&mut self, other: &mut Self) -> Result<(), SlotsError> {
        if !Arc::ptr_eq(&self.shared, &other.shared) {
            return Err(SlotsError::OtherAllocator);
        }
        self.ids.append(&mut other.ids);
        Ok(())
    }

    /// Returns a set for each id, in their order. If the iterator drops early, the remaining ids
    /// are freed.
    pub fn each(mut self) -> impl Iterator<Item = Self> {
        self.ids.reverse();
        iter::from_fn(move || {
            let id = self.ids.pop()?;
            Some(Self::new(&self.shared, smallvec![id]))
        })
    }

    /// Frees the ids once the ticket's transfer has ended, whether it has succeeded or failed. If
    /// it has ended, they are free at once.
    ///
    /// If that transfer was [orphaned](crate::CopyJob::orphan), they become free only when its copy
    /// has ended as well.
    pub fn free_after(self, ticket: &Ticket) {
        ticket.keep(Arc::new(self));
    }

    /// Frees the ids once the transfers of all these tickets have ended; at once if there are none.
    pub fn free_after_all(self, tickets: &[Ticket]) {
        // The set drops with the last ticket that keeps it.
        let ids = Arc::new(self);
        tickets.iter().for_each(|ticket| ticket.keep(Arc::clone(&ids) as _));
    }
}

impl Drop for SlotSet {
    fn drop(&mut self) {
        self.shared.put_back(&self.ids);
    }
}

impl Deref for SlotSet {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.ids
    }
}

impl AsRef<[u32]> for SlotSet {
    fn as_ref(&self) -> &[u32] {
        &self.ids
    }
}

impl<'a> IntoIterator for &'a SlotSet {
    type Item = &'a u32;
    type IntoIter = std::slice::Iter<'a, u32>;

    fn into_iter(self) -> Self::IntoIter {
        self.ids.iter()
    }
}

terrane_core::debug_fields!(SlotSet, |this| (this.ids));
