//! Copies within host memory, compared with memcpy.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;

use terrane_core::{Alignment, ByteCount, RegionRequest};
use terrane_layout::Geometry;
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_transfer::engines::{HostEngine, HostEngineOptions};
use terrane_transfer::{Endpoint, TransferManager};

use super::{Ids, Shape, endpoint, first_ids, seconds_of_blocks, seconds_of_call};
use crate::error::Failure;

/// Blocks in the layout of a device and in the layout of the host, both in system memory.
#[derive(Debug)]
pub(crate) struct HostCase {
    manager: TransferManager,
    layers: Endpoint,
    contiguous: Endpoint,
    ids: Ids,
    bytes: u64,
    block_bytes: u64,
    threads: NonZeroUsize,
    /// Contiguous buffers of the same size, once the limit is measured.
    plain: Option<(Vec<u8>, Vec<u8>)>,
}

impl HostCase {
    pub(crate) fn new(shape: &Shape) -> Result<Self, Failure> {
        let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let engine =
            HostEngine::new(HostEngineOptions { threads, ..HostEngineOptions::default() })?;
        Ok(Self {
            manager: TransferManager::new([Arc::new(engine) as _]),
            layers: system(&shape.device)?,
            contiguous: system(&shape.host)?,
            ids: shape.ids(),
            bytes: shape.bytes(),
            block_bytes: shape.block_bytes(),
            threads,
            plain: None,
        })
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads.get()
    }

    /// Copies from blocks to layers.
    pub(crate) fn load(&mut self) -> Result<f64, Failure> {
        let (ids, backwards) = &self.ids;
        seconds_of_blocks(&self.manager, (&self.contiguous, ids), (&self.layers, backwards))
    }

    /// Copies the first blocks.
    pub(crate) fn load_some(&mut self, blocks: u32) -> Result<f64, Failure> {
        let (ids, backwards) = first_ids(&self.ids, blocks);
        seconds_of_blocks(&self.manager, (&self.contiguous, ids), (&self.layers, backwards))
    }

    /// Copies from layers to blocks.
    pub(crate) fn store(&mut self) -> Result<f64, Failure> {
        let (ids, backwards) = &self.ids;
        seconds_of_blocks(&self.manager, (&self.layers, ids), (&self.contiguous, backwards))
    }

    /// Copies one block, from layers.
    pub(crate) fn one_block(&mut self) -> Result<f64, Failure> {
        seconds_of_blocks(&self.manager, (&self.layers, &[1]), (&self.contiguous, &[0]))
    }

    /// Measures the limit: each thread copies one contiguous part with memcpy.
    pub(crate) fn memcpy(&mut self) -> Result<f64, Failure> {
        let threads = self.threads.get();
        let (source, destination) = self.plain();
        let part = source.len().div_ceil(threads).max(1);
        seconds_of_call(|| {
            thread::scope(|scope| {
                for (to, from) in destination.chunks_mut(part).zip(source.chunks(part)) {
                    scope.spawn(|| to.copy_from_slice(from));
                }
            });
            Ok(())
        })
    }

    /// Measures the limit of one block: memcpy on this thread.
    pub(crate) fn memcpy_of_one_block(&mut self) -> Result<f64, Failure> {
        let length = ByteCount::new(self.block_bytes).to_usize();
        let (source, destination) = self.plain();
        seconds_of_call(|| {
            let pair = destination.chunks_mut(length).zip(source.chunks(length)).next();
            if let Some((to, from)) = pair {
                to.copy_from_slice(from);
            }
            Ok(())
        })
    }

    fn plain(&mut self) -> &mut (Vec<u8>, Vec<u8>) {
        let length = ByteCount::new(self.bytes).to_usize();
        self.plain.get_or_insert_with(|| (vec![1; length], vec![2; length]))
    }
}

/// Blocks in system memory.
pub(super) fn system(geometry: &Geometry) -> Result<Endpoint, Failure> {
    endpoint(geometry, &SystemAllocator::new(SystemOptions::default()))
}

/// The limit of a first touch: memory that was touched before.
#[derive(Debug)]
pub(crate) struct Filled(Vec<u8>);

impl Filled {
    pub(crate) fn new(bytes: ByteCount) -> Self {
        Self(vec![1; bytes.to_usize()])
    }

    /// Each thread writes a part with memset.
    pub(crate) fn fill(&mut self) -> Result<f64, Failure> {
        let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let part = self.0.len().div_ceil(threads.get()).max(1);
        seconds_of_call(|| {
            thread::scope(|scope| {
                for part in self.0.chunks_mut(part) {
                    scope.spawn(|| part.fill(2));
                }
            });
            Ok(())
        })
    }
}

/// The time to allocate memory and touch all of it.
pub(crate) fn touch_once(bytes: ByteCount) -> Result<f64, Failure> {
    let request = RegionRequest::new(bytes).aligned_to(Alignment::PAGE);
    let mut memory = None;
    // The time excludes freeing the memory.
    seconds_of_call(|| {
        let allocator = SystemAllocator::new(SystemOptions::default());
        memory = Some(allocator.allocate_memory(&request)?);
        Ok(())
    })
    .inspect(|_| drop(memory))
}
