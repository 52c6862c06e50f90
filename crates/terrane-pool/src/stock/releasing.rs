//! Returns blocks to the stock. A block goes into the thread's magazine if possible, else into the
//! shared queue of its class or into the parking. Without room, it goes to the upstream.

use std::sync::Arc;

use terrane_core::{ByteCount, Memory};

use super::Stock;
use crate::barrier;
use crate::grant::{CapabilityStatus, GrantRef, Use};
use crate::record::{Record, UNPOOLED};
use crate::seat::Home as _;
use crate::slot::{Batch, Refusal, Shelf};
use crate::tags::Tag;

impl<M: Memory> Stock<M> {
    /// Takes a block back from its user. The grant must belong to the record's stock.
    #[inline]
    pub(crate) fn give_back(record: Box<Record<M>>, grant: GrantRef<M>) {
        // SAFETY: the record keeps its stock alive, and this function owns the record.
        let grant = unsafe { grant.get() };
        if grant.is == Use::Apart {
            return Self::give_back_apart(record, grant);
        }
        let mut record = Some(record);
        // SAFETY: as above, while `record` holds the block. If the block has moved into a magazine
        // of this thread, the thread has settled there (`settle_in`), and keeps the stock alive.
        let stock = unsafe { grant.stock.as_ref() };
        let work =
            |shelf: &mut Shelf<M>| shelf.put(grant.class, grant.weight, grant.tag, &mut record);
        let done = stock.enter(work);
        if let Some(record) = record {
            Self::give_back_slowly(record, grant, done.and_then(Result::err));
        }
    }

    /// Takes back a block that is not pooled, or that streams may use.
    fn give_back_apart(record: Box<Record<M>>, grant: CapabilityStatus<M>) {
        let CapabilityStatus { class, weight, tag, .. } = grant;
        if class != UNPOOLED && record.order.is_free() {
            let plain = record.stock.grant(class, tag, Use::Plain);
            return Self::give_back(record, plain);
        }
        let mut record = Some(record);
        if class != UNPOOLED
            && let Some(block) = record.as_ref()
            && let Some(stream) = block.order.only_home()
        {
            // SAFETY: as in `give_back`.
            let stock = unsafe { grant.stock.as_ref() };
            stock.enter(|shelf| shelf.put_on(stream, (class, weight), tag, &mut record));
        }
        if let Some(record) = record {
            Self::give_back_to_parking(record, tag);
        }
    }

    #[cold]
    fn give_back_to_parking(record: Box<Record<M>>, tag: Tag) {
        let stock = Arc::clone(&record.stock);
        stock.settle_in();
        stock.count(tag, record.granted, false);
        if record.order.is_free() {
            return drop(record);
        }
        stock.extend_lane(&record);
        stock.park([record]);
    }

    /// Prepares the thread's lane for the next block like this one. The lane has no credit yet, or
    /// serves another stream.
    fn extend_lane(&self, record: &Record<M>) {
        let Some(stream) = record.order.only_home() else { return };
        if record.class == UNPOOLED || self.is_closed() {
            return;
        }
        let weight = self.weight(record.class);
        let credit = self.reserve_credit(record.class, weight);
        let room = || self.make_room(record.class, weight).then_some(weight);
        let credit = credit.or_else(room).unwrap_or(0);
        let mut flushed = Vec::new();
        let entered = self.enter(|shelf| {
            shelf.credit += credit;
            shelf.credit += shelf.bind_lane(stream, &mut flushed, |class| self.weight(class));
            shelf.surplus(record.class, weight)
        });
        self.budget.give_back(entered.unwrap_or(credit));
        self.park(flushed);
    }

    /// Parks blocks that streams use.
    pub(crate) fn park(&self, records: impl IntoIterator<Item = Box<Record<M>>>) {
        let Some(parking) = &self.parking else { return };
        records.into_iter().for_each(|record| parking.park(record));
        self.evacuate_if_closed();
    }

    /// Empties the parking if the pool is closed: `close` may have missed a block that was parked
    /// later.
    pub(super) fn evacuate_if_closed(&self) {
        // `close` sets `closed`, runs a heavy barrier, and then empties the parking.
        barrier::light();
        if let Some(parking) = &self.parking
            && self.is_closed()
        {
            parking.evacuate();
        }
    }

    #[cold]
    fn give_back_slowly(
        record: Box<Record<M>>,
        grant: CapabilityStatus<M>,
        refusal: Option<Refusal>,
    ) {
        let CapabilityStatus { class, weight, tag, .. } = grant;
        // SAFETY: until the block is stored somewhere, it keeps its stock alive. Afterwards `kept`
        // does, or this thread does, because it has settled there. Foreign code may end that, but
        // the thread runs none before the last use of the stock.
        let stock = unsafe { grant.stock.as_ref() };
        let mut kept = None;
        if !stock.is_settled() {
            record.stock.settle_in();
            kept = Some(Arc::clone(&record.stock));
        }
        stock.give_back_settled(record, (class, weight), tag, refusal);
        drop(kept);
    }

    /// [`give_back_slowly`](Self::give_back_slowly), on a thread that keeps the stock alive. Blocks
    /// that do not fit drop last.
    fn give_back_settled(
        &self,
        record: Box<Record<M>>,
        (class, weight): (usize, u64),
        tag: Tag,
        refusal: Option<Refusal>,
    ) {
        if self.is_closed() {
            self.count(tag, weight, false);
            return drop(record);
        }
        if !self.has_magazine(class) || self.passes_magazines() {
            return self.give_back_shared(class, tag, record);
        }
        // Making room runs foreign code. After it, the thread may no longer keep the stock alive.
        let mut kept = None;
        // The blocks that a full magazine spills keep their reservation.
        let reserved = if refusal == Some(Refusal::Full) {
            let spilled = self.depth(class).div_ceil(2);
            let weight = weight * ByteCount::from_usize(spilled).get();
            self.budget.reserve(weight).then_some(weight).or(Some(0))
        } else {
            self.reserve_credit(class, weight).or_else(|| {
                kept = Some(Arc::clone(&record.stock));
                self.make_room(class, weight).then_some(weight)
            })
        };
        let Some(credit) = reserved else {
            self.count(tag, weight, false);
            self.note_eviction(class, 1);
            return drop(record);
        };
        let mut record = Some(record);
        let done = self.undisturbed(|shelf| {
            let Some(shelf) = shelf else { return (None, credit) };
            shelf.credit += credit;
            let over = shelf.spill(class).map(|batch| self.shelve_batch(class, batch));
            // If credit is short, the block goes into the shared queue below.
            let _ = shelf.put(class, weight, tag, &mut record);
            (over, 0)
        });
        let (over, unused) = done.unwrap_or((None, 0));
        self.budget.give_back(unused);
        if let Some(record) = record {
            self.give_back_shared(class, tag, record);
        }
        drop(over);
        drop(kept);
    }

    /// Reserves credit for a full magazine if there is as much, to save later calls. Otherwise
    /// reserves credit for one block.
    fn reserve_credit(&self, class: usize, weight: u64) -> Option<u64> {
        let most = weight * ByteCount::from_usize(self.depth(class).max(1)).get();
        if self.budget.reserve(most) {
            Some(most)
        } else {
            self.budget.reserve(weight).then_some(weight)
        }
    }

    /// Takes a block back without a magazine. A block that does not fit drops last.
    pub(crate) fn give_back_shared(&self, class: usize, tag: Tag, record: Box<Record<M>>) {
        let weight = self.weight(class);
        self.count(tag, weight, false);
        let mut kept = None;
        let has_room = self.budget.reserve(weight) || {
            // As in `give_back_settled`.
            kept = Some(Arc::clone(&record.stock));
            self.make_room(class, weight)
        };
        if has_room {
            drop(self.shelve(class, record));
        } else {
            self.note_eviction(class, 1);
            drop(record);
        }
        drop(kept);
    }

    /// Puts a free block of `class`, which already counts to the cap, into the shared queue. If the
    /// queue is full or the pool is closed, returns the block, which then no longer counts.
    pub(crate) fn shelve(&self, class: usize, record: Box<Record<M>>) -> Option<Box<Record<M>>> {
        let mut record = Some(record);
        self.depots.get(class)?.put(|| record.take(), self.now());
        if record.is_some() {
            self.lighten(class, 1);
            self.note_eviction(class, 1);
        }
        record
    }

    /// Puts new blocks, which do not yet count to the cap, into the shared queue.
    pub(crate) fn stock_up(&self, records: impl IntoIterator<Item = Box<Record<M>>>) {
        for record in records {
            if self.budget.reserve(self.weight(record.class)) {
                drop(self.shelve(record.class, record));
            }
        }
    }

    /// [`shelve`](Self::shelve) for several blocks of a class.
    fn shelve_batch(&self, class: usize, mut batch: Batch<M>) -> Batch<M> {
        if let Some(depot) = self.depots.get(class) {
            depot.put(|| batch.pop(), self.now());
        }
        self.lighten(class, batch.len());
        self.note_eviction(class, batch.len());
        batch
    }
}
