//! Changes of the store's content, and their subscribers.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use terrane_core::sync::lock;

use crate::KeyHash;
use crate::error::StoreError;
use crate::queue::CompletionQueue;
use crate::store::query::presence::TierId;

/// A key in a report: its bytes if the store keeps them, or its hash.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyName {
    /// The bytes of the key.
    Bytes(Arc<[u8]>),
    /// Only the hash is known, because the store was opened without `keep_keys`.
    Hash(KeyHash),
}

impl fmt::Display for KeyName {
    /// Printable text as it is, and other bytes in hexadecimal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) if bytes.iter().all(u8::is_ascii_graphic) => {
                bytes.iter().try_for_each(|&byte| write!(f, "{}", char::from(byte)))
            }
            Self::Bytes(bytes) => {
                f.write_str("0x")?;
                bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
            Self::Hash(hash) => write!(f, "hash {hash}"),
        }
    }
}

/// A change of the store's content.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreEvent {
    /// The change.
    pub kind: StoreEventKind,
    /// The tier, if the change concerns one.
    pub tier: Option<TierId>,
    /// The group of the block.
    pub group: u16,
    /// The key, if the change concerns one.
    pub key: Option<KeyName>,
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreEventKind {
    /// A tier has the block from now on.
    Stored,
    /// A tier dropped the block to make room.
    Evicted,
    /// The key was removed from all tiers.
    Removed,
    /// The bytes on disk differed from the checksum; the block was dropped.
    Corrupt,
    /// The device could not read the block; the store dropped it.
    Unreadable,
    /// No job gets the slot of the block any more, until the store is opened again.
    SlotQuarantined,
    /// The store was cleared.
    Cleared,
    /// The disk tier takes no more blocks, after a failed write or sync.
    TierReadOnly,
}

/// The events of one subscriber, the oldest first.
///
/// The list is bounded. If it is full, events are dropped and counted. The descriptor is readable
/// while there are events.
#[derive(Debug)]
pub struct Events {
    pub(crate) shared: Arc<Subscriber>,
}

#[derive(Debug)]
pub(crate) struct Subscriber {
    queue: CompletionQueue<StoreEvent>,
    lost: AtomicU64,
}

impl Subscriber {
    pub(crate) const fn new(queue: CompletionQueue<StoreEvent>) -> Self {
        Self { queue, lost: AtomicU64::new(0) }
    }

    pub(crate) fn deliver(&self, event: StoreEvent) {
        match self.queue.reserve() {
            Ok(place) => place.deliver(event),
            Err(_) => {
                // Relaxed: a count that orders nothing.
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

impl Events {
    /// Takes the oldest event; `None` if there is none.
    pub fn try_take(&self) -> Option<StoreEvent> {
        self.shared.queue.try_take()
    }

    /// Moves all events into `taken` and returns their number.
    pub fn take_all(&self, taken: &mut Vec<StoreEvent>) -> usize {
        self.shared.queue.take_all(taken)
    }

    /// The number of events that were dropped because the list was full.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// Blocks until there is an event, and takes it. Returns `None` once the deadline has passed,
    /// and in a forked process.
    pub fn wait(&self, deadline: Instant) -> Option<StoreEvent> {
        // The descriptor of the parent process may stay readable.
        while self.shared.queue.is_own() {
            if let Some(event) = self.shared.queue.try_take() {
                return Some(event);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            let left = rustix::event::Timespec::try_from(left).ok()?;
            let mut polled =
                [rustix::event::PollFd::new(&self.shared.queue, rustix::event::PollFlags::IN)];
            // An interrupted poll is tried again.
            let _ = rustix::event::poll(&mut polled, Some(&left));
        }
        None
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.queue.as_fd()
    }
}

/// The subscribers of events.
#[derive(Default)]
pub(crate) struct Subscribers {
    list: Mutex<Vec<Weak<Subscriber>>>,
    count: AtomicUsize,
}

impl Subscribers {
    pub(crate) fn add(&self, capacity: usize) -> Result<Events, StoreError> {
        let shared = Arc::new(Subscriber::new(CompletionQueue::new(capacity)?));
        let mut list = lock(&self.list);
        list.push(Arc::downgrade(&shared));
        self.count.store(list.len(), Ordering::Relaxed);
        Ok(Events { shared })
    }

    pub(crate) fn are_none(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn deliver(&self, event: &StoreEvent) {
        let subscribers: Vec<Arc<Subscriber>> = {
            let mut list = lock(&self.list);
            list.retain(|subscriber| subscriber.strong_count() > 0);
            self.count.store(list.len(), Ordering::Relaxed);
            list.iter().filter_map(Weak::upgrade).collect()
        };
        subscribers.iter().for_each(|subscriber| subscriber.deliver(event.clone()));
    }
}
