//! The tiers of a store: their slot tables, memory, files and counts.

pub(crate) mod counters;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrane_storage::IoMemory;
use terrane_transfer::{Endpoint, Hold, SlotSet};

use crate::disk::{Catalog, DirectoryLock};
use crate::slab::{SlabBuffers, Slabs};
use crate::store::copy::copies::YieldingCopies;
use crate::store::group::{EndpointFacts, GroupInfo, host_buffers};
use crate::store::job::result::BlockResult;
use crate::store::query::presence::TierId;
use crate::store::slot_table::SlotTable;
use crate::store::tier::counters::TierCounters;

/// A tier: its slot tables, one for each group, and its memory unless it is the disk tier.
pub(crate) struct Tier {
    pub(crate) id: TierId,
    pub(crate) name: String,
    pub(crate) tables: Vec<Arc<SlotTable>>,
    /// The memory of each group; empty for the disk tier.
    pub(crate) memory: Vec<TierBlocks>,
    /// The bytes of a slot of each group.
    pub(crate) slot_bytes: Vec<u64>,
    pub(crate) counters: TierCounters,
}

/// The memory of one group in a tier.
pub(crate) struct TierBlocks {
    pub(crate) endpoint: Endpoint,
    pub(crate) facts: EndpointFacts,
    /// All block ids of the endpoint. The slot table allocates them.
    pub(crate) _ids: SlotSet,
}

/// The disk tier's files and catalog.
pub(crate) struct DiskParts {
    pub(crate) slabs: Slabs,
    pub(crate) catalog: Catalog,
    pub(crate) is_read_only: bool,
    /// The locks of the folders besides the catalog's.
    pub(crate) _folder_locks: Vec<Box<dyn DirectoryLock>>,
}

/// Adds to a count. Relaxed: counts order nothing.
pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl Tier {
    pub(crate) const fn is_disk(&self) -> bool {
        self.memory.is_empty()
    }

    pub(crate) fn table(&self, group: u16) -> Option<&Arc<SlotTable>> {
        self.tables.get(usize::from(group))
    }

    pub(crate) fn blocks(&self, group: u16) -> Option<&TierBlocks> {
        self.memory.get(usize::from(group))
    }

    /// Whether the host can address the memory of a group in this tier.
    pub(crate) fn is_host(&self, group: u16) -> bool {
        self.blocks(group).is_some_and(|blocks| blocks.facts.is_host)
    }
}

impl TierBlocks {
    /// Keeps transfers from a slot that other code writes. When the hold drops, the block counts as
    /// written, even if a failed transfer had left it incomplete.
    pub(crate) fn hold(&self, slot: u32) -> Result<Hold, BlockResult> {
        self.endpoint.hold_for_write(&[slot]).map_err(BlockResult::failed)
    }

    /// Copies a block of `length` bytes from host memory to a slot on this thread, and holds the
    /// slot meanwhile. Fails if a transfer uses the slot, or if the job is stopped.
    ///
    /// # Safety
    ///
    /// `from` is valid for reads. No other code writes it, or uses the slot, until the future has ended or
    /// dropped.
    #[expect(unsafe_code, reason = "the memory is named by addresses")]
    pub(crate) async unsafe fn copy_in(
        &self,
        yielding: &mut YieldingCopies<'_>,
        info: &GroupInfo,
        (slot, length): (u32, u32),
        from: &SlabBuffers,
    ) -> Result<(), BlockResult> {
        let _hold = self.hold(slot)?;
        // SAFETY: the caller keeps the contract of the call. The slot is memory of this tier.
        unsafe { yielding.copy(from, &self.buffers(info, slot, length)).await }
    }

    /// The first range of the memory of the slots, which an I/O queue may register.
    pub(crate) fn io_memory(&self) -> Option<IoMemory> {
        self.endpoint.io_memory().first().cloned()
    }

    /// The host memory of the first `length` bytes of a slot.
    pub(crate) fn buffers(&self, info: &GroupInfo, slot: u32, length: u32) -> SlabBuffers {
        host_buffers(&self.endpoint, slot, (length, info.tokens_of(length)))
    }
}
