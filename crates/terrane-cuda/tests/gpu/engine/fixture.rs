//! Endpoints in every kind of memory that the engine copies between.

use std::any::Any;
use std::ffi::c_void;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use cudarc::driver::{CudaContext, sys};
use terrane_core::{Alignment, Allocate, BoxedCause, ByteCount, Memory, Region, RegionRequest};
use terrane_cuda::{
    Context, CopyPath, DeviceAllocator, DeviceEngine, DeviceEngineOptions, DeviceMemory,
    PinnedAllocator, PinnedOptions, Stream,
};
use terrane_layout::{
    BlockDimension, ElementFormat, Geometry, LayoutBuilder, LayoutConfig, LayoutKind,
};
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::pattern::PieceAccess;
use terrane_transfer::{
    CopyEngine, CopyJob, Declined, DeviceOrder, Endpoint, Quote, TransferManager, TransferOptions,
    TransferPlan,
};

use crate::needs::{OnDevice, is_simulated};

/// Blocks in one allocation of the device.
pub const DEVICE: &str = "device";
/// Blocks whose layers are at irregular distances in the device's memory.
pub const APART: &str = "device, layers apart";
/// Blocks in pinned memory.
pub const PINNED: &str = "pinned";
/// Blocks in the memory of another device.
pub const PEER: &str = "another device";

pub struct Fixture {
    context: Context,
    peer: Option<Context>,
    options: DeviceEngineOptions,
    ends: Vec<&'static str>,
    access: OnDevice,
}

impl Fixture {
    pub fn new(context: &Context, options: DeviceEngineOptions, ends: &[&'static str]) -> Self {
        let (context, access) = (context.clone(), OnDevice::new(context));
        Self { context, peer: None, options, ends: ends.to_vec(), access }
    }

    /// With a forced path, and with the smallest possible parts.
    pub fn in_small_parts(context: &Context, path: CopyPath, ends: &[&'static str]) -> Self {
        let options = DeviceEngineOptions {
            path: Some(path),
            scratch_bytes: ByteCount::kib(64),
            scratch_buffers: NonZeroU32::new(2).unwrap(),
            request_bytes: ByteCount::kib(2),
            relayout_bytes: ByteCount::kib(2),
            direct_ctas: NonZeroU32::new(2).unwrap(),
            peer_ctas: NonZeroU32::new(2).unwrap(),
            ..DeviceEngineOptions::default()
        };
        Self::new(context, options, ends)
    }

    pub fn beside(self, peer: Context) -> Self {
        Self { peer: Some(peer), ..self }
    }

    pub fn manager(&self) -> TransferManager {
        TransferManager::new([self.engine()])
    }
}

/// An engine with a forced path, and an engine for transfers that this path cannot copy. For
/// example, some heads of pinned pages are not packed.
#[derive(Debug)]
struct Preferring {
    first: DeviceEngine,
    second: DeviceEngine,
}

// SAFETY: the inner engines copy, and their guarantees apply.
unsafe impl CopyEngine for Preferring {
    fn name(&self) -> &'static str {
        self.first.name()
    }

    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        self.first.quote(plan, options).or_else(|_| self.second.quote(plan, options))
    }

    fn computes_checksums(&self) -> bool {
        self.first.computes_checksums()
    }

    fn capture_order(&self, order: &DeviceOrder) -> Result<DeviceOrder, BoxedCause> {
        self.first.capture_order(order)
    }

    fn submit(&self, job: CopyJob) {
        // Each engine copies by the path that was quoted.
        self.first.submit(job);
    }
}

impl EngineFixture for Fixture {
    fn engine(&self) -> Arc<dyn CopyEngine> {
        let first = DeviceEngine::new(&self.context, self.options.clone()).unwrap();
        if self.options.path.is_none() {
            return Arc::new(first);
        }
        let any = DeviceEngineOptions { path: None, ..self.options.clone() };
        Arc::new(Preferring { first, second: DeviceEngine::new(&self.context, any).unwrap() })
    }

    fn ends(&self) -> &[&'static str] {
        &self.ends
    }

    fn endpoint(&self, end: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        match end {
            APART => apart(&self.context, config, kind),
            PINNED => pinned(&self.context, config, kind),
            PEER => endpoint(&DeviceAllocator::new(self.peer.as_ref().unwrap()), config, kind),
            _ => endpoint(&DeviceAllocator::new(&self.context), config, kind),
        }
    }

    fn serves(&self, source: &str, destination: &str) -> bool {
        // At least one end is the device's own memory. Only device memory is copied within a kind.
        let host = [source, destination].contains(&PINNED);
        let peer = [source, destination].contains(&PEER);
        let both_foreign = |end: &str| end == PINNED || end == PEER;
        if both_foreign(source) && both_foreign(destination) {
            return false;
        }
        match self.options.path {
            Some(CopyPath::Direct | CopyPath::Staged) => host,
            Some(CopyPath::Relayout) => !host && !peer,
            Some(CopyPath::Peer) => peer,
            _ => true,
        }
    }

    fn unserved(&self, config: LayoutConfig) -> Option<Endpoint> {
        let system = SystemAllocator::new(SystemOptions::default());
        Some(endpoint(&system, config, LayoutKind::FullyContiguous))
    }

    fn unreached(&self) -> Option<(DeviceOrder, Box<dyn Any>)> {
        let held = HeldStream::new(&self.context);
        Some((held.order(), Box::new(held)))
    }

    fn least_relayouts(&self) -> usize {
        20
    }

    fn access(&self) -> &dyn PieceAccess {
        &self.access
    }
}

/// A stream whose work does not run until this drops. Until then no code may free memory of the
/// device, which waits for all streams.
pub struct HeldStream {
    stream: Stream,
    release: Option<Sender<()>>,
}

impl HeldStream {
    pub fn new(context: &Context) -> Self {
        /// Blocks the stream until the sender has dropped.
        ///
        /// # Safety
        ///
        /// `until` is a boxed receiver, which this call owns.
        unsafe extern "C" fn keep(until: *mut c_void) {
            // SAFETY: the caller guarantees it.
            let until = unsafe { Box::from_raw(until.cast::<Receiver<()>>()) };
            let _ = until.recv();
        }

        let stream = Stream::new(context).unwrap();
        let device = usize::try_from(context.device().id.get()).unwrap();
        CudaContext::new(device).unwrap().bind_to_thread().unwrap();
        let (release, until) = channel();
        let until = Box::into_raw(Box::new(until)).cast();
        // SAFETY: the function owns its argument, and calls no function of the driver.
        let code = unsafe { sys::cuLaunchHostFunc(stream.handle().cast(), Some(keep), until) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        Self { stream, release: Some(release) }
    }

    /// The stream, for work that must not run yet.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The order "after all work of the stream so far".
    pub fn order(&self) -> DeviceOrder {
        self.stream.order()
    }
}

impl Drop for HeldStream {
    fn drop(&mut self) {
        drop(self.release.take());
        self.stream.synchronize().unwrap();
    }
}

pub fn endpoint(allocator: &impl Allocate, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
    let layout = LayoutBuilder::new(config).kind(kind).allocate(allocator).unregistered().build();
    Endpoint::new(layout.unwrap()).unwrap()
}

pub fn pinned(context: &Context, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
    endpoint(&PinnedAllocator::new(context, PinnedOptions::default()).unwrap(), config, kind)
}

/// One allocation per region, at irregular distances.
pub fn apart(context: &Context, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
    let allocator = DeviceAllocator::new(context);
    let geometry = Geometry::new(&config, kind).unwrap();
    let regions = (0..geometry.region_count()).map(|number| {
        let first = ByteCount::new(4096 * u64::from(number % 3));
        let bytes = geometry.region_bytes(0).checked_add(first).unwrap();
        let request = RegionRequest::new(bytes).aligned_to(Alignment::PAGE);
        let region = Region::new(allocator.allocate(&request).unwrap());
        assert!(!region.length().is_zero());
        region.view(first, geometry.region_bytes(0)).unwrap()
    });
    let layout = LayoutBuilder::new(config).kind(kind).adopt(regions.collect::<Vec<_>>());
    Endpoint::new(layout.unregistered().build().unwrap()).unwrap()
}

pub const LAYERS_APART: LayoutKind =
    LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };

/// K and V of `page` tokens of 128 numbers of two bytes.
pub fn config(blocks: u32, layers: u32, page: u32) -> LayoutConfig {
    let config = LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(layers)
        .outer_dim(2)
        .page_size(page)
        .inner_dim(128)
        .element(ElementFormat::Width(2));
    config.build().unwrap()
}

/// Memory for [`keep_busy`]. A simulated device is slower, so it needs less.
pub fn large_memory(context: &Context) -> DeviceMemory {
    let bytes = if is_simulated(context) { ByteCount::mib(2) } else { ByteCount::mib(128) };
    DeviceAllocator::new(context).allocate(&RegionRequest::new(bytes)).unwrap()
}

/// Some milliseconds of work on a stream.
pub fn keep_busy(stream: &Stream, room: &impl Memory) {
    for value in 0..20_u8 {
        // SAFETY: only the test uses the memory, which lives until the stream has been
        // synchronised.
        unsafe { stream.fill(room.location(), value, room.length()) }.unwrap();
    }
}

/// Whether every byte of an end without transfers in flight has this value.
pub fn all_are(end: &Endpoint, fixture: &Fixture, value: u8) -> bool {
    end.layout().regions().iter().all(|region| {
        let mut bytes = vec![0; region.length().to_usize()];
        // SAFETY: the region is alive, and nothing in flight writes it.
        unsafe { fixture.access().read(region.location(), &mut bytes) }.unwrap();
        bytes == vec![value; bytes.len()]
    })
}
