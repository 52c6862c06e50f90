//! The table of a manager's blocks.

use terrane_core::convert::to_usize;
use terrane_core::{ByteCount, Location, RegionRequest, Span};

use super::error::ManagedError;
use super::identity::{BlockHandle, BlockIdentity, Lifecycle};
use crate::streams::fence::StreamId;

/// Every block of a manager by its handle. `P` is the stored part of an exported block.
///
/// A freed block's entry stays until it is reused. Until then, an error for a stale handle contains
/// the block's label.
#[derive(Debug)]
pub(super) struct Registry<P> {
    slots: Vec<Slot<P>>,
    /// Entries whose blocks were freed.
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<P> {
    identity: BlockIdentity,
    exported: Option<P>,
}

impl<P> Registry<P> {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    pub(super) fn enter(
        &mut self,
        span: Span,
        request: &RegionRequest,
        stream: Option<StreamId>,
    ) -> Result<BlockHandle, ManagedError> {
        let Span { kind, location, length } = span;
        let (requested, tag, state) = (request.bytes, request.label.clone(), Lifecycle::Live);
        let identity = |handle| BlockIdentity {
            handle,
            kind,
            location,
            length,
            requested,
            stream,
            tag,
            state,
        };
        let place = self.free.pop().and_then(|index| {
            // An entry without further generations is removed from the list.
            let slot = self.slots.get_mut(to_index(index))?;
            Some((slot.identity.handle.generation().checked_add(1)?, index, slot))
        });
        if let Some((generation, index, slot)) = place {
            let handle = BlockHandle::new(index, generation);
            slot.identity = identity(handle);
            return Ok(handle);
        }
        let index = u32::try_from(self.slots.len()).map_err(|_| ManagedError::TooManyBlocks)?;
        let handle = BlockHandle::new(index, 1);
        self.slots.push(Slot { identity: identity(handle), exported: None });
        Ok(handle)
    }

    /// Returns the identity of a block in any state.
    pub(super) fn identity(&self, handle: BlockHandle) -> Result<&BlockIdentity, ManagedError> {
        self.slot(handle).map(|slot| &slot.identity)
    }

    /// Returns the identity of a live block.
    pub(super) fn live(&self, handle: BlockHandle) -> Result<&BlockIdentity, ManagedError> {
        let identity = self.identity(handle)?;
        match identity.state {
            Lifecycle::Live => Ok(identity),
            state => Err(ManagedError::UseAfterFree { handle, tag: identity.tag.clone(), state }),
        }
    }

    /// Returns the location of `length` bytes at `offset` in a live block.
    pub(super) fn access(
        &self,
        handle: BlockHandle,
        offset: ByteCount,
        length: ByteCount,
    ) -> Result<Location, ManagedError> {
        let identity = self.live(handle)?;
        let out_of_bounds = || ManagedError::OutOfBounds {
            handle,
            tag: identity.tag.clone(),
            offset,
            length,
            block_length: identity.length,
        };
        let end = offset.checked_add(length).map_err(|_| out_of_bounds())?;
        if end > identity.length {
            return Err(out_of_bounds());
        }
        identity.location.checked_add(offset).ok_or_else(out_of_bounds)
    }

    pub(super) fn set_pending(&mut self, handle: BlockHandle) {
        if let Some(slot) = self.slot_mut(handle) {
            slot.identity.state = Lifecycle::PendingFree;
        }
    }

    pub(super) fn set_freed(&mut self, handle: BlockHandle) {
        let Some(slot) = self.slot_mut(handle) else { return };
        slot.identity.state = Lifecycle::Freed;
        if handle.generation() < u32::MAX {
            self.free.push(handle.slot());
        }
    }

    pub(super) fn export(&mut self, handle: BlockHandle, parts: P) {
        if let Some(slot) = self.slot_mut(handle) {
            slot.exported = Some(parts);
        }
    }

    pub(super) fn import(&mut self, handle: BlockHandle) -> Result<P, ManagedError> {
        self.live(handle)?;
        self.slot_mut(handle)
            .and_then(|slot| slot.exported.take())
            .ok_or(ManagedError::NotExported { handle })
    }

    /// Removes all exported blocks.
    pub(super) fn drain_exported(&mut self) -> impl Iterator<Item = (BlockHandle, P)> {
        self.slots.iter_mut().filter_map(|slot| Some((slot.identity.handle, slot.exported.take()?)))
    }

    pub(super) fn identities(&self) -> impl Iterator<Item = &BlockIdentity> {
        self.slots.iter().map(|slot| &slot.identity)
    }

    fn slot(&self, handle: BlockHandle) -> Result<&Slot<P>, ManagedError> {
        let slot = self.slots.get(to_index(handle.slot()));
        let slot = slot.ok_or(ManagedError::Unknown { handle })?;
        let current = slot.identity.handle.generation();
        match handle.generation() {
            generation if generation == current => Ok(slot),
            generation if generation == 0 || generation > current => {
                Err(ManagedError::Unknown { handle })
            }
            _ => Err(ManagedError::Stale { handle, current }),
        }
    }

    fn slot_mut(&mut self, handle: BlockHandle) -> Option<&mut Slot<P>> {
        self.slots.get_mut(to_index(handle.slot())).filter(|slot| slot.identity.handle == handle)
    }
}

fn to_index(slot: u32) -> usize {
    to_usize(u64::from(slot))
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrane_core::{DeviceAddress, DeviceId, StorageKind};

    fn enter(registry: &mut Registry<()>) -> BlockHandle {
        let device = DeviceId::new(0);
        let location = Location::Device { device, address: DeviceAddress::new(4096) };
        let span = Span { kind: StorageKind::Device(device), location, length: ByteCount::new(64) };
        registry.enter(span, &RegionRequest::new(span.length), None).unwrap()
    }

    #[test]
    fn a_handle_lives_through_its_states_and_its_successor_is_another() {
        let mut registry = Registry::new();
        let first = enter(&mut registry);
        assert_ne!(first.to_raw(), 0);
        assert_eq!(registry.live(first).unwrap().state, Lifecycle::Live);
        registry.set_pending(first);
        let error = registry.live(first).unwrap_err();
        assert!(
            matches!(error, ManagedError::UseAfterFree { state: Lifecycle::PendingFree, .. }),
            "{error}"
        );
        registry.set_freed(first);
        assert_eq!(registry.identity(first).unwrap().state, Lifecycle::Freed);

        let second = enter(&mut registry);
        assert_eq!((second.slot(), second.generation()), (first.slot(), 2));
        assert!(matches!(registry.identity(first), Err(ManagedError::Stale { current: 2, .. })));
        for forged in [0, 7, 3 << 32, 0xFFFF_FFFF] {
            let error = registry.identity(BlockHandle::from_raw(forged)).unwrap_err();
            assert!(matches!(error, ManagedError::Unknown { .. }), "{error}");
        }
    }

    #[test]
    fn bounds_are_the_blocks() {
        let mut registry = Registry::new();
        let handle = enter(&mut registry);
        let bytes = ByteCount::new;
        assert!(registry.access(handle, bytes(0), bytes(64)).is_ok());
        assert!(registry.access(handle, bytes(64), bytes(0)).is_ok());
        for (offset, length) in [(0, 65), (64, 1), (u64::MAX, 2)] {
            let error = registry.access(handle, bytes(offset), bytes(length)).unwrap_err();
            assert!(matches!(error, ManagedError::OutOfBounds { .. }), "{error}");
        }
    }
}
