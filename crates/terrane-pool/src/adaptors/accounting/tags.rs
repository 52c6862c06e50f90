//! Keeps a table of live blocks, with the labels of their requests.

use std::sync::Arc;

use terrane_core::{
    Allocate, AllocateError, ByteCount, Label, RegionRequest, Span, delegate_allocate,
};

use super::snapshot::{BlockRecord, BlockState, Inspect};
use crate::adaptors::attached::Attached;
use crate::sync::Mutex;

/// An upstream that records its live blocks in a [`LiveBlocks`], by the labels of their requests.
#[derive(Debug)]
pub struct Tags<A> {
    upstream: A,
    table: LiveBlocks,
}

/// Memory from [`Tags`].
pub type Tagged<M> = Attached<M, TagEntry>;

/// The live blocks of one or several upstreams. Cloning returns another handle to the same table.
#[derive(Clone, Debug, Default)]
pub struct LiveBlocks(Arc<Mutex<LiveTable>>);

#[derive(Debug, Default)]
struct LiveTable {
    /// Freed entries are `None` until their place is reused.
    blocks: Vec<Option<BlockRecord>>,
    free: Vec<usize>,
    sequence: u64,
}

impl<A: Allocate> Tags<A> {
    /// Records the live blocks of `upstream` in `table`.
    #[must_use]
    pub fn new(upstream: A, table: LiveBlocks) -> Self {
        Self { upstream, table }
    }

    /// The table.
    #[must_use]
    pub fn table(&self) -> &LiveBlocks {
        &self.table
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other caller.
unsafe impl<A: Allocate> Allocate for Tags<A> {
    type Memory = Tagged<A::Memory>;

    delegate_allocate!(self, self.upstream);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let memory = self.upstream.allocate(request)?;
        let entry = self.table.enter(Span::of(&memory), request.bytes, &request.label);
        Ok(Attached::before(entry, memory))
    }
}

impl LiveBlocks {
    /// Creates an empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of live blocks.
    #[must_use]
    pub fn live(&self) -> usize {
        let table = self.0.lock();
        table.blocks.len() - table.free.len()
    }

    fn enter(&self, span: Span, requested: ByteCount, tag: &Label) -> TagEntry {
        let mut table = self.0.lock();
        table.sequence += 1;
        let (state, sequence) = (BlockState::Live, table.sequence);
        let record = BlockRecord { span, requested, tag: tag.clone(), state, sequence };
        let slot = table.free.pop().unwrap_or(table.blocks.len());
        match table.blocks.get_mut(slot) {
            Some(free) => *free = Some(record),
            None => table.blocks.push(Some(record)),
        }
        TagEntry { table: self.clone(), slot }
    }
}

impl Inspect for LiveBlocks {
    fn inspect(&self, visit: &mut dyn FnMut(BlockRecord)) {
        let live: Vec<_> = self.0.lock().blocks.iter().flatten().cloned().collect();
        live.into_iter().for_each(visit);
    }
}

/// The entry of a live block. It is removed from the table on drop.
#[derive(Debug)]
pub struct TagEntry {
    table: LiveBlocks,
    slot: usize,
}

impl Drop for TagEntry {
    fn drop(&mut self) {
        let mut table = self.table.0.lock();
        if let Some(record) = table.blocks.get_mut(self.slot) {
            *record = None;
            table.free.push(self.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::Snapshot;
    use super::*;
    use terrane_core::{Alignment, Limits};
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    fn source() -> Tags<Simulated> {
        let limits = Limits { granule: Alignment::SECTOR, ..Limits::NONE };
        let options = SimulatedOptions { limits, ..SimulatedOptions::default() };
        Tags::new(Simulated::new(options), LiveBlocks::new())
    }

    #[test]
    fn a_snapshot_shows_what_is_live_and_whose() {
        let source = source();
        let obtain = |bytes, label: &'static str| {
            source.allocate(&RegionRequest::new(ByteCount::new(bytes)).labelled(label)).unwrap()
        };
        let released = obtain(100, "scratch");
        let held = [obtain(100, "kv"), obtain(600, "kv"), obtain(1, "scratch")];
        drop(released);
        let snapshot = Snapshot::of(&[source.table()]);
        assert!(snapshot.blocks.iter().all(|block| block.state == BlockState::Live));
        let mut blocks: Vec<_> = snapshot
            .blocks
            .iter()
            .map(|block| (block.tag.as_str(), block.span.length.get(), block.requested.get()))
            .collect();
        blocks.sort_unstable();
        assert_eq!(blocks, [("kv", 512, 100), ("kv", 1024, 600), ("scratch", 512, 1)]);
        drop(held);
        assert_eq!(Snapshot::of(&[source.table()]), Snapshot::default());
        let _reuses_a_slot = obtain(1, "");
        assert_eq!(source.table().live(), 1);
    }

    #[cfg(feature = "serde")]
    #[test]
    fn a_snapshot_serialises() {
        let source = source();
        let request = RegionRequest::new(ByteCount::new(3)).labelled("weights \"a\"");
        let _held = source.allocate(&request).unwrap();
        let json = Snapshot::of(&[source.table()]).to_json().unwrap();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        let block = &value["blocks"][0];
        assert_eq!(value["version"], 1);
        assert_eq!((&block["bytes"], &block["requested"]), (&512.into(), &3.into()));
        assert_eq!((&block["tag"], &block["state"]), (&"weights \"a\"".into(), &"live".into()));
        assert_eq!(block["address"], "0x1000000000000000");
    }
}
