//! The shared part of a pool: every place that blocks return to, without the upstream.
//!
//! A free block is in one of three places. It is in a thread's magazine ([`Slot`]) or in the shared
//! queue of its class ([`Depot`]). While streams may still use it, it is in the [`Parking`]. Blocks
//! in use keep the stock alive, so it may outlive its pool. Free blocks would keep it alive too, so
//! a pool closes its stock when it is dropped.
//!
//! [`releasing`] returns blocks to these places.

mod releasing;

use std::sync::{Arc, OnceLock};

use crossbeam_utils::CachePadded;
use terrane_core::{ByteCount, Label, Memory};

use crate::StreamId;
use crate::depot::{Budget, Depot, Occupied};
use crate::grant::{GrantRef, Grants, Use};
use crate::options::PoolOptions;
use crate::parking::Parking;
use crate::record::{Account, Record};
use crate::seat::{self, Home};
use crate::size_class::ClassTable;
use crate::slot::{MAGAZINE, Shelf, Slot};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::tags::{TAGS, Tag, TagTable, Tally};

pub(crate) struct Stock<M: Memory> {
    pub(crate) table: ClassTable,
    pub(crate) tags: TagTable,
    grants: Grants<M>,
    pub(crate) account: Arc<Account>,
    pub(crate) parking: Option<Parking<M>>,
    pub(crate) depots: Box<[CachePadded<Depot<M>>]>,
    pub(crate) occupied: Arc<Occupied>,
    pub(crate) budget: Budget,
    pub(crate) slots: Box<[Seat<M>]>,
    /// Held while gates are shut and while a slot is made.
    pub(crate) sweeping: Mutex<()>,
    pub(crate) closed: AtomicBool,
    /// Live bytes by tag that no slot could count.
    stray_tally: Mutex<Tally>,
    /// The depth of each class's magazines.
    depths: Box<[usize]>,
    /// The depth of each class's lanes.
    lane_depths: Box<[usize]>,
    /// The clock for idle classes; see [`now`](Self::now).
    clock: CachePadded<AtomicU64>,
    /// The time when unused credit was last collected.
    pub(crate) settled: CachePadded<AtomicU64>,
    /// The number of further releases that bypass the magazines after an exhaustion. Blocks in a
    /// shared queue can be found without a sweep.
    pressure: CachePadded<AtomicU64>,
}

/// A thread keeps a block for a stream, however large, up to this fraction of the cap on cached
/// bytes. Without it, every use of a large block would go through the parking.
const LANE_SHARE: u64 = 64;

/// The number of releases after an exhaustion that bypass the magazines.
const PRESSURE: u64 = 256;

/// The place of one thread. Its slot is made when the thread settles in.
type Seat<M> = OnceLock<Box<CachePadded<Slot<M>>>>;

impl<M: Memory> Stock<M> {
    pub(crate) fn new(
        table: ClassTable,
        options: &PoolOptions,
        parking: Option<Parking<M>>,
    ) -> Arc<Self> {
        let slabs = table.blocks_per_slab().is_some();
        let most = if slabs { usize::MAX } else { options.blocks_per_class };
        let depth = |class| {
            let fitting = options.magazine_bytes.get() / table.size(class);
            let fitting = usize::try_from(fitting).unwrap_or(MAGAZINE);
            fitting.min(options.magazine_depth).min(MAGAZINE)
        };
        let lane_depth = |class| {
            let keeps = options.magazine_depth > 0 && !options.magazine_bytes.is_zero();
            let is_kept = keeps && table.size(class) <= options.cached_bytes.get() / LANE_SHARE;
            depth(class).max(usize::from(is_kept))
        };
        let occupied = Occupied::new(table.len());
        let depot = |class| {
            let occupied = Arc::clone(&occupied);
            CachePadded::new(Depot::new(class, table.size(class), most, occupied))
        };
        Arc::new(Self {
            grants: Grants::new(),
            depots: (0..table.len()).map(depot).collect(),
            depths: (0..table.len()).map(depth).collect(),
            lane_depths: (0..table.len()).map(lane_depth).collect(),
            budget: Budget::new(if slabs { u64::MAX } else { options.cached_bytes.get() }),
            occupied,
            table,
            tags: TagTable::new(),
            account: Arc::new(Account::new()),
            parking,
            slots: (0..options.threads).map(|_| OnceLock::new()).collect(),
            sweeping: Mutex::new(()),
            closed: AtomicBool::new(false),
            stray_tally: Mutex::new(Tally::default()),
            clock: CachePadded::new(AtomicU64::new(0)),
            settled: CachePadded::new(AtomicU64::new(0)),
            pressure: CachePadded::new(AtomicU64::new(0)),
        })
    }

    /// Returns the grant of a block of `class` under `tag`.
    #[inline]
    pub(crate) fn grant(&self, class: usize, tag: Tag, is: Use) -> GrantRef<M> {
        self.grants.get(self, class, tag, is)
    }

    /// Returns the weight of a block of the class: the bytes that it counts of the cap.
    #[inline]
    pub(crate) fn weight(&self, class: usize) -> u64 {
        self.table.size(class)
    }

    pub(crate) fn knows_streams(&self) -> bool {
        self.parking.is_some()
    }

    fn depth(&self, class: usize) -> usize {
        self.depths.get(class).copied().unwrap_or(0)
    }

    fn has_magazine(&self, class: usize) -> bool {
        self.depth(class) > 0
    }

    /// Returns the time: the number of times that the pool has reached the upstream, or its cap.
    pub(crate) fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// Records that the upstream was exhausted.
    pub(crate) fn press(&self) {
        self.pressure.store(PRESSURE, Ordering::Relaxed);
    }

    fn is_pressed(&self) -> bool {
        self.pressure.load(Ordering::Relaxed) > 0
    }

    /// Counts a release that bypasses the magazines. Returns whether it does.
    fn passes_magazines(&self) -> bool {
        let is_pressed = self.is_pressed();
        if is_pressed {
            // Two threads may both subtract at the end. The next exhaustion sets the count again.
            let less = |pressure: u64| pressure.checked_sub(1);
            let _ = self.pressure.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
        is_pressed
    }

    /// Returns whether threads have blocks or credit, which only a sweep finds.
    pub(crate) fn is_in_threads(&self) -> bool {
        let reserved = self.budget.reserved();
        if reserved == 0 {
            return false;
        }
        let depots = self.occupied.iter().filter_map(|class| self.depots.get(class));
        // A block that moves meanwhile changes the reservation.
        reserved > depots.map(|depot| depot.bytes()).sum() || reserved != self.budget.reserved()
    }

    /// Advances the time, and returns it.
    pub(crate) fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed) + 1
    }

    // ---- acquiring

    /// Takes a free block from the thread's magazine.
    #[inline]
    pub(crate) fn take(&self, class: usize, tag: Tag) -> Option<Box<Record<M>>> {
        let weight = self.weight(class);
        self.enter(|shelf| shelf.take(class, weight, tag))?
    }

    /// Takes a block that this thread released on `stream`.
    #[inline]
    pub(crate) fn take_on(
        &self,
        class: usize,
        tag: Tag,
        stream: StreamId,
    ) -> Option<Box<Record<M>>> {
        let weight = self.weight(class);
        self.enter(|shelf| shelf.take_on(stream, class, weight, tag))?
    }

    /// Takes a free block from the shared queue, and more blocks for the magazine.
    pub(crate) fn take_shared(self: &Arc<Self>, class: usize, tag: Tag) -> Option<Box<Record<M>>> {
        let depot = self.depots.get(class)?;
        if depot.blocks() == 0 {
            return None;
        }
        let weight = self.weight(class);
        if !self.has_magazine(class) || self.is_pressed() {
            let record = depot.take_one(self.now())?;
            self.budget.give_back(weight);
            depot.shared_hits.fetch_add(1, Ordering::Relaxed);
            self.count(tag, weight, true);
            return Some(record);
        }
        self.settle_in();
        // At least one, because the class has magazines.
        let company = self.depth(class).div_ceil(2);
        let (record, surplus, counted) = self.undisturbed(|shelf| {
            // A sweep may have kept the thread out of a magazine that has blocks, so only as many
            // are taken as there is room for.
            let room = shelf.as_ref().map_or(0, |shelf| shelf.room(class));
            let mut batch = depot.take(1 + room.min(company - 1), self.now())?;
            let record = batch.pop()?;
            let counted = shelf.is_some();
            let surplus = shelf.map_or(weight, |shelf| {
                shelf.count(tag, weight, true);
                shelf.credit += weight;
                shelf.refill(class, &mut batch);
                shelf.surplus(class, weight)
            });
            Some((record, surplus, counted))
        })??;
        self.budget.give_back(surplus);
        if !counted {
            depot.shared_hits.fetch_add(1, Ordering::Relaxed);
            self.count(tag, weight, true);
        }
        Some(record)
    }

    /// Returns the tag of `label`.
    #[inline]
    pub(crate) fn tag(&self, label: &Label) -> Tag {
        if label.as_str().is_empty() {
            return Tag::NONE;
        }
        let known = self.enter(|shelf| {
            shelf.label.as_ref().filter(|(last, _)| last == label).map(|&(_, tag)| tag)
        });
        known.flatten().unwrap_or_else(|| {
            let tag = self.tags.tag(label);
            let mut last = Some((label.clone(), tag));
            // The previous label drops here, outside the gate.
            self.enter(|shelf| std::mem::swap(&mut shelf.label, &mut last));
            tag
        })
    }

    // ---- both ways

    /// Runs `work` while no sweep runs: inside the thread's gate, with its shelf, or under the
    /// sweepers' lock. Blocks move between a magazine and a shared queue only here, so a sweep
    /// always finds them in one of the two. `work` must run no code of the pool's user.
    fn undisturbed<R>(&self, work: impl FnOnce(Option<&mut Shelf<M>>) -> R) -> Option<R> {
        let mut work = Some(work);
        let inside = self.enter(|shelf| Some(work.take()?(Some(shelf))));
        inside.flatten().or_else(|| {
            let work = work?;
            let _sweeping = self.sweeping.lock();
            Some(work(None))
        })
    }

    /// Releases the weight of `count` blocks of the class from the cap.
    pub(crate) fn lighten(&self, class: usize, count: usize) {
        let count = ByteCount::from_usize(count).get();
        self.budget.give_back(self.weight(class) * count);
    }

    pub(crate) fn note_miss(&self, class: usize) {
        self.tick();
        if let Some(depot) = self.depots.get(class) {
            depot.misses.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn note_eviction(&self, class: usize, count: usize) {
        if let Some(depot) = self.depots.get(class) {
            depot.evictions.fetch_add(ByteCount::from_usize(count).get(), Ordering::Relaxed);
        }
    }

    // ---- the thread's slot

    /// Runs `work` on the calling thread's shelf. Returns `None`, without running it, if the thread
    /// has no shelf or a sweep is running.
    #[inline]
    pub(crate) fn enter<R>(&self, work: impl FnOnce(&mut Shelf<M>) -> R) -> Option<R> {
        let slot = self.slots.get(seat::current())?.get()?;
        // SAFETY: the seat is this thread's own. No `work` enters again, because the closures of
        // this module and of its siblings only move blocks and count.
        unsafe { slot.enter(work) }
    }

    /// Returns whether the calling thread has a slot, and so keeps the stock alive.
    fn is_settled(&self) -> bool {
        let slot = self.slots.get(seat::current()).and_then(OnceLock::get);
        slot.is_some_and(|slot| !slot.is_vacant())
    }

    /// Gives the calling thread a slot, if it has none and its seat has a place. During a sweep the
    /// thread continues without a slot.
    fn settle_in(self: &Arc<Self>) {
        // There may be more threads than places.
        let seat = seat::current();
        if self.is_settled() || (seat != seat::UNSEATED && seat >= self.slots.len()) {
            return;
        }
        // A sweeper must find the same slots at the end that it shut at the beginning.
        let Some(sweeping) = self.sweeping.try_lock() else { return };
        if self.is_closed() {
            return;
        }
        let Some((seat, closed)) = seat::settle(Arc::clone(self) as _) else { return };
        if let Some(place) = self.slots.get(seat) {
            let lanes = self.knows_streams();
            let lanes = self.lane_depths.iter().copied().filter(|_| lanes);
            let depths = self.depths.iter().copied();
            let slot = || Box::new(CachePadded::new(Slot::new(depths, lanes)));
            place.get_or_init(slot).settle();
        }
        drop(sweeping);
        // The last owner of a closed pool's stock drops the upstream's memory and the fences here.
        // Their code may call this pool.
        drop(closed);
    }

    /// Counts bytes of `tag` that became live, or stopped being live.
    pub(crate) fn count(&self, tag: Tag, bytes: u64, live: bool) {
        if tag == Tag::NONE || self.enter(|shelf| shelf.count(tag, bytes, live)).is_some() {
            return;
        }
        self.stray_tally.lock().count(tag, bytes, live);
    }

    /// Returns the labels with the most live bytes, at most `count`, the largest first.
    pub(crate) fn labels(&self, count: usize) -> Vec<(Label, ByteCount)> {
        let mut sums = [0; TAGS];
        // Every refusal runs this, so it sums only the tags that exist.
        let known = self.tags.known();
        let Some(sums) = sums.get_mut(..known).filter(|sums| !sums.is_empty()) else {
            return Vec::new();
        };
        let slots = self.slots.iter().filter_map(OnceLock::get);
        slots.for_each(|slot| slot.tally.add_to(sums));
        self.stray_tally.lock().add_to(sums);
        let bytes = |sum: i64| u64::try_from(sum).ok().filter(|&sum| sum > 0).map(ByteCount::new);
        let sums = sums.iter().enumerate();
        let mut live: Vec<_> = sums.filter_map(|(tag, &sum)| Some((tag, bytes(sum)?))).collect();
        live.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        live.truncate(count);
        self.tags.named(live)
    }
}

impl<M: Memory> Home for Stock<M> {
    fn vacate(&self, seat: usize) {
        let Some(slot) = self.slots.get(seat).and_then(OnceLock::get) else { return };
        let (mut blocks, mut lane, mut over) = (Vec::new(), Vec::new(), Vec::new());
        let credit = {
            let _sweeping = self.sweeping.lock();
            let work = |shelf: &mut Shelf<M>| {
                shelf.empty_into(&mut blocks)
                    + shelf.empty_lane_into(&mut lane, |class| self.weight(class))
            };
            // SAFETY: the seat belongs to the calling thread, which is ending, and `work` does not
            // enter again; see `enter`.
            let credit = unsafe { slot.enter(work) };
            slot.vacate();
            if let Some(parking) = &self.parking {
                lane.into_iter().for_each(|record| parking.park(record));
            }
            over.extend(blocks.into_iter().filter_map(|block| self.shelve(block.class, block)));
            credit
        };
        self.budget.give_back(credit.unwrap_or(0));
        self.evacuate_if_closed();
        drop(over);
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Pool;
    use crate::SizeClasses;
    use crate::adaptors::{Simulated, SimulatedOptions};

    #[test]
    fn a_thread_without_a_seat_leaves_nothing_behind() {
        let options = PoolOptions { threads: 0, ..PoolOptions::default() };
        let pool = Pool::new(Simulated::new(SimulatedOptions::default()), options).unwrap();
        let holders = || {
            drop(pool.acquire(ByteCount::kib(4)).unwrap());
            Arc::strong_count(&pool.stock)
        };
        // This thread may hold the stock once, and so does its cached block.
        let first = holders();
        for _ in 0..100 {
            assert_eq!(holders(), first);
        }
    }
    #[test]
    fn a_refill_takes_no_more_blocks_than_the_magazine_has_room_for() {
        const SIZE: ByteCount = ByteCount::kib(4);
        let slab = SizeClasses::ExactSlab { stride: SIZE, count: 64 };
        for classes in [SizeClasses::Steps8, slab] {
            let options = PoolOptions { classes, ..PoolOptions::default() };
            let pool = Pool::new(Simulated::new(SimulatedOptions::default()), options).unwrap();
            let blocks: Vec<_> = (0..64).map(|_| pool.acquire(SIZE).unwrap()).collect();
            drop(blocks);
            let before = pool.snapshot();
            let class = before.classes.iter().position(|class| class.size == SIZE).unwrap();
            assert!(before.classes[class].in_magazines > MAGAZINE / 2, "it is nearly full");
            // A request gets here with blocks in its magazine if a sweep has kept it out of there.
            let record = pool.stock.take_shared(class, Tag::NONE).unwrap();
            let after = pool.snapshot();
            assert_eq!((after.live, after.held), (SIZE, before.held), "{after:?}");
            pool.stock.give_back_shared(class, Tag::NONE, record);
            assert_eq!(pool.clear(), before.held);
            assert_eq!(pool.stock.budget.reserved(), 0, "a reservation is lost");
        }
    }
}
