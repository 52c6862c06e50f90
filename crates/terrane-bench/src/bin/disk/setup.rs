//! A file and memory with the same blocks, and the engine that copies between them.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use terrane_core::{ByteCount, Region, Requirement};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
use terrane_storage::{
    DiskFile, DiskOptions, HugePages, IoQueueOptions, SystemAllocator, SystemOptions,
};
use terrane_transfer::engines::{DiskEngine, DiskEngineOptions};
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use crate::fio::{Method, Pass};
use crate::{Arguments, Case};

/// The size of the memory pages of both programs.
#[derive(Clone, Copy, Debug)]
pub enum Pages {
    Small,
    Huge,
}

impl Pages {
    fn options(self) -> HugePages {
        match self {
            Self::Small => HugePages::None,
            Self::Huge => HugePages::Transparent(Requirement::Required),
        }
    }

    /// The setting by which the C library's allocator requests transparent huge pages.
    pub const fn tunables(self) -> &'static str {
        match self {
            Self::Small => "",
            Self::Huge => "glibc.malloc.hugetlb=1",
        }
    }

    /// Returns the reason why fio's buffers cannot be on these pages, or `None` if they can.
    pub fn reason_against(self) -> Option<String> {
        let path = "/sys/kernel/mm/transparent_hugepage/enabled";
        let switch = std::fs::read_to_string(path).unwrap_or_else(|_| "[never]".to_owned());
        let is_wrong = match self {
            Self::Small => switch.contains("[always]"),
            Self::Huge => switch.contains("[never]"),
        };
        is_wrong.then(|| format!("{path} is {}: fio's buffers are on other pages", switch.trim()))
    }
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Small => "4 KiB pages",
            Self::Huge => "huge pages",
        })
    }
}

/// A file that is removed when this drops.
#[derive(Debug)]
struct TemporaryFile(PathBuf);

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A file and memory with the same blocks, and the engine that copies between them.
#[derive(Debug)]
pub struct Setup {
    manager: TransferManager,
    memory: Endpoint,
    disk: Endpoint,
    ids: Vec<u32>,
    path: TemporaryFile,
    block: u64,
    depth: u32,
    pages: Pages,
}

impl Setup {
    pub fn new(case: &Case, pages: Pages, arguments: &Arguments) -> Result<Self> {
        let (block, depth) = (case.block(), arguments.depth.max(1));
        // Each thread of fio copies the same number of blocks.
        let blocks = u32::try_from(ByteCount::mib(arguments.size_mib).get() / block)?;
        let blocks = blocks / depth * depth;
        ensure!(blocks > 0, "--size-mib has to be at least {depth} blocks of {block} bytes");
        let config = LayoutConfig::builder()
            .num_blocks(blocks)
            .num_layers(case.layers)
            .outer_dim(1)
            .page_size(16)
            .inner_dim(u32::try_from(case.piece / 32)?)
            .element(ElementFormat::Width(2))
            .build()?;

        let path = arguments.directory.join(format!("terrane-bench-{}", std::process::id()));
        let size = config.total_bytes();
        let file =
            DiskFile::create_new(&path, size, &DiskOptions::default()).with_context(|| {
                format!("cannot make a file of {size} in {:?}", arguments.directory)
            })?;
        let path = TemporaryFile(path);
        let region = Region::new(file).view(ByteCount::ZERO, size)?;
        let builder = LayoutBuilder::new(config).fully_contiguous().adopt([region]);
        let disk = Endpoint::new(builder.unregistered().build()?)?;

        let options = SystemOptions { huge_pages: pages.options(), ..SystemOptions::default() };
        let allocator = SystemAllocator::new(options);
        let builder = LayoutBuilder::new(config).kind(case.kind).allocate(&allocator);
        let memory = Endpoint::new(builder.unregistered().build()?)?;

        let options = DiskEngineOptions {
            queue: IoQueueOptions {
                depth,
                registered: ByteCount::gib(arguments.registered_gib),
                ..DiskEngineOptions::default().queue
            },
            request: ByteCount::new(block.next_multiple_of(4096)),
            ..DiskEngineOptions::default()
        };
        let manager = TransferManager::new([Arc::new(DiskEngine::new(&options)?) as _]);
        let ids = (0..blocks).collect();
        Ok(Self { manager, memory, disk, ids, path, block, depth, pages })
    }

    pub fn is_direct(&self) -> bool {
        let explained = self.manager.explain(&self.transfer(true));
        explained.is_ok_and(|explanation| explanation.path().starts_with("direct"))
    }

    fn bytes(&self) -> u64 {
        self.disk.layout().geometry().total_bytes().get()
    }

    /// The blocks are in reverse order in memory, so that each request is one block.
    fn transfer(&self, is_write: bool) -> Transfer {
        let backwards: Vec<u32> = self.ids.iter().rev().copied().collect();
        if is_write {
            Transfer::new(&self.memory, &self.disk).blocks(&backwards, &self.ids)
        } else {
            Transfer::new(&self.disk, &self.memory).blocks(&self.ids, &backwards)
        }
    }

    /// Copies the file's blocks once with the engine. Returns GB/s.
    pub fn pass(&self, is_write: bool) -> Result<f64> {
        let begun = Instant::now();
        let submitted = self.manager.submit(self.transfer(is_write), ());
        let completion = submitted.map_err(|rejected| anyhow!(rejected.cause))?;
        completion.wait().result.context("the transfer failed")?;
        Ok(self.bytes() as f64 / begun.elapsed().as_secs_f64() / 1e9)
    }

    /// Copies the same blocks once with fio. Returns GB/s.
    pub fn fio(&self, method: Method, is_write: bool) -> Result<f64> {
        let Self { path: TemporaryFile(path), block, depth, pages, .. } = self;
        let (block, depth, pages) = (*block, *depth, *pages);
        Pass { path, is_write, block, bytes: self.bytes(), depth, pages }.run(method)
    }
}
