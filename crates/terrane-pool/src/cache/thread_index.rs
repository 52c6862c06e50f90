//! A small number for every thread, which each pool uses as the index of the thread's magazines.
//!
//! An index belongs to one thread at a time. After the thread has ended and has unregistered from
//! every pool, another thread can get the index. A thread keeps the pools that it has registered
//! with alive, so no pool drops while the thread is inside it.

use std::sync::Arc;

#[cfg(loom)]
pub(crate) use model::{current, register};
#[cfg(not(loom))]
pub(crate) use threads::{current, register};

/// No index: the thread has not registered yet, or is ending. No pool has this many threads.
pub(crate) const NO_INDEX: usize = usize::MAX;

/// The shared part of a pool, as a trait for threads that end.
pub(crate) trait ThreadExit: Send + Sync {
    /// Returns the blocks that the calling thread, which is ending, keeps under `index`.
    fn unregister(&self, index: usize);

    /// Returns whether the thread may drop its reference, because it cannot enter the pool again.
    fn is_closed(&self) -> bool;
}

type Pools = Vec<Arc<dyn ThreadExit>>;

/// Adds `pool`, and removes the closed pools.
fn replace_closed(pools: &mut Pools, pool: Arc<dyn ThreadExit>) -> Pools {
    let closed = pools.extract_if(.., |pool| pool.is_closed()).collect();
    pools.push(pool);
    closed
}

#[cfg(not(loom))]
mod threads {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeSet;
    use std::sync::{Arc, Mutex};

    use terrane_core::sync::lock;

    use super::{NO_INDEX, Pools, ThreadExit, replace_closed};

    thread_local! {
        // It has no destructor, so reading it is one load.
        static INDEX: Cell<usize> = const { Cell::new(NO_INDEX) };
        static REGISTERED: Registered = const { Registered { pools: RefCell::new(Vec::new()) } };
    }

    static INDEXES: Mutex<Indexes> = Mutex::new(Indexes { free: BTreeSet::new(), next: 0 });

    struct Indexes {
        free: BTreeSet<usize>,
        /// Indexes from this number on have never been used.
        next: usize,
    }

    /// Returns the index of the calling thread. Returns [`NO_INDEX`] before the thread has
    /// registered with a pool, and when it is ending.
    #[inline]
    pub(crate) fn current() -> usize {
        INDEX.get()
    }

    /// Makes the calling thread keep `pool` alive until the thread ends and unregisters. Returns
    /// the index, and the closed pools that the thread no longer keeps. `None` if the thread is
    /// ending.
    ///
    /// Dropping a closed pool runs foreign code, so the caller must drop it without a lock.
    pub(crate) fn register(pool: Arc<dyn ThreadExit>) -> Option<(usize, Pools)> {
        let register = |registered: &Registered| {
            let closed = replace_closed(&mut registered.pools.borrow_mut(), pool);
            if INDEX.get() == NO_INDEX {
                INDEX.set(lowest_free());
            }
            (INDEX.get(), closed)
        };
        REGISTERED.try_with(register).ok()
    }

    fn lowest_free() -> usize {
        let mut indexes = lock(&INDEXES);
        indexes.free.pop_first().unwrap_or_else(|| {
            indexes.next += 1;
            indexes.next - 1
        })
    }

    /// The pools of a thread. The destructor runs when the thread ends.
    struct Registered {
        pools: RefCell<Pools>,
    }

    impl Drop for Registered {
        fn drop(&mut self) {
            let index = INDEX.get();
            for pool in self.pools.get_mut().drain(..) {
                pool.unregister(index);
            }
            INDEX.set(NO_INDEX);
            if index != NO_INDEX {
                lock(&INDEXES).free.insert(index);
            }
        }
    }
}

/// Threads of the model are not threads of the system. They get indexes and never return them.
#[cfg(loom)]
mod model {
    use std::cell::RefCell;
    use std::sync::Arc;

    use super::{NO_INDEX, Pools, ThreadExit, replace_closed};
    use loom::sync::atomic::{AtomicUsize, Ordering};

    loom::lazy_static! {
        static ref NEXT: AtomicUsize = AtomicUsize::new(0);
    }
    loom::thread_local! {
        static REGISTERED: Registered = Registered {
            index: NEXT.fetch_add(1, Ordering::Relaxed),
            pools: RefCell::new(Vec::new()),
        };
    }

    struct Registered {
        index: usize,
        pools: RefCell<Pools>,
    }

    impl Drop for Registered {
        fn drop(&mut self) {
            for pool in self.pools.get_mut().drain(..) {
                pool.unregister(self.index);
            }
        }
    }

    pub(crate) fn current() -> usize {
        REGISTERED.try_with(|registered| registered.index).unwrap_or(NO_INDEX)
    }

    pub(crate) fn register(pool: Arc<dyn ThreadExit>) -> Option<(usize, Pools)> {
        let register = |registered: &Registered| {
            (registered.index, replace_closed(&mut registered.pools.borrow_mut(), pool))
        };
        REGISTERED.try_with(register).ok()
    }
}
