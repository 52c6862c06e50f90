//! Owned block ids of an endpoint.

mod free_ids;
mod set;

pub use set::SlotSet;

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;
use terrane_core::ForkedProcess;

use crate::hazard::endpoint::Endpoint;
use crate::sync::{Mutex, lock};
use free_ids::FreeIds;

/// Allocates the block ids of an endpoint, each to one owner at a time.
///
/// [`take`](Self::take) returns a [`SlotSet`], which owns its ids. It can be used as a transfer's
/// list of blocks. The ids are free again when the set drops, or [after a transfer has
/// ended](SlotSet::free_after).
///
/// An id is never allocated while a transfer or a [hold](crate::Endpoint::hold_for_read) claims its
/// block. So a set may drop while a transfer of its blocks waits, runs, or was
/// [orphaned](crate::CopyJob::orphan). Its ids become free when the last claim on them is released.
///
/// The lowest free ids are allocated first, in ascending order. So blocks that are allocated
/// together are mostly adjacent, and their transfers have long runs.
///
/// Clones share the ids. They and the sets keep the endpoint alive. In a process that was forked
/// from the endpoint's process, nothing is allocated or freed. A set that is leaked (`mem::forget`)
/// only leaks its ids.
///
/// Taking or freeing one id costs a lock and some tens of nanoseconds. For `n` ids at once, the
/// time grows with `n`, and slightly with the number of free ids.
///
/// ```
/// # use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
/// # use terrane_storage::{SystemAllocator, SystemOptions};
/// use terrane_transfer::{Endpoint, Slots, Transfer, TransferManager};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let endpoint = || -> Result<Endpoint, Box<dyn std::error::Error>> {
/// #     let config = LayoutConfig::builder()
/// #         .num_blocks(16)
/// #         .num_layers(2)
/// #         .outer_dim(2)
/// #         .page_size(4)
/// #         .inner_dim(8)
/// #         .element(ElementFormat::Width(2))
/// #         .build()?;
/// #     let system = SystemAllocator::new(SystemOptions::default());
/// #     let layout = LayoutBuilder::new(config).fully_contiguous().allocate(&system);
/// #     Ok(Endpoint::new(layout.unregistered().build()?)?)
/// # };
/// let (device, host) = (endpoint()?, endpoint()?);
/// let (device_slots, host_slots) = (Slots::new(&device)?, Slots::new(&host)?);
/// let manager = TransferManager::with_default_engines()?;
///
/// let computed = device_slots.take(3)?;
/// let kept = host_slots.take(computed.len())?;
/// let offload = Transfer::new(&device, &host).blocks(&computed, &kept);
/// let completion = manager.submit(offload, ())?;
/// // The device's blocks are free once they have been read.
/// computed.free_after(&completion.ticket());
/// completion.wait().result?;
/// assert_eq!((device_slots.free(), host_slots.free()), (16, 13));
/// # drop(kept);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Slots {
    shared: Arc<SharedSlots>,
}

/// The ids of one allocator.
struct SharedSlots {
    endpoint: Endpoint,
    range: Range<u32>,
    /// Locked before the hazards of the endpoint.
    state: Mutex<SlotIds>,
}

struct SlotIds {
    free: FreeIds,
    /// Returned ids whose blocks are still claimed.
    in_flight: Vec<u32>,
}

/// The reason why no slots were returned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SlotsError {
    /// There are fewer free ids than were requested. None was allocated.
    #[error(
        "{requested} block ids requested; {free} of {total} are free, and {in_flight} more once \
         transfers of their blocks have ended; drop other slots first, or take fewer"
    )]
    Exhausted {
        /// The number of ids that were requested.
        requested: usize,
        /// The number of free ids.
        free: usize,
        /// The number of returned ids whose blocks transfers or holds still claim.
        in_flight: usize,
        /// The number of ids of the allocator.
        total: usize,
    },
    /// The range of ids is empty or out of range.
    #[error(
        "blocks {}..{} are not a range within the {num_blocks} blocks of the endpoint; name one or \
         more of them",
        .blocks.start, .blocks.end
    )]
    NoSuchBlocks {
        /// The requested range.
        blocks: Range<u32>,
        /// The number of blocks of the endpoint.
        num_blocks: u32,
    },
    /// Another allocator owns some of the ids.
    #[error(
        "blocks {}..{} of the endpoint already have an allocator of slots, for blocks {}..{}; clone \
         that one, or name other blocks",
        .blocks.start, .blocks.end, .owned.start, .owned.end
    )]
    InUse {
        /// The requested range.
        blocks: Range<u32>,
        /// The range of the other allocator.
        owned: Range<u32>,
    },
    /// The two sets belong to different allocators, so they cannot be joined.
    #[error("the slots to append belong to another allocator; keep them in a separate set")]
    OtherAllocator,
    /// The endpoint belongs to the process that this one was forked from.
    #[error(
        "the slots are those of an endpoint of another process; create the endpoint after the fork"
    )]
    Forked(#[from] ForkedProcess),
}

impl Slots {
    /// Creates an allocator of all blocks of the endpoint.
    ///
    /// Endpoints of [groups](Endpoint::of_groups) share their block ids, so one endpoint's
    /// allocator is for all of them.
    ///
    /// # Errors
    ///
    /// [`SlotsError::InUse`] if a block of the endpoint has an allocator, and
    /// [`SlotsError::Forked`].
    pub fn new(endpoint: &Endpoint) -> Result<Self, SlotsError> {
        Self::of_range(endpoint, 0..endpoint.layout().geometry().num_blocks())
    }

    /// Creates an allocator of some blocks of the endpoint, by their ids. The caller, or another
    /// allocator, manages the others.
    ///
    /// # Errors
    ///
    /// [`SlotsError::NoSuchBlocks`] if the range is empty or out of range, [`SlotsError::InUse`] if
    /// a block of it has an allocator, and [`SlotsError::Forked`].
    pub fn of_range(endpoint: &Endpoint, blocks: Range<u32>) -> Result<Self, SlotsError> {
        endpoint.check_owner()?;
        let num_blocks = endpoint.layout().geometry().num_blocks();
        if blocks.is_empty() || blocks.end > num_blocks {
            return Err(SlotsError::NoSuchBlocks { blocks, num_blocks });
        }
        if let Err(owned) = endpoint.hazards().lock().add_slots(&blocks) {
            return Err(SlotsError::InUse { blocks, owned });
        }
        let free = FreeIds::new(blocks.clone());
        let state = Mutex::new(SlotIds { free, in_flight: Vec::new() });
        let shared = SharedSlots { endpoint: endpoint.clone(), range: blocks, state };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Takes `count` free ids, the lowest first and in ascending order, or none.
    ///
    /// # Errors
    ///
    /// [`SlotsError::Exhausted`] if fewer are free, and [`SlotsError::Forked`].
    pub fn take(&self, count: usize) -> Result<SlotSet, SlotsError> {
        self.shared.endpoint.check_owner()?;
        let mut state = lock(&self.shared.state);
        let exhausted = |free, state: &SlotIds| {
            let (in_flight, total) = (state.in_flight.len(), self.total());
            Err(SlotsError::Exhausted { requested: count, free, in_flight, total })
        };
        self.shared.collect_for(count, &mut state);
        // Taking all ids, to put them back, would take long under the locks.
        if state.free.len() < count {
            return exhausted(state.free.len(), &state);
        }
        let ids = self.shared.take(count, &mut state);
        if ids.len() < count {
            ids.iter().for_each(|&id| state.free.put(id));
            return exhausted(ids.len(), &state);
        }
        Ok(SlotSet::new(&self.shared, ids))
    }

    /// Takes up to `most` free ids, the lowest first and in ascending order. The set is empty if
    /// none is free, and in a forked process.
    #[must_use = "dropping the set frees its ids"]
    pub fn take_up_to(&self, most: usize) -> SlotSet {
        if self.shared.endpoint.check_owner().is_err() {
            return SlotSet::new(&self.shared, SmallVec::new());
        }
        let mut state = lock(&self.shared.state);
        let ids = self.shared.take(most, &mut state);
        SlotSet::new(&self.shared, ids)
    }

    /// The number of free ids; 0 in a forked process. [`take`](Self::take) returns that many,
    /// unless code that does not own an id uses its block.
    #[must_use]
    pub fn free(&self) -> usize {
        if self.shared.endpoint.check_owner().is_err() {
            return 0;
        }
        let mut state = lock(&self.shared.state);
        self.shared.collect(&mut state);
        state.free.len()
    }

    /// The number of ids of the allocator, allocated or free.
    #[must_use]
    pub fn total(&self) -> usize {
        self.shared.range.len()
    }

    /// The endpoint whose blocks these are.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.shared.endpoint
    }
}

terrane_core::debug_fields!(Slots, |slots| {
    range: slots.shared.range,
    free: slots.free()
});

impl SharedSlots {
    /// Takes up to `count` free ids, the lowest first. An id is kept back if a transfer or a hold
    /// of code that does not own it claims its block.
    fn take(&self, count: usize, state: &mut SlotIds) -> SmallVec<[u32; 2]> {
        self.collect_for(count, state);
        let SlotIds { free, in_flight } = state;
        let mut ids: SmallVec<[u32; 2]> = SmallVec::new();
        while ids.len() < count && free.len() > 0 {
            let begin = ids.len();
            free.take(count - begin, &mut ids);
            let hazards = self.endpoint.hazards().lock();
            if hazards.are_unclaimed(ids.get(begin..).unwrap_or_default()) {
                continue;
            }
            for id in ids.drain(begin..).collect::<Vec<_>>() {
                if hazards.are_unclaimed(&[id]) { ids.push(id) } else { in_flight.push(id) }
            }
        }
        ids
    }

    /// Frees ids whose owner has returned them, or keeps them back while their blocks are claimed.
    fn put_back(&self, ids: &[u32]) {
        if ids.is_empty() || self.endpoint.check_owner().is_err() {
            return;
        }
        let SlotIds { free, in_flight } = &mut *lock(&self.state);
        let hazards = self.endpoint.hazards().lock();
        if hazards.are_unclaimed(ids) {
            drop(hazards);
            return ids.iter().for_each(|&id| free.put(id));
        }
        for &id in ids {
            if hazards.are_unclaimed(&[id]) {
                free.put(id);
            } else {
                in_flight.push(id);
            }
        }
    }

    /// Frees returned ids whose blocks are not claimed any more, if fewer than `count` are free.
    fn collect_for(&self, count: usize, state: &mut SlotIds) {
        if state.free.len() < count {
            self.collect(state);
        }
    }

    /// Frees returned ids whose blocks are not claimed any more.
    fn collect(&self, state: &mut SlotIds) {
        let SlotIds { free, in_flight } = state;
        if in_flight.is_empty() {
            return;
        }
        let hazards = self.endpoint.hazards().lock();
        in_flight.retain(|&id| {
            let is_claimed = !hazards.are_unclaimed(&[id]);
            if !is_claimed {
                free.put(id);
            }
            is_claimed
        });
    }
}

impl Drop for SharedSlots {
    fn drop(&mut self) {
        if self.endpoint.check_owner().is_ok() {
            self.endpoint.hazards().lock().remove_slots(&self.range);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
    use terrane_testkit::memory::HeapAllocator;

    use super::*;

    #[test]
    fn a_refused_take_allocates_nothing() {
        let config = LayoutConfig::builder().num_blocks(1_000).num_layers(1).outer_dim(1);
        let config = config.page_size(1).inner_dim(1).element(ElementFormat::Width(1));
        let layout = LayoutBuilder::new(config.build().unwrap()).fully_contiguous();
        let layout = layout.allocate(&HeapAllocator::system()).unregistered().build().unwrap();
        let slots = Slots::new(&Endpoint::new(layout).unwrap()).unwrap();
        // Fewer and fewer are fresh, and none is returned.
        for taken in [0, 400] {
            let taken = slots.take(taken).unwrap();
            let free = 1_000 - taken.len();
            let (requested, in_flight, total) = (free + 1, 0, 1_000);
            let expected = SlotsError::Exhausted { requested, free, in_flight, total };
            assert_eq!(slots.take(requested).unwrap_err(), expected);
            assert_eq!(lock(&slots.shared.state).free.capacity(), 0);
        }
    }
}
