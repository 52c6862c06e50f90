//! Copies between host memory and files, beside fio with the same requests on the same file.
//!
//! Where the disk is fast, most of the difference that one sees at first is not in the queue: it
//! is in the pages of the buffers, as a request of 1 MiB has one segment in huge pages and 256 in
//! small ones. So fio is run twice: as it comes, which is the baseline with a target, and with huge
//! pages for its buffers too, which shows what is left between the queues.

#![forbid(unsafe_code)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};
use clap::Parser;
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread, run};
use terrane_core::{ByteCount, Memory, Region};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_storage::{DiskFile, DiskOptions, IoQueueOptions, SystemAllocator, SystemOptions};
use terrane_transfer::engines::{DiskEngine, DiskEngineOptions};
use terrane_transfer::{Endpoint, Transfer, TransferManager};

/// Measures copies between host memory and files.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// The directory of the file; the disk that it is on is measured
    #[arg(long, default_value = "target")]
    directory: PathBuf,
    /// How much is moved in each case, in MiB
    #[arg(long, default_value_t = 1024)]
    size_mib: u32,
    /// How many requests are in flight
    #[arg(long, default_value_t = 32)]
    depth: u32,
}

/// One shape of blocks and requests.
struct Case {
    name: &'static str,
    layers: u32,
    piece: u64,
    kind: LayoutKind,
    /// The share of fio's rate to be reached.
    target: f64,
}

/// A block is one request: of 1 MiB and 4 MiB in one piece, and of the 61 pieces of a block of a
/// model with latent attention, which lie apart in memory and together in the file.
const CASES: [Case; 3] = [
    Case {
        name: "blocks of 1 MiB",
        layers: 1,
        piece: 1 << 20,
        kind: LayoutKind::FullyContiguous,
        target: 0.95,
    },
    Case {
        name: "blocks of 4 MiB",
        layers: 1,
        piece: 4 << 20,
        kind: LayoutKind::FullyContiguous,
        target: 0.95,
    },
    Case {
        name: "blocks of 61 pieces of 18,432 bytes",
        layers: 61,
        piece: 18_432,
        kind: LayoutKind::ALL[1],
        target: 0.90,
    },
];

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    run("disk", &arguments.settings, |settings, reporter| {
        for case in &CASES {
            measure(case, &arguments, settings, reporter)?;
        }
        Ok(())
    })
}

fn measure<W: Write>(
    case: &Case,
    arguments: &Arguments,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    if !reporter.wants(case.name) {
        return Ok(());
    }
    if let Err(reason) = Command::new("fio").arg("--version").output() {
        reporter.skip(case.name, &format!("fio, the baseline, cannot be run: {reason}"));
        return Ok(());
    }
    let rig = Rig::new(case, arguments)?;
    if !rig.is_direct() {
        reporter.skip(case.name, "the file system has no direct I/O for these blocks");
        return Ok(());
    }
    // The first pass writes what was only reserved, and does not count; nor do those in which the
    // engine measures which way is faster.
    for is_write in [true, false, true, false, true, false, true, false] {
        rig.pass(is_write)?;
    }
    for is_write in [true, false] {
        let (mut ours, mut huge, mut plain) = (Vec::new(), Vec::new(), Vec::new());
        // In turns, and the first of each turn by turns: disks remember.
        for round in 0..settings.repeats.max(1) {
            if round % 2 == 0 {
                ours.push(rig.pass(is_write)?);
                huge.push(rig.fio(is_write, Pages::Huge)?);
            } else {
                huge.push(rig.fio(is_write, Pages::Huge)?);
                ours.push(rig.pass(is_write)?);
            }
            plain.push(rig.fio(is_write, Pages::AsItComes)?);
        }
        let spread = |rates: &[f64]| Spread::of(rates).unwrap_or(Spread::single(f64::NAN));
        let direction = if is_write { "write" } else { "read" };
        let name = format!("{direction} {}, depth {}", case.name, arguments.depth);
        let measured = Measurement::new(name, spread(&ours), "GB/s", Direction::HigherIsBetter);
        let beside_plain = measured.clone().beside("fio", spread(&plain).median);
        reporter.report(&beside_plain.at_least(case.target))?;
        reporter.report(&measured.beside("fio, huge pages", spread(&huge).median))?;
    }
    Ok(())
}

/// A file and memory of the same blocks, and what moves them.
struct Rig {
    manager: TransferManager,
    memory: Endpoint,
    disk: Endpoint,
    ids: Vec<u32>,
    path: TemporaryFile,
    block: u64,
    depth: u32,
}

/// The pages of fio's buffers.
#[derive(Clone, Copy)]
enum Pages {
    AsItComes,
    Huge,
}

impl Pages {
    /// The C library's allocator asks for transparent huge pages if it is told to.
    const fn tunables(self) -> &'static str {
        match self {
            Self::AsItComes => "",
            Self::Huge => "glibc.malloc.hugetlb=1",
        }
    }
}

struct TemporaryFile(PathBuf);

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Rig {
    fn new(case: &Case, arguments: &Arguments) -> Result<Self> {
        let block = case.piece * u64::from(case.layers);
        let blocks = u32::try_from(ByteCount::mib(arguments.size_mib).get() / block)?;
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

        let allocator = SystemAllocator::new(SystemOptions::default());
        let builder = LayoutBuilder::new(config).kind(case.kind).allocate(&allocator);
        let memory = Endpoint::new(builder.unregistered().build()?)?;

        let options = DiskEngineOptions {
            queue: IoQueueOptions { depth: arguments.depth, ..DiskEngineOptions::default().queue },
            request: ByteCount::new(block.next_multiple_of(4096)),
            ..DiskEngineOptions::default()
        };
        let manager = TransferManager::new([Arc::new(DiskEngine::new(&options)?) as _]);
        let ids = (0..blocks).collect();
        Ok(Self { manager, memory, disk, ids, path, block, depth: arguments.depth })
    }

    fn is_direct(&self) -> bool {
        let explained = self.manager.explain(&self.transfer(true));
        explained.is_ok_and(|explanation| explanation.path.starts_with("direct"))
    }

    /// The blocks in memory are in reverse, so that one request is one block.
    fn transfer(&self, is_write: bool) -> Transfer {
        let backwards: Vec<u32> = self.ids.iter().rev().copied().collect();
        if is_write {
            Transfer::new(&self.memory, &self.disk).blocks(&backwards, &self.ids)
        } else {
            Transfer::new(&self.disk, &self.memory).blocks(&self.ids, &backwards)
        }
    }

    /// One pass over the file by the engine; GB/s.
    fn pass(&self, is_write: bool) -> Result<f64> {
        let begun = Instant::now();
        let submitted = self.manager.submit(self.transfer(is_write), ());
        let completion = submitted.map_err(|rejected| anyhow!(rejected.cause))?;
        completion.wait().result.context("the transfer failed")?;
        Ok(self.disk.layout().config().total_bytes().get() as f64
            / begun.elapsed().as_secs_f64()
            / 1e9)
    }

    /// The same pass by fio; GB/s.
    fn fio(&self, is_write: bool, pages: Pages) -> Result<f64> {
        let Self { path: TemporaryFile(path), block, depth, .. } = self;
        let direction = if is_write { "write" } else { "read" };
        let size = self.disk.layout().regions().iter().map(|r| r.length().get()).sum::<u64>();
        let output = Command::new("fio")
            .args(["--name=pass", "--ioengine=io_uring", "--direct=1", "--overwrite=1"])
            .args(["--output-format=json", &format!("--rw={direction}")])
            .args([format!("--bs={block}"), format!("--iodepth={depth}"), format!("--size={size}")])
            .arg(format!("--filename={}", Path::display(path)))
            .env("GLIBC_TUNABLES", pages.tunables())
            .output()
            .context("fio cannot be run")?;
        if !output.status.success() {
            bail!("fio failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        let report: serde_json::Value =
            serde_json::from_slice(&output.stdout).context("fio's report cannot be read")?;
        let rate = &report["jobs"][0][direction]["bw_bytes"];
        Ok(rate.as_f64().context("fio's report has no rate")? / 1e9)
    }
}
