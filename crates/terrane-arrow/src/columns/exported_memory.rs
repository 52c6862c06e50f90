//! What of our memory other libraries have just now: where it is found again when it comes back,
//! through whichever of them and by whichever interface.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use terrane_core::{Memory, Position, Region, Span};

use super::{Column, ColumnBuffer, Origin};

/// By where each memory begins. An entry stands for as long as something of that memory is out,
/// which keeps the memory alive, so that its addresses are no other code's meanwhile.
static OUT: Mutex<BTreeMap<Position, Entry>> = Mutex::new(BTreeMap::new());

struct Entry {
    memory: Weak<dyn Memory>,
    /// Whose it was when it went out.
    origin: Origin,
    /// How often it is out.
    times: usize,
}

/// Buffers of ours that another library has, until this drops. Its owner keeps the column.
#[derive(Debug, Default)]
pub(crate) struct ExportedMemory(Vec<Position>);

impl ExportedMemory {
    /// The buffers of a column that are ours, but not those of its children.
    pub(crate) fn new(column: &Column) -> Self {
        Self::of(column.buffers().iter().flatten())
    }

    /// Those of these buffers that are ours, or that somebody else lets us write.
    pub(crate) fn of<'a>(buffers: impl IntoIterator<Item = &'a ColumnBuffer>) -> Self {
        let is_known = |buffer: &&ColumnBuffer| {
            let is_empty = buffer.inner().memory().length().is_zero();
            !is_empty && (buffer.origin() == Origin::Owned || !buffer.is_read_only())
        };
        // What memory says of itself may be anybody's code, and is not called under the lock.
        let known = buffers.into_iter().filter(is_known).map(|buffer| {
            let (memory, origin) = (buffer.inner().memory(), buffer.origin());
            (memory.location().position(), memory, origin)
        });
        let known: Vec<_> = known.collect();
        let mut out = OUT.lock().unwrap_or_else(PoisonError::into_inner);
        let places = known.into_iter().map(|(place, memory, origin)| {
            let fresh = || Entry { memory: Arc::downgrade(memory), origin, times: 0 };
            let entry = out.entry(place).or_insert_with(fresh);
            if entry.memory.strong_count() == 0 {
                // Another memory was here, which has gone while this one was out.
                (entry.memory, entry.origin) = (Arc::downgrade(memory), origin);
            }
            entry.times += 1;
            place
        });
        Self(places.collect())
    }
}

impl Drop for ExportedMemory {
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

/// The buffer that a span is, if it is part of a memory of ours that is out.
///
/// It is for reading only: another library has it, and may have said that no code writes it.
pub(crate) fn find(span: Span) -> Option<ColumnBuffer> {
    if span.length.is_zero() {
        return None;
    }
    let place = span.location.position();
    // Outside of the lock: it may be the last to drop.
    let (memory, origin) = {
        let out = OUT.lock().unwrap_or_else(PoisonError::into_inner);
        let (begin, entry) = out.range(..=place).next_back()?;
        let memory = (begin.space == place.space).then(|| entry.memory.upgrade())??;
        (memory, entry.origin)
    };
    let region = Region::from_arc(memory);
    let skipped = place.start.checked_sub(region.location().position().start)?;
    let region = region.view(skipped.into(), span.length).ok()?;
    Some(ColumnBuffer::foreign(region, origin).as_read_only())
}

/// A column that was handed out and has come back: as it was, but for reading only as far as its
/// memory is out once more, to others.
pub(crate) fn returned(column: Column) -> Column {
    let is_lent = |buffer: &ColumnBuffer| !buffer.is_read_only() && is_out(buffer);
    if !column.has_buffer(&is_lent) {
        return column;
    }
    column.with_buffers(&|buffer| match is_lent(buffer) {
        true => buffer.as_read_only(),
        false => buffer.clone(),
    })
}

fn is_out(buffer: &ColumnBuffer) -> bool {
    let place = buffer.inner().memory().location().position();
    OUT.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&place)
}
