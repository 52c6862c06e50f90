//! A block that was written becomes visible: in the index, then in the catalog.

use crate::KeyHash;
use crate::disk::PutRecord;
use crate::error::StoreError;
use crate::index::StoredBlock;
use crate::slab::SlabFailure;
use crate::store::claims::HeldClaim;
use crate::store::event::StoreEventKind;
use crate::store::presence::TierId;
use crate::store::result::BlockResult;
use crate::store::room::{PinnedSlot, TakenSlots};
use crate::store::shared::StoreCore;
use crate::store::tier::{Tier, count};

/// A block whose bytes are in its slots.
pub(crate) struct WrittenBlock<'a> {
    pub(crate) group: u16,
    pub(crate) key: KeyHash,
    /// The bytes of the key, or none if they are not known.
    pub(crate) name: &'a [u8],
    pub(crate) length: u32,
    /// 0 if it is not known. The disk tier knows it.
    pub(crate) checksum: u64,
    pub(crate) claim: &'a HeldClaim,
    /// The block was put in this epoch. A later one began without it.
    pub(crate) epoch: Option<u64>,
    /// The block is a copy of this one, which must still be in the store.
    pub(crate) copy_of: Option<&'a PinnedSlot>,
    pub(crate) is_dirty: bool,
}

/// A slot that a block was written to: the tier, and the place among the slots of the job.
pub(crate) struct Place<'a> {
    pub(crate) tier: TierId,
    pub(crate) taken: &'a mut TakenSlots,
    pub(crate) at: usize,
    /// The slot, once the block has it.
    slot: Option<u32>,
}

impl<'a> Place<'a> {
    pub(crate) const fn new(tier: TierId, taken: &'a mut TakenSlots, at: usize) -> Self {
        Self { tier, taken, at, slot: None }
    }
}

/// The result of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Committed {
    Stored,
    /// The key was removed, or the store was cleared, while the block was written.
    Dropped,
}

impl StoreCore {
    /// Adds a block to the index of each tier, and to the catalog.
    pub(crate) async fn commit(
        &self,
        block: &WrittenBlock<'_>,
        places: &mut [Place<'_>],
    ) -> Result<Committed, StoreError> {
        let entry = self.gate.enter().await;
        if block.epoch.is_some_and(|epoch| epoch != entry.epoch()) {
            return Ok(Committed::Dropped);
        }
        let order = self.order.lock(block.key);
        if block.claim.is_removed() || !block.is_current() {
            return Ok(Committed::Dropped);
        }
        if (self.names.keeps_all || block.is_dirty) && !block.name.is_empty() {
            self.names.insert(block.key, block.name);
        }
        let result = self.add(block, places);
        if result.is_err() {
            self.undo(block, places);
        } else {
            self.publish_stored(block, places);
            let is_last = |place: &Place<'_>| self.below(place.tier).is_none();
            if block.copy_of.is_some() && places.iter().any(is_last) && !self.names.keeps_all {
                // The record has the name now. Under the lock, since a later put needs its own.
                self.names.remove(block.key);
            }
        }
        drop(order);
        drop(entry);
        for place in &*places {
            let tier = self.tiers.get(place.tier.index());
            if let Some(room) = tier.and_then(|tier| tier.room(block.group)) {
                // The tier may have shrunk since the slot was taken.
                place.slot.into_iter().for_each(|slot| room.evict_beyond(slot));
                room.retry_for_waiters();
            }
        }
        result?;
        let stored = places.iter().filter(|place| place.slot.is_some());
        if stored.filter_map(|place| self.tiers.get(place.tier.index())).any(Tier::is_disk) {
            self.recorded();
        }
        Ok(Committed::Stored)
    }

    /// Adds a block to the index of each tier, and to the catalog, until one of them fails.
    fn add(&self, block: &WrittenBlock<'_>, places: &mut [Place<'_>]) -> Result<(), StoreError> {
        for place in places {
            let Some(tier) = self.tiers.get(place.tier.index()) else { continue };
            let Some(room) = tier.room(block.group) else { continue };
            let Some(slot) = place.taken.keep(place.at) else { continue };
            place.slot = Some(slot);
            let &WrittenBlock { length, checksum, .. } = block;
            let stored = StoredBlock { slot, length, checksum, sequence: 0 };
            room.insert(block.key, &stored, block.is_dirty);
            if let (true, Some(disk)) = (tier.is_disk(), &self.disk) {
                disk.catalog.append_puts(&[PutRecord {
                    key_hash: block.key,
                    group: block.group,
                    slot,
                    length: length.into(),
                    checksum,
                    key: block.name,
                }])?;
            }
        }
        Ok(())
    }

    /// Removes a block from the places that have it. The caller has the lock of the key's order.
    fn undo(&self, block: &WrittenBlock<'_>, places: &[Place<'_>]) {
        for place in places.iter().filter(|place| place.slot.is_some()) {
            let tier = self.tiers.get(place.tier.index());
            if let Some(room) = tier.and_then(|tier| tier.room(block.group)) {
                room.remove(block.key);
            }
        }
        self.forget_name_in_order(block.group, block.key);
    }

    /// Counts and publishes a block. The caller has the lock of the key's order, so that the events of
    /// a key come in the order of its changes.
    fn publish_stored(&self, block: &WrittenBlock<'_>, places: &[Place<'_>]) {
        for place in places.iter().filter(|place| place.slot.is_some()) {
            if let Some(tier) = self.tiers.get(place.tier.index()) {
                count(&tier.counters.stored, 1);
                count(&tier.counters.written_bytes, block.length.into());
            }
            self.publish(StoreEventKind::Stored, Some(place.tier), block.group, Some(block.key));
        }
    }
}

impl WrittenBlock<'_> {
    fn is_current(&self) -> bool {
        self.copy_of.is_none_or(|source| {
            let found = source.room.index.get(self.key);
            found.is_some_and(|found| found.slot == source.block.slot)
        })
    }
}

/// The result of a block that could not be written to disk.
pub(crate) fn not_written(failure: SlabFailure) -> BlockResult {
    match failure {
        SlabFailure::Io(failure) => BlockResult::failed(StoreError::WriteFailed(failure)),
        other => not_read(other),
    }
}

/// The result of a block that could not be read from disk.
pub(crate) fn not_read(failure: SlabFailure) -> BlockResult {
    match failure {
        SlabFailure::Corrupt { .. } => BlockResult::Corrupt,
        SlabFailure::TimedOut => BlockResult::TimedOut,
        SlabFailure::Cancelled => BlockResult::Cancelled,
        SlabFailure::Io(failure) => BlockResult::failed(StoreError::ReadFailed(failure)),
        SlabFailure::ReadOnly(error) | SlabFailure::Refused(error) => BlockResult::Failed(error),
        SlabFailure::Closed => BlockResult::failed(StoreError::Closed),
    }
}
