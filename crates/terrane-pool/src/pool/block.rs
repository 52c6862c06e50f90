//! A block in use: an owned handle that returns to its pool when dropped.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use terrane_core::{ByteCount, Location, Memory, StorageKind};

use crate::cache::descriptor::{BlockDescriptor, BlockUse, DescriptorRef};
use crate::cache::shared_cache::SharedCache;
use crate::error::PoolError;
use crate::pool::record::Block;
use crate::streams::fence::{Access, StreamId};

/// A block of a [`Pool`](crate::Pool), for as long as it is in use.
///
/// Dropping it, on any thread, returns the block to its pool, even if the pool was dropped. It is
/// neither `Copy` nor `Clone`, so releasing a block twice, or to another pool, does not compile.
///
/// Its [length](Memory::length) is the [granted](Self::granted) size, which is at least the size
/// requested. The block does not keep the size requested.
pub struct PoolBlock<M: Memory> {
    record: ManuallyDrop<Block<M>>,
    descriptor: DescriptorRef<M>,
}

impl<M: Memory> PoolBlock<M> {
    /// Creates a block in use from a record, with the descriptor of its class. No stream uses it.
    #[inline]
    pub(crate) fn new(record: Block<M>, descriptor: DescriptorRef<M>) -> Self {
        Self { record: ManuallyDrop::new(record), descriptor }
    }

    /// Sets the stream that the block is released on.
    pub(crate) fn on_stream(mut self, stream: StreamId) -> Self {
        self.record.uses.own = Some(stream);
        self.set_listed();
        self
    }

    /// Marks the block as used by streams; its record lists them.
    fn set_listed(&mut self) {
        // SAFETY: the record keeps its cache alive.
        let &BlockDescriptor { class, tag, .. } = unsafe { self.descriptor.get() };
        self.descriptor = self.record.cache.descriptor(class, tag, BlockUse::Listed);
    }

    /// Returns the usable bytes: the size of the block.
    #[must_use]
    pub fn granted(&self) -> ByteCount {
        ByteCount::new(self.record.granted)
    }

    /// Returns the stream that the block was allocated on, and is released on.
    #[must_use]
    pub fn stream(&self) -> Option<StreamId> {
        self.record.uses.own
    }

    /// Records a use of the block by work that has been, or is about to be, submitted to `stream`.
    ///
    /// The block is reused only after all work submitted to that stream before the drop of the
    /// block has completed. For several uses on one stream, only the strongest is kept. Uses on the
    /// block's own stream need no record.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoFences`] if the pool was created without streams.
    pub fn record_use(&mut self, stream: StreamId, access: Access) -> Result<(), PoolError> {
        if !self.record.cache.knows_streams() {
            return Err(PoolError::NoFences);
        }
        self.record.uses.record(stream, access);
        self.set_listed();
        Ok(())
    }

    /// Returns the streams other than the block's own that use it, and their accesses.
    #[must_use]
    pub fn uses(&self) -> &[(StreamId, Access)] {
        self.record.uses.others()
    }

    /// Releases the block on `stream`. That stream can reuse it at once. Other streams can reuse it
    /// once the work submitted so far has completed, on that stream and every other one that uses
    /// the block.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoFences`], with the unchanged block, if the pool was created without streams.
    #[expect(clippy::result_large_err, reason = "the error contains the block")]
    pub fn release_on(mut self, stream: StreamId) -> Result<(), (Self, PoolError)> {
        if !self.record.cache.knows_streams() {
            return Err((self, PoolError::NoFences));
        }
        if let Some(before) = self.record.uses.own.replace(stream)
            && before != stream
        {
            self.record.uses.record(before, Access::Write);
        }
        self.record.uses.forget(stream);
        self.set_listed();
        Ok(())
    }
}

impl<M: Memory> Drop for PoolBlock<M> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the record is not used again, because the handle is being dropped.
        let record = unsafe { ManuallyDrop::take(&mut self.record) };
        SharedCache::release(record, self.descriptor);
    }
}

// SAFETY: the record owns its memory, or a part of a slab that it keeps alive. Neither moves, and
// the record always returns the same values. A block has one owner at a time.
unsafe impl<M: Memory> Memory for PoolBlock<M> {
    fn kind(&self) -> StorageKind {
        self.record.kind
    }

    #[inline]
    fn location(&self) -> Location {
        self.record.location
    }

    #[inline]
    fn length(&self) -> ByteCount {
        self.granted()
    }

    terrane_core::delegate_part!(self, *self.record.memory(), self.record.offset());
}

terrane_core::debug_fields!(PoolBlock<M: Memory>, |it| { granted: it.granted(),
    location: it.location(),
    stream: it.stream() });

/// Checks that blocks can be sent to other threads, as documented.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<PoolBlock<Arc<dyn Memory>>>();
};
