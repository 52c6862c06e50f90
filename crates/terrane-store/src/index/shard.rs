//! The lock of a part of an index, and reads without it.

use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::sync::{RwLock, RwLockWriteGuard, write};

/// The lock of a shard's buckets, and of the blocks whose keys are in them.
pub(super) struct Shard {
    /// The number of blocks.
    pub(super) blocks: RwLock<usize>,
    /// The number of changes that began or ended: odd during a change.
    changes: AtomicU64,
}

/// The lock for a change.
pub(super) struct Change<'a> {
    pub(super) count: RwLockWriteGuard<'a, usize>,
    changes: &'a AtomicU64,
}

impl Shard {
    pub(super) fn new() -> Self {
        Self { blocks: RwLock::new(0), changes: AtomicU64::new(0) }
    }

    pub(super) fn write(&self) -> Change<'_> {
        let count = write(&self.blocks);
        let changes = &self.changes;
        changes.store(changes.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        // A reader that sees a later store of this thread sees the number, too.
        fence(Ordering::Release);
        Change { count, changes }
    }

    /// The result of reads without the lock, or `None` if a change may have come between them.
    ///
    /// The slot of a block that left the shard may be filled under the lock of another one. Its
    /// [`write`](Self::write) comes after the change here, so the reader sees that change.
    #[inline]
    pub(super) fn read_unlocked<T>(&self, look: impl Fn() -> T) -> Option<T> {
        let before = self.changes.load(Ordering::Acquire);
        if before % 2 == 1 {
            return None;
        }
        let found = look();
        fence(Ordering::Acquire);
        (self.changes.load(Ordering::Relaxed) == before).then_some(found)
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        // Release: a reader that sees the number sees the whole change.
        self.changes.store(self.changes.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}
