//! The choice of the memory to register.
//!
//! Memory is registered in chunks, because registering faults all pages in and takes the thread's
//! time. Registering a chunk costs about as much as pinning each of its pages once. So a chunk is
//! registered after requests have used as many bytes as it has: the cost is at most doubled.

use std::fmt;
use std::sync::{Arc, Mutex};

use io_uring::IoUring;
use rustc_hash::FxHashMap;
use terrane_core::convert::to_u64;
use terrane_core::sync::lock;
use terrane_core::{ByteCount, CapabilityStatus, OsError, Reason};

use super::memory::{IoMemory, WeakMemory};
use super::table::{BufferTable, NotRegistered};

/// The smallest chunk: the kernel pins it in some milliseconds.
const MIN_CHUNK: usize = 64 << 20;

/// The largest chunk: the kernel's limit of a registered buffer.
const MAX_CHUNK: usize = 1 << 30;

/// A chunk of a memory is this many times as long as the span of the memory's first request, at
/// most [`MAX_CHUNK`]. Few requests then cross the end of a chunk.
const SPANS: usize = 16;

/// Below this number of chunks, none are removed.
const MIN_SWEPT: usize = 64;

/// The registered memory of a ring.
pub(in crate::queue) struct Registrar {
    chunks: FxHashMap<ChunkId, Chunk>,
    /// At this number of chunks, the next one removes those of memory that has dropped.
    sweep_at: usize,
    registration: IoRegistration,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct ChunkId {
    memory: u64,
    /// The chunk's number in the memory.
    number: usize,
}

struct Chunk {
    memory: WeakMemory,
    /// The bytes of the requests in the chunk before it was registered.
    used: u64,
    state: ChunkState,
}

#[derive(Clone, Copy)]
enum ChunkState {
    NotTried,
    /// The index in the table.
    Registered(u16),
    Refused,
}

/// Whether a queue registers memory, and the last reason why it did not.
#[derive(Clone)]
pub struct IoRegistration {
    /// `None` if the queue has no table.
    table: Option<Arc<BufferTable>>,
    outcome: Arc<Mutex<Outcome>>,
}

#[derive(Clone, Copy)]
struct Outcome {
    /// The maximum number of bytes. It shrinks to what the kernel has granted.
    limit: u64,
    refusal: Option<Reason>,
}

impl IoRegistration {
    /// The state of a queue without a table.
    pub(in crate::queue) fn without_table(refusal: Option<Reason>) -> Self {
        Self { table: None, outcome: Arc::new(Mutex::new(Outcome { limit: 0, refusal })) }
    }

    /// Granted until the kernel refuses memory.
    #[must_use]
    pub fn status(&self) -> CapabilityStatus {
        match *lock(&self.outcome) {
            Outcome { refusal: Some(reason), .. } => CapabilityStatus::Refused(reason),
            _ if self.table.is_none() => CapabilityStatus::NotTried,
            _ => CapabilityStatus::Granted,
        }
    }

    /// Whether the queue may register this many more bytes.
    #[must_use]
    pub fn has_room_for(&self, bytes: ByteCount) -> bool {
        let limit = lock(&self.outcome).limit;
        let pinned = self.table.as_ref().map_or(u64::MAX, |table| table.pinned());
        pinned.checked_add(bytes.get()).is_some_and(|sum| sum <= limit)
    }
}

impl fmt::Debug for IoRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("IoRegistration").field(&self.status()).finish()
    }
}

impl Registrar {
    /// A registrar for at most `limit` bytes. If `limit` is zero, the ring gets no table.
    pub(in crate::queue) fn new(ring: &IoUring, limit: ByteCount) -> Self {
        let registration = if limit.is_zero() {
            IoRegistration::without_table(None)
        } else {
            match BufferTable::new(ring) {
                Ok(table) => {
                    let outcome = Outcome { limit: limit.get(), refusal: None };
                    let outcome = Arc::new(Mutex::new(outcome));
                    IoRegistration { table: Some(table), outcome }
                }
                Err(OsError { code: libc::EINVAL, .. }) => {
                    let by = "the kernel (before Linux 5.19)";
                    IoRegistration::without_table(Some(Reason::Unsupported { by }))
                }
                Err(error) => IoRegistration::without_table(Some(Reason::Os(error))),
            }
        };
        Self { chunks: FxHashMap::default(), sweep_at: MIN_SWEPT, registration }
    }

    pub(in crate::queue) fn registration(&self) -> IoRegistration {
        self.registration.clone()
    }

    /// The index of the registered buffer that contains all of these ranges of `memory`. Registers
    /// a chunk after as many bytes of it have been used as it has.
    pub(in crate::queue) fn find(
        &mut self,
        memory: &IoMemory,
        ranges: impl ExactSizeIterator<Item = (usize, usize)>,
    ) -> Option<u16> {
        let table = self.registration.table.as_ref()?;
        if (ranges.len() > 1 && !table.has_vectored)
            || !(memory.is_of_this_process() && table.is_of_this_process())
        {
            return None;
        }
        let (mut first, mut end, mut bytes) = (usize::MAX, 0, 0);
        for (address, length) in ranges {
            first = first.min(address);
            end = end.max(address.checked_add(length)?);
            bytes += to_u64(length);
        }
        let (first, end) = (first.checked_sub(memory.begin())?, end.checked_sub(memory.begin())?);
        if end > memory.bytes() || first >= end {
            return None;
        }
        // One size for a memory: with several, the same pages would be registered more than once.
        let wanted = (end - first).saturating_mul(SPANS).min(MAX_CHUNK).next_power_of_two();
        let size = memory.chunk_size(wanted.max(MIN_CHUNK));
        let number = first / size;
        if (end - 1) / size != number {
            return None;
        }
        let id = ChunkId { memory: memory.number(), number };
        let new = || Chunk { memory: memory.downgrade(), used: 0, state: ChunkState::NotTried };
        let chunk = self.chunks.entry(id).or_insert_with(new);
        match chunk.state {
            ChunkState::Registered(index) => return Some(index),
            ChunkState::Refused => return None,
            ChunkState::NotTried => {}
        }
        chunk.used = chunk.used.saturating_add(bytes);
        let begin = number * size;
        let length = size.min(memory.bytes() - begin);
        let found = if chunk.used < to_u64(length) {
            None
        } else {
            chunk.state = self.registration.register(table, memory, (begin, length));
            match chunk.state {
                ChunkState::Registered(index) => Some(index),
                _ => None,
            }
        };
        self.sweep();
        found
    }

    /// Removes the chunks of memory that has dropped, if there are enough chunks.
    fn sweep(&mut self) {
        if self.chunks.len() >= self.sweep_at {
            self.chunks.retain(|_, chunk| !chunk.memory.has_gone());
            self.sweep_at = 2 * self.chunks.len() + MIN_SWEPT;
        }
    }

    /// Unregisters all memory, before the ring closes.
    pub(in crate::queue) fn close(&mut self) {
        if let Some(table) = &self.registration.table {
            table.close();
        }
    }
}

impl IoRegistration {
    /// Registers a part of `memory`.
    fn register(
        &self,
        table: &Arc<BufferTable>,
        memory: &IoMemory,
        (begin, length): (usize, usize),
    ) -> ChunkState {
        if !self.has_room_for(ByteCount::from_usize(length)) {
            // Other memory may drop, which leaves room.
            return ChunkState::NotTried;
        }
        match table.register((memory.begin() + begin, length)) {
            Ok(buffer) => {
                let index = buffer.index;
                memory.keep(buffer);
                let mut outcome = lock(&self.outcome);
                // An earlier refusal was about other memory, unless it was about the limit.
                outcome.refusal = outcome.refusal.filter(is_of_limit);
                drop(outcome);
                tracing::debug!(bytes = length, pinned = table.pinned(), "registered memory");
                ChunkState::Registered(index)
            }
            Err(NotRegistered::Full) => ChunkState::NotTried,
            Err(NotRegistered::Os(error)) => {
                tracing::debug!(%error, bytes = length, "the kernel registers no more memory");
                let mut outcome = lock(&self.outcome);
                let reason = Reason::Os(error);
                outcome.refusal = Some(reason);
                // The limit of locked memory, or the lack of memory, holds for other memory too.
                if is_of_limit(&reason) {
                    outcome.limit = table.pinned();
                }
                ChunkState::Refused
            }
        }
    }
}

/// Whether the kernel refused because of the limit of locked memory, or for lack of memory.
fn is_of_limit(reason: &Reason) -> bool {
    matches!(reason, Reason::Os(error) if error.code == libc::ENOMEM)
}
