//! Copies between a device and pinned memory.

use std::sync::Arc;

use terrane_core::{ByteCount, DeviceId, RegionRequest};
use terrane_cuda::{
    Context, CopyPath, DeviceAllocator, DeviceEngine, DeviceEngineOptions, PinnedAllocator,
    PinnedOptions,
};
use terrane_transfer::{DeviceOrder, Endpoint, Transfer, TransferManager};

use super::{End, Ids, Shape, endpoint, first_ids, seconds_of_call, seconds_of_transfer};
use crate::error::Failure;

/// Blocks on a device and in pinned memory, in the layouts of both tiers, and contiguous on both
/// sides.
#[derive(Debug)]
pub(crate) struct Bus {
    context: Context,
    manager: TransferManager,
    device: Endpoint,
    pinned: Endpoint,
    other_pinned: Endpoint,
    contiguous: Endpoint,
    ids: Ids,
}

impl Bus {
    /// Allocates on the first device. With a path, the engine uses only this path.
    pub(crate) fn new(shape: &Shape, path: Option<CopyPath>) -> Result<Self, Failure> {
        let context = Context::primary(DeviceId::new(0))?;
        let options = DeviceEngineOptions { path, ..DeviceEngineOptions::default() };
        let engine = DeviceEngine::new(&context, options)?;
        let device = DeviceAllocator::new(&context);
        let pinned = PinnedAllocator::new(&context, PinnedOptions::default())?;
        Ok(Self {
            manager: TransferManager::new([Arc::new(engine) as _]),
            device: endpoint(&shape.device, &device)?,
            pinned: endpoint(&shape.host, &pinned)?,
            other_pinned: endpoint(&shape.host, &pinned)?,
            contiguous: endpoint(&shape.host, &device)?,
            ids: shape.ids(),
            context,
        })
    }

    /// The device's name.
    pub(crate) fn device_name(&self) -> &str {
        &self.context.device().name
    }

    /// Copies all blocks: layers on the device, blocks in pinned memory.
    pub(crate) fn pass(&self, to_host: bool) -> Result<f64, Failure> {
        let (ids, backwards) = &self.ids;
        self.copy((&self.device, ids), (&self.pinned, backwards), to_host)
    }

    /// Copies the first blocks.
    pub(crate) fn pass_some(&self, to_host: bool, blocks: u32) -> Result<f64, Failure> {
        let (ids, backwards) = first_ids(&self.ids, blocks);
        self.copy((&self.device, ids), (&self.pinned, backwards), to_host)
    }

    /// Measures the limit: the same bytes in one piece on both sides.
    pub(crate) fn contiguous(&self, to_host: bool) -> Result<f64, Failure> {
        let (ids, _) = &self.ids;
        self.copy((&self.contiguous, ids), (&self.pinned, ids), to_host)
    }

    /// Copies one block.
    pub(crate) fn one_block(&self, to_host: bool) -> Result<f64, Failure> {
        self.copy((&self.device, &[1]), (&self.pinned, &[0]), to_host)
    }

    /// Copies in both directions at once, with separate memory for each.
    pub(crate) fn both(&self) -> Result<f64, Failure> {
        let (ids, _) = &self.ids;
        seconds_of_call(|| {
            let out = ordered((&self.device, ids), (&self.pinned, ids));
            let back = ordered((&self.other_pinned, ids), (&self.contiguous, ids));
            let out = self.manager.submit(out, ()).map_err(|rejected| rejected.cause)?;
            let back = self.manager.submit(back, ()).map_err(|rejected| rejected.cause)?;
            out.wait().result?;
            back.wait().result?;
            Ok(())
        })
    }

    fn copy(&self, device: End<'_>, pinned: End<'_>, to_host: bool) -> Result<f64, Failure> {
        let transfer = if to_host { ordered(device, pinned) } else { ordered(pinned, device) };
        seconds_of_transfer(&self.manager, transfer)
    }

    /// Allocates pinned memory. The time excludes freeing the memory.
    pub(crate) fn bring_up(&self, bytes: ByteCount) -> Result<f64, Failure> {
        let allocator = PinnedAllocator::new(&self.context, PinnedOptions::default())?;
        let mut memory = None;
        seconds_of_call(|| {
            memory = Some(allocator.allocate_memory(&RegionRequest::new(bytes))?);
            Ok(())
        })
        .inspect(|_| drop(memory))
    }

    /// The path of a pass, from the manager's explanation.
    pub(crate) fn explained(&self, to_host: bool) -> Result<String, Failure> {
        let (ids, backwards) = &self.ids;
        let (device, pinned) = ((&self.device, &ids[..]), (&self.pinned, &backwards[..]));
        let transfer = if to_host { ordered(device, pinned) } else { ordered(pinned, device) };
        Ok(self.manager.explain(&transfer)?.path().into_owned())
    }
}

/// A transfer of blocks that no other work on the device uses.
fn ordered((source, from): End<'_>, (destination, to): End<'_>) -> Transfer {
    let transfer = Transfer::new(source, destination).blocks(from, to);
    transfer.device_order(DeviceOrder::AlreadySynchronised)
}
