//! Lets a thread that waits for a relayed transfer help the engines of its parts.

use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use smallvec::SmallVec;
use terrane_core::sync::lock;

use crate::completion::waiter_progress::WaiterProgress;
use crate::engine::finalizer::Waiters;

/// The engines' invitations for the parts in flight, oldest first. Each is passed on to the threads
/// that wait for the transfer.
///
/// Without them, a thread that waits for a relayed transfer would sleep, while one that waits for a
/// transfer of the host engine copies, and one that waits for a device polls it.
pub(super) struct PartInvitations {
    waiters: Waiters,
    parts: Mutex<Vec<Weak<dyn WaiterProgress>>>,
}

/// An engine has few parts at a time.
type Parts = SmallVec<[Arc<dyn WaiterProgress>; 8]>;

impl PartInvitations {
    pub(super) fn new(waiters: Waiters) -> Self {
        Self { waiters, parts: Mutex::default() }
    }

    pub(super) fn invite(self: &Arc<Self>, part: &Arc<dyn WaiterProgress>) {
        let part = Arc::downgrade(part);
        let mut parts = lock(&self.parts);
        // A part may invite again.
        parts.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&part));
        parts.push(part);
        drop(parts);
        let progress: Arc<dyn WaiterProgress> = Arc::<Self>::clone(self);
        self.waiters.invite(&progress);
    }

    /// Engines are called, and their values drop, without the lock.
    fn parts(&self) -> Parts {
        lock(&self.parts).iter().filter_map(Weak::upgrade).collect()
    }
}

impl WaiterProgress for PartInvitations {
    fn poll(&self) {
        self.parts().iter().for_each(|part| part.poll());
    }

    /// Every part is called, because a device reports its end only to a thread that polls it. The
    /// thread copies for the oldest part first, because parts end one after the other.
    fn poll_blocking(&self) -> bool {
        let mut has_copied = false;
        for part in self.parts() {
            if has_copied {
                part.poll();
            } else {
                has_copied = part.poll_blocking();
            }
        }
        has_copied
    }

    fn expected_end(&self) -> Option<Range<Instant>> {
        self.parts().iter().filter_map(|part| part.expected_end()).min_by_key(|range| range.start)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A part with some pieces to copy.
    struct Part {
        left: AtomicUsize,
        polls: AtomicUsize,
    }

    impl WaiterProgress for Part {
        fn poll(&self) {
            self.polls.fetch_add(1, Ordering::Relaxed);
        }

        fn poll_blocking(&self) -> bool {
            let taken = |left: usize| left.checked_sub(1);
            self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).is_ok()
        }
    }

    #[test]
    fn a_waiting_thread_copies_for_the_oldest_part_and_polls_the_others() {
        let waiters = Waiters { sink: None, layers: None };
        let invitations = Arc::new(PartInvitations::new(waiters));
        let parts = [2, 1].map(|pieces| {
            let part = Part { left: AtomicUsize::new(pieces), polls: AtomicUsize::new(0) };
            let part = Arc::new(part);
            let progress: Arc<dyn WaiterProgress> = Arc::<Part>::clone(&part);
            invitations.invite(&progress);
            part
        });
        let state = || {
            let of = |count: &AtomicUsize| count.load(Ordering::Relaxed);
            parts.each_ref().map(|part| (of(&part.left), of(&part.polls)))
        };
        assert!(invitations.poll_blocking());
        assert_eq!(state(), [(1, 0), (1, 1)]);
        assert!(invitations.poll_blocking() && invitations.poll_blocking());
        assert_eq!(state(), [(0, 0), (0, 2)]);
        assert!(!invitations.poll_blocking());
    }
}
