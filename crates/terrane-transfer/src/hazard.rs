//! Which blocks of a layout are being read and written right now.
//!
//! Every transfer claims the blocks that it reads and those that it writes before it starts, and
//! releases them when it has ended. A claim that conflicts with another one in flight is granted
//! only if its transfer runs after that one; otherwise it is refused with the blocks concerned.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use slab::Slab;

use crate::sync::{Mutex, MutexGuard, lock};
use crate::{Ticket, TransferId};

/// What a transfer does with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// It reads it.
    Read,
    /// It writes it.
    Write,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Read => "read",
            Self::Write => "written",
        })
    }
}

/// A block that something else in flight reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockConflict {
    /// The block.
    pub block: u32,
    /// What the refused transfer would do with it.
    pub wanted: Access,
    /// What the other one does with it.
    pub held: Access,
    /// The other one. Run [after](crate::Transfer::after) its ticket, or wait for it.
    pub holder: TransferId,
}

/// The blocks, layers and heads that a transfer is about to use on one side.
#[derive(Clone, Debug)]
pub(crate) struct Use<'a> {
    pub(crate) access: Access,
    pub(crate) blocks: &'a [u32],
    pub(crate) layers: Range<u32>,
    /// All heads of a layout that does not state them are one.
    pub(crate) heads: Range<u32>,
}

/// The claims in flight on the blocks of one layout.
pub(crate) struct HazardTable {
    inner: Arc<Mutex<Claims>>,
}

struct Claims {
    /// Per block, how many claims in flight read and write it: tells in one look that there is
    /// no conflict, which is nearly always so.
    counts: Box<[Counts]>,
    in_flight: Slab<Entry>,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    readers: u32,
    writers: u32,
}

struct Entry {
    holder: TransferId,
    access: Access,
    layers: Range<u32>,
    heads: Range<u32>,
    blocks: Blocks,
}

/// The blocks of a claim.
enum Blocks {
    /// Blocks that follow one another, as those of a sequence that was allocated at once. No list is kept
    /// of them, and their counts lie behind one another: several are looked at, and changed, at a time.
    Range(Range<u32>),
    /// Any others; and whether they are in ascending order, in which a block is found by bisection.
    /// They are put into it when one is first looked for, which is rare.
    List(Box<[u32]>, bool),
}

impl HazardTable {
    pub(crate) fn new(num_blocks: u32) -> Self {
        let counts = (0..num_blocks).map(|_| Counts::default()).collect();
        let claims = Claims { counts, in_flight: Slab::new() };
        Self { inner: Arc::new(Mutex::new(claims)) }
    }

    /// Locks the table, to look and to claim in one step.
    pub(crate) fn lock(&self) -> LockedHazards<'_> {
        LockedHazards { table: &self.inner, claims: lock(&self.inner) }
    }
}

/// A locked table.
///
/// Two of them are locked in the order of their endpoints' numbers, and tickets, one at a time,
/// inside of them. In no other case does this crate hold two locks.
pub(crate) struct LockedHazards<'a> {
    table: &'a Arc<Mutex<Claims>>,
    claims: MutexGuard<'a, Claims>,
}

impl LockedHazards<'_> {
    /// The conflicts of `wanted` with claims in flight, but for those of `predecessors`.
    pub(crate) fn conflicts(
        &mut self,
        wanted: &Use<'_>,
        predecessors: &dyn Fn(TransferId) -> bool,
    ) -> Vec<BlockConflict> {
        let mut conflicts = Vec::new();
        if self.claims.are_free_for(wanted.blocks, wanted.access) {
            return conflicts;
        }
        for &block in wanted.blocks {
            if self.claims.is_free_for(block, wanted.access) {
                continue;
            }
            for (_, entry) in &mut self.claims.in_flight {
                let conflicts_with_it = entry.excludes(wanted.access)
                    && meet(&entry.layers, &wanted.layers)
                    && meet(&entry.heads, &wanted.heads)
                    && entry.has(block)
                    && !predecessors(entry.holder);
                if conflicts_with_it {
                    let (held, holder) = (entry.access, entry.holder);
                    let wanted = wanted.access;
                    conflicts.push(BlockConflict { block, wanted, held, holder });
                }
            }
        }
        conflicts
    }

    /// Claims the blocks for `holder`. The caller has looked for conflicts under the same lock,
    /// and has checked that every block exists.
    pub(crate) fn claim(&mut self, holder: &Ticket, used: &Use<'_>) -> Claim {
        let claims = &mut *self.claims;
        let blocks = Blocks::new(used.blocks);
        claims.count(&blocks, used.access, |count| *count += 1);
        let (layers, heads) = (used.layers.clone(), used.heads.clone());
        let entry = Entry { holder: holder.id(), access: used.access, layers, heads, blocks };
        let key = claims.in_flight.insert(entry);
        Claim { table: Arc::clone(self.table), key }
    }
}

impl Claims {
    fn is_free_for(&self, block: u32, access: Access) -> bool {
        self.are_free_for(&[block], access)
    }

    /// Whether nothing in flight is in the way of any of the blocks, which is nearly always so; found
    /// out without a branch for each.
    fn are_free_for(&self, blocks: &[u32], access: Access) -> bool {
        match range_of(blocks) {
            Some(range) => {
                let counts = self.counts.get(widen(range.start)..widen(range.end));
                are_free(counts.unwrap_or_default().iter().copied(), access)
            }
            None => {
                let of = |&block: &u32| self.counts.get(widen(block)).copied().unwrap_or_default();
                are_free(blocks.iter().map(of), access)
            }
        }
    }

    fn count(&mut self, blocks: &Blocks, access: Access, change: impl Fn(&mut u32)) {
        let change = |counts: &mut Counts| {
            change(match access {
                Access::Read => &mut counts.readers,
                Access::Write => &mut counts.writers,
            });
        };
        match blocks {
            Blocks::Range(range) => {
                let counts = self.counts.get_mut(widen(range.start)..widen(range.end));
                counts.unwrap_or_default().iter_mut().for_each(change);
            }
            Blocks::List(blocks, _) => {
                for &block in blocks {
                    self.counts.get_mut(widen(block)).map(change);
                }
            }
        }
    }
}

fn are_free(counts: impl Iterator<Item = Counts>, access: Access) -> bool {
    let in_the_way = match access {
        Access::Read => counts.fold(0, |any, found| any | found.writers),
        Access::Write => counts.fold(0, |any, found| any | found.readers | found.writers),
    };
    in_the_way == 0
}

impl Entry {
    fn excludes(&self, wanted: Access) -> bool {
        self.access == Access::Write || wanted == Access::Write
    }

    fn has(&mut self, block: u32) -> bool {
        match &mut self.blocks {
            Blocks::Range(range) => range.contains(&block),
            Blocks::List(blocks, is_sorted) => {
                if !std::mem::replace(is_sorted, true) && !blocks.is_sorted() {
                    blocks.sort_unstable();
                }
                blocks.binary_search(&block).is_ok()
            }
        }
    }
}

impl Blocks {
    fn new(blocks: &[u32]) -> Self {
        range_of(blocks).map_or_else(|| Self::List(blocks.into(), false), Self::Range)
    }
}

/// The range that these blocks are, in this order.
fn range_of(blocks: &[u32]) -> Option<Range<u32>> {
    let (first, end) = (*blocks.first()?, blocks.last()?.checked_add(1)?);
    if first >= end || widen(end - first) != blocks.len() {
        return None;
    }
    // Without a branch for each, several are compared at a time.
    let is_range =
        blocks.iter().zip(first..end).fold(true, |all, (&block, id)| all & (block == id));
    is_range.then_some(first..end)
}

/// A granted claim. Dropping it releases the blocks.
pub(crate) struct Claim {
    table: Arc<Mutex<Claims>>,
    key: usize,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut claims = lock(&self.table);
        if let Some(entry) = claims.in_flight.try_remove(self.key) {
            claims.count(&entry.blocks, entry.access, |count| *count -= 1);
        }
    }
}

/// Whether two ranges have anything in common.
pub(crate) fn meet(a: &Range<u32>, b: &Range<u32>) -> bool {
    a.start < b.end && b.start < a.end
}

/// A block number as an index.
fn widen(block: u32) -> usize {
    terrane_core::ByteCount::new(block.into()).to_usize()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn used<'a>(access: Access, blocks: &'a [u32], layers: Range<u32>) -> Use<'a> {
        Use { access, blocks, layers, heads: 0..1 }
    }

    fn nobody(_: TransferId) -> bool {
        false
    }

    #[test]
    fn readers_share_and_writers_do_not() {
        let table = HazardTable::new(8);
        let ticket = Ticket::new([]);
        let reading = table.lock().claim(&ticket, &used(Access::Read, &[3, 1], 0..4));
        let mut locked = table.lock();
        assert!(locked.conflicts(&used(Access::Read, &[1, 2, 3], 0..4), &nobody).is_empty());
        let conflicts = locked.conflicts(&used(Access::Write, &[1, 2], 0..4), &nobody);
        let expected = BlockConflict {
            block: 1,
            wanted: Access::Write,
            held: Access::Read,
            holder: ticket.id(),
        };
        assert_eq!(conflicts, [expected]);
        drop(locked);
        drop(reading);
        assert!(table.lock().conflicts(&used(Access::Write, &[1], 0..4), &nobody).is_empty());
    }

    #[test]
    fn other_layers_of_a_block_do_not_conflict() {
        let table = HazardTable::new(2);
        let _writing = table.lock().claim(&Ticket::new([]), &used(Access::Write, &[0], 0..2));
        let mut locked = table.lock();
        assert!(locked.conflicts(&used(Access::Write, &[0], 2..4), &nobody).is_empty());
        assert_eq!(locked.conflicts(&used(Access::Read, &[0], 1..3), &nobody).len(), 1);
    }

    #[test]
    fn other_heads_of_a_block_do_not_conflict() {
        let of_heads = |heads| Use { heads, ..used(Access::Write, &[0], 0..2) };
        let table = HazardTable::new(2);
        let _writing = table.lock().claim(&Ticket::new([]), &of_heads(2..4));
        let mut locked = table.lock();
        assert!(locked.conflicts(&of_heads(0..2), &nobody).is_empty());
        assert!(locked.conflicts(&of_heads(4..8), &nobody).is_empty());
        assert_eq!(locked.conflicts(&of_heads(3..5), &nobody).len(), 1);
        assert_eq!(locked.conflicts(&of_heads(0..8), &nobody).len(), 1);
    }

    #[test]
    fn what_runs_after_the_holder_may_claim() {
        let table = HazardTable::new(1);
        let first = Ticket::new([]);
        let _claim = table.lock().claim(&first, &used(Access::Write, &[0], 0..1));
        let after_first = |id| id == first.id();
        let wanted = used(Access::Write, &[0], 0..1);
        assert!(table.lock().conflicts(&wanted, &after_first).is_empty());
        assert_eq!(table.lock().conflicts(&wanted, &nobody).len(), 1);
    }

    #[test]
    fn a_block_read_twice_by_one_claim_is_released_once_for_each() {
        let table = HazardTable::new(1);
        let claim = table.lock().claim(&Ticket::new([]), &used(Access::Read, &[0, 0], 0..1));
        drop(claim);
        assert!(table.lock().conflicts(&used(Access::Write, &[0], 0..1), &nobody).is_empty());
    }

    proptest! {
        /// Ranges, what is nearly one, and what is none: each is counted as a list of it would be.
        #[test]
        fn blocks_are_claimed_and_released_whether_they_are_a_range_or_not(
            first in 0_u32..12,
            count in 0_u32..12,
            changed in proptest::option::of((0_usize..12, 0_u32..24)),
            writes in any::<bool>(),
        ) {
            let mut blocks: Vec<u32> = (first..first + count).collect();
            if let Some((place, block)) = changed
                && let Some(at) = blocks.get_mut(place)
            {
                *at = block;
            }
            let access = if writes { Access::Write } else { Access::Read };
            let table = HazardTable::new(24);
            let claim = table.lock().claim(&Ticket::new([]), &used(access, &blocks, 0..1));
            for wanted in [Access::Read, Access::Write] {
                let excludes = writes || wanted == Access::Write;
                for block in 0..24 {
                    let found = table.lock().conflicts(&used(wanted, &[block], 0..1), &nobody);
                    prop_assert_eq!(!found.is_empty(), excludes && blocks.contains(&block));
                }
                // Also with others about them.
                let all: Vec<u32> = (0..24).collect();
                let found = table.lock().conflicts(&used(wanted, &all, 0..1), &nobody);
                let mut distinct = blocks.clone();
                distinct.sort_unstable();
                distinct.dedup();
                prop_assert_eq!(found.len(), if excludes { distinct.len() } else { 0 });
            }
            drop(claim);
            let all: Vec<u32> = (0..24).collect();
            let found = table.lock().conflicts(&used(Access::Write, &all, 0..1), &nobody);
            prop_assert!(found.is_empty());
        }
    }
}
