//! Buffers on the device in which blocks are packed.

use terrane_core::{ByteCount, RegionRequest};

use super::options::DeviceEngineOptions;
use crate::context::Context;
use crate::error::CudaError;
use crate::memory::{DeviceAllocator, DeviceMemory};

/// A buffer of the staged path.
#[derive(Debug)]
pub(super) struct Scratch(DeviceMemory);

impl Scratch {
    pub(super) fn address(&self) -> u64 {
        self.0.address().get()
    }
}

/// The buffers of one direction. They are allocated when they are first needed, and kept; where
/// memory is short, there are as many as there is memory for.
#[derive(Debug)]
pub(super) struct ScratchPool {
    allocator: DeviceAllocator,
    bytes: ByteCount,
    most: u32,
    made: u32,
    free: Vec<Scratch>,
}

impl ScratchPool {
    pub(super) fn new(context: &Context, options: &DeviceEngineOptions) -> Self {
        Self {
            allocator: DeviceAllocator::new(context),
            bytes: options.scratch_bytes,
            most: options.scratch_buffers.get().max(2),
            made: 0,
            free: Vec::new(),
        }
    }

    /// A buffer that has been allocated and is not in use.
    pub(super) fn take_free(&mut self) -> Option<Scratch> {
        self.free.pop()
    }

    /// A buffer; `None` if all are in use.
    ///
    /// # Errors
    ///
    /// The driver's, if there is no memory for even one.
    pub(super) fn take(&mut self) -> Result<Option<Scratch>, CudaError> {
        if let Some(free) = self.free.pop() {
            return Ok(Some(free));
        }
        if self.made >= self.most {
            return Ok(None);
        }
        let request = RegionRequest::new(self.bytes).labelled("scratch of the copy engine");
        match self.allocator.bring_up(&request) {
            Ok(memory) => {
                self.made += 1;
                Ok(Some(Scratch(memory)))
            }
            // One will come back.
            Err(error) if self.made > 0 && !error.is_device_lost() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Counts a buffer out, which its holder frees.
    pub(super) fn forget_one(&mut self) {
        self.made = self.made.saturating_sub(1);
    }

    pub(super) fn give_back(&mut self, scratch: Scratch) {
        self.free.push(scratch);
    }
}
