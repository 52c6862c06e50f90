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

/// The device of the measurements.
pub struct Setup {
    pub bindings: Bindings,
    pub kernels: Kernels,
    pub stream: Stream,
    pub second_stream: Stream,
    pub third_stream: Stream,
    pub device: DeviceAllocator,
    pub pinned: PinnedAllocator,
    calibration: Calibration,
    /// A manager over the engine with its default options.
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

    /// Creates a new engine with its default options.
    pub fn engine(&self) -> Result<Arc<dyn CopyEngine>> {
        engine(&self.context, &self.calibration, None)
    }

    /// Creates a manager over the engines of this device and of another one of its model.
    pub fn manager_with(&self, other: &Context) -> Result<TransferManager> {
        let other = engine(other, &self.calibration, None)?;
        Ok(TransferManager::new([self.engine()?, other]))
    }

    /// Creates a manager over an engine that uses one path for all transfers.
    pub fn forced(&self, path: CopyPath) -> Result<TransferManager> {
        manager(&self.context, &self.calibration, Some(path))
    }

    pub fn on_device(&self, shape: &Shape, blocks: u32, kind: LayoutKind) -> Result<Endpoint> {
        endpoint(shape, blocks, kind, &self.device)
    }

    pub fn in_pinned(&self, shape: &Shape, blocks: u32, kind: LayoutKind) -> Result<Endpoint> {
        endpoint(shape, blocks, kind, &self.pinned)
    }

    /// Allocates contiguous device memory.
    pub fn flat(&self, bytes: ByteCount) -> Result<DeviceMemory> {
        Ok(self.device.allocate(&RegionRequest::new(bytes).labelled("contiguous"))?)
    }

    /// The repeats of calls that take microseconds.
    pub fn many(&self, settings: &Settings) -> Settings {
        let (warm_up, repeats) = if self.smoke { (0, 1) } else { (20, settings.repeats.max(101)) };
        Settings { warm_up, repeats, ..settings.clone() }
    }

    /// The repeats of calls that take a large part of a second.
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

/// Measures the seconds of each call, with every call once in each round. A slower clock or another
/// program then affects all calls equally.
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

/// Submits a transfer. No other code accesses its blocks.
pub fn submit(
    manager: &TransferManager,
    source: (&Endpoint, &[u32]),
    destination: (&Endpoint, &[u32]),
) -> Result<Completion<()>> {
    submit_after(DeviceOrder::AlreadySynchronised, manager, source, destination)
}

/// Submits a transfer after a stream's work. Only that work accesses the blocks.
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

/// Returns the planned path of a transfer of `blocks` blocks, and its predicted time.
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

/// Returns the ids of a range, out of order.
pub fn shuffled(ids: Range<u32>, seed: u64) -> Vec<u32> {
    let mut ids: Vec<u32> = ids.collect();
    Seeded::new(seed).shuffle(&mut ids);
    ids
}

/// Returns the address that the driver uses for a location.
pub fn address(location: Location) -> Result<u64> {
    match location {
        Location::Host(address) => Ok(address.get()),
        Location::Device { address, .. } => Ok(address.get()),
        other => Err(anyhow!("{other} has no address")),
    }
}

/// Returns the address that a kernel uses for a region.
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

/// Opens the first device, or returns the reason why there is none.
pub fn first_device(ordinal: u32) -> Result<Context, terrane_cuda::CudaError> {
    Context::primary(DeviceId::new(ordinal))
}
