//! A raw managed allocation.

use std::any::Any;
use std::sync::Arc;

use smallvec::SmallVec;
use terrane_core::{
    ByteCount, CapabilityReport, DeviceAddress, Label, Location, Memory, RegistrationRecord, Span,
    StorageKind,
};

use super::error::ManagedError;
use super::identity::{BlockHandle, BlockIdentity};
use super::manager::{ManagedMemory, Shared};
use crate::streams::fence::{Access, StreamId};
use crate::sync::Mutex;

/// An allocation of a [`MemoryManager`](super::MemoryManager), freed on drop.
///
/// It may outlive its manager. It is neither `Copy` nor `Clone`, so releasing it twice does not
/// compile. [`export`](Self::export) turns it into a number, for interfaces that cannot carry an
/// owned value.
pub struct TrackedBlock<M: Memory> {
    /// `None` only during drop and export.
    memory: Option<ManagedMemory<M>>,
    block: ManagedBlock,
    span: Span,
    shared: Arc<Shared<M>>,
}

/// A manager's data on a live block, independent of the memory's type.
///
/// Code with a view of a block's memory, such as a [`Region`](terrane_core::Region), gets it with
/// [`of`](Self::of), and can record the streams that use the memory.
pub struct ManagedBlock {
    handle: BlockHandle,
    uses: Uses,
    manager: Arc<dyn ErasedManager>,
}

/// A manager, without the type of its memory.
pub(super) trait ErasedManager: Send + Sync {
    /// Returns whether streams may use blocks.
    fn knows_streams(&self) -> bool;
    /// Returns the identity of a block.
    fn identity(&self, handle: BlockHandle) -> Option<BlockIdentity>;
}

impl ManagedBlock {
    /// Returns the managed block that contains `memory`. `None` if no manager allocated it.
    #[must_use]
    pub fn of(memory: &(impl Memory + ?Sized)) -> Option<&Self> {
        memory.managed_block()?.downcast_ref()
    }

    /// Returns the block as a number. It is unique among all blocks of the manager, live or freed.
    #[must_use]
    pub fn handle(&self) -> BlockHandle {
        self.handle
    }

    /// Returns the identity of the block.
    #[must_use]
    pub fn identity(&self) -> Option<BlockIdentity> {
        self.manager.identity(self.handle)
    }

    /// Records a use of the block by work that has been, or is about to be, submitted to `stream`.
    ///
    /// The block is freed only after all work submitted to that stream before the drop of the block
    /// has completed. Each stream has one entry, with the strongest access.
    ///
    /// # Errors
    ///
    /// [`ManagedError::NoFences`] if the manager was created without fences.
    pub fn record_use(&self, stream: StreamId, access: Access) -> Result<(), ManagedError> {
        if !self.manager.knows_streams() {
            return Err(ManagedError::NoFences);
        }
        self.uses.record(stream, access);
        Ok(())
    }

    /// Returns the streams that use the block and their accesses, one entry for each stream.
    #[must_use]
    pub fn uses(&self) -> Vec<(StreamId, Access)> {
        self.uses.list()
    }
}

terrane_core::debug_fields!(ManagedBlock, |it| { handle: it.handle, uses: it.uses() });

/// The parts of a block that move between its owner and its manager.
pub(super) struct BlockParts<M: Memory> {
    pub(super) memory: ManagedMemory<M>,
    pub(super) uses: Uses,
}

impl<M: Memory> TrackedBlock<M> {
    pub(super) fn new(parts: BlockParts<M>, handle: BlockHandle, shared: Arc<Shared<M>>) -> Self {
        let BlockParts { memory, uses } = parts;
        let span = Span::of(&memory);
        let manager: Arc<dyn ErasedManager> = Arc::clone(&shared) as _;
        let block = ManagedBlock { handle, uses, manager };
        Self { memory: Some(memory), block, span, shared }
    }

    /// Returns the manager's data on the block.
    #[must_use]
    pub fn block(&self) -> &ManagedBlock {
        &self.block
    }

    /// Returns the block as a number. It is unique among all blocks of the manager, live or freed.
    #[must_use]
    pub fn handle(&self) -> BlockHandle {
        self.block.handle
    }

    /// Returns the identity of the block.
    #[must_use]
    pub fn identity(&self) -> Option<BlockIdentity> {
        self.block.identity()
    }

    /// Returns the label of the block.
    #[must_use]
    pub fn tag(&self) -> Label {
        self.identity().map(|identity| identity.tag).unwrap_or_default()
    }

    /// Records a use of the block by work that has been, or is about to be, submitted to `stream`,
    /// like [`ManagedBlock::record_use`].
    ///
    /// # Errors
    ///
    /// [`ManagedError::NoFences`] if the manager was created without fences.
    pub fn record_use(&self, stream: StreamId, access: Access) -> Result<(), ManagedError> {
        self.block.record_use(stream, access)
    }

    /// Returns the streams that use the block and their accesses, one entry for each stream.
    #[must_use]
    pub fn uses(&self) -> Vec<(StreamId, Access)> {
        self.block.uses()
    }

    /// Moves the block into its manager, and returns its handle.
    /// [`import`](super::MemoryManager::import) moves the block out again, once.
    #[must_use = "without the handle, the block cannot be imported"]
    pub fn export(mut self) -> BlockHandle {
        if let Some(parts) = self.take() {
            self.shared.export(self.block.handle, parts);
        }
        self.block.handle
    }

    fn take(&mut self) -> Option<BlockParts<M>> {
        Some(BlockParts { memory: self.memory.take()?, uses: self.block.uses.take() })
    }
}

impl<M: Memory> Drop for TrackedBlock<M> {
    fn drop(&mut self) {
        if let Some(parts) = self.take() {
            self.shared.release(self.block.handle, parts);
        }
    }
}

// SAFETY: the span is the memory's span. The value owns the memory until it drops or is exported,
// and a move of the value does not move the bytes.
unsafe impl<M: Memory> Memory for TrackedBlock<M> {
    fn kind(&self) -> StorageKind {
        self.span.kind
    }

    fn location(&self) -> Location {
        self.span.location
    }

    fn length(&self) -> ByteCount {
        self.span.length
    }

    fn device_alias(&self) -> Option<DeviceAddress> {
        self.memory.as_ref()?.device_alias()
    }

    fn copyable_from(&self, offset: ByteCount) -> Option<ByteCount> {
        self.memory.as_ref()?.copyable_from(offset)
    }

    fn capabilities(&self) -> CapabilityReport {
        self.memory.as_ref().map(Memory::capabilities).unwrap_or_default()
    }

    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        if let Some(memory) = &self.memory {
            memory.visit_registrations(visit);
        }
    }

    fn managed_block(&self) -> Option<&(dyn Any + Send + Sync)> {
        Some(&self.block)
    }
}

terrane_core::debug_fields!(TrackedBlock<M: Memory>, |it| { handle: it.block.handle, span: it.span });

/// The streams that use a block, with at most one entry for each stream.
#[derive(Debug)]
pub(super) struct Uses(Mutex<SmallVec<[(StreamId, Access); 2]>>);

impl Uses {
    pub(super) fn new() -> Self {
        Self(Mutex::new(SmallVec::new()))
    }

    fn record(&self, stream: StreamId, access: Access) {
        let mut uses = self.0.lock();
        match uses.iter_mut().find(|(known, _)| *known == stream) {
            Some((_, strongest)) => *strongest = access.max(*strongest),
            None => uses.push((stream, access)),
        }
    }

    fn take(&self) -> Self {
        Self(Mutex::new(std::mem::take(&mut *self.0.lock())))
    }

    fn list(&self) -> Vec<(StreamId, Access)> {
        self.0.lock().to_vec()
    }

    pub(super) fn streams(&self) -> SmallVec<[StreamId; 2]> {
        self.0.lock().iter().map(|&(stream, _)| stream).collect()
    }
}
