//! The latest record of each slot: the one with the highest sequence number.

use std::collections::HashMap;
use std::iter;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use terrane_core::convert::to_usize;
use terrane_core::sync::lock;

use crate::disk::format::namespace::GroupSlots;

/// The slots of a page of the table. A page is allocated when a record names one of its slots.
const PAGE: usize = 4096;

/// A table has at most this many slots for each record, so that the files bound its memory: 512
/// bytes for a record of 128.
const SLOTS_OF_A_RECORD: u64 = 64;

/// A table of this many slots is small enough for any number of records.
const FEW_SLOTS: u64 = 1 << 16;

/// The number of maps, each with a lock of its own.
const MAPS: usize = 64;

/// The number of a slot that a record has claimed.
const CLAIMED: u64 = u64::MAX;

type Page = Box<[AtomicU64]>;

/// The latest record of each slot.
#[derive(Debug)]
pub(crate) struct LatestOfSlots {
    /// The sequence number that all records of the checkpoint have.
    checkpoint: Option<u64>,
    groups: Vec<GroupSlots>,
    numbers: Numbers,
    /// Whether several records name one slot. While a tier was never full, none do. The numbers of
    /// the slots, which are not in the cache, are then not read again.
    is_any_repeated: AtomicBool,
}

/// The sequence number of each slot's latest record, plus one; 0 without a record.
#[derive(Debug)]
enum Numbers {
    /// For few slots in proportion to the records. It takes no lock.
    Table(Vec<Vec<OnceLock<Page>>>),
    /// For far more slots than records: an entry for each slot that a record names.
    Maps(Vec<Mutex<HashMap<(u16, u32), u64>>>),
}

impl Numbers {
    /// Numbers for the slots of groups, for this many records.
    fn new(groups: &[GroupSlots], records: u64) -> Self {
        let slots: u64 = groups.iter().map(|group| u64::from(group.slots)).sum();
        if slots > records.saturating_mul(SLOTS_OF_A_RECORD).max(FEW_SLOTS) {
            return Self::Maps(iter::repeat_with(Mutex::default).take(MAPS).collect());
        }
        let pages = groups.iter().map(|group| {
            let count = to_usize(group.slots.into()).div_ceil(PAGE);
            iter::repeat_with(OnceLock::new).take(count).collect()
        });
        Self::Table(pages.collect())
    }

    /// Replaces the number of an existing slot by that which `next` returns, if any. Returns the
    /// number before.
    #[inline]
    fn update(&self, group: u16, slot: u32, next: impl Fn(u64) -> Option<u64>) -> u64 {
        match self {
            Self::Table(pages) => {
                let Some(number) = number(pages, group, slot) else { return 0 };
                // Relaxed: the threads are joined before anything is read.
                let result = number.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
                result.unwrap_or_else(|before| before)
            }
            Self::Maps(maps) => {
                let Some(map) = maps.get(to_usize(slot.into()) % MAPS) else { return 0 };
                let mut map = lock(map);
                let before = map.get(&(group, slot)).copied().unwrap_or(0);
                if let Some(next) = next(before) {
                    map.insert((group, slot), next);
                }
                before
            }
        }
    }
}

fn number(pages: &[Vec<OnceLock<Page>>], group: u16, slot: u32) -> Option<&AtomicU64> {
    let slot = to_usize(slot.into());
    let page = pages.get(usize::from(group))?.get(slot / PAGE)?;
    page.get_or_init(|| iter::repeat_with(AtomicU64::default).take(PAGE).collect()).get(slot % PAGE)
}

impl LatestOfSlots {
    /// No records yet. `records` is the most that will be noted.
    pub(crate) fn new(groups: &[GroupSlots], checkpoint: Option<u64>, records: u64) -> Self {
        let numbers = Numbers::new(groups, records);
        let groups = groups.to_vec();
        Self { checkpoint, groups, numbers, is_any_repeated: AtomicBool::new(false) }
    }

    /// Whether a record's slot exists and its payload fits.
    pub(crate) fn has(&self, group: u16, slot: u32, length: u64) -> bool {
        let group = self.groups.get(usize::from(group));
        group.is_some_and(|group| slot < group.slots && length <= group.slot_bytes)
    }

    /// Notes that record `sequence` put a block into an existing slot.
    ///
    /// The number 0 is that of a possible checkpoint, so numbers are stored plus one.
    pub(crate) fn note(&self, group: u16, slot: u32, sequence: u64) {
        let later = |before| (before < sequence + 1).then_some(sequence + 1);
        if self.numbers.update(group, slot, later) != 0
            && !self.is_any_repeated.load(Ordering::Relaxed)
        {
            self.is_any_repeated.store(true, Ordering::Relaxed);
        }
    }

    /// Whether record `sequence`, which was noted, is the latest of its slot.
    pub(crate) fn is_latest(&self, group: u16, slot: u32, sequence: u64) -> bool {
        if !self.is_any_repeated.load(Ordering::Relaxed) {
            return true;
        }
        self.numbers.update(group, slot, |_| None) == sequence + 1
    }

    /// Claims a slot for a record that [is its latest](Self::is_latest). True once for each slot: a
    /// checkpoint that was written during an eviction can name a slot twice.
    pub(crate) fn claim(&self, group: u16, slot: u32, sequence: u64) -> bool {
        // In a journal no other record has the number.
        if self.checkpoint != Some(sequence) || !self.is_any_repeated.load(Ordering::Relaxed) {
            return true;
        }
        let own = sequence + 1;
        self.numbers.update(group, slot, |before| (before == own).then_some(CLAIMED)) == own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(slots: u32) -> GroupSlots {
        GroupSlots { slot_bytes: 4096, slots, fingerprint: [0; 16] }
    }

    fn entries(slots: &LatestOfSlots) -> usize {
        match &slots.numbers {
            Numbers::Table(groups) => {
                let pages = groups.iter().flatten().filter(|page| page.get().is_some());
                pages.count() * PAGE
            }
            Numbers::Maps(maps) => maps.iter().map(|map| lock(map).len()).sum(),
        }
    }

    #[test]
    fn a_table_and_maps_find_the_same_owners() {
        let groups = [group(10_000), group(u32::MAX)];
        let [small, large] = [10_000, u32::MAX].map(|slots| vec![group(slots); 2]);
        let table = LatestOfSlots::new(&small, Some(0), 1000);
        let maps = LatestOfSlots::new(&large, Some(0), 1000);
        assert!(matches!(table.numbers, Numbers::Table(_)));
        assert!(matches!(maps.numbers, Numbers::Maps(_)));
        assert!(matches!(LatestOfSlots::new(&groups, None, 1 << 27).numbers, Numbers::Table(_)));
        for slots in [&table, &maps] {
            assert!(slots.has(1, 9_999, 4096) && !slots.has(2, 0, 1) && !slots.has(0, 0, 4097));
            for (slot, sequence) in [(0, 0), (0, 0), (9_999, 5), (7, 3), (7, 9), (7, 4)] {
                slots.note(1, slot, sequence);
            }
            assert!(!slots.is_latest(0, 7, 9), "another group");
            for (sequence, is_latest) in [(3, false), (9, true), (4, false)] {
                assert_eq!(slots.is_latest(1, 7, sequence), is_latest);
            }
            assert!(slots.is_latest(1, 9_999, 5) && slots.claim(1, 9_999, 5));
            // Two records of the checkpoint name slot 0.
            assert!(slots.is_latest(1, 0, 0));
            assert_eq!([(); 2].map(|()| slots.claim(1, 0, 0)), [true, false]);
            assert!(!slots.is_latest(1, 0, 0));
        }
        assert_eq!((entries(&table), entries(&maps)), (3 * PAGE, 3));
    }

    #[test]
    fn records_in_distant_slots_take_memory_by_their_number() {
        let slots = LatestOfSlots::new(&[group(u32::MAX)], None, 1000);
        (0..1000).for_each(|number| slots.note(0, number * 4_000_000, number.into()));
        assert_eq!(entries(&slots), 1000);
        assert!((0..1000).all(|number| slots.is_latest(0, number * 4_000_000, number.into())));
    }
}
