//! The first state of a slot table: which slots have a block of an earlier session, and which are free.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use terrane_core::convert::to_usize;
use terrane_core::sync::lock;

use crate::store::slot_table::SlotTable;

/// With fewer slots, one thread is faster: other threads take longer to start than they save.
const MANY_SLOTS: usize = 1 << 18;

impl SlotTable {
    /// Adds the blocks of a recovery, which the index has, to the eviction policy, and frees all
    /// other slots. It is called once, before the first use of the table.
    pub(crate) fn start(&self, threads: NonZeroUsize) {
        let threads = if self.index.capacity() < MANY_SLOTS { 1 } else { threads.get() };
        // An empty index is not searched.
        let is_used = match self.index.len() {
            0 => Box::default(),
            _ => self.index.used_slots(threads),
        };
        // Relaxed: the threads that set the values were joined.
        let is_used = |slot: u32| {
            let is_used = is_used.get(to_usize(slot.into()));
            is_used.is_some_and(|is_used: &AtomicBool| is_used.load(Ordering::Relaxed))
        };
        let free_others = || {
            let mut state = lock(&self.state);
            let limit = state.limit;
            state.free.reserve_exact(self.index.capacity() - self.index.len());
            // The lowest slot is taken first.
            state.free.extend((0..limit).rev().filter(|slot| !is_used(*slot)));
        };
        thread::scope(|scope| {
            let other = (threads > 1).then(|| {
                let thread = thread::Builder::new().name(String::from("terrane-load"));
                thread.spawn_scoped(scope, free_others)
            });
            let mut used = (0..).take(self.index.capacity()).filter(|slot| is_used(*slot));
            self.policy.insert_all(&mut used, &|slot| self.index.key_in(slot));
            if !matches!(other, Some(Ok(_))) {
                free_others();
            }
        });
    }
}
