//! A small number for every thread: its seat, by which each pool finds the thread's magazines.
//!
//! A seat belongs to one thread at a time. It passes to another thread after its thread has ended
//! and every pool that the thread settled in has taken its blocks back. A thread keeps the pools
//! that it settled in alive, so a pool never drops while the thread is inside it.

use std::sync::Arc;

#[cfg(loom)]
pub(crate) use model::{current, settle};
#[cfg(not(loom))]
pub(crate) use threads::{current, settle};

/// No seat: the thread has none yet, or is ending. No pool has this many seats.
pub(crate) const UNSEATED: usize = usize::MAX;

/// An object that a thread settles in: the shared part of a pool.
pub(crate) trait Home: Send + Sync {
    /// Takes back the blocks that the calling thread, which is ending, keeps at `seat`.
    fn vacate(&self, seat: usize);

    /// Returns whether the thread need not keep this alive any longer, because it cannot enter
    /// again.
    fn is_closed(&self) -> bool;
}

/// Adds `home`, and takes out closed homes.
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
        // Needs no destructor, so reading it is one load.
        static SEAT: Cell<usize> = const { Cell::new(UNSEATED) };
        static SETTLED: Settled = const { Settled { homes: RefCell::new(Vec::new()) } };
    }

    static SEATS: Mutex<Seats> = Mutex::new(Seats { free: BTreeSet::new(), taken: 0 });

    struct Seats {
        free: BTreeSet<usize>,
        /// Seats from this number on have never been taken.
        taken: usize,
    }

    /// Returns the seat of the calling thread. Returns [`UNSEATED`] before the thread has settled
    /// anywhere, and when it is ending.
    #[inline]
    pub(crate) fn current() -> usize {
        SEAT.get()
    }

    /// Makes the calling thread keep `home` alive until the thread ends and vacates it. Returns the
    /// seat, and the closed homes that the thread no longer keeps; `None` if the thread is ending.
    ///
    /// Dropping a closed home runs foreign code, so the caller must drop it without a lock.
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

    /// Takes the lowest free seat.
    fn take() -> usize {
        let mut seats = SEATS.lock().unwrap_or_else(PoisonError::into_inner);
        seats.free.pop_first().unwrap_or_else(|| {
            seats.taken += 1;
            seats.taken - 1
        })
    }

    /// The homes of a thread. The destructor runs when the thread ends.
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

/// Threads of the model are not threads of the system. They take seats and do not return them.
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
