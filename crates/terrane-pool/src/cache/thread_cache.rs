//! One thread's part of one pool. It has a magazine of free blocks for every class, and a second
//! set of magazines for the blocks of one stream.
//!
//! The owner enters its cache with plain stores and loads. A sweeper, which may be any thread,
//! closes the gate first and then waits until the owner has left:
//!
//! | owner | sweeper |
//! |---|---|
//! | `inside = true` | `gate = CLOSED` |
//! | [`membarrier::light`] | [`membarrier::heavy`] |
//! | unless the gate is `OPEN`: leave, and skip the magazines | until not `inside`: wait |
//! | magazines | magazines |
//! | `inside = false` (release) | `gate = OPEN` (release) |
//!
//! The barriers ensure that at least one of the two sees the other's store (Dekker), so they never
//! access the magazines at the same time.

use std::sync::Arc;

use terrane_core::Label;
use terrane_core::convert::to_u64;

use crate::cache::class_queue::ClassQueue;
use crate::cache::membarrier;
use crate::cache::stack::Stack;
use crate::streams::fence::StreamId;
use crate::sync::{AtomicBool, AtomicUsize, Cell, Ordering, yield_now};
use crate::tags::{LiveBytes, Tag, Tally};

/// The maximum number of blocks in a magazine. With its counters, a magazine then fills four cache
/// lines.
pub(crate) const MAGAZINE: usize = 28;

/// The magazines of one thread behind their gate.
#[derive(Debug)]
pub(crate) struct ThreadCache<B> {
    inside: AtomicBool,
    gate: AtomicUsize,
    magazines: Cell<ThreadMagazines<B>>,
    /// The tally of the magazines, which other threads can read without the gate.
    pub(crate) tally: Arc<Tally>,
}

/// The owner may enter.
const OPEN: usize = 0;
/// A sweeper is active, or the pool is closed.
const CLOSED: usize = 1;
/// The owner has ended, and no other thread has registered under its index.
const UNREGISTERED: usize = 2;

// SAFETY: the owner accesses the magazines inside the gate, and a sweeper accesses them behind the
// closed gate, never at the same time. All of their contents are `Send`.
unsafe impl<B: Send> Sync for ThreadCache<B> {}

impl<B> ThreadCache<B> {
    /// Creates an unregistered cache of empty magazines with the depths `depths`, and as many for a
    /// stream if `has_streams`.
    pub(crate) fn new(depths: &[usize], has_streams: bool) -> Self {
        let magazines = ThreadMagazines::new(depths, has_streams);
        Self {
            inside: AtomicBool::new(false),
            gate: AtomicUsize::new(UNREGISTERED),
            tally: Arc::clone(&magazines.tally),
            magazines: Cell::new(magazines),
        }
    }

    /// Runs `work` on the magazines. Returns `None`, without running it, unless the gate is open.
    ///
    /// # Safety
    ///
    /// Only the thread that owns this index may call it, and not from within `work`. `work` must
    /// run no code of the pool's user and must not panic.
    #[inline]
    pub(crate) unsafe fn enter<R>(
        &self,
        work: impl FnOnce(&mut ThreadMagazines<B>) -> R,
    ) -> Option<R> {
        self.inside.store(true, Ordering::Relaxed);
        membarrier::light();
        if self.gate.load(Ordering::Acquire) != OPEN {
            self.inside.store(false, Ordering::Release);
            return None;
        }
        let result = self.magazines.with_mut(|magazines| {
            // SAFETY: the gate was open after `inside` was set, so every sweeper waits until
            // `inside` is cleared. There is only one owner.
            work(unsafe { &mut *magazines })
        });
        self.inside.store(false, Ordering::Release);
        Some(result)
    }

    /// Opens an unregistered cache for a new owner. The caller holds the pool's sweeping lock.
    pub(crate) fn register(&self) {
        if self.gate.load(Ordering::Relaxed) == UNREGISTERED {
            self.gate.store(OPEN, Ordering::Release);
        }
    }

    /// Returns whether a thread has registered here.
    pub(crate) fn is_registered(&self) -> bool {
        self.gate.load(Ordering::Relaxed) != UNREGISTERED
    }

    /// Records that the owner has ended. The caller is the owner and holds the sweeping lock.
    pub(crate) fn unregister(&self) {
        self.gate.store(UNREGISTERED, Ordering::Release);
    }

    /// Closes the gate, if it is open. The caller holds the sweeping lock, and must call
    /// [`membarrier::heavy`] afterwards.
    pub(crate) fn close(&self) {
        if self.gate.load(Ordering::Relaxed) == OPEN {
            self.gate.store(CLOSED, Ordering::Relaxed);
        }
    }

    /// Waits until the owner has left.
    pub(crate) fn wait(&self) {
        while self.inside.load(Ordering::Acquire) {
            yield_now();
        }
    }

    /// Reopens the gate, if a sweeper closed it. The caller holds the sweeping lock.
    pub(crate) fn open(&self) {
        if self.gate.load(Ordering::Relaxed) == CLOSED {
            self.gate.store(OPEN, Ordering::Release);
        }
    }

    /// Runs `work` on the magazines behind the gate.
    ///
    /// # Safety
    ///
    /// The caller holds the pool's sweeping lock. It has called [`close`](Self::close), then
    /// [`membarrier::heavy`], then [`wait`](Self::wait).
    pub(crate) unsafe fn sweep(&self, work: impl FnOnce(&mut ThreadMagazines<B>)) {
        self.magazines.with_mut(|magazines| {
            // SAFETY: the caller promises that the owner has left and cannot enter.
            work(unsafe { &mut *magazines })
        })
    }
}

/// A thread's magazines and counters.
#[derive(Debug)]
pub(crate) struct ThreadMagazines<B> {
    /// Bytes that are reserved from the pool's limit and not yet used. Blocks with that many bytes
    /// may still be cached here.
    pub(crate) credit: u64,
    /// Live bytes by tag: bytes allocated here minus bytes released here, so a value may be
    /// negative.
    pub(crate) tally: Arc<Tally>,
    /// The label of this thread's last request, to save a look-up.
    pub(crate) label: Option<(Label, Tag)>,
    pub(crate) classes: Box<[Magazine<B>]>,
    pub(crate) stream: StreamMagazines<B>,
}

/// The blocks that a thread keeps for one stream. The thread released them on that stream and no
/// other stream uses them, so the stream can reuse them at once. For all other streams they are
/// pending.
#[derive(Debug)]
pub(crate) struct StreamMagazines<B> {
    id: Option<StreamId>,
    /// The number of blocks of other streams since the last block of this stream.
    other_streams: u32,
    /// Empty, if the pool was created without streams.
    pub(crate) classes: Box<[Magazine<B>]>,
}

/// After this many blocks of other streams, the stream magazines switch to another stream.
const OTHER_STREAMS: u32 = 16;

/// The free blocks of one class in one thread.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Magazine<B> {
    pub(crate) blocks: Stack<B, MAGAZINE>,
    pub(crate) depth: usize,
    pub(crate) hits: u64,
    /// The number of fills from the shared queue that also served a request.
    pub(crate) shared_hits: u64,
}

/// The reason why a block does not fit into a magazine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Full,
    NoCredit,
}

impl<B> Magazine<B> {
    /// Removes a block, and adds its weight to the credit.
    #[inline]
    fn take(&mut self, credit: &mut u64, weight: u64) -> Option<B> {
        let block = self.blocks.pop()?;
        self.hits += 1;
        *credit += weight;
        Some(block)
    }

    /// Inserts the block, and subtracts its weight from the credit. A refused block stays in
    /// `block`.
    #[inline]
    fn put(&mut self, credit: &mut u64, weight: u64, block: &mut Option<B>) -> Result<(), Refusal> {
        if self.blocks.len() >= self.depth {
            return Err(Refusal::Full);
        }
        let rest = credit.checked_sub(weight).ok_or(Refusal::NoCredit)?;
        if let Some(inserted) = block.take() {
            self.blocks.push(inserted).map_err(|refused| {
                *block = Some(refused);
                Refusal::Full
            })?;
        }
        *credit = rest;
        Ok(())
    }
}

impl<B> ThreadMagazines<B> {
    fn new(depths: &[usize], has_streams: bool) -> Self {
        let magazine = |&depth| Magazine { blocks: Stack::new(), depth, hits: 0, shared_hits: 0 };
        let of_stream = if has_streams { depths } else { &[] };
        Self {
            credit: 0,
            tally: Arc::default(),
            label: None,
            classes: depths.iter().map(magazine).collect(),
            stream: StreamMagazines {
                id: None,
                other_streams: 0,
                classes: of_stream.iter().map(magazine).collect(),
            },
        }
    }

    /// Removes a block of `class`. Each block counts `weight` bytes to the limit.
    #[inline]
    pub(crate) fn take(&mut self, class: usize, weight: u64, tag: Tag) -> Option<B> {
        let block = self.classes.get_mut(class)?.take(&mut self.credit, weight)?;
        self.count(tag, weight, LiveBytes::Added);
        Some(block)
    }

    /// Inserts a block of `class`, which counts `weight` bytes to the limit, into its magazine, if
    /// there is capacity and credit.
    #[inline]
    pub(crate) fn put(
        &mut self,
        class: usize,
        weight: u64,
        tag: Tag,
        block: &mut Option<B>,
    ) -> Result<(), Refusal> {
        let magazine = self.classes.get_mut(class).ok_or(Refusal::Full)?;
        magazine.put(&mut self.credit, weight, block)?;
        self.count(tag, weight, LiveBytes::Removed);
        Ok(())
    }

    /// Removes a block of `class` that was released on `stream`.
    #[inline]
    pub(crate) fn take_on(
        &mut self,
        stream: StreamId,
        class: usize,
        weight: u64,
        tag: Tag,
    ) -> Option<B> {
        if self.stream.id != Some(stream) {
            return None;
        }
        let block = self.stream.classes.get_mut(class)?.take(&mut self.credit, weight)?;
        self.count(tag, weight, LiveBytes::Added);
        Some(block)
    }

    /// Inserts a block that was released on `stream`, and that no other stream uses. The stream
    /// magazines must belong to that stream, and have capacity and credit.
    #[inline]
    pub(crate) fn put_on(
        &mut self,
        stream: StreamId,
        (class, weight): (usize, u64),
        tag: Tag,
        block: &mut Option<B>,
    ) {
        if self.stream.id != Some(stream) {
            self.stream.other_streams += 1;
            return;
        }
        self.stream.other_streams = 0;
        let Some(magazine) = self.stream.classes.get_mut(class) else { return };
        if magazine.put(&mut self.credit, weight, block).is_ok() {
            self.count(tag, weight, LiveBytes::Removed);
        }
    }

    /// Assigns the stream magazines to `stream`, if they have no stream, or if their stream has not
    /// been used for long. Moves their blocks into `flushed`, and returns the blocks' weight.
    pub(crate) fn assign_stream(
        &mut self,
        stream: StreamId,
        flushed: &mut Vec<B>,
        weight: impl Fn(usize) -> u64,
    ) -> u64 {
        let bound = self.stream.id.is_some();
        let is_recent = bound && self.stream.other_streams < OTHER_STREAMS;
        if self.stream.id == Some(stream) || is_recent {
            return 0;
        }
        let credit = self.drain_stream_into(flushed, weight);
        self.stream.id = Some(stream);
        self.stream.other_streams = 0;
        credit
    }

    /// Removes all blocks from the stream magazines, and returns their weight.
    pub(crate) fn drain_stream_into(
        &mut self,
        records: &mut Vec<B>,
        weight: impl Fn(usize) -> u64,
    ) -> u64 {
        let mut credit = 0;
        for (class, magazine) in self.stream.classes.iter_mut().enumerate() {
            credit += weight(class) * to_u64(magazine.blocks.len());
            records.extend(&mut magazine.blocks);
        }
        credit
    }

    /// Moves half of a full magazine to its shared queue, and returns the number of blocks that the
    /// queue took. The blocks need not be the oldest.
    pub(crate) fn spill(&mut self, queue: &ClassQueue<B>, now: u64) -> usize {
        let Some(magazine) = self.classes.get_mut(queue.class) else { return 0 };
        let before = magazine.blocks.len();
        if magazine.depth > 0 && before >= magazine.depth {
            let mut left = magazine.depth.div_ceil(2);
            let next = || {
                left = left.checked_sub(1)?;
                magazine.blocks.pop()
            };
            queue.put(next, now);
        }
        before - magazine.blocks.len()
    }

    /// Takes a block from the shared queue, and up to `further` more blocks for the magazine. The
    /// limit counts all these blocks.
    pub(crate) fn refill(&mut self, queue: &ClassQueue<B>, further: usize, now: u64) -> Option<B> {
        let magazine = self.classes.get_mut(queue.class)?;
        // If a sweep has excluded the thread, its magazine may have blocks.
        let room = magazine.depth.saturating_sub(magazine.blocks.len());
        let block = queue.take(further.min(room), now, |block| {
            // There is room for every block.
            let _ = magazine.blocks.push(block);
        })?;
        magazine.shared_hits += 1;
        Some(block)
    }

    /// Removes the credit that exceeds the need of a magazine of `class`.
    pub(crate) fn surplus(&mut self, class: usize, weight: u64) -> u64 {
        let depth = self.classes.get(class).map_or(0, |magazine| magazine.depth);
        let room = weight.checked_mul(to_u64(depth)).unwrap_or(0);
        let surplus = self.credit.saturating_sub(room);
        self.credit -= surplus;
        surplus
    }

    /// Removes all blocks, and returns the credit.
    pub(crate) fn drain_into(&mut self, blocks: &mut Vec<B>) -> u64 {
        for magazine in &mut self.classes {
            blocks.extend(&mut magazine.blocks);
        }
        std::mem::take(&mut self.credit)
    }

    /// Counts bytes of `tag` that became live here, or stopped being live.
    #[inline]
    pub(crate) fn count(&mut self, tag: Tag, bytes: u64, change: LiveBytes) {
        if tag != Tag::NONE {
            self.tally.count(tag, bytes, change);
        }
    }
}
