//! Memory that queues may register.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use terrane_core::convert::to_u64;
use terrane_core::sync::lock;
use terrane_core::{ByteCount, HostAddress, OwnerProcess};

use super::table::RegisteredBuffer;
use crate::queue::request::IoBuffer;

/// A range of host memory that [`IoQueue`](crate::IoQueue)s may register with the kernel.
///
/// Direct I/O pins the pages of a request's buffers, one by one. A queue registers parts of this
/// memory that many bytes were read into or written from. The kernel then pins their pages once. It
/// unpins them when the last clone of this value drops, or when the queue drops.
///
/// The identity of the memory is this value, not its addresses: other memory that is mapped at the
/// same addresses later has another value.
#[derive(Clone)]
pub struct IoMemory(Arc<MemoryInner>);

struct MemoryInner {
    /// A forked process does not register memory of its parent, whose locks may stay locked.
    owner: OwnerProcess,
    number: u64,
    begin: usize,
    length: usize,
    /// The size of the chunks that queues register, once a request has decided it.
    chunk_size: OnceLock<usize>,
    /// Dropping a buffer unregisters it.
    buffers: Mutex<Vec<RegisteredBuffer>>,
    /// Drops after the buffers: the kernel unpins the pages before they may be freed.
    _owner: Option<Box<dyn Any + Send + Sync>>,
}

impl IoMemory {
    /// States that a range of memory keeps its pages.
    ///
    /// # Safety
    ///
    /// Until the last clone of the value drops, the addresses of the range refer to the same pages:
    ///
    /// - The range is not unmapped, moved (`mremap`) or mapped again.
    /// - Its pages are not discarded (`MADV_DONTNEED`, `MADV_REMOVE`).
    /// - No hole is punched in a file that is mapped there.
    ///
    /// Otherwise the kernel reads and writes the pages that were there before.
    #[must_use]
    pub unsafe fn new(range: IoBuffer) -> Self {
        Self::build(range, None)
    }

    /// States that a range of memory keeps its pages while `owner` lives. The value owns it, and
    /// drops it with its last clone.
    ///
    /// # Safety
    ///
    /// Until `owner` drops, the addresses of the range refer to the same pages, as for
    /// [`new`](Self::new).
    #[must_use]
    pub unsafe fn owning(range: IoBuffer, owner: impl Any + Send + Sync) -> Self {
        Self::build(range, Some(Box::new(owner)))
    }

    fn build(range: IoBuffer, owner_of_pages: Option<Box<dyn Any + Send + Sync>>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed: only uniqueness is needed.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let (begin, length) = (range.address.as_ptr().expose_provenance(), range.length.to_usize());
        let owner = OwnerProcess::current();
        let (chunk_size, buffers) = (OnceLock::new(), Mutex::default());
        let _owner = owner_of_pages;
        Self(Arc::new(MemoryInner { owner, number, begin, length, chunk_size, buffers, _owner }))
    }

    /// Whether the range contains this address.
    #[must_use]
    pub fn contains(&self, address: HostAddress) -> bool {
        address.as_ptr().addr().checked_sub(self.0.begin).is_some_and(|at| at < self.0.length)
    }

    /// The length of the range.
    #[must_use]
    pub fn length(&self) -> ByteCount {
        ByteCount::from_usize(self.0.length)
    }

    /// The bytes that are registered now, with all queues.
    #[must_use]
    pub fn registered(&self) -> ByteCount {
        if !self.is_of_this_process() {
            return ByteCount::ZERO;
        }
        let buffers = lock(&self.0.buffers);
        let lengths = buffers.iter().filter(|buffer| buffer.is_in_force());
        ByteCount::new(lengths.map(|buffer| to_u64(buffer.length)).sum())
    }

    pub(super) fn is_of_this_process(&self) -> bool {
        self.0.owner.is_current()
    }

    pub(super) fn number(&self) -> u64 {
        self.0.number
    }

    pub(super) fn begin(&self) -> usize {
        self.0.begin
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.length
    }

    /// The size of its chunks: `wanted` at the first call.
    pub(super) fn chunk_size(&self, wanted: usize) -> usize {
        *self.0.chunk_size.get_or_init(|| wanted)
    }

    /// Keeps a buffer registered as long as the memory exists.
    pub(super) fn keep(&self, buffer: RegisteredBuffer) {
        let mut buffers = lock(&self.0.buffers);
        buffers.retain(RegisteredBuffer::is_in_force);
        buffers.push(buffer);
    }

    pub(super) fn downgrade(&self) -> WeakMemory {
        WeakMemory(Arc::downgrade(&self.0))
    }
}

terrane_core::debug_fields!(IoMemory, |it| { length: it.0.length });

/// A reference that does not keep buffers registered.
pub(super) struct WeakMemory(Weak<MemoryInner>);

impl WeakMemory {
    pub(super) fn has_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}
