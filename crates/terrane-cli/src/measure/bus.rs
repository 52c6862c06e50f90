//! Copies between a device and pinned memory.

use std::sync::Arc;

use terrane_core::{ByteCount, DeviceId, RegionRequest};
use terrane_cuda::{
    Context, CopyPath, DeviceAllocator, DeviceEngine, DeviceEngineOptions, PinnedAllocator,
    PinnedOptions,
};
use terrane_layout::{Geometry, LayoutBuilder};
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use super::{Shape, seconds, transfer};
use crate::error::Failure;

/// Blocks on a device and in pinned memory, in the layouts of both tiers, and contiguous on both sides.
#[derive(Debug)]
pub(crate) struct Bus {
    context: Context,
    manager: TransferManager,
    device: Endpoint,
    pinned: Endpoint,
    other_pinned: Endpoint,
    contiguous: Endpoint,
    ids: (Vec<u32>, Vec<u32>),
    bytes: u64,
    block_bytes: u64,
}

impl Bus {
    /// On the first device. With a path, the engine takes no other.
    pub(crate) fn new(shape: &Shape, path: Option<CopyPath>) -> Result<Self, Failure> {
        let context = Context::primary(DeviceId::new(0))?;
        let options = DeviceEngineOptions { path, ..DeviceEngineOptions::default() };
        let engine = DeviceEngine::new(&context, options)?;
        let device = DeviceAllocator::new(&context);
        let pinned = PinnedAllocator::new(&context, PinnedOptions::default())?;
        let on_device = |geometry: &Geometry| -> Result<Endpoint, Failure> {
            let builder = LayoutBuilder::from_geometry(geometry.clone()).allocate(&device);
            Ok(Endpoint::new(builder.unregistered().build()?)?)
        };
        let on_host = |geometry: &Geometry| -> Result<Endpoint, Failure> {
            let builder = LayoutBuilder::from_geometry(geometry.clone()).allocate(&pinned);
            Ok(Endpoint::new(builder.unregistered().build()?)?)
        };
        Ok(Self {
            manager: TransferManager::new([Arc::new(engine) as _]),
            device: on_device(&shape.device)?,
            pinned: on_host(&shape.host)?,
            other_pinned: on_host(&shape.host)?,
            contiguous: on_device(&shape.host)?,
            ids: shape.ids(),
            bytes: shape.bytes(),
            block_bytes: shape.block_bytes(),
            context,
        })
    }

    /// The device's name.
    pub(crate) fn device_name(&self) -> &str {
        &self.context.device().name
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// All blocks: layers on the device, blocks in pinned memory.
    pub(crate) fn pass(&self, to_host: bool) -> Result<f64, Failure> {
        let (ids, backwards) = &self.ids;
        let (device, pinned) =
            ((&self.device, ids.as_slice()), (&self.pinned, backwards.as_slice()));
        if to_host {
            transfer(&self.manager, device, pinned)
        } else {
            transfer(&self.manager, pinned, device)
        }
    }

    /// The limit: the same bytes in one piece on both sides.
    pub(crate) fn contiguous(&self, to_host: bool) -> Result<f64, Failure> {
        let (ids, _) = &self.ids;
        let (device, pinned) = ((&self.contiguous, ids.as_slice()), (&self.pinned, ids.as_slice()));
        if to_host {
            transfer(&self.manager, device, pinned)
        } else {
            transfer(&self.manager, pinned, device)
        }
    }

    /// One block.
    pub(crate) fn one_block(&self, to_host: bool) -> Result<f64, Failure> {
        let (device, pinned): ((_, &[u32]), (_, &[u32])) =
            ((&self.device, &[1]), (&self.pinned, &[0]));
        if to_host {
            transfer(&self.manager, device, pinned)
        } else {
            transfer(&self.manager, pinned, device)
        }
    }

    /// Both directions at once, with memory of their own.
    pub(crate) fn both(&self) -> Result<f64, Failure> {
        let (ids, _) = &self.ids;
        seconds(|| {
            let out = Transfer::new(&self.device, &self.pinned).blocks(ids, ids);
            let back = Transfer::new(&self.other_pinned, &self.contiguous).blocks(ids, ids);
            let out = self.manager.submit(out, ()).map_err(|rejected| rejected.cause)?;
            let back = self.manager.submit(back, ()).map_err(|rejected| rejected.cause)?;
            out.wait().result?;
            back.wait().result?;
            Ok(())
        })
    }

    /// Allocates pinned memory, which is freed after the clock has been read.
    pub(crate) fn bring_up(&self, bytes: ByteCount) -> Result<f64, Failure> {
        let allocator = PinnedAllocator::new(&self.context, PinnedOptions::default())?;
        let mut kept = None;
        seconds(|| {
            kept = Some(allocator.allocate_memory(&RegionRequest::new(bytes))?);
            Ok(())
        })
        .inspect(|_| drop(kept))
    }

    /// The runs of a pass, as `explain` tells them.
    pub(crate) fn explained(&self, to_host: bool) -> Result<String, Failure> {
        let (ids, backwards) = &self.ids;
        let transfer = if to_host {
            Transfer::new(&self.device, &self.pinned).blocks(ids, backwards)
        } else {
            Transfer::new(&self.pinned, &self.device).blocks(backwards, ids)
        };
        Ok(self.manager.explain(&transfer)?.path().into_owned())
    }
}
