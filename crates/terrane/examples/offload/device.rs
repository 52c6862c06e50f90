//! The device, if there is one: its tier, pinned memory, and access by the processor to the
//! device's bytes.

use terrane::core::convert::to_u64;
use terrane::core::{Allocate, BoxedCause, ByteCount, DeviceId, Location, Memory, RegionRequest};
use terrane::cuda::{
    Context, CudaError, DeviceAllocator, DeviceEngine, DeviceEngineOptions, PinnedAllocator,
    PinnedOptions, Stream,
};
use terrane::storage::{Progress, SystemAllocator, SystemMemory, SystemOptions};
use terrane::transfer::Endpoint;
use terrane_testkit::pattern::{InProcess, PieceAccess};

use crate::cli::{Options, Part};
use crate::failure::Failure;

/// The first device, and the allocators of its tiers.
pub struct Gpu {
    context: Context,
    pub memory: DeviceAllocator,
    pub pinned: PinnedAllocator,
}

impl Gpu {
    /// Finds the device, or returns a text with the reason why the example runs without one.
    pub fn find(
        options: &Options,
        system: &SystemOptions,
        progress: &Progress,
    ) -> Result<Result<Self, String>, Failure> {
        if options.without == Some(Part::Gpu) {
            return Ok(Err("as requested by --without gpu".to_owned()));
        }
        match Self::open(system, progress) {
            Ok(gpu) => Ok(Ok(gpu)),
            Err(source) if options.require == Some(Part::Gpu) => Err(Failure::NoGpu(source)),
            Err(reason) => Ok(Err(format!("no device: {reason}"))),
        }
    }

    fn open(system: &SystemOptions, progress: &Progress) -> Result<Self, CudaError> {
        let context = Context::primary(DeviceId::new(0))?;
        let pinned = PinnedOptions { system: system.clone(), ..PinnedOptions::default() };
        Ok(Self {
            memory: DeviceAllocator::new(&context),
            pinned: PinnedAllocator::new(&context, pinned)?.reporting_to(progress.clone()),
            context,
        })
    }

    /// The engine between the device and pinned memory.
    pub fn engine(&self) -> Result<DeviceEngine, Failure> {
        DeviceEngine::new(&self.context, DeviceEngineOptions::default()).map_err(Failure::Device)
    }

    /// Describes the device in one line.
    pub fn describe(&self) -> String {
        let device = self.context.device();
        let (major, minor) = device.compute_capability;
        format!("{}, {}, compute capability {major}.{minor}", device.name, device.memory)
    }
}

/// A copy of a device tier in host memory, through which the processor accesses it. Plain driver
/// copies transfer the whole tier, so the engine under test is not involved.
pub struct Image {
    stream: Stream,
    parts: Vec<Copied>,
}

/// A region of the device, and its copy in host memory.
struct Copied {
    on_device: Location,
    begin: u64,
    copy: SystemMemory,
    length: ByteCount,
}

impl Image {
    pub fn new(gpu: &Gpu, endpoint: &Endpoint, system: &SystemAllocator) -> Result<Self, Failure> {
        let layout = endpoint.layout();
        let mut parts = Vec::new();
        for (number, region) in (0..).zip(layout.regions()) {
            let length = layout.geometry().region_bytes(number);
            let Location::Device { address, .. } = region.location() else { continue };
            let request = RegionRequest::new(length).labelled("image");
            let copy = system.allocate_memory(&request).map_err(Failure::Limit)?;
            let on_device = region.location();
            parts.push(Copied { on_device, begin: address.get(), copy, length });
        }
        Ok(Self { stream: Stream::new(&gpu.context).map_err(Failure::Device)?, parts })
    }

    /// Copies the whole tier to the host. No transfer may write to the tier meanwhile.
    pub fn fetch(&self) -> Result<(), Failure> {
        self.copy_all(|part| (part.on_device, part.copy.location()))
    }

    /// Copies the whole tier back to the device. No transfer may use the tier meanwhile.
    pub fn put(&self) -> Result<(), Failure> {
        self.copy_all(|part| (part.copy.location(), part.on_device))
    }

    fn copy_all(&self, ends: impl Fn(&Copied) -> (Location, Location)) -> Result<(), Failure> {
        for part in &self.parts {
            let (from, to) = ends(part);
            // SAFETY: the endpoint owns the region, and this value owns its copy. No other code
            // uses them until the synchronisation of the stream: the steps of the job are
            // sequential.
            unsafe { self.stream.copy(from, to, part.length) }.map_err(Failure::Device)?;
        }
        self.stream.synchronize().map_err(Failure::Device)
    }

    /// The location in the copy of the bytes at this location of the device.
    fn find(&self, at: Location, bytes: usize) -> Result<Location, BoxedCause> {
        let Location::Device { address, .. } = at else { return Ok(at) };
        let bytes = to_u64(bytes);
        let location = self.parts.iter().find_map(|part| {
            let offset = address.get().checked_sub(part.begin)?;
            let end = offset.checked_add(bytes)?;
            let inside = end <= part.length.get();
            inside.then(|| part.copy.location().checked_add(ByteCount::new(offset)))?
        });
        location.ok_or_else(|| format!("{at} is not in this tier").into())
    }
}

impl PieceAccess for Image {
    unsafe fn read(&self, at: Location, bytes: &mut [u8]) -> Result<(), BoxedCause> {
        let at = self.find(at, bytes.len())?;
        // SAFETY: the span is in the copy, whose pieces are as far apart as those on the device.
        // The caller promised that no code writes to the pieces on the device.
        unsafe { InProcess.read(at, bytes) }
    }

    unsafe fn write(&self, at: Location, bytes: &[u8]) -> Result<(), BoxedCause> {
        let at = self.find(at, bytes.len())?;
        // SAFETY: as above.
        unsafe { InProcess.write(at, bytes) }
    }
}

/// Contiguous memory on both sides, to measure the limit of the bus.
pub struct BusLimit {
    stream: Stream,
    on_device: <DeviceAllocator as Allocate>::Memory,
    pinned: <PinnedAllocator as Allocate>::Memory,
    bytes: ByteCount,
}

impl BusLimit {
    pub fn new(gpu: &Gpu, bytes: ByteCount) -> Result<Self, Failure> {
        let request = RegionRequest::new(bytes).labelled("limit");
        Ok(Self {
            stream: Stream::new(&gpu.context).map_err(Failure::Device)?,
            on_device: gpu.memory.allocate_memory(&request).map_err(Failure::Device)?,
            pinned: gpu.pinned.allocate_memory(&request).map_err(Failure::Device)?,
            bytes,
        })
    }

    /// One contiguous copy of all the bytes.
    pub fn copy(&self, to_device: bool) -> Result<(), Failure> {
        let (from, to) = match to_device {
            true => (self.pinned.location(), self.on_device.location()),
            false => (self.on_device.location(), self.pinned.location()),
        };
        // SAFETY: this value owns both, and no other code uses them until the synchronisation of
        // the stream.
        unsafe { self.stream.copy(from, to, self.bytes) }.map_err(Failure::Device)?;
        self.stream.synchronize().map_err(Failure::Device)
    }
}
