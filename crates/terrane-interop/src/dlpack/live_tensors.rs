//! Which managed tensors there are just now: foreign ones that were taken in, and ours that are out.
//!
//! A structure of C says nothing of who has it. By its address it is known here, so that one that is
//! taken in twice is refused, and a deleter of ours that is called twice does nothing the second
//! time. That is a net under the contracts of both, and no more: once a structure has gone, another
//! may stand at its address.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

/// Structures by their addresses.
pub(super) struct Live(Mutex<BTreeSet<NonZeroUsize>>);

/// Foreign structures that were taken in, and have a deleter that was not called yet.
pub(super) static TAKEN_IN: Live = Live(Mutex::new(BTreeSet::new()));

/// Structures of ours whose deleter was not called yet.
pub(super) static HANDED_OUT: Live = Live(Mutex::new(BTreeSet::new()));

impl Live {
    /// Notes a structure; false if it is noted already.
    pub(super) fn enter(&self, address: NonZeroUsize) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(address)
    }

    /// Strikes a structure out; false if it was not noted.
    pub(super) fn leave(&self, address: NonZeroUsize) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&address)
    }
}
