//! The common setup: the device, memory on both sides, engines, and interleaved timing.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow};
use terrane_bench::{Settings, Spread};
use terrane_core::{Allocate, ByteCount, DeviceId, Location, Memory, Region, RegionRequest};
use terrane_cuda::{
    Calibration, CalibrationOptions, Context, CopyPath, DeviceAllocator, DeviceEngine,
    DeviceEngineOptions, DeviceMemory, Kernels, PinnedAllocator, PinnedOptions, Stream,
};
use terrane_layout::{LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_testkit::random::Seeded;
use terrane_transfer::{
    Completion, CopyEngine, DeviceOrder, Endpoint, Explanation, Transfer, TransferManager,
};

use crate::Arguments;
use crate::bindings::Bindings;
use crate::predictions::Predictions;
use crate::shapes::Shape;

/// One device, ready to be measured.
pub struct Setup {
    pub bindings: Bindings,
    pub kernels: Kernels,
    pub stream: Stream,
    pub second_stream: Stream,
    pub third_stream: Stream,
    pub device: DeviceAllocator,
    pub pinned: PinnedAllocator,
    calibration: Calibration,
    /// Over the engine as users get it.
    pub manager: TransferManager,
    pub predictions: Predictions,
    pub moved: ByteCount,
    pub smoke: bool,
    pub context: Context,
}

impl Setup {
    pub fn new(context: Context, arguments: &Arguments) -> Result<Self> {
        let device = context.device().id;
        let calibration = match &arguments.calibration {
            Some(file) => Calibration::load(file, &context.device().name)?,
            None => calibration_options(arguments.smoke).measure(&context)?,
        };
        Ok(Self {
            manager: manager(&context, &calibration, None)?,
            bindings: Bindings::open(device)?,
            kernels: Kernels::load(&context)?,
            stream: Stream::new(&context)?,
            second_stream: Stream::new(&context)?,
            third_stream: Stream::new(&context)?,
            device: DeviceAllocator::new(&context),
            pinned: PinnedAllocator::new(&context, PinnedOptions::default())?,
            calibration,
            predictions: Predictions::default(),
            moved: if arguments.smoke {
                ByteCount::kib(256)
            } else {
                ByteCount::mib(arguments.moved_mib)
            },
            smoke: arguments.smoke,
            context,
        })
    }

    /// An engine as users get it, of its own.
    pub fn engine(&self) -> Result<Arc<dyn CopyEngine>> {
        engine(&self.context, &self.calibration, None)
    }

    /// A manager over the engines of this device and of another one of its model.
    pub fn beside(&self, other: &Context) -> Result<TransferManager> {
        let other = engine(other, &self.calibration, None)?;
        Ok(TransferManager::new([self.engine()?, other]))
    }

    /// A manager over an engine that takes one path for everything.
    pub fn forced(&self, path: CopyPath) -> Result<TransferManager> {
        manager(&self.context, &self.calibration, Some(path))
    }

    pub fn on_device(&self, shape: &Shape, blocks: u32, kind: LayoutKind) -> Result<Endpoint> {
        endpoint(shape, blocks, kind, &self.device)
    }

    pub fn in_pinned(&self, shape: &Shape, blocks: u32, kind: LayoutKind) -> Result<Endpoint> {
        endpoint(shape, blocks, kind, &self.pinned)
    }

    /// Contiguous memory of the device.
    pub fn flat(&self, bytes: ByteCount) -> Result<DeviceMemory> {
        Ok(self.device.allocate(&RegionRequest::new(bytes).labelled("contiguous"))?)
    }

    /// Repeats for what takes microseconds.
    pub fn many(&self, settings: &Settings) -> Settings {
        let (warm_up, repeats) = if self.smoke { (0, 1) } else { (20, settings.repeats.max(101)) };
        Settings { warm_up, repeats, ..settings.clone() }
    }

    /// Repeats for what takes a good part of a second.
    pub fn few(&self, settings: &Settings) -> Settings {
        let warm_up = settings.warm_up.min(1);
        Settings { warm_up, repeats: settings.repeats.min(3), ..settings.clone() }
    }
}

fn manager(
    context: &Context,
    calibration: &Calibration,
    path: Option<CopyPath>,
) -> Result<TransferManager> {
    Ok(TransferManager::new([engine(context, calibration, path)?]))
}

fn engine(
    context: &Context,
    calibration: &Calibration,
    path: Option<CopyPath>,
) -> Result<Arc<dyn CopyEngine>> {
    let calibration = Some(calibration.clone());
    let options = DeviceEngineOptions { path, calibration, ..DeviceEngineOptions::default() };
    Ok(Arc::new(DeviceEngine::new(context, options)?))
}

fn calibration_options(smoke: bool) -> CalibrationOptions {
    let mut options = CalibrationOptions::default();
    if smoke {
        options.bytes = ByteCount::mib(1);
        options.repetitions = 1;
    }
    options
}

pub fn endpoint(
    shape: &Shape,
    blocks: u32,
    kind: LayoutKind,
    memory: &impl Allocate,
) -> Result<Endpoint> {
    endpoint_of(shape.config(blocks)?, kind, memory)
}

pub fn endpoint_of(
    config: LayoutConfig,
    kind: LayoutKind,
    memory: &impl Allocate,
) -> Result<Endpoint> {
    let layout = LayoutBuilder::new(config).kind(kind).allocate(memory);
    Ok(Endpoint::new(layout.unregistered().build()?)?)
}

/// Seconds that each of the calls takes, all of them once a round: a machine that slows down, or
/// a neighbour that wakes up, meets all alike.
pub fn interleaved(
    settings: &Settings,
    calls: &mut [&mut dyn FnMut() -> Result<()>],
) -> Result<Vec<Spread>> {
    let mut seconds = vec![Vec::new(); calls.len()];
    for round in 0..settings.warm_up + settings.repeats.max(1) {
        for (call, seconds) in calls.iter_mut().zip(&mut seconds) {
            let begin = Instant::now();
            call()?;
            let took = begin.elapsed().as_secs_f64();
            if round >= settings.warm_up {
                seconds.push(took);
            }
        }
    }
    Ok(seconds.iter().map(|all| Spread::of(all).unwrap_or(Spread::single(f64::NAN))).collect())
}

/// Submits a transfer of blocks that no other code accesses.
pub fn submit(
    manager: &TransferManager,
    source: (&Endpoint, &[u32]),
    destination: (&Endpoint, &[u32]),
) -> Result<Completion<()>> {
    submit_after(DeviceOrder::AlreadySynchronised, manager, source, destination)
}

/// Submits a transfer of blocks that only the work before it accesses.
pub fn submit_after(
    order: DeviceOrder,
    manager: &TransferManager,
    (source, from): (&Endpoint, &[u32]),
    (destination, to): (&Endpoint, &[u32]),
) -> Result<Completion<()>> {
    let transfer = Transfer::new(source, destination).blocks(from, to).device_order(order);
    manager.submit(transfer, ()).map_err(|rejected| anyhow!(rejected.cause))
}

/// Submits a transfer and waits for its end.
pub fn transfer(
    manager: &TransferManager,
    source: (&Endpoint, &[u32]),
    destination: (&Endpoint, &[u32]),
) -> Result<()> {
    submit(manager, source, destination)?.wait().result.context("the transfer failed")?;
    Ok(())
}

/// How a transfer of so many blocks would be made, and how long it should take.
pub fn explain(
    manager: &TransferManager,
    (source, from): (&Endpoint, &[u32]),
    (destination, to): (&Endpoint, &[u32]),
) -> Result<Explanation> {
    let transfer = Transfer::new(source, destination)
        .blocks(from, to)
        .device_order(DeviceOrder::AlreadySynchronised);
    Ok(manager.explain(&transfer)?)
}

/// The ids of a range, out of order.
pub fn shuffled(ids: Range<u32>, seed: u64) -> Vec<u32> {
    let mut ids: Vec<u32> = ids.collect();
    Seeded::new(seed).shuffle(&mut ids);
    ids
}

/// Where the driver finds something.
pub fn address(location: Location) -> Result<u64> {
    match location {
        Location::Host(address) => Ok(address.get()),
        Location::Device { address, .. } => Ok(address.get()),
        other => Err(anyhow!("{other} has no address")),
    }
}

/// Where a kernel finds a region.
pub fn device_address(region: &Region) -> Result<u64> {
    let memory = region.memory();
    match memory.location() {
        Location::Device { address, .. } => Ok(address.get() + region.offset().get()),
        _ => {
            let alias = memory.device_alias().context("a kernel cannot reach this memory")?;
            Ok(alias.get() + region.offset().get())
        }
    }
}

/// The first device, or why there is none.
pub fn first_device(ordinal: u32) -> Result<Context, terrane_cuda::CudaError> {
    Context::primary(DeviceId::new(ordinal))
}
