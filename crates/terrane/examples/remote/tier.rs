//! The blocks of one process: a layout that is registered with the process's agent, filled with a
//! pattern, and verified.

use std::path::PathBuf;
use std::sync::Arc;

use terrane::core::DeviceId;
use terrane::cuda::{
    Context, DeviceAllocator, DeviceEngine, DeviceEngineOptions, PinnedAllocator, PinnedOptions,
};
use terrane::layout::{BlockDimension, LayoutBuilder, LayoutConfig, LayoutKind};
use terrane::nixl::{Agent, AgentBuilder, BackendConfig, probe, probe_file};
use terrane::storage::{SystemAllocator, SystemOptions};
use terrane::transfer::{CopyEngine, DeviceOrder, Endpoint, Transfer, TransferManager};
use terrane_testkit::pattern::{InProcess, Pattern, Verification};

use crate::cli::{MemoryTier, Options, Role};
use crate::failure::Failure;

/// Engines have one tensor for K and V of each layer: outer first.
const KIND: LayoutKind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };

/// The NIXL agent of one process, and the device of its blocks, if it has one.
pub struct LocalAgent {
    pub agent: Agent,
    tier: MemoryTier,
    gpu: Option<Context>,
}

/// The blocks.
pub struct Tier {
    pub endpoint: Endpoint,
    /// For device memory: a host copy through which the processor accesses it.
    image: Option<Image>,
}

/// Host memory in the same layout, and the engine that copies between the two.
struct Image {
    endpoint: Endpoint,
    manager: TransferManager,
}

impl LocalAgent {
    /// Creates the agent of this process. NIXL also measures the times of its transfers.
    pub fn new(options: &Options) -> Result<Self, Failure> {
        find_nixl()?;
        let gpu = match options.tier {
            MemoryTier::System => None,
            MemoryTier::Device | MemoryTier::Pinned => {
                Some(Context::primary(DeviceId::new(0)).map_err(Failure::NoGpu)?)
            }
        };
        let role = match options.role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        };
        let agent = AgentBuilder::new(format!("{role}-{}", std::process::id()))
            .backend(BackendConfig::new("UCX").required())
            .telemetry(true)
            .build()?;
        Ok(Self { agent, tier: options.tier, gpu })
    }

    /// Allocates and registers blocks of this shape.
    pub fn allocate(&self, config: LayoutConfig) -> Result<Tier, Failure> {
        let system = || SystemAllocator::new(SystemOptions::default());
        let builder = LayoutBuilder::new(config).kind(KIND);
        let layout = match (&self.gpu, self.tier) {
            (Some(gpu), MemoryTier::Device) => {
                builder.allocate(&DeviceAllocator::new(gpu)).register(&self.agent).build()
            }
            (Some(gpu), _) => {
                let pinned = pinned(gpu)?;
                builder.allocate(&pinned).register(&self.agent).build()
            }
            (None, _) => builder.allocate(&system()).register(&self.agent).build(),
        };
        let endpoint = Endpoint::new(layout.map_err(Failure::Tier)?)?;
        let image = match (&self.gpu, self.tier) {
            (Some(gpu), MemoryTier::Device) => Some(Image::new(gpu, config)?),
            _ => None,
        };
        Ok(Tier { endpoint, image })
    }
}

impl Tier {
    /// Fills all blocks.
    pub fn fill(&self, pattern: &Pattern) -> Result<(), Failure> {
        let Some(image) = &self.image else {
            return Ok(pattern.fill(&self.endpoint)?);
        };
        pattern.fill(&image.endpoint)?;
        image.copy(&image.endpoint, &self.endpoint)
    }

    /// Verifies these blocks, in these layers.
    pub fn verify(
        &self,
        pattern: &Pattern,
        blocks: &[u32],
        filled_as: &[u32],
        layers: std::ops::Range<u32>,
    ) -> Result<Verification, Failure> {
        let bytes = match &self.image {
            Some(image) => {
                image.copy(&self.endpoint, &image.endpoint)?;
                &image.endpoint
            }
            None => &self.endpoint,
        };
        Ok(pattern.verify_with(bytes, blocks, filled_as, layers, &InProcess)?)
    }
}

impl Image {
    fn new(gpu: &Context, config: LayoutConfig) -> Result<Self, Failure> {
        let memory = pinned(gpu)?;
        let layout = LayoutBuilder::new(config).kind(KIND).allocate(&memory).unregistered();
        let engine = DeviceEngine::new(gpu, DeviceEngineOptions::default());
        let engine: Arc<dyn CopyEngine> = Arc::new(engine.map_err(Failure::Device)?);
        Ok(Self {
            endpoint: Endpoint::new(layout.build().map_err(Failure::Tier)?)?,
            manager: TransferManager::new([engine]),
        })
    }

    /// Copies all blocks, and waits for the copy.
    fn copy(&self, from: &Endpoint, to: &Endpoint) -> Result<(), Failure> {
        let all: Vec<u32> = (0..from.layout().geometry().num_blocks()).collect();
        let copy = Transfer::new(from, to)
            .blocks(&all, &all)
            .device_order(DeviceOrder::AlreadySynchronised);
        self.manager.submit(copy, ())?.wait().result?;
        Ok(())
    }
}

/// Uses the NIXL that the dynamic linker finds, or the file in the environment variable. This
/// repository's cargo configuration sets the variable to the file that `cargo xtask nixl` has
/// downloaded.
#[expect(clippy::disallowed_methods, reason = "the ban is for libraries; this is a program")]
fn find_nixl() -> Result<(), Failure> {
    let Err(missing) = probe() else { return Ok(()) };
    let file = std::env::var_os("NIXL_CAPI_LIBRARY").map(PathBuf::from);
    match file.filter(|file| file.exists()) {
        Some(file) => probe_file(&file).map(drop).map_err(|error| Failure::Nixl(error.into())),
        None => Err(Failure::Nixl(missing.into())),
    }
}

fn pinned(gpu: &Context) -> Result<PinnedAllocator, Failure> {
    PinnedAllocator::new(gpu, PinnedOptions::default()).map_err(Failure::Device)
}
