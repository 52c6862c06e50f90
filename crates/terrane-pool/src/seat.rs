//! A small number for every thread: its seat, by which each pool finds the thread's magazines.
//!
//! A seat belongs to one thread at a time, and goes to another when the thread has ended, after
//! every pool in which the thread had settled has taken its blocks back. A thread keeps the pools
//! in which it has settled alive: nothing that it has entered goes away beneath it.

use std::sync::Arc;

#[cfg(loom)]
pub(crate) use model::{current, settle};
#[cfg(not(loom))]
pub(crate) use threads::{current, settle};

/// No seat, as yet or any more. No pool has that many.
pub(crate) const UNSEATED: usize = usize::MAX;

/// What a thread settles in.
pub(crate) trait Home: Send + Sync {
    /// Takes back what the calling thread, which is ending, keeps at `seat`.
    fn vacate(&self, seat: usize);

    /// Whether the thread need not keep this alive any longer, as it cannot enter again.
    fn is_closed(&self) -> bool;
}

/// Adds `home`, and takes out those that have been closed.
fn replace_closed(homes: &mut Vec<Arc<dyn Home>>, home: Arc<dyn Home>) -> Vec<Arc<dyn Home>> {
    let closed = homes.extract_if(.., |home| home.is_closed()).collect();
    homes.push(home);
    closed
}

#[cfg(not(loom))]
mod threads {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeSet;
    use std::sync::{Arc, Mutex, PoisonError};

    use super::{Home, UNSEATED, replace_closed};

    thread_local! {
        // Needs no destructor, so that reading it is one load.
        static SEAT: Cell<usize> = const { Cell::new(UNSEATED) };
        static SETTLED: Settled = const { Settled { homes: RefCell::new(Vec::new()) } };
    }

    static SEATS: Mutex<Seats> = Mutex::new(Seats { free: BTreeSet::new(), taken: 0 });

    struct Seats {
        free: BTreeSet<usize>,
        /// Seats from this number on have never been taken.
        taken: usize,
    }

    /// The seat of the calling thread; before it has settled anywhere, and when it is ending,
    /// [`UNSEATED`].
    #[inline]
    pub(crate) fn current() -> usize {
        SEAT.get()
    }

    /// Makes the calling thread keep `home` alive until it ends, and then vacate it. Returns the
    /// seat, and the closed homes that the thread no longer keeps; `None` if the thread is ending.
    ///
    /// To drop a closed home runs foreign code: the caller drops it without a lock.
    pub(crate) fn settle(home: Arc<dyn Home>) -> Option<(usize, Vec<Arc<dyn Home>>)> {
        let settle = |settled: &Settled| {
            let closed = replace_closed(&mut settled.homes.borrow_mut(), home);
            if SEAT.get() == UNSEATED {
                SEAT.set(take());
            }
            (SEAT.get(), closed)
        };
        SETTLED.try_with(settle).ok()
    }

    /// The lowest free seat.
    fn take() -> usize {
        let mut seats = SEATS.lock().unwrap_or_else(PoisonError::into_inner);
        seats.free.pop_first().unwrap_or_else(|| {
            seats.taken += 1;
            seats.taken - 1
        })
    }

    /// The homes of a thread. The destructor is the end of the thread.
    struct Settled {
        homes: RefCell<Vec<Arc<dyn Home>>>,
    }

    impl Drop for Settled {
        fn drop(&mut self) {
            let seat = SEAT.get();
            for home in self.homes.get_mut().drain(..) {
                home.vacate(seat);
            }
            SEAT.set(UNSEATED);
            if seat != UNSEATED {
                SEATS.lock().unwrap_or_else(PoisonError::into_inner).free.insert(seat);
            }
        }
    }
}

/// Threads of the model are not threads of the system; they take seats and do not return them.
#[cfg(loom)]
mod model {
    use std::cell::RefCell;
    use std::sync::Arc;

    use super::{Home, UNSEATED, replace_closed};
    use loom::sync::atomic::{AtomicUsize, Ordering};

    loom::lazy_static! {
        static ref TAKEN: AtomicUsize = AtomicUsize::new(0);
    }
    loom::thread_local! {
        static SETTLED: Settled = Settled {
            seat: TAKEN.fetch_add(1, Ordering::Relaxed),
            homes: RefCell::new(Vec::new()),
        };
    }

    struct Settled {
        seat: usize,
        homes: RefCell<Vec<Arc<dyn Home>>>,
    }

    impl Drop for Settled {
        fn drop(&mut self) {
            for home in self.homes.get_mut().drain(..) {
                home.vacate(self.seat);
            }
        }
    }

    pub(crate) fn current() -> usize {
        SETTLED.try_with(|settled| settled.seat).unwrap_or(UNSEATED)
    }

    pub(crate) fn settle(home: Arc<dyn Home>) -> Option<(usize, Vec<Arc<dyn Home>>)> {
        let settle = |settled: &Settled| {
            (settled.seat, replace_closed(&mut settled.homes.borrow_mut(), home))
        };
        SETTLED.try_with(settle).ok()
    }
}
