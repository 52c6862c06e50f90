//! Buffers on the device in which blocks are packed.

use std::collections::VecDeque;
use std::sync::Arc;

use terrane_core::convert::to_usize;
use terrane_core::{ByteCount, RegionRequest};

use crate::engine::options::DeviceEngineOptions;
use crate::engine::submit::batch::Batch;
use crate::error::CudaError;
use crate::memory::device::{DeviceAllocator, DeviceMemory};
use crate::runtime::context::Context;
use crate::runtime::event::Event;

/// A buffer of the staged path. Dropping it frees its memory, so that another buffer can be
/// allocated. Boxed, because each submit moves it several times.
#[derive(Debug)]
pub(crate) struct Scratch(Box<Buffer>);

#[derive(Debug)]
struct Buffer {
    memory: DeviceMemory,
    /// The copies between the buffer and the host. Their lists are allocated once per buffer.
    batch: Batch,
    /// One of the buffers that the [`ScratchMaker`] counts.
    _counted: Arc<()>,
    /// The event after its last use. The buffer is free when the event is complete.
    used_until: Option<Event>,
}

impl Scratch {
    pub(crate) fn address(&self) -> u64 {
        self.0.memory.address().get()
    }

    /// The address, and the list for the copies between the buffer and the host.
    pub(crate) fn address_and_batch(&mut self) -> (u64, &mut Batch) {
        (self.address(), &mut self.0.batch)
    }

    /// Records that the device uses the buffer until `event`. Returns the former event.
    pub(crate) fn in_use_until(&mut self, event: Event) -> Option<Event> {
        self.0.used_until.replace(event)
    }

    /// Whether the work of its last use has ended.
    ///
    /// # Errors
    ///
    /// The reason why that is unknown.
    fn is_free(&self) -> Result<bool, CudaError> {
        self.0.used_until.as_ref().map_or(Ok(true), |event| event.is_complete())
    }
}

/// Allocates the buffers of one direction. The driver call is slow, so it runs without the pool's
/// lock.
#[derive(Debug)]
pub(crate) struct ScratchMaker {
    allocator: DeviceAllocator,
    bytes: ByteCount,
    most: usize,
    /// Each buffer has a clone, wherever it is.
    made: Arc<()>,
}

impl ScratchMaker {
    pub(crate) fn new(context: &Context, options: &DeviceEngineOptions) -> Self {
        Self {
            allocator: DeviceAllocator::new(context),
            bytes: options.scratch_bytes,
            most: to_usize(options.scratch_buffers.get().max(2).into()),
            made: Arc::default(),
        }
    }

    /// Allocates one more buffer. `None` if as many exist as are permitted, or if memory is short,
    /// but another buffer will return.
    ///
    /// # Errors
    ///
    /// The driver's error, if there is no memory for even one.
    pub(crate) fn make(&self) -> Result<Option<Scratch>, CudaError> {
        // Other threads only drop buffers.
        let existing = Arc::strong_count(&self.made) - 1;
        if existing >= self.most {
            return Ok(None);
        }
        let request = RegionRequest::new(self.bytes).labelled("scratch of the copy engine");
        match self.allocator.allocate_memory(&request) {
            Ok(memory) => Ok(Some(Scratch(Box::new(Buffer {
                memory,
                batch: Batch::default(),
                _counted: Arc::clone(&self.made),
                used_until: None,
            })))),
            Err(error) if existing > 0 && !error.is_context_lost() => {
                tracing::debug!(%error, "no memory for another buffer; transfers share the others");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// The buffers of one direction. They are allocated on first use, and kept. If memory is short,
/// there are as many as fit.
///
/// A buffer returns once its work has been submitted, with the event after that work. The
/// next user checks whether the event is complete, so no thread has to watch it.
///
/// The pool is behind a lock, so no event and no buffer is dropped here: if the driver refuses such
/// a drop, that is logged.
#[derive(Debug, Default)]
pub(crate) struct ScratchPool {
    free: Vec<Scratch>,
    /// The buffers that the device uses, in the order of their submission.
    lent: VecDeque<Scratch>,
}

impl ScratchPool {
    /// A buffer that is allocated and unused.
    pub(crate) fn take_free(&mut self) -> Option<Scratch> {
        if let Some(free) = self.free.pop() {
            return Some(free);
        }
        for index in 0..self.lent.len() {
            match self.lent.get(index).map(Scratch::is_free) {
                Some(Ok(true)) => return self.lent.remove(index),
                // It is unknown whether the device still uses that buffer.
                Some(Err(_)) => {}
                // Later buffers were submitted later.
                Some(Ok(false)) | None => return None,
            }
        }
        None
    }

    /// Takes back a buffer that no work on the device uses.
    pub(crate) fn give_back(&mut self, scratch: Scratch) {
        self.free.push(scratch);
    }

    /// Takes back a buffer that the device [uses](Scratch::in_use_until) until an event.
    pub(crate) fn lend(&mut self, scratch: Scratch) {
        self.lent.push_back(scratch);
    }

    /// The event of the buffer that becomes free first.
    pub(crate) fn next_event(&self) -> Option<Event> {
        self.lent.front().and_then(|scratch| scratch.0.used_until.clone())
    }

    /// The buffers whose events fail. It is unknown whether they are in use, so they must be freed,
    /// which waits for the device.
    pub(crate) fn take_broken(&mut self) -> Vec<Scratch> {
        let (kept, broken) = std::mem::take(&mut self.lent)
            .into_iter()
            .partition::<VecDeque<_>, _>(|scratch| scratch.is_free().is_ok());
        self.lent = kept;
        broken.into()
    }
}

impl Drop for ScratchPool {
    fn drop(&mut self) {
        for event in self.lent.iter().filter_map(|scratch| scratch.0.used_until.as_ref()) {
            // If the wait fails, the state is unknown; freeing waits for the device in any case.
            let _ = event.wait();
        }
    }
}
