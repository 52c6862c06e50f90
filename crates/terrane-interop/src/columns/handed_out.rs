//! What of our memory other libraries have just now: where it is found again when it comes back,
//! through whichever of them and by whichever interface.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use terrane_core::{Memory, Place, Region, Span};

use super::{Column, ColumnBuffer};

/// By where each memory begins. An entry stands for as long as something of that memory is out,
/// which keeps the memory alive, so that its addresses are nobody else's meanwhile.
static OUT: Mutex<BTreeMap<Place, Entry>> = Mutex::new(BTreeMap::new());

struct Entry {
    memory: Weak<dyn Memory>,
    /// How often it is out.
    times: usize,
}

/// Buffers of ours that another library has, until this drops. Whoever keeps it keeps the column.
#[derive(Debug, Default)]
pub(crate) struct HandedOut(Vec<Place>);

impl HandedOut {
    /// The buffers of a column that are ours, but not those of its children.
    pub(crate) fn new(column: &Column) -> Self {
        Self::of(column.buffers().iter().flatten())
    }

    /// Those of these buffers that are ours.
    pub(crate) fn of<'a>(buffers: impl IntoIterator<Item = &'a ColumnBuffer>) -> Self {
        let ours = buffers.into_iter().filter(|buffer| !buffer.is_read_only());
        let memories = ours.map(ColumnBuffer::inner).map(Region::memory);
        let memories: Vec<_> = memories.filter(|memory| !memory.length().is_zero()).collect();
        let mut out = OUT.lock().unwrap_or_else(PoisonError::into_inner);
        let places = memories.into_iter().map(|memory| {
            let place = memory.location().place();
            let fresh = || Entry { memory: Arc::downgrade(memory), times: 0 };
            let entry = out.entry(place).or_insert_with(fresh);
            if entry.memory.strong_count() == 0 {
                // Another memory was here, which has gone while this one was out.
                entry.memory = Arc::downgrade(memory);
            }
            entry.times += 1;
            place
        });
        Self(places.collect())
    }
}

impl Drop for HandedOut {
    fn drop(&mut self) {
        let mut out = OUT.lock().unwrap_or_else(PoisonError::into_inner);
        for place in &self.0 {
            if let Some(entry) = out.get_mut(place) {
                entry.times -= 1;
                if entry.times == 0 {
                    out.remove(place);
                }
            }
        }
    }
}

/// The region of ours that a span is, if it is part of a memory of ours that is out.
pub(crate) fn find(span: Span) -> Option<Region> {
    if span.length.is_zero() {
        return None;
    }
    let place = span.location.place();
    // Outside of the lock: it may be the last to drop.
    let memory = {
        let out = OUT.lock().unwrap_or_else(PoisonError::into_inner);
        let (begin, entry) = out.range(..=place).next_back()?;
        (begin.space == place.space).then(|| entry.memory.upgrade())??
    };
    let region = Region::from_arc(memory);
    let skipped = place.start.checked_sub(region.location().place().start)?;
    region.view(skipped.into(), span.length).ok()
}
