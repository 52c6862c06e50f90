//! Commits of written blocks: to the index, then to the catalog.

use std::time::Instant;

use crate::KeyHash;
use crate::disk::PutRecord;
use crate::error::StoreError;
use crate::index::StoredBlock;
use crate::store::claims::HeldClaim;
use crate::store::query::event::StoreEventKind;
use crate::store::query::presence::TierId;
use crate::store::shared::StoreCore;
use crate::store::slot_table::{PinnedSlot, TakenSlots};
use crate::store::tier::Tier;

/// A block whose bytes are in its slots.
pub(crate) struct WrittenBlock<'a> {
    pub(crate) group: u16,
    pub(crate) key: KeyHash,
    /// The bytes of the key, or none if they are not known.
    pub(crate) name: &'a [u8],
    pub(crate) length: u32,
    /// 0 if it is not known. Blocks that were read from disk or written there have one.
    pub(crate) checksum: u64,
    pub(crate) claim: &'a HeldClaim,
    /// The epoch of its put. After a clear, which begins a later one, the block is not stored.
    pub(crate) epoch: Option<u64>,
    /// The block is a copy of this one, which must still be in the store.
    pub(crate) copy_of: Option<&'a PinnedSlot>,
    pub(crate) is_dirty: bool,
    /// The time at which its put was submitted; `None` for a copy.
    pub(crate) put_at: Option<Instant>,
}

/// A slot that a block was written to: the tier, and the place among the slots of the job.
pub(crate) struct Place<'a> {
    pub(crate) tier: TierId,
    pub(crate) taken: &'a mut TakenSlots,
    pub(crate) at: usize,
    /// The slot, once the block has it.
    slot: Option<u32>,
    keeps_pin: bool,
    /// The pin of [`pinned`](Self::pinned), from the first moment in the index on.
    pub(crate) pin: Option<PinnedSlot>,
}

impl<'a> Place<'a> {
    pub(crate) const fn new(tier: TierId, taken: &'a mut TakenSlots, at: usize) -> Self {
        Self { tier, taken, at, slot: None, keeps_pin: false, pin: None }
    }

    /// A place whose block is pinned when it is stored, so that no other job evicts it before its
    /// use.
    pub(crate) fn pinned(tier: TierId, taken: &'a mut TakenSlots, at: usize) -> Self {
        Self { keeps_pin: true, ..Self::new(tier, taken, at) }
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
        if block.epoch.is_some_and(|epoch| epoch != entry.epoch) {
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
            self.recent.forget(block.key);
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
            if let Some(table) = tier.and_then(|tier| tier.table(block.group)) {
                // The tier may have shrunk since the slot was taken.
                if let Some(slot) = place.slot {
                    table.evict_beyond(slot);
                    table.write_beyond(slot);
                }
                table.retry_for_waiters();
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
            let Some(table) = tier.table(block.group) else { continue };
            let Some(slot) = place.taken.keep(place.at, block.key) else { continue };
            place.slot = Some(slot);
            let &WrittenBlock { length, checksum, .. } = block;
            let stored = StoredBlock { slot, length, checksum };
            place.pin = table.insert(block.key, &stored, block.is_dirty, place.keeps_pin);
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
            if let Some(table) = tier.and_then(|tier| tier.table(block.group)) {
                table.remove(block.key);
            }
        }
        self.forget_name_in_order(block.group, block.key);
    }

    /// Counts and publishes a block. The caller has the lock of the key's order, so that the events of
    /// a key come in the order of its changes.
    fn publish_stored(&self, block: &WrittenBlock<'_>, places: &[Place<'_>]) {
        let took = block.put_at.map(|begun| begun.elapsed());
        for place in places.iter().filter(|place| place.slot.is_some()) {
            if let Some(tier) = self.tiers.get(place.tier.index()) {
                tier.counters.stored(block.length, took);
            }
            self.publish(StoreEventKind::Stored, Some(place.tier), block.group, Some(block.key));
        }
    }
}

impl<'a> WrittenBlock<'a> {
    /// A copy of a block of another tier, with its checksum, and whether no slower tier has it.
    pub(crate) fn copy(
        source: &'a PinnedSlot,
        (key, name): (KeyHash, &'a [u8]),
        claim: &'a HeldClaim,
        (checksum, is_dirty): (u64, bool),
    ) -> Self {
        let (group, length) = (source.table.group, source.block.length);
        let (epoch, copy_of, put_at) = (None, Some(source), None);
        Self { group, key, name, length, checksum, claim, epoch, copy_of, is_dirty, put_at }
    }

    fn is_current(&self) -> bool {
        self.copy_of.is_none_or(|source| {
            let found = source.table.index.get(self.key);
            found.is_some_and(|found| found.slot == source.block.slot)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};
    use std::time::Duration;

    use terrane_core::ByteCount;

    use super::*;
    use crate::store::Store;
    use crate::store::claims::ClaimKind;
    use crate::store::open::builder::tests::of_16_blocks;
    use crate::store::open::builder::{BlockGroup, WritePolicy};

    fn ready<F: Future>(future: F) -> F::Output {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => output,
            Poll::Pending => panic!("it waits"),
        }
    }

    fn block<'a>(key: KeyHash, claim: &'a HeldClaim) -> WrittenBlock<'a> {
        WrittenBlock {
            group: 0,
            key,
            name: b"key",
            length: 4096,
            checksum: 0,
            claim,
            epoch: None,
            copy_of: None,
            is_dirty: false,
            put_at: None,
        }
    }

    #[test]
    fn a_block_beyond_the_limit_that_is_wanted_pinned_has_its_pin() {
        let group = BlockGroup::new("kv", 4096);
        let (store, _) = Store::builder().group(group).host(ByteCount::kib(32)).open().unwrap();
        let core = store.core();
        let key = core.hasher.hash(b"key").unwrap();
        let claim = core.claims.claim(key, ClaimKind::Load).ok().unwrap();
        let table = core.tiers[0].table(0).unwrap();
        let mut taken = table.try_take(8).unwrap();
        table.evict_all_beyond(table.set_limit(0));
        let mut places = [Place::pinned(TierId::new(0), &mut taken, 7)];
        let committed = ready(core.commit(&block(key, &claim), &mut places));
        assert_eq!(committed.unwrap(), Committed::Stored);
        let [place] = places;
        let pin = place.pin.unwrap();
        assert_eq!(table.index.get(key), Some(pin.block));
        drop(pin);
        assert_eq!(table.index.get(key), None);
        drop((taken, claim));
        assert_eq!(store.close(Instant::now()).left, 0);
    }

    #[test]
    fn a_block_whose_record_is_refused_is_in_no_tier() {
        let directory = tempfile::tempdir().unwrap();
        let (store, _) =
            of_16_blocks(directory.path()).host(ByteCount::kib(64)).keep_keys(true).open().unwrap();
        let core = store.core();
        let events = store.events(8).unwrap();
        let key = core.hasher.hash(b"key").unwrap();
        let claim = core.claims.claim(key, ClaimKind::Put).ok().unwrap();
        let take = |tier: usize| core.tiers[tier].table(0).unwrap().try_take(1).unwrap();
        let (mut memory, mut disk) = (take(0), take(1));
        // Longer than a record can have.
        let block = WrittenBlock { name: &[b'k'; 70_000], ..block(key, &claim) };
        let mut places =
            [Place::new(TierId::new(0), &mut memory, 0), Place::new(TierId::new(1), &mut disk, 0)];
        assert!(ready(core.commit(&block, &mut places)).is_err());
        drop((memory, disk, claim));
        assert!(core.tiers.iter().all(|tier| tier.tables[0].index.is_empty()));
        assert!(core.names.get(key).is_none() && events.try_take().is_none());
        let used = |tier: &crate::store::metrics::snapshot::TierSnapshot| tier.groups[0].in_use;
        assert_eq!(store.snapshot().tiers.iter().map(used).sum::<usize>(), 0);
        assert_eq!(store.close(Instant::now()).left, 0);
    }

    #[test]
    fn a_dirty_block_beyond_the_limit_is_written_to_the_tier_below() {
        let directory = tempfile::tempdir().unwrap();
        let (store, _) = of_16_blocks(directory.path())
            .host(ByteCount::kib(32))
            .write_policy(WritePolicy::Back)
            .open()
            .unwrap();
        let core = store.core();
        let key = core.hasher.hash(b"key").unwrap();
        let claim = core.claims.claim(key, ClaimKind::Put).ok().unwrap();
        let [table, disk] = [0, 1].map(|tier: usize| core.tiers[tier].table(0).unwrap());
        let mut taken = table.try_take(8).unwrap();
        table.evict_all_beyond(table.set_limit(4));
        let block = WrittenBlock { is_dirty: true, ..block(key, &claim) };
        let at = (0..8).find(|&at| taken.slot(at).is_some_and(|slot| slot >= 4)).unwrap();
        let mut places = [Place::new(TierId::new(0), &mut taken, at)];
        assert_eq!(ready(core.commit(&block, &mut places)).unwrap(), Committed::Stored);
        drop((taken, claim));
        let until = Instant::now() + Duration::from_secs(60);
        while table.index.get(key).is_some() || disk.index.get(key).is_none() {
            assert!(Instant::now() < until, "{:#?}", store.snapshot());
            std::thread::yield_now();
        }
        assert_eq!(store.close(until).left, 0);
    }
}
