//! The live managed tensors: imported foreign ones, and exported ones.
//!
//! A C structure does not record its owner. This table identifies it by its address. So a structure
//! that is imported twice is refused, and an exported tensor's deleter does nothing on a second
//! call. That only guards the contracts of both: once a structure is freed, another may have its
//! address.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

/// Structures by their addresses.
pub(super) struct Live(Mutex<BTreeSet<NonZeroUsize>>);

/// Imported foreign structures that have a deleter that was not called yet.
pub(super) static TAKEN_IN: Live = Live(Mutex::new(BTreeSet::new()));

/// Exported structures whose deleter was not called yet.
pub(super) static HANDED_OUT: Live = Live(Mutex::new(BTreeSet::new()));

impl Live {
    /// Adds a structure; false if it is already present.
    pub(super) fn enter(&self, address: NonZeroUsize) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(address)
    }

    /// Removes a structure; false if it was not present.
    pub(super) fn leave(&self, address: NonZeroUsize) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&address)
    }
}
