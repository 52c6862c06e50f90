//! The job: allocate the tiers, run the hops, verify, and compare with the limits.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane::core::{ByteCount, StorageKind};
use terrane::layout::LayoutError;
use terrane::layout::model::CacheGroup;
use terrane::layout::{BlockDimension, LayoutKind};
use terrane::storage::{DiskAllocator, DiskOptions, Progress, SystemAllocator, SystemOptions};
use terrane::transfer::engines::{DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions};
use terrane::transfer::{CopyEngine, DeviceOrder, Endpoint, Report, Transfer, TransferManager};
use terrane_testkit::pattern::Pattern;
use terrane_testkit::random::Seeded;

use crate::cli::Options;
use crate::console::Console;
use crate::device::{BusLimit, Gpu};
use crate::failure::Failure;
use crate::limits::{Limit, Limits, Setup};
use crate::machine;
use crate::models::Model;
use crate::progress;
use crate::tiers::{Patterns, Tier};

/// The number of bytes that are moved by default.
const DEFAULT_MOVED: ByteCount = ByteCount::mib(256);

/// Engines have one tensor for K and V of each layer: outer first.
const ON_COMPUTE: LayoutKind =
    LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };

/// The result of a hop: medians over the rounds.
pub struct Hop {
    pub name: String,
    pub path: String,
    pub bytes: ByteCount,
    pub seconds: f64,
    pub limit_seconds: f64,
    pub verified: bool,
}

impl Hop {
    pub fn gb_per_s(&self) -> f64 {
        self.bytes.get() as f64 / self.seconds / 1e9
    }

    pub fn limit_gb_per_s(&self) -> f64 {
        self.bytes.get() as f64 / self.limit_seconds / 1e9
    }

    /// The rate as a share of the limit's rate.
    pub fn share(&self) -> f64 {
        self.limit_seconds / self.seconds
    }
}

/// The state that all groups of the model share.
pub struct Job<'a> {
    options: &'a Options,
    model: &'a Model,
    counts: Counts,
    patterns: Patterns,
    threads: NonZeroUsize,
    memory: SystemAllocator,
    gpu: Option<Gpu>,
    progress: Progress,
    disk: DiskAllocator,
    manager: TransferManager,
    disk_options: DiskEngineOptions,
}

/// The numbers of blocks: those that are moved, and the size of each tier.
#[derive(Clone, Copy)]
struct Counts {
    moved: u32,
    /// A tier in memory has space for the blocks in two places, and for some blocks that are not
    /// moved.
    in_memory: u32,
    /// A tier on disk has space for the blocks in one place, and for some blocks that are not
    /// moved.
    on_disk: u32,
}

impl Counts {
    fn new(moved: u32) -> Result<Self, Failure> {
        let spare = (moved / 16).max(1);
        let on_disk = moved.checked_add(spare);
        let in_memory = on_disk.and_then(|on_disk| on_disk.checked_add(moved));
        match (in_memory, on_disk) {
            (Some(in_memory), Some(on_disk)) => Ok(Self { moved, in_memory, on_disk }),
            _ => Err(Failure::TooManyIds { blocks: moved }),
        }
    }

    fn moved(self) -> usize {
        ByteCount::new(self.moved.into()).to_usize()
    }

    /// The peak number of blocks in memory: two tiers, and two buffers for the limits.
    fn peak_in_memory(self) -> u64 {
        u64::from(self.in_memory) * 2 + u64::from(self.moved) * 2
    }
}

impl<'a> Job<'a> {
    /// Chooses the sizes and the tiers, prints them, and checks that the machine has the resources.
    pub fn prepare(
        options: &'a Options,
        model: &'a Model,
        console: &Console,
    ) -> Result<Self, Failure> {
        let counts = count_blocks(options, model)?;
        let disk = machine::choose_disk(options.disk_path.as_deref());
        let allocator =
            DiskAllocator::new(&disk.directory, DiskOptions::default()).map_err(|source| {
                let (directory, source) = (disk.directory.clone(), Box::new(source));
                Failure::Disk { directory, source }
            })?;

        let host_options = HostEngineOptions {
            threads: options.threads.unwrap_or(HostEngineOptions::default().threads),
            ..HostEngineOptions::default()
        };
        let threads = host_options.threads;
        let disk_options = DiskEngineOptions::default();
        let host = HostEngine::new(host_options).map_err(Failure::Threads)?;
        let disk_engine = DiskEngine::new(&disk_options)
            .map_err(|source| Failure::Engine { what: "the disk", source })?;
        let queue = disk_engine.capabilities().clone();
        let mut engines: Vec<Arc<dyn CopyEngine>> = vec![Arc::new(host), Arc::new(disk_engine)];

        let progress = Progress::default();
        let memory =
            SystemOptions { huge_pages: options.huge_pages.into(), ..SystemOptions::default() };
        let gpu = Gpu::find(options, &memory, &progress)?;
        if let Ok(gpu) = &gpu {
            engines.push(Arc::new(gpu.engine()?));
        }
        console.note(format_args!(
            "model: {} ({}), rank 1 of {}",
            model.name,
            model.geometry.model_type(),
            model.tensor_parallel
        ))?;
        let a_token = model.geometry.bytes_per_token().map_err(|e| invalid(model, e))?;
        console.note(format_args!("cache: {} bytes a token", a_token.get()))?;
        match &gpu {
            Ok(gpu) => console.note(format_args!("device tier: {}", gpu.describe()))?,
            Err(why) => console.note(format_args!("compute tier: system memory ({why})"))?,
        }
        console.note(format_args!(
            "disk tier: {} on {}{}; {}; {queue}",
            disk.directory.display(),
            disk.file_system,
            if disk.is_memory() { " (memory; name a disk with --disk-path)" } else { "" },
            allocator.capabilities(),
        ))?;
        Ok(Self {
            options,
            model,
            counts,
            patterns: Patterns {
                data: Pattern::new(options.seed).threads(threads),
                poison: Pattern::new(!options.seed).threads(threads),
            },
            threads,
            memory: SystemAllocator::new(memory).reporting_to(progress.clone()),
            gpu: gpu.ok(),
            progress,
            disk: allocator,
            manager: TransferManager::new(engines),
            disk_options,
        })
    }

    /// Runs all hops with all groups of the model, one group after the other.
    pub fn run(&self, console: &Console) -> Result<Vec<Hop>, Failure> {
        let groups = self.model.geometry.groups();
        let mut hops = Vec::new();
        for group in groups {
            let suffix = match groups {
                [_] => String::new(),
                _ => format!(" ({})", group.kind()),
            };
            hops.extend(self.run_group(group, &suffix, console)?);
        }
        Ok(hops)
    }

    fn run_group(
        &self,
        group: &CacheGroup,
        suffix: &str,
        console: &Console,
    ) -> Result<Vec<Hop>, Failure> {
        let mut stage = self.allocate(group, console)?;
        let mut random = Seeded::new(self.options.seed);
        self.fill(&mut stage, &mut random)?;

        let Stage { compute, host, disk, limits } = &mut stage;
        let mut hops = Vec::new();
        let mut hop = |from: &Tier, to: &mut Tier, limit| -> Result<(), Failure> {
            let name = format!("{} to {}{suffix}", from.name, to.name);
            let hop = self.hop(name, from, to, (limits, limit), &mut random, console)?;
            console.hop(&hop)?;
            hops.push(hop);
            Ok(())
        };
        let (out, home) = match self.gpu {
            Some(_) => (Limit::ToHost, Limit::ToDevice),
            None => (Limit::Memory, Limit::Memory),
        };
        hop(compute, host, out)?;
        hop(host, disk, Limit::DiskWrite)?;
        hop(disk, host, Limit::DiskRead)?;
        hop(host, compute, home)?;
        Ok(hops)
    }

    /// Allocates the tiers of a group. The disk tier is first, because its allocation fails
    /// quickly.
    fn allocate(&self, group: &CacheGroup, console: &Console) -> Result<Stage, Failure> {
        let Counts { moved, in_memory, on_disk } = self.counts;
        let config = group
            .layout_config(moved, self.options.page_size)
            .map_err(|error| invalid(self.model, error))?;
        console.note(format_args!(
            "\ngroup: {}, {} layers of {} × {} heads of {}; a block of {} tokens is {}",
            group.kind(),
            group.layers().len(),
            group.outer_dim(),
            group.heads(),
            group.head_dim(),
            config.page_size(),
            config.block_bytes(),
        ))?;
        let contiguous = LayoutKind::FullyContiguous;
        let disk = Tier::allocate("disk", &config, on_disk, contiguous, &self.disk)?;
        let stage = progress::while_allocating("memory is allocated", &self.progress, || {
            let bytes = config.total_bytes();
            let setup = Setup {
                threads: self.threads.get(),
                queue: &self.disk_options.queue,
                request: self.disk_options.request,
                bus: self.gpu.as_ref().map(|gpu| BusLimit::new(gpu, bytes)).transpose()?,
            };
            let limits = Limits::new(bytes, &self.memory, self.disk.directory(), setup)?;
            let memory = &self.memory;
            let (compute, host) = match &self.gpu {
                Some(gpu) => (
                    Tier::allocate("device", &config, in_memory, ON_COMPUTE, &gpu.memory)?
                        .with_host_copy(gpu, memory)?,
                    Tier::allocate("pinned", &config, in_memory, contiguous, &gpu.pinned)?,
                ),
                None => (
                    Tier::allocate("compute", &config, in_memory, ON_COMPUTE, memory)?,
                    Tier::allocate("host", &config, in_memory, contiguous, memory)?,
                ),
            };
            Ok::<_, Failure>(Stage { compute, host, disk, limits })
        })?;
        for tier in [&stage.compute, &stage.host, &stage.disk] {
            console.note(format_args!("  {}", tier.describe()))?;
        }
        console.note(format_args!(
            "  {moved} blocks are moved, {}; the others must not change",
            config.total_bytes()
        ))?;
        Ok(stage)
    }

    /// Writes poison everywhere, and then the computed blocks.
    fn fill(&self, stage: &mut Stage, random: &mut Seeded) -> Result<(), Failure> {
        let Stage { compute, host, disk, .. } = stage;
        compute.poison(&self.patterns)?;
        host.poison(&self.patterns)?;
        // Poison is written to the disk by the same transfers as blocks. This is the first pass
        // over blocks that the file system has only reserved.
        let all: Vec<u32> = (0..self.counts.on_disk).collect();
        let transfer = Transfer::new(&host.endpoint, &disk.endpoint).blocks(&all, &all);
        let submitted = Instant::now();
        let completion = self.manager.submit(transfer, ())?;
        let bytes = disk.endpoint.layout().geometry().total_bytes();
        progress::wait("poison to disk".to_owned(), bytes, completion, submitted).0.result?;
        disk.received_poison(host, &all);
        compute.compute(self.counts.moved(), &self.patterns, random)
    }

    fn hop(
        &self,
        name: String,
        from: &Tier,
        to: &mut Tier,
        (limits, limit): (&mut Limits, Limit),
        random: &mut Seeded,
        console: &Console,
    ) -> Result<Hop, Failure> {
        let (mut times, mut limit_times) = (Vec::new(), Vec::new());
        let (mut verified, mut path) = (true, String::new());
        let bytes = bytes_of(from, self.counts.moved)?;
        for round in 1..=self.options.rounds {
            let targets = to.choose(self.counts.moved(), random);
            let transfer = transfer(&from.endpoint, &to.endpoint).blocks(from.current(), &targets);
            if round == 1 {
                console.detail(format_args!("{name}: {}", self.manager.explain(&transfer)?))?;
            }
            let submitted = Instant::now();
            let completion = self.manager.submit(transfer, ())?;
            let message = format!("{name}, round {round}");
            let (outcome, took) = progress::wait(message, bytes, completion, submitted);
            let report = outcome.result?;
            console.detail(format_args!("  round {round}: {}", actual(&report)))?;
            to.received(from, targets);
            for result in to.verify(&self.patterns)? {
                if !result.is_clean() {
                    verified = false;
                    console.warn(format_args!("{name}, round {round}: {result}"))?;
                }
            }
            path = report.explanation.path().into_owned();
            times.push(took);
            limit_times.push(limits.measure(limit)?);
        }
        Ok(Hop {
            name,
            path,
            bytes,
            seconds: median(times),
            limit_seconds: median(limit_times),
            verified,
        })
    }
}

/// A transfer without blocks. No kernel runs on the device here, and all earlier copies to it have
/// completed.
fn transfer(from: &Endpoint, to: &Endpoint) -> Transfer {
    let transfer = Transfer::new(from, to);
    let is_device = |end: &Endpoint| matches!(end.kind(), StorageKind::Device(_));
    match is_device(from) || is_device(to) {
        true => transfer.device_order(DeviceOrder::AlreadySynchronised),
        false => transfer,
    }
}

/// The endpoints and patterns of the group that is moved.
struct Stage {
    compute: Tier,
    host: Tier,
    disk: Tier,
    limits: Limits,
}

/// The requested number of blocks, or as many as take a few seconds; never more than fit.
fn count_blocks(options: &Options, model: &Model) -> Result<Counts, Failure> {
    let (mut largest, mut all) = (1, 0_u64);
    for group in model.geometry.groups() {
        let config = group.layout_config(1, options.page_size).map_err(|e| invalid(model, e))?;
        let block = config.block_bytes().get();
        largest = largest.max(block);
        all = ByteCount::new(all).checked_add(config.block_bytes())?.get();
    }
    let available = machine::available_memory();
    // Each moved block needs memory of 7 blocks, rounded up.
    let fitting = available.map_or(u64::MAX, |bytes| bytes.get() / largest / 7);
    let moved = options.blocks.unwrap_or_else(|| {
        let few_seconds = DEFAULT_MOVED.get() / all.max(1);
        u32::try_from(few_seconds.min(fitting / 4).max(1)).unwrap_or(u32::MAX)
    });
    let counts = Counts::new(moved)?;
    let needed =
        ByteCount::product(&[("blocks", counts.peak_in_memory()), ("bytes a block", largest)])?;
    match available {
        Some(available) if needed > available => {
            Err(Failure::TooManyBlocks { blocks: moved, needed, available, fitting })
        }
        _ => Ok(counts),
    }
}

/// Describes the measured time and the prediction.
fn actual(report: &Report) -> String {
    let milliseconds = |duration: Duration| duration.as_secs_f64() * 1e3;
    format!(
        "{:.2} ms, {:.2} predicted, {:.3} in the queue: {:.2} GB/s",
        milliseconds(report.copied),
        milliseconds(report.explanation.predicted),
        milliseconds(report.queued),
        report.bytes_per_second() / 1e9,
    )
}

fn bytes_of(tier: &Tier, blocks: u32) -> Result<ByteCount, Failure> {
    let block = tier.endpoint.layout().geometry().block_bytes();
    Ok(block.checked_mul("blocks", blocks.into())?)
}

fn invalid(model: &Model, source: LayoutError) -> Failure {
    Failure::Model { name: model.name.clone(), source }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default().as_secs_f64()
}
