//! How blocks come back to the stock: into the thread's magazine at best, else into the shared queue
//! of their class or into the parking, and back to the upstream where there is no room.

use std::sync::Arc;

use terrane_core::{ByteCount, Memory};

use super::{Stock, batches};
use crate::barrier;
use crate::record::{Record, UNPOOLED};
use crate::seat::Home as _;
use crate::slot::{Batch, Refusal};

impl<M: Memory> Stock<M> {
    /// Takes a block back from its user.
    #[inline]
    pub(crate) fn give_back(record: Box<Record<M>>) {
        let class = record.class;
        if class == UNPOOLED || !record.order.is_free() {
            return Self::give_back_apart(record);
        }
        let stock = Arc::as_ptr(&record.stock);
        let mut record = Some(record);
        // SAFETY: as long as the block is ours it keeps its stock alive; when it has gone into a
        // magazine of this thread, this thread does, as it has settled there (`settle_in`).
        let stock = unsafe { &*stock };
        let weight = stock.weight(class);
        let done = stock.enter(|shelf| shelf.put(weight, &mut record));
        if let Some(record) = record {
            Self::give_back_slowly(record, done.and_then(Result::err));
        }
    }

    /// Takes back a block that is not pooled, or that streams use.
    fn give_back_apart(record: Box<Record<M>>) {
        let class = record.class;
        let mut record = Some(record);
        if class != UNPOOLED
            && let Some(block) = record.as_ref()
            && let Some(stream) = block.order.only_home()
        {
            let stock = Arc::as_ptr(&block.stock);
            // SAFETY: as in `give_back`.
            let stock = unsafe { &*stock };
            let weight = stock.weight(class);
            stock.enter(|shelf| shelf.put_on(stream, weight, &mut record));
        }
        if let Some(record) = record {
            Self::give_back_to_parking(record);
        }
    }

    #[cold]
    fn give_back_to_parking(record: Box<Record<M>>) {
        let stock = Arc::clone(&record.stock);
        stock.settle_in();
        stock.count(record.tag, record.granted, false);
        if record.order.is_free() {
            return drop(record);
        }
        stock.extend_lane(&record);
        stock.park([record]);
    }

    /// Sees to it that the next block like this may go into the thread's lane, which has no
    /// credit yet, or serves another stream.
    fn extend_lane(&self, record: &Record<M>) {
        let Some(stream) = record.order.only_home() else { return };
        if record.class == UNPOOLED || self.is_closed() {
            return;
        }
        let weight = self.weight(record.class);
        let credit = self.reserve_credit(record.class, weight).unwrap_or(0);
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

    /// What was parked after the pool was closed has to leave by itself.
    pub(super) fn evacuate_if_closed(&self) {
        // Close shuts the door, has a heavy barrier, and then empties the parking.
        barrier::light();
        if let Some(parking) = &self.parking
            && self.is_closed()
        {
            parking.evacuate();
        }
    }

    #[cold]
    fn give_back_slowly(record: Box<Record<M>>, refusal: Option<Refusal>) {
        let stock = Arc::clone(&record.stock);
        let class = record.class;
        let (weight, tag, granted) = (stock.weight(class), record.tag, record.granted);
        if stock.is_closed() {
            stock.count(tag, granted, false);
            return drop(record);
        }
        stock.settle_in();
        if !stock.has_magazine(class) {
            return stock.give_back_shared(record);
        }
        // What a full magazine spills takes its reservation along.
        let reserved = if refusal == Some(Refusal::Full) {
            let spilled = stock.depth(class).div_ceil(2);
            let weight = weight * ByteCount::from_usize(spilled).get();
            stock.budget.reserve(weight).then_some(weight).or(Some(0))
        } else {
            stock.reserve_credit(class, weight)
        };
        let Some(credit) = reserved else {
            stock.count(tag, granted, false);
            stock.note_eviction(class, 1);
            return drop(record);
        };
        let mut record = Some(record);
        let done = stock.undisturbed(|shelf| {
            let Some(shelf) = shelf else { return (None, credit) };
            shelf.credit += credit;
            let over = shelf.spill(class).and_then(|batch| stock.shelve(class, batch));
            // Where credit is short, the shared queue is next.
            let _ = shelf.put(weight, &mut record);
            (over, 0)
        });
        if let Some((over, unused)) = done {
            drop(over);
            stock.budget.give_back(unused);
        }
        if let Some(record) = record {
            stock.give_back_shared(record);
        }
    }

    /// Reserves credit for a block at least; for a magazine's worth, to save the next trips, if
    /// there is as much.
    fn reserve_credit(&self, class: usize, weight: u64) -> Option<u64> {
        let most = weight * ByteCount::from_usize(self.depth(class).max(1)).get();
        if self.budget.reserve(most) {
            Some(most)
        } else {
            (self.budget.reserve(weight) || self.make_room(class, weight)).then_some(weight)
        }
    }

    /// Takes a block back without a magazine.
    pub(crate) fn give_back_shared(&self, record: Box<Record<M>>) {
        let class = record.class;
        let weight = self.weight(class);
        self.count(record.tag, record.granted, false);
        if !(self.budget.reserve(weight) || self.make_room(class, weight)) {
            self.note_eviction(class, 1);
            return drop(record);
        }
        self.restock(class, [record]);
    }

    /// Puts free blocks, which weigh on the cap already, into the shared queue; if the pool is
    /// closed, they are dropped.
    pub(crate) fn restock(&self, class: usize, records: impl IntoIterator<Item = Box<Record<M>>>) {
        for batch in batches(records) {
            let over = self.undisturbed(|_| {
                if self.is_closed() {
                    self.lighten(class, batch.len());
                    return Some(batch);
                }
                self.shelve(class, batch)
            });
            drop(over);
        }
    }

    /// Puts free blocks, which weigh on the cap already, into the shared queue, and answers those
    /// that are beyond the cap of their class. They weigh nothing any more.
    ///
    /// No sweep may be under way, or it would miss them: callers are [`undisturbed`].
    ///
    /// [`undisturbed`]: Self::undisturbed
    pub(crate) fn shelve(&self, class: usize, batch: Batch<M>) -> Option<Batch<M>> {
        if batch.len() == 0 {
            return None;
        }
        let over = self.depots.get(class)?.push(batch, self.now())?;
        self.lighten(class, over.len());
        self.note_eviction(class, over.len());
        Some(over)
    }
}
