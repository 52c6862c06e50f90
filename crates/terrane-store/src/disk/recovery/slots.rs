//! Which record has each slot: the one with the highest sequence number.

use std::iter;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrane_core::convert::to_usize;

use crate::disk::namespace::GroupSlots;

/// The slots of a page. Pages are allocated when a record names one of their slots, so that the
/// memory is bounded by the files and not by the capacity.
const PAGE: usize = 4096;

/// A slot whose owner was found.
const CLAIMED: u64 = u64::MAX;

type Page = Box<[AtomicU64]>;

/// The latest record of each slot.
#[derive(Debug)]
pub(crate) struct Slots {
    /// The number that all records of the checkpoint have.
    checkpoint: Option<u64>,
    groups: Vec<GroupSlots>,
    pages: Vec<Vec<OnceLock<Page>>>,
    /// Whether several records name one slot. Until a tier is full none do, and the numbers of the
    /// slots, which are not in the cache, are not read again.
    is_any_repeated: AtomicBool,
}

impl Slots {
    pub(crate) fn new(groups: &[GroupSlots], checkpoint: Option<u64>) -> Self {
        let pages = groups.iter().map(|group| {
            let count = to_usize(group.slots.into()).div_ceil(PAGE);
            iter::repeat_with(OnceLock::new).take(count).collect()
        });
        let (groups, pages) = (groups.to_vec(), pages.collect());
        Self { checkpoint, groups, pages, is_any_repeated: AtomicBool::new(false) }
    }

    /// Whether a record's slot exists and its payload fits.
    pub(crate) fn has(&self, group: u16, slot: u32, length: u64) -> bool {
        let group = self.groups.get(usize::from(group));
        group.is_some_and(|group| slot < group.slots && length <= group.slot_bytes)
    }

    /// Notes that record `sequence` put a block into an existing slot.
    ///
    /// Sequence numbers start at 0, for checkpoints, so that they are stored plus one.
    pub(crate) fn note(&self, group: u16, slot: u32, sequence: u64) {
        // Relaxed: the threads are joined before anything is read.
        if let Some(latest) = self.slot(group, slot)
            && latest.fetch_max(sequence + 1, Ordering::Relaxed) != 0
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
        let latest = self.slot(group, slot).map(|latest| latest.load(Ordering::Relaxed));
        latest == Some(sequence + 1)
    }

    /// Claims a slot for a record that [is its latest](Self::is_latest). True once for each slot: a
    /// checkpoint that was written during an eviction can name a slot twice.
    pub(crate) fn claim(&self, group: u16, slot: u32, sequence: u64) -> bool {
        // In a journal no other record has the number.
        if self.checkpoint != Some(sequence) || !self.is_any_repeated.load(Ordering::Relaxed) {
            return true;
        }
        self.slot(group, slot).is_some_and(|latest| {
            let (own, claimed) = (sequence + 1, CLAIMED);
            // Relaxed: only one thread may claim it, and nothing else depends on the order.
            latest.compare_exchange(own, claimed, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        })
    }

    fn slot(&self, group: u16, slot: u32) -> Option<&AtomicU64> {
        let slot = to_usize(slot.into());
        let page = self.pages.get(usize::from(group))?.get(slot / PAGE)?;
        page.get_or_init(|| iter::repeat_with(AtomicU64::default).take(PAGE).collect())
            .get(slot % PAGE)
    }
}
