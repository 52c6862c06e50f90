//! The blocks of a layout that transfers in flight read and write.
//!
//! Every transfer claims its blocks before it starts, and releases them when it has ended. If a
//! claim conflicts with another one in flight, it is granted only if its transfer runs after that
//! one. Otherwise it is refused with the conflicting blocks.
//!
//! The table records a destination that a failed transfer may have written in part, until it is
//! written again.

pub(crate) mod blocks;
mod counts;
pub(crate) mod incomplete;
#[cfg(all(test, not(loom)))]
mod tests;

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::atomic::{self, AtomicU64, AtomicUsize};
use std::sync::{Arc, OnceLock};

use slab::Slab;
use terrane_core::{ForkedProcess, OwnerProcess};

use crate::error::TransferError;
use crate::hazard::conflict::{Access, BlockConflict};
use crate::hazard::ticket::{Ticket, TransferId};
use crate::sync::{Mutex, MutexGuard, lock};
use blocks::{Blocks, as_parts, entries_of, overlap};
use counts::BlockCounts;
use incomplete::{Area, Incomplete};

/// The blocks, layers, heads and tokens that a transfer uses at one end.
#[derive(Clone, Debug)]
pub(crate) struct BlockUse<'a> {
    pub(crate) access: Access,
    pub(crate) blocks: &'a [u32],
    /// The group, among those that share the blocks; 0 if there is one.
    pub(crate) group: u32,
    pub(crate) area: Area,
}

/// All tokens of a block, whatever their number.
pub(crate) const ALL_TOKENS: Range<u32> = 0..u32::MAX;

/// The claims in flight on the blocks of one layout, or of several that share their blocks. Clones
/// share one table.
#[derive(Clone)]
pub(crate) struct HazardTable {
    shared: Arc<SharedTable>,
}

struct SharedTable {
    /// Unique within the process. Addresses would also order tables, but differently in each run of
    /// the model checker.
    number: u64,
    owner: OwnerProcess,
    /// The number of claims whose holders failed while the blocks may still be accessed. It changes under
    /// the lock.
    orphaned: AtomicUsize,
    /// The number of those claims that have ended. It changes under the lock.
    orphaned_ended: AtomicUsize,
    claims: Mutex<TableState>,
}

struct TableState {
    counts: BlockCounts,
    in_flight: Slab<ClaimEntry>,
    incomplete: Incomplete,
    /// The ranges of blocks that have an allocator of slots.
    slots: Vec<Range<u32>>,
}

struct ClaimEntry {
    holder: TransferId,
    access: Access,
    group: u32,
    area: Area,
    blocks: Blocks,
    /// Whether the holder has ended while the blocks may still be accessed.
    is_orphaned: bool,
}

/// The outcome of a write claim that did not fail as a whole.
#[derive(Clone, Debug)]
pub(crate) enum Written {
    /// The blocks are unchanged.
    Nothing,
    /// The blocks are fully written.
    All,
    /// These blocks of the claim may be written in part, and all others are fully written.
    AllExcept(Box<[u32]>),
}

impl HazardTable {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self::build(num_blocks, Incomplete::default())
    }

    /// Creates one table for groups that share their blocks, with the layers and the heads of each
    /// group.
    pub(crate) fn of_groups(num_blocks: u32, groups: impl IntoIterator<Item = (u32, u32)>) -> Self {
        let whole =
            |(layers, heads)| Area { layers: 0..layers, heads: 0..heads, tokens: ALL_TOKENS };
        Self::build(num_blocks, Incomplete::of_groups(groups.into_iter().map(whole).collect()))
    }

    fn build(num_blocks: u32, incomplete: Incomplete) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (counts, in_flight) = (BlockCounts::new(num_blocks), Slab::new());
        let claims = TableState { counts, in_flight, incomplete, slots: Vec::new() };
        let owner = OwnerProcess::current();
        // Relaxed: only uniqueness is needed.
        let number = NEXT.fetch_add(1, atomic::Ordering::Relaxed);
        let [orphaned, orphaned_ended] = [(); 2].map(|()| AtomicUsize::new(0));
        let claims = Mutex::new(claims);
        let shared = SharedTable { number, owner, orphaned, orphaned_ended, claims };
        Self { shared: Arc::new(shared) }
    }

    /// Whether an orphaned transfer claims the block. Without any orphaned transfer, it takes no lock.
    pub(crate) fn is_orphaned(&self, block: u32) -> bool {
        // Acquire: the copies that had a claim have ended once it is not counted.
        self.shared.orphaned.load(atomic::Ordering::Acquire) > 0
            && self.check_owner().is_ok()
            && self.lock().is_orphaned(block)
    }

    /// The number of claims of orphaned transfers that have ended. It takes no lock.
    pub(crate) fn orphaned_ended(&self) -> usize {
        // Acquire: a thread that sees the count also sees that the claim is gone.
        self.shared.orphaned_ended.load(atomic::Ordering::Acquire)
    }

    /// Fails in a forked process, where the table must not be locked: a thread of the parent may
    /// hold the lock.
    pub(crate) fn check_owner(&self) -> Result<(), ForkedProcess> {
        self.shared.owner.check()
    }

    /// Locks two tables in an order that excludes a deadlock. If both are the same table, only the
    /// first lock exists.
    pub(crate) fn lock_both<'a>(
        first: &'a Self,
        second: &'a Self,
    ) -> (LockedHazards<'a>, Option<LockedHazards<'a>>) {
        match first.shared.number.cmp(&second.shared.number) {
            Ordering::Equal => (first.lock(), None),
            Ordering::Less => {
                let locked = first.lock();
                (locked, Some(second.lock()))
            }
            Ordering::Greater => {
                let locked = second.lock();
                (first.lock(), Some(locked))
            }
        }
    }

    /// Locks the table, to check and to claim atomically.
    pub(crate) fn lock(&self) -> LockedHazards<'_> {
        LockedHazards { table: &self.shared, claims: lock(&self.shared.claims) }
    }
}

/// A locked table.
///
/// Two tables are locked in the order of their numbers. Tickets are locked one at a time, inside of
/// these locks. An allocator of slots locks a table inside of its own lock. A completion locks its
/// guard inside of its state. In no other case does this crate hold two locks.
pub(crate) struct LockedHazards<'a> {
    table: &'a Arc<SharedTable>,
    claims: MutexGuard<'a, TableState>,
}

impl LockedHazards<'_> {
    /// The conflicts of `wanted` with claims in flight, except those of `predecessors`; the first
    /// ones if there are very many.
    #[cold]
    pub(crate) fn conflicts(
        &mut self,
        wanted: &BlockUse<'_>,
        predecessors: &dyn Fn(TransferId) -> bool,
    ) -> Vec<BlockConflict> {
        let counts = |entry: &ClaimEntry| entry.is_orphaned || !predecessors(entry.holder);
        self.claims.conflicts(wanted, |_| true, counts)
    }

    /// Fails if a failed transfer may have written some of the wanted blocks in part.
    pub(crate) fn check_complete(&self, wanted: &BlockUse<'_>) -> Result<(), TransferError> {
        if self.claims.incomplete.is_empty() { Ok(()) } else { self.claims.check_complete(wanted) }
    }

    /// Whether no claim, not even that of an orphaned transfer, has any of the blocks.
    pub(crate) fn are_unclaimed(&self, blocks: &[u32]) -> bool {
        self.claims.counts.are_free(blocks, Access::Write)
    }

    fn is_orphaned(&mut self, block: u32) -> bool {
        let mut entries = self.claims.in_flight.iter_mut();
        entries.any(|(_, entry)| entry.is_orphaned && entry.blocks.has(block))
    }

    /// Records that these blocks have an allocator of slots. Fails with the range of another
    /// allocator that has some of them.
    pub(crate) fn add_slots(&mut self, blocks: &Range<u32>) -> Result<(), Range<u32>> {
        let slots = &mut self.claims.slots;
        if let Some(owned) = slots.iter().find(|owned| overlap(owned, blocks)) {
            return Err(owned.clone());
        }
        slots.push(blocks.clone());
        Ok(())
    }

    /// Records that the allocator of slots of exactly these blocks has dropped.
    pub(crate) fn remove_slots(&mut self, blocks: &Range<u32>) {
        self.claims.slots.retain(|owned| owned != blocks);
    }

    /// Counts a claim on these blocks, which all exist. Returns whether no claim in flight can
    /// conflict with it. Otherwise the caller must check for [conflicts](Self::conflicts).
    #[must_use]
    pub(crate) fn count(&mut self, wanted: &BlockUse<'_>) -> bool {
        self.claims.counts.add(wanted.blocks, wanted.access)
    }

    /// Removes a claim that was counted and is refused.
    pub(crate) fn uncount(&mut self, refused: &BlockUse<'_>) {
        self.claims.counts.remove(as_parts(refused.blocks), refused.access);
    }

    /// Grants the claim on these blocks to `holder`. The caller has [counted](Self::count) it under
    /// the same lock.
    pub(crate) fn claim(&mut self, holder: &Ticket, used: &BlockUse<'_>) -> Claim {
        let claims = &mut *self.claims;
        let (holder, access, blocks) = (holder.id(), used.access, Blocks::new(used.blocks));
        let (group, area) = (used.group, used.area.clone());
        let entry = ClaimEntry { holder, access, group, area, blocks, is_orphaned: false };
        let key = claims.in_flight.insert(entry);
        Claim { table: Arc::clone(self.table), key, written: OnceLock::new() }
    }
}

/// The largest number of conflicts that a refusal lists.
const MOST_CONFLICTS: usize = 1_000;

impl TableState {
    #[cold]
    fn check_complete(&self, wanted: &BlockUse<'_>) -> Result<(), TransferError> {
        let blocks = self.incomplete.among(wanted.blocks, wanted.group, &wanted.area);
        if blocks.is_empty() { Ok(()) } else { Err(TransferError::Incomplete { blocks }) }
    }

    /// The conflicts of `wanted` with the claims in flight for which `counts` is true, in the order
    /// of the wanted blocks. The search stops after [`MOST_CONFLICTS`].
    ///
    /// It takes place under the lock, so each claim that `may_count` costs the smaller of two
    /// numbers of blocks: its own, and those of `wanted` that are in use. `counts` may take longer,
    /// so it is called only for claims that share blocks.
    fn conflicts(
        &mut self,
        wanted: &BlockUse<'_>,
        may_count: impl Fn(&ClaimEntry) -> bool,
        counts: impl Fn(&ClaimEntry) -> bool,
    ) -> Vec<BlockConflict> {
        let access = wanted.access;
        if self.counts.are_free(wanted.blocks, access) {
            return Vec::new();
        }
        let side = access.side();
        // Each with its position in the wanted blocks.
        let blocks = wanted.blocks.iter().copied().zip(0..);
        let in_use = |&(block, _): &(u32, usize)| !self.counts.are_free(&[block], access);
        let mut contended: Vec<(u32, usize)> = blocks.filter(in_use).collect();
        contended.sort_unstable();
        let (mut shared, mut found) = (Vec::new(), Vec::new());
        for (_, entry) in &mut self.in_flight {
            if found.len() == MOST_CONFLICTS {
                break;
            }
            if !may_count(entry) || !entry.excludes(wanted) {
                continue;
            }
            let left = MOST_CONFLICTS - found.len();
            shared.clear();
            if contended.len() <= entry.blocks.len() {
                let blocks = contended.iter().filter(|&&(block, _)| entry.blocks.has(block));
                shared.extend(blocks.take(left));
            } else {
                let blocks = entry.blocks.distinct();
                shared.extend(blocks.flat_map(|block| entries_of(&contended, block)).take(left));
            }
            if !shared.is_empty() && counts(entry) {
                let (held, holder) = (entry.access, entry.holder);
                let conflict = |&(block, position): &(u32, usize)| {
                    (position, BlockConflict { side, block, wanted: access, held, holder })
                };
                found.extend(shared.iter().map(conflict));
            }
        }
        found.sort_by_key(|&(position, _)| position);
        found.into_iter().map(|(_, conflict)| conflict).collect()
    }
}

impl ClaimEntry {
    fn excludes(&self, wanted: &BlockUse<'_>) -> bool {
        // Layers and heads of different groups cannot be compared.
        (self.access == Access::Write || wanted.access == Access::Write)
            && (self.group != wanted.group
                || overlap(&self.area.layers, &wanted.area.layers)
                    && overlap(&self.area.heads, &wanted.area.heads))
    }
}

/// A granted claim. Dropping it releases the blocks.
pub(crate) struct Claim {
    table: Arc<SharedTable>,
    key: usize,
    /// Empty if the write failed half-way.
    written: OnceLock<Written>,
}

impl Claim {
    /// Records the outcome of a write that did not fail half-way. The first call counts.
    pub(crate) fn has_written(&self, written: Written) {
        self.written.get_or_init(|| written);
    }

    /// Records that the holder has failed. The blocks may be accessed until the claim drops, so no
    /// successor may use them.
    pub(crate) fn orphan(&self) {
        if !self.table.owner.is_current() {
            return;
        }
        let claims = &mut *lock(&self.table.claims);
        let Some(entry) = claims.in_flight.get_mut(self.key) else { return };
        if !std::mem::replace(&mut entry.is_orphaned, true) {
            self.table.orphaned.fetch_add(1, atomic::Ordering::Relaxed);
        }
        if entry.access == Access::Write {
            claims.incomplete.add(&entry.blocks, entry.group, &entry.area);
        }
    }

    /// Checks again once all predecessors of the holder have ended, because some may have failed.
    ///
    /// # Errors
    ///
    /// [`TransferError::Conflict`] if the blocks may still be accessed;
    /// [`TransferError::Incomplete`] if the claim reads incomplete blocks without permission.
    pub(crate) fn check_start(&self, allow_incomplete: bool) -> Result<(), TransferError> {
        let claims = &mut *lock(&self.table.claims);
        // Relaxed: the lock orders it.
        let has_orphaned = self.table.orphaned.load(atomic::Ordering::Relaxed) > 0;
        if claims.incomplete.is_empty() && !has_orphaned {
            return Ok(());
        }
        let Some(entry) = claims.in_flight.get(self.key) else { return Ok(()) };
        let blocks = entry.blocks.to_vec();
        let (access, group, area) = (entry.access, entry.group, entry.area.clone());
        let wanted = BlockUse { access, blocks: &blocks, group, area };
        if has_orphaned {
            no_conflicts(claims.conflicts(&wanted, |entry| entry.is_orphaned, |_| true))?;
        }
        if wanted.access == Access::Write || allow_incomplete {
            return Ok(());
        }
        claims.check_complete(&wanted)
    }
}

/// Fails if there are any conflicts.
pub(crate) fn no_conflicts(conflicts: Vec<BlockConflict>) -> Result<(), TransferError> {
    if conflicts.is_empty() { Ok(()) } else { Err(TransferError::Conflict { conflicts }) }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.table.owner.is_current() {
            return;
        }
        let claims = &mut *lock(&self.table.claims);
        let Some(entry) = claims.in_flight.try_remove(self.key) else { return };
        claims.counts.remove(entry.blocks.parts(), entry.access);
        if entry.is_orphaned {
            self.table.orphaned.fetch_sub(1, atomic::Ordering::Release);
            self.table.orphaned_ended.fetch_add(1, atomic::Ordering::Release);
        }
        match (entry.access, self.written.get()) {
            (Access::Read, _) | (_, Some(Written::Nothing)) => {}
            (Access::Write, Some(Written::All)) => {
                claims.incomplete.remove(&entry.blocks, entry.group, &entry.area);
            }
            (Access::Write, Some(Written::AllExcept(blocks))) => {
                claims.incomplete.remove(&entry.blocks, entry.group, &entry.area);
                claims.incomplete.add(&Blocks::new(blocks), entry.group, &entry.area);
            }
            (Access::Write, None) => claims.incomplete.add(&entry.blocks, entry.group, &entry.area),
        }
    }
}
