//! The slot table: the slots of one group in one tier.
//!
//! It takes, evicts and frees slots, and queues the jobs that wait for them. It keeps the pins and
//! marks of the blocks, the limit after a resize, and the slots that no job may use.

mod blocks;
mod dirty;
mod free;
mod quarantine;
mod resize;
mod slots;
mod start;
pub(crate) mod waiting;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, Weak};
use std::task::Waker;

use terrane_core::OwnerProcess;
use terrane_core::convert::to_usize;
use terrane_core::sync::lock;
use terrane_transfer::OrphanedClaims;

use crate::KeyHash;
use crate::eviction::EvictionPolicy;
use crate::index::TierIndex;
use crate::slab::Priority;
use crate::store::job::control::{JobControl, PriorityQueue};
use crate::store::job::result::{BlockResult, NoRoom};
use crate::store::query::presence::TierId;

pub(crate) use resize::Retired;
pub(crate) use slots::{LeasedSlot, PinnedSlot, SharedSlots, TakenSlots};
use waiting::{Grant, WaitingForSlots};

/// The slots of one group in one tier.
///
/// A job gets all slots that it asks for at once, or none. Jobs wait in the order of their priority,
/// then of their arrival, and hold no slot of the table meanwhile.
pub(crate) struct SlotTable {
    pub(crate) tier: TierId,
    pub(crate) group: u16,
    pub(crate) index: TierIndex,
    policy: Box<dyn EvictionPolicy>,
    state: Mutex<SlotTableState>,
    /// The number of waiting jobs. Code that makes a slot evictable reads it, and then tries to grant
    /// them their slots.
    waiting: AtomicUsize,
    /// Not [`CLEAN`] if no slower tier has the block of the slot.
    dirty: Box<[AtomicU8]>,
    /// The number of slots whose mark is [`MUST_BE_WRITTEN`].
    must_be_written: AtomicUsize,
    /// The mark of a dirty block.
    dirty_mark: u8,
    /// The uses of each block, as far as the write policy counts them.
    uses: Box<[AtomicU8]>,
    /// Whether a job writes dirty blocks back, for those that wait.
    is_writing_back: AtomicBool,
    /// The limit of the state, to read without its lock.
    limit: AtomicU32,
    /// Whether slots beyond the limit became free that were not reported to the store.
    has_retired: AtomicBool,
    owner: OwnerProcess,
    /// The claims of orphaned copies on the slots; `None` for the disk tier.
    orphaned: Option<OrphanedClaims>,
    store: Weak<dyn SlotTableOwner>,
}

/// A slower tier has the block, or the tier is the slowest.
const CLEAN: u8 = 0;

/// The block is written to a slower tier before it is evicted.
const MUST_BE_WRITTEN: u8 = 1;

/// The block is not in a slower tier. It may be evicted, and is lost then.
const MAY_BE_LOST: u8 = 2;

/// A slot is quarantined after this number of damages. The first one may come from a crash, which
/// can leave a record that is older than the bytes in its slot.
const MOST_DAMAGES: u8 = 2;

/// The treatment of dirty blocks in a slot table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DirtyBlocks {
    /// There are none.
    None,
    /// They are written to a slower tier before they are evicted.
    MustBeWritten,
    /// They may be evicted.
    MayBeLost,
}

/// The calls of a slot table to its store. No lock is held during them.
pub(crate) trait SlotTableOwner: Send + Sync {
    /// The table evicted the blocks of these keys.
    fn after_eviction(&self, table: &SlotTable, evicted: &[KeyHash]);

    /// A job frees slots that it may have written, and that have no block.
    fn before_return(&self, table: &SlotTable, slots: &[u32]);

    /// Slots beyond the limit of a smaller tier became free.
    fn after_retiring(&self, tier: TierId);

    /// A job waits for `lacks` slots that dirty blocks occupy.
    fn write_back_for(self: Arc<Self>, tier: TierId, group: u16, lacks: usize);

    /// A job waits while orphaned copies claim slots, and nothing [checks](SlotTable::check_claims) those.
    fn check_claims_for(self: Arc<Self>, tier: TierId, group: u16);
}

struct SlotTableState {
    free: Vec<u32>,
    /// Slots with this number or a higher one are not used.
    limit: u32,
    /// Free slots beyond the limit.
    retired: BTreeSet<u32>,
    /// How often the limit became higher: slots left the retired ones.
    growths: u64,
    /// How often each slot lost its block to damage. Few slots ever do.
    damages: HashMap<u32, u8>,
    /// Free slots that no job gets any more, because the device damages their blocks.
    quarantined: BTreeSet<u32>,
    /// Free slots that an orphaned copy may still read or write.
    claimed: Vec<u32>,
    /// The number of orphaned claims that had ended at the last check of the claimed slots.
    orphaned_ended: Option<usize>,
    /// Whether a job of the store checks the claimed slots for the jobs that wait.
    is_checking: bool,
    /// The number of leases of each slot that leases pin.
    leases: HashMap<u32, u32>,
    waiters: BTreeMap<(Reverse<Priority>, u64), Waiter>,
    arrivals: u64,
    /// Slots that became dirty: those beyond the limit first, then the oldest first. Some may be
    /// clean by now.
    dirty: VecDeque<(u32, KeyHash)>,
}

struct Waiter {
    count: usize,
    grant: Arc<Grant>,
}

/// Why there are no slots now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    Never(NoRoom),
    /// Jobs use the slots, or wait for them.
    Now,
}

/// The calls to make once the lock of the slot table has been released.
#[derive(Default)]
struct DeferredEffects {
    evicted: Vec<KeyHash>,
    woken: Vec<Waker>,
    /// The slots that a waiter lacks because blocks are dirty.
    lacks: usize,
    /// Whether the store has to check the claimed slots from now on.
    checks: bool,
}

impl SlotTable {
    /// A slot table without free slots, until it is [started](Self::start).
    pub(crate) fn new(
        (tier, group): (TierId, u16),
        slots: u32,
        policy: Box<dyn EvictionPolicy>,
        dirty: DirtyBlocks,
        orphaned: Option<OrphanedClaims>,
        store: Weak<dyn SlotTableOwner>,
    ) -> Self {
        let marks = if dirty == DirtyBlocks::None { 0 } else { to_usize(slots.into()) };
        let zeros = || (0..marks).map(|_| AtomicU8::new(0)).collect();
        Self {
            tier,
            group,
            index: TierIndex::new(slots),
            policy,
            state: Mutex::new(SlotTableState {
                free: Vec::new(),
                limit: slots,
                retired: BTreeSet::new(),
                growths: 0,
                damages: HashMap::new(),
                quarantined: BTreeSet::new(),
                claimed: Vec::new(),
                orphaned_ended: None,
                is_checking: false,
                leases: HashMap::new(),
                waiters: BTreeMap::new(),
                arrivals: 0,
                dirty: VecDeque::new(),
            }),
            waiting: AtomicUsize::new(0),
            dirty: zeros(),
            must_be_written: AtomicUsize::new(0),
            dirty_mark: if dirty == DirtyBlocks::MayBeLost { MAY_BE_LOST } else { MUST_BE_WRITTEN },
            uses: zeros(),
            is_writing_back: AtomicBool::new(false),
            limit: AtomicU32::new(slots),
            has_retired: AtomicBool::new(false),
            owner: OwnerProcess::current(),
            orphaned,
            store,
        }
    }

    /// Takes slots if there are enough now, or can be after evictions.
    pub(crate) fn try_take(self: &Arc<Self>, count: usize) -> Result<TakenSlots, Shortage> {
        let mut effects = DeferredEffects::default();
        let mut state = lock(&self.state);
        let taken = if state.waiters.is_empty() {
            self.obtain(&mut state, count, &mut effects)
        } else {
            Err(Shortage::Now)
        };
        drop(state);
        effects.lacks = 0;
        self.apply(effects);
        taken.map(|slots| TakenSlots::new(self, slots))
    }

    /// Takes slots. If there are not enough, it waits until they are free, or until the job stops.
    pub(crate) async fn take(
        self: &Arc<Self>,
        count: usize,
        control: &JobControl,
    ) -> Result<TakenSlots, BlockResult> {
        if count == 0 {
            return Ok(TakenSlots::new(self, Vec::new()));
        }
        let priority = control.priority();
        let waiting = match self.enter(count, priority) {
            Ok(entered) => return entered.map_err(BlockResult::NoRoom),
            Err(waiting) => waiting,
        };
        control.set_waits(Some((Arc::clone(self) as _, waiting.arrival)));
        // A raise before `set_waits` did not find the table.
        if control.priority() > priority {
            self.raise(waiting.arrival, control.priority());
        }
        let granted = control.until(waiting.grant.receive()).await;
        control.set_waits(None);
        let slots = granted?.map_err(BlockResult::NoRoom)?;
        Ok(TakenSlots::new(self, slots))
    }

    /// Takes up to `most` slots, and at least one: half of those that no lease pins, and fewer if leases
    /// pin others meanwhile.
    pub(crate) async fn take_part(
        self: &Arc<Self>,
        most: usize,
        control: &JobControl,
    ) -> Result<TakenSlots, BlockResult> {
        let usable = {
            let mut state = lock(&self.state);
            self.free_unclaimed(&mut state);
            state.slots().saturating_sub(state.pinned())
        };
        let mut count = most.min(usable / 2).max(1);
        loop {
            match self.take(count, control).await {
                Err(BlockResult::NoRoom(_)) if count > 1 => count /= 2,
                taken => return taken,
            }
        }
    }

    /// Takes slots now, or adds the job to those that wait.
    fn enter(
        self: &Arc<Self>,
        count: usize,
        priority: Priority,
    ) -> Result<Result<TakenSlots, NoRoom>, WaitingForSlots> {
        // Before the pins are read: a thread that unpins later sees this job.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let mut effects = DeferredEffects::default();
        let mut state = lock(&self.state);
        let taken = if state.is_next(priority) {
            self.obtain(&mut state, count, &mut effects)
        } else {
            self.free_unclaimed(&mut state);
            Err(state.shortage(count))
        };
        let result = match taken {
            Ok(slots) => Ok(Ok(TakenSlots::new(self, slots))),
            Err(Shortage::Never(never)) => Ok(Err(never)),
            Err(Shortage::Now) => {
                let arrival = state.arrivals;
                state.arrivals += 1;
                let grant = Arc::new(Grant::new());
                let waiter = Waiter { count, grant: Arc::clone(&grant) };
                state.waiters.insert((Reverse(priority), arrival), waiter);
                Err(WaitingForSlots { table: Arc::clone(self), arrival, grant })
            }
        };
        effects.checks = state.begin_check();
        drop(state);
        if result.is_ok() {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        self.apply(effects);
        result
    }

    /// Takes `count` slots from the free ones, and evicts blocks until there are enough.
    fn obtain(
        &self,
        state: &mut SlotTableState,
        count: usize,
        effects: &mut DeferredEffects,
    ) -> Result<Vec<u32>, Shortage> {
        self.free_unclaimed(state);
        if let Some(never) = state.never(count) {
            return Err(Shortage::Never(never));
        }
        if state.free.len() < count {
            // A search of the policy would visit each dirty block.
            let dirty = self.must_be_written.load(Ordering::SeqCst);
            let clean = self.index.len().saturating_sub(dirty);
            if dirty > 0 && state.free.len() + clean < count {
                effects.lacks = count - state.free.len();
                return Err(Shortage::Now);
            }
        }
        while state.free.len() < count {
            let (mut key, mut dirty) = (None, 0);
            let mut take = |slot| {
                let may_leave = || {
                    let must_be_written = self.mark(slot) == MUST_BE_WRITTEN;
                    dirty += usize::from(must_be_written);
                    !must_be_written
                };
                key = self.index.evict(slot, may_leave);
                key
            };
            let Some(slot) = self.policy.evict(&mut take) else {
                let shortage = state.shortage(count);
                if dirty > 0 && shortage == Shortage::Now {
                    effects.lacks = count - state.free.len();
                }
                return Err(shortage);
            };
            effects.evicted.extend(key);
            let free = state.free.len();
            self.put_back(state, slot);
            // A copy claims the slot. Further evictions would be for nothing.
            if state.free.len() == free
                && let Some(never) = state.never(count)
            {
                return Err(Shortage::Never(never));
            }
        }
        let rest = state.free.len() - count;
        Ok(state.free.split_off(rest))
    }

    /// Grants slots to the jobs that wait, in their order. No lock may be held.
    pub(crate) fn retry(&self) {
        let mut effects = DeferredEffects::default();
        let mut state = lock(&self.state);
        while let Some(first) = state.waiters.first_entry() {
            let count = first.get().count;
            let key = *first.key();
            let result = match self.obtain(&mut state, count, &mut effects) {
                Ok(slots) => Ok(slots),
                Err(Shortage::Never(never)) => Err(never),
                Err(Shortage::Now) => break,
            };
            if let Some(waiter) = state.waiters.remove(&key) {
                self.waiting.fetch_sub(1, Ordering::SeqCst);
                effects.woken.extend(waiter.grant.put(result));
            }
        }
        effects.checks = state.begin_check();
        drop(state);
        self.apply(effects);
    }

    fn apply(&self, effects: DeferredEffects) {
        effects.woken.into_iter().for_each(Waker::wake);
        self.report_retired();
        if effects.evicted.is_empty() && effects.lacks == 0 && !effects.checks {
            return;
        }
        let Some(store) = self.store.upgrade() else { return };
        if !effects.evicted.is_empty() {
            store.after_eviction(self, &effects.evicted);
        }
        if effects.lacks > 0 {
            Arc::clone(&store).write_back_for(self.tier, self.group, effects.lacks);
        }
        if effects.checks {
            store.check_claims_for(self.tier, self.group);
        }
    }

    /// Tries again for the jobs that wait. No lock may be held.
    pub(crate) fn retry_for_waiters(&self) {
        self.report_retired();
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.retry();
        }
    }
}

impl PriorityQueue for SlotTable {
    fn raise(&self, arrival: u64, priority: Priority) {
        let mut state = lock(&self.state);
        let found = state.waiters.keys().find(|(_, number)| *number == arrival).copied();
        if let Some(key) = found.filter(|(Reverse(before), _)| *before < priority)
            && let Some(waiter) = state.waiters.remove(&key)
        {
            state.waiters.insert((Reverse(priority), arrival), waiter);
        }
        drop(state);
        self.retry();
    }
}

impl SlotTableState {
    /// Whether a job of this priority goes before all that wait.
    fn is_next(&self, priority: Priority) -> bool {
        self.waiters.keys().next().is_none_or(|(Reverse(first), _)| priority > *first)
    }

    /// The slots that are neither quarantined nor claimed. No job waits for a claim alone, because
    /// it may never end.
    fn slots(&self) -> usize {
        let unused = self.quarantined.len() + self.claimed.len();
        to_usize(self.limit.into()).saturating_sub(unused)
    }

    fn shortage(&self, requested: usize) -> Shortage {
        self.never(requested).map_or(Shortage::Now, Shortage::Never)
    }

    /// The slots that leases pin. Leases beyond the limit pin no slot that a job could get.
    fn pinned(&self) -> usize {
        self.leases.keys().filter(|slot| **slot < self.limit).count()
    }

    /// Why a job never gets `requested` slots, if so.
    fn never(&self, requested: usize) -> Option<NoRoom> {
        let slots = self.slots();
        if requested > slots {
            return Some(NoRoom::TierTooSmall { requested, slots });
        }
        let pinned = self.pinned();
        (slots.saturating_sub(pinned) < requested).then_some(NoRoom::Pinned {
            requested,
            slots,
            pinned,
        })
    }
}
