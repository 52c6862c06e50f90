//! A table of Terrane's memory that other libraries currently use. It recognises memory that is
//! imported again, from any library and with any interface.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use terrane_core::sync::lock;
use terrane_core::{Memory, Position, Region, Span};

use super::{Column, ColumnBuffer, Origin};

/// The key is the start of each memory. An entry exists while a part of its memory is exported. The
/// export keeps the memory alive, so no other memory has these addresses.
static OUT: Mutex<BTreeMap<Position, Entry>> = Mutex::new(BTreeMap::new());

struct Entry {
    memory: Weak<dyn Memory>,
    /// The owner when it was exported.
    origin: Origin,
    /// The number of exports.
    times: usize,
}

/// Buffers that another library uses until this drops. The owner of this value also keeps the
/// column alive.
#[derive(Debug, Default)]
pub(crate) struct ExportedMemory(Vec<Position>);

impl ExportedMemory {
    /// The buffers of a column that belong to Terrane, without those of its children.
    pub(crate) fn new(column: &Column) -> Self {
        Self::of(column.buffers().iter().flatten())
    }

    /// The buffers that belong to Terrane, or are foreign and writable.
    pub(crate) fn of<'a>(buffers: impl IntoIterator<Item = &'a ColumnBuffer>) -> Self {
        let is_known = |buffer: &&ColumnBuffer| {
            let is_empty = buffer.inner().memory().length().is_zero();
            !is_empty && (buffer.origin() == Origin::Owned || !buffer.is_read_only())
        };
        // Implementations of `Memory` may be users' code, so they are not called under the lock.
        let known = buffers.into_iter().filter(is_known).map(|buffer| {
            let (memory, origin) = (buffer.inner().memory(), buffer.origin());
            (memory.location().position(), memory, origin)
        });
        let known: Vec<_> = known.collect();
        let mut out = lock(&OUT);
        let places = known.into_iter().map(|(place, memory, origin)| {
            let fresh = || Entry { memory: Arc::downgrade(memory), origin, times: 0 };
            let entry = out.entry(place).or_insert_with(fresh);
            if entry.memory.strong_count() == 0 {
                // Freed memory had this address before. The new memory was exported meanwhile.
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
        let mut out = lock(&OUT);
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

/// The buffer for a span, if it is part of exported memory.
///
/// It is read-only, because another library uses it and may expect it not to change.
pub(crate) fn find(span: Span) -> Option<ColumnBuffer> {
    if span.length.is_zero() {
        return None;
    }
    let place = span.location.position();
    // Outside the lock, because it may drop the last reference.
    let (memory, origin) = {
        let out = lock(&OUT);
        let (begin, entry) = out.range(..=place).next_back()?;
        let memory = (begin.space == place.space).then(|| entry.memory.upgrade())??;
        (memory, entry.origin)
    };
    let region = Region::from_arc(memory);
    let skipped = place.start.checked_sub(region.location().position().start)?;
    let region = region.view(skipped.into(), span.length).ok()?;
    Some(ColumnBuffer::foreign(region, origin).as_read_only())
}

/// An exported column that is imported again. It is read-only if its memory is exported another
/// time.
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
    lock(&OUT).contains_key(&place)
}
