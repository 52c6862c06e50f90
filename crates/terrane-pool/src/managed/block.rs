//! A raw managed allocation.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;
use terrane_core::{
    ByteCount, CapabilityReport, DeviceAddress, Label, Location, Memory, RegistrationRecord, Span,
    StorageKind,
};

use super::error::ManagedError;
use super::identity::{BlockHandle, BlockIdentity};
use super::manager::{ManagedMemory, Shared};
use crate::sync::Mutex;
use crate::{Access, StreamId};

/// An allocation of a [`MemoryManager`](super::MemoryManager), which goes back when it drops.
///
/// It may outlive its manager. It is neither `Copy` nor `Clone`: releasing it twice does not
/// compile. [`export`](Self::export) turns it into a number for where no owned value can go.
pub struct TrackedBlock<M: Memory> {
    /// Taken out on drop and on export, and nowhere else.
    parts: Option<Parts<M>>,
    handle: BlockHandle,
    span: Span,
    shared: Arc<Shared<M>>,
}

/// What goes from hand to hand with a block.
pub(super) struct Parts<M: Memory> {
    pub(super) memory: ManagedMemory<M>,
    pub(super) uses: Uses,
}

impl<M: Memory> TrackedBlock<M> {
    pub(super) fn new(parts: Parts<M>, handle: BlockHandle, shared: Arc<Shared<M>>) -> Self {
        let span = Span::of(&parts.memory);
        Self { parts: Some(parts), handle, span, shared }
    }

    /// The block as a number. It stays this block's for as long as it is live, and is never
    /// another's.
    #[must_use]
    pub fn handle(&self) -> BlockHandle {
        self.handle
    }

    /// What the manager knows of the block.
    #[must_use]
    pub fn identity(&self) -> Option<BlockIdentity> {
        self.shared.identity(self.handle).ok()
    }

    /// Whose it is.
    #[must_use]
    pub fn tag(&self) -> Label {
        self.identity().map(|identity| identity.tag).unwrap_or_default()
    }

    /// Says that work has been, or is about to be, submitted to `stream` that uses the block.
    ///
    /// The block goes back only after that stream has come to the point where the block was
    /// dropped. One entry is kept for each stream, the strongest.
    ///
    /// # Errors
    ///
    /// [`ManagedError::NoFences`] if the manager knows no streams.
    pub fn record_use(&self, stream: StreamId, access: Access) -> Result<(), ManagedError> {
        if !self.shared.knows_streams() {
            return Err(ManagedError::NoFences);
        }
        if let Some(parts) = &self.parts {
            parts.uses.record(stream, access);
        }
        Ok(())
    }

    /// What streams use the block, and how, one entry for each.
    #[must_use]
    pub fn uses(&self) -> Vec<(StreamId, Access)> {
        self.parts.as_ref().map(|parts| parts.uses.list()).unwrap_or_default()
    }

    /// Gives the block into the keeping of its manager, and returns the handle by which
    /// [`import`](super::MemoryManager::import) takes it out again, once.
    #[must_use = "the handle is all that is left of the block"]
    pub fn export(mut self) -> BlockHandle {
        if let Some(parts) = self.parts.take() {
            self.shared.export(self.handle, parts);
        }
        self.handle
    }
}

impl<M: Memory> Drop for TrackedBlock<M> {
    fn drop(&mut self) {
        if let Some(parts) = self.parts.take() {
            self.shared.give_back(self.handle, parts);
        }
    }
}

// SAFETY: the span is that of the memory, which is owned until `self` drops or is exported, and
// does not move its bytes.
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
        self.parts.as_ref()?.memory.device_alias()
    }

    fn copyable_from(&self, offset: ByteCount) -> Option<ByteCount> {
        self.parts.as_ref()?.memory.copyable_from(offset)
    }

    fn capabilities(&self) -> CapabilityReport {
        self.parts.as_ref().map(|parts| parts.memory.capabilities()).unwrap_or_default()
    }

    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        if let Some(parts) = &self.parts {
            parts.memory.visit_registrations(visit);
        }
    }
}

impl<M: Memory> fmt::Debug for TrackedBlock<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrackedBlock")
            .field("handle", &self.handle)
            .field("span", &self.span)
            .finish_non_exhaustive()
    }
}

/// The streams that use a block: no more entries than streams, however often they do.
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

    fn list(&self) -> Vec<(StreamId, Access)> {
        self.0.lock().to_vec()
    }

    pub(super) fn streams(&self) -> SmallVec<[StreamId; 2]> {
        self.0.lock().iter().map(|&(stream, _)| stream).collect()
    }
}
