//! The live managed tensors: imported foreign tensors, and exported tensors.
//!
//! A C structure does not record its owner. This table identifies it by its address. A structure
//! that is imported twice is refused, and a second call of an exported tensor's deleter does
//! nothing. This detects only some violations, because another structure may get the address of a
//! freed one.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::Mutex;

use terrane_core::sync::lock;

/// Structures by their addresses.
pub(super) struct LiveTensors(Mutex<BTreeSet<NonZeroUsize>>);

/// Imported foreign structures whose deleter was not called yet. Structures without a deleter are
/// not entered.
pub(super) static IMPORTED: LiveTensors = LiveTensors(Mutex::new(BTreeSet::new()));

/// Exported structures whose deleter was not called yet.
pub(super) static EXPORTED: LiveTensors = LiveTensors(Mutex::new(BTreeSet::new()));

impl LiveTensors {
    /// Adds a structure; false if it is already present.
    pub(super) fn enter(&self, address: NonZeroUsize) -> bool {
        lock(&self.0).insert(address)
    }

    /// Removes a structure; false if it was not present.
    pub(super) fn leave(&self, address: NonZeroUsize) -> bool {
        lock(&self.0).remove(&address)
    }
}
