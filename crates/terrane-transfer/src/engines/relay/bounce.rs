//! The memory between the hops.

use std::fmt;
use std::sync::Mutex;

use terrane_core::sync::lock;
use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Memory, Region, RegionRequest, StorageKind,
};
use terrane_layout::{Geometry, LayoutBuilder, LayoutError};

use super::options::RelayOptions;
use crate::hazard::endpoint::Endpoint;

/// Slots of one size. The first is allocated at the start, the others on demand.
pub(super) struct BounceSlots {
    allocate: Box<Allocating>,
    kind: StorageKind,
    slot_bytes: ByteCount,
    state: Mutex<SlotsState>,
    /// The endpoint of the latest quote.
    quoted: Mutex<Option<(Geometry, Endpoint)>>,
}

type Allocating = dyn Fn() -> Result<Region, AllocateError> + Send + Sync;

struct SlotsState {
    free: Vec<Slot>,
    slots: RelaySlots,
    /// The memory of a slot. Quotes, and jobs without bytes, are planned with it.
    first: Region,
    /// Whether that slot is owned by an orphaned copy, so that another slot should replace it here.
    first_is_orphaned: bool,
}

/// The slots of a [`RelayEngine`](super::RelayEngine).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RelaySlots {
    /// The number of slots now.
    pub held: usize,
    /// The maximum number of slots.
    pub most: usize,
    /// The number of slots that the allocator refused. Transfers then share the existing ones.
    pub refused: u64,
    /// The number of slots that went to orphaned copies so far. Their memory is freed when the copy
    /// has ended. Until then it adds to the memory of the other slots.
    pub orphaned: u64,
}

impl fmt::Display for RelaySlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { held, most, refused, orphaned } = self;
        write!(
            f,
            "{held} of {most} slots; {refused} more refused by the allocator, {orphaned} given to \
             orphaned copies"
        )
    }
}

/// A slot that is in use until it is returned.
pub(super) struct Slot {
    region: Region,
    /// The endpoint of the latest chunk.
    latest: Option<(Geometry, Endpoint)>,
}

impl BounceSlots {
    /// # Errors
    ///
    /// [`AllocateError`] if the first slot cannot be allocated.
    pub(super) fn new(
        allocator: impl Allocate + Send + Sync + 'static,
        options: &RelayOptions,
    ) -> Result<Self, AllocateError> {
        let kind = allocator.kind();
        let slot_bytes = options.slot_bytes.max(ByteCount::new(1));
        // Direct I/O needs buffers aligned to a page, at most.
        let request =
            RegionRequest::new(slot_bytes).aligned_to(Alignment::PAGE).labelled("relay slot");
        let allocate = Box::new(move || allocator.allocate(&request).map(Region::new));
        let first = allocate()?;
        let slots = RelaySlots { held: 1, most: options.slots.max(1), refused: 0, orphaned: 0 };
        let free = vec![Slot { region: first.clone(), latest: None }];
        let state = Mutex::new(SlotsState { free, slots, first, first_is_orphaned: false });
        Ok(Self { allocate, kind, slot_bytes, state, quoted: Mutex::default() })
    }

    pub(super) fn kind(&self) -> StorageKind {
        self.kind
    }

    pub(super) fn slot_bytes(&self) -> ByteCount {
        self.slot_bytes
    }

    pub(super) fn slots(&self) -> RelaySlots {
        lock(&self.state).slots
    }

    /// Returns a slot; `None` if all slots are in use and no more are allowed or available. One
    /// thread calls this at a time, and may wait for the allocator.
    ///
    /// # Errors
    ///
    /// [`AllocateError`] if no slot exists and none can be allocated.
    pub(super) fn take(&self) -> Result<Option<Slot>, AllocateError> {
        let mut state = lock(&self.state);
        if let Some(slot) = state.free.pop() {
            return Ok(Some(slot));
        }
        if state.slots.held >= state.slots.most {
            return Ok(None);
        }
        drop(state);
        let allocated = (self.allocate)();
        let mut state = lock(&self.state);
        match allocated {
            Ok(region) => {
                state.slots.held += 1;
                if std::mem::take(&mut state.first_is_orphaned) {
                    let left = std::mem::replace(&mut state.first, region.clone());
                    drop(state);
                    let quoted = lock(&self.quoted).take();
                    drop((quoted, left));
                }
                Ok(Some(Slot { region, latest: None }))
            }
            Err(error) => {
                state.slots.refused += 1;
                if state.slots.held == 0 {
                    return Err(error);
                }
                drop(state);
                // A waiting chunk gets an existing slot later.
                tracing::warn!(%error, "no memory for another slot; the relay continues with fewer slots");
                Ok(None)
            }
        }
    }

    pub(super) fn give_back(&self, slot: Slot) {
        lock(&self.state).free.push(slot);
    }

    /// Gives a slot to an orphaned copy, which then owns its memory.
    pub(super) fn orphan(&self, slot: Slot) {
        let mut state = lock(&self.state);
        state.slots.held -= 1;
        state.slots.orphaned += 1;
        state.first_is_orphaned |= slot.region.same_memory(&state.first);
        drop(state);
        drop(slot);
    }

    /// Sets the number of slots to the number of free slots, when no chunk uses any.
    pub(super) fn count_free(&self) {
        let mut state = lock(&self.state);
        state.slots.held = state.free.len();
    }

    /// Frees idle slots, but keeps at least one slot, and the first one if it is idle. Returns the
    /// bytes freed.
    pub(super) fn trim(&self) -> ByteCount {
        let mut state = lock(&self.state);
        let mut freed = std::mem::take(&mut state.free);
        let first = state.first.clone();
        let is_first = |slot: &Slot| slot.region.same_memory(&first);
        let kept = freed.iter().position(is_first).or_else(|| freed.len().checked_sub(1));
        // If another slot is in use, only the first slot must be kept.
        if let Some(kept) = kept
            && (freed.len() == state.slots.held || freed.get(kept).is_some_and(is_first))
        {
            state.free.push(freed.swap_remove(kept));
        }
        state.slots.held -= freed.len();
        drop(state);
        // The sum is less than the mapped memory, so it does not overflow.
        ByteCount::new(freed.iter().map(|slot| slot.region.length().get()).sum())
    }

    /// Returns an endpoint of such blocks for planning only: other chunks use the slot's bytes.
    pub(super) fn planning_endpoint(&self, geometry: &Geometry) -> Result<Endpoint, LayoutError> {
        let first = lock(&self.state).first.clone();
        // Dropping an endpoint may free memory, so no drop happens under the lock.
        let mut quoted = lock(&self.quoted).take();
        let endpoint = cached(&mut quoted, &first, geometry)?;
        let state = lock(&self.state);
        if state.first.same_memory(&first) {
            std::mem::swap(&mut *lock(&self.quoted), &mut quoted);
        }
        drop((state, quoted));
        Ok(endpoint)
    }
}

terrane_core::debug_fields!(BounceSlots, |slots| {
    kind: slots.kind,
    slot_bytes: slots.slot_bytes,
    slots: slots.slots()
});

impl Slot {
    /// Returns the slot as an endpoint of such blocks, for the current chunk and one hop at a time.
    pub(super) fn endpoint(&mut self, geometry: &Geometry) -> Result<Endpoint, LayoutError> {
        cached(&mut self.latest, &self.region, geometry)
    }
}

fn cached(
    latest: &mut Option<(Geometry, Endpoint)>,
    region: &Region,
    geometry: &Geometry,
) -> Result<Endpoint, LayoutError> {
    if let Some((_, endpoint)) = latest.as_ref().filter(|(known, _)| known == geometry) {
        return Ok(endpoint.clone());
    }
    let layout = LayoutBuilder::from_geometry(geometry.clone())
        .adopt([region.clone()])
        .unregistered()
        .build()?;
    // SAFETY: only endpoints made here access a slot's bytes. A slot has one owner. The owner runs
    // one hop at a time through it, and returns it when that hop has ended. Endpoints for planning
    // copy nothing.
    let endpoint = unsafe { Endpoint::sharing(layout) };
    *latest = Some((geometry.clone(), endpoint.clone()));
    Ok(endpoint)
}
