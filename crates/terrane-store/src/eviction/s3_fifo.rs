//! S3-FIFO: three queues, and hits that move nothing.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use terrane_core::sync::lock;

use super::EvictionPolicy;
use super::ghost::Ghost;
use super::links::{Links, List};
use crate::KeyHash;

/// S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).
///
/// A new block enters a small queue, a tenth of the slots. If it is used twice there, it moves to the
/// main queue as it reaches the end; otherwise it is evicted, and its key is remembered. A block
/// whose key is remembered enters the main queue at once. The main queue gives a used block another
/// round for each use, up to three. So blocks that are used once pass through the small queue, and a
/// scan does not empty the tier.
///
/// A hit writes at most one byte, without a lock. Memory: 10 bytes a slot, and at most 20 for each
/// remembered key.
#[derive(Debug)]
pub struct S3Fifo {
    /// The uses of each block since it entered its queue, at most [`MOST_USES`].
    uses: Box<[AtomicU8]>,
    state: Mutex<State>,
}

/// More uses than these are not counted: two bits, as in the paper.
const MOST_USES: u8 = 3;

/// A block with this many uses moves from the small queue to the main one.
const USES_TO_STAY: u8 = 2;

/// The small queue's share of the slots: one in ten, as in the paper.
const SMALL_SHARE: u32 = 10;

/// The main queue's share of the slots.
const fn main_share(slots: u32) -> u32 {
    slots - slots.div_ceil(SMALL_SHARE)
}

#[derive(Debug)]
struct State {
    links: Links,
    small: List,
    main: List,
    ghost: Ghost,
    /// The queue that each slot is in.
    queues: Box<[Queue]>,
    /// Blocks are evicted from the main queue while it is longer than this.
    main_share: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queue {
    Absent,
    Small,
    Main,
}

impl S3Fifo {
    /// The policy of a tier of this many slots.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        let main_share = main_share(slots);
        let count = usize::try_from(slots).unwrap_or(usize::MAX);
        Self {
            uses: (0..count).map(|_| AtomicU8::new(0)).collect(),
            state: Mutex::new(State {
                links: Links::new(slots),
                small: List::new(),
                main: List::new(),
                // As many keys as the main queue has blocks, as in the paper.
                ghost: Ghost::new(main_share),
                queues: vec![Queue::Absent; count].into(),
                main_share,
            }),
        }
    }

    fn uses_of(&self, slot: u32) -> Option<&AtomicU8> {
        usize::try_from(slot).ok().and_then(|slot| self.uses.get(slot))
    }

    /// Returns the uses of a block, and sets them to zero.
    fn take_uses(&self, slot: u32) -> u8 {
        // Relaxed: a count that orders nothing.
        self.uses_of(slot).map_or(0, |uses| uses.swap(0, Ordering::Relaxed))
    }

    fn set_uses(&self, slot: u32, uses: u8) {
        if let Some(counted) = self.uses_of(slot) {
            counted.store(uses, Ordering::Relaxed);
        }
    }

    fn insert_locked(&self, state: &mut State, slot: u32, is_remembered: bool) {
        state.leave(slot);
        self.set_uses(slot, 0);
        state.enter(slot, if is_remembered { Queue::Main } else { Queue::Small });
    }

    /// Evicts the oldest block of the small queue that was not used enough, and moves those that
    /// were. It visits each block once.
    fn evict_small(
        &self,
        state: &mut State,
        take: &mut dyn FnMut(u32) -> Option<KeyHash>,
    ) -> Option<u32> {
        for _ in 0..state.small.len() {
            let slot = state.small.oldest()?;
            state.leave(slot);
            if self.take_uses(slot) >= USES_TO_STAY {
                state.enter(slot, Queue::Main);
                continue;
            }
            if let Some(key) = take(slot) {
                state.ghost.insert(key);
                return Some(slot);
            }
            state.enter(slot, Queue::Small);
        }
        None
    }

    /// Evicts the oldest block of the main queue without uses. Each use gives a block another round.
    fn evict_main(
        &self,
        state: &mut State,
        take: &mut dyn FnMut(u32) -> Option<KeyHash>,
    ) -> Option<u32> {
        // After as many rounds as there are uses, every block was a candidate once.
        let rounds = u64::from(MOST_USES) + 1;
        for _ in 0..u64::from(state.main.len()) * rounds {
            let slot = state.main.oldest()?;
            state.leave(slot);
            let uses = self.take_uses(slot);
            if uses == 0 && take(slot).is_some() {
                return Some(slot);
            }
            self.set_uses(slot, uses.saturating_sub(1));
            state.enter(slot, Queue::Main);
        }
        None
    }
}

impl State {
    /// Takes a slot out of its queue.
    fn leave(&mut self, slot: u32) {
        let queue = self.queue(slot).map_or(Queue::Absent, |queue| *queue);
        let Self { links, small, main, .. } = self;
        match queue {
            Queue::Absent => return,
            Queue::Small => small.remove(links, slot),
            Queue::Main => main.remove(links, slot),
        }
        if let Some(queue) = self.queue(slot) {
            *queue = Queue::Absent;
        }
    }

    /// Puts a slot that is in no queue at the end of one.
    fn enter(&mut self, slot: u32, queue: Queue) {
        let Some(own) = self.queue(slot) else { return };
        *own = queue;
        let Self { links, small, main, .. } = self;
        match queue {
            Queue::Absent => {}
            Queue::Small => small.push(links, slot),
            Queue::Main => main.push(links, slot),
        }
    }

    fn queue(&mut self, slot: u32) -> Option<&mut Queue> {
        usize::try_from(slot).ok().and_then(|slot| self.queues.get_mut(slot))
    }
}

impl EvictionPolicy for S3Fifo {
    fn insert(&self, slot: u32, key: KeyHash) {
        let mut state = lock(&self.state);
        let is_remembered = state.ghost.remove(key);
        self.insert_locked(&mut state, slot, is_remembered);
    }

    fn insert_all(
        &self,
        slots: &mut dyn Iterator<Item = u32>,
        key_of: &dyn Fn(u32) -> Option<KeyHash>,
    ) {
        let mut state = lock(&self.state);
        // A new store remembers none, and the keys of all blocks are not in the cache.
        let remembers_none = state.ghost.is_empty();
        for slot in slots {
            let is_remembered =
                !remembers_none && key_of(slot).is_some_and(|key| state.ghost.remove(key));
            self.insert_locked(&mut state, slot, is_remembered);
        }
    }

    fn hit(&self, slot: u32) {
        let Some(uses) = self.uses_of(slot) else { return };
        // A use that two threads count at once may be lost. A block that is used often is not
        // written, so that threads do not compete for its cache line.
        let counted = uses.load(Ordering::Relaxed);
        if counted < MOST_USES {
            uses.store(counted + 1, Ordering::Relaxed);
        }
    }

    fn remove(&self, slot: u32) {
        lock(&self.state).leave(slot);
    }

    fn evict(&self, take: &mut dyn FnMut(u32) -> Option<KeyHash>) -> Option<u32> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        if state.main.len() > state.main_share
            && let Some(slot) = self.evict_main(state, take)
        {
            return Some(slot);
        }
        // The main queue comes last: blocks that the small one moves there are candidates, too.
        let evicted = self.evict_small(state, take);
        evicted.or_else(|| self.evict_main(state, take))
    }

    fn set_limit(&self, slots: u32) {
        let mut state = lock(&self.state);
        state.main_share = main_share(slots);
        state.ghost.set_capacity(main_share(slots));
    }

    fn was_evicted(&self, key: KeyHash) -> bool {
        lock(&self.state).ghost.has(key)
    }
}
