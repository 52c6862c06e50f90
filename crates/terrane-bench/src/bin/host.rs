//! Copies within host memory, compared with memcpy, and the allocation rate of system memory.

#![forbid(unsafe_code)]

use std::io::Write;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, anyhow};
use clap::Parser;
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread, run};
use terrane_core::{Alignment, ByteCount, RegionRequest};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_storage::{FirstTouch, HugePages, SystemAllocator, SystemMemory, SystemOptions};
use terrane_testkit::memory::FilledMemory;
use terrane_transfer::engines::{HostEngine, HostEngineOptions};
use terrane_transfer::{Endpoint, Transfer, TransferManager};

/// Measures copies within host memory.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// The number of threads that copy, in Terrane and in the baseline; default: all processors of
    /// this process
    #[arg(long)]
    threads: Option<NonZeroUsize>,
    /// The size of the allocated memory, in MiB
    #[arg(long, default_value_t = 4096)]
    bring_up_mib: u32,
}

/// The bytes of each case.
const MOVED: ByteCount = ByteCount::mib(256);

/// Scattered pieces have to reach this share of one contiguous memcpy.
const LEAST_SHARE: f64 = 0.90;

/// The time of one submitted block, including the wait, may be 1.3 times that of its memcpy.
const LEAST_SHARE_OF_ONE_BLOCK: f64 = 1.0 / 1.3;

/// The minimum speedup of two threads over one when they allocate memory.
const LEAST_SPEED_UP: f64 = 1.6;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    run("host", &arguments.settings, |settings, reporter| {
        let available = thread::available_parallelism()?;
        let threads = arguments.threads.unwrap_or(available);
        for piece in [ByteCount::kib(4), ByteCount::new(18_432), ByteCount::kib(32)] {
            for (name, kinds) in [
                ("layer separate to fully contiguous", [LayoutKind::ALL[2], LayoutKind::ALL[0]]),
                ("fully contiguous to layer separate", [LayoutKind::ALL[0], LayoutKind::ALL[2]]),
            ] {
                // Smaller pieces are only reported. Larger ones have to reach the target.
                let target = (piece == ByteCount::kib(32)).then_some(LEAST_SHARE);
                copies(name, piece, kinds, threads, target, settings, reporter)?;
            }
        }
        small_transfer(settings, reporter)?;
        bring_up(ByteCount::mib(arguments.bring_up_mib), available, settings, reporter)
    })
}

fn copies<W: Write>(
    name: &str,
    piece: ByteCount,
    kinds: [LayoutKind; 2],
    threads: NonZeroUsize,
    target: Option<f64>,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    const LAYERS: u32 = 32;
    let a_block = piece.get() * 2 * u64::from(LAYERS);
    let blocks = u32::try_from(MOVED.get() / a_block)?;
    let bytes = u64::from(blocks) * a_block;
    let case = format!("{MOVED} in pieces of {piece}, {name}, {threads} threads");
    if !reporter.wants(&case) {
        return Ok(());
    }
    let [source, destination] =
        [endpoint(kinds[0], blocks, LAYERS, piece)?, endpoint(kinds[1], blocks, LAYERS, piece)?];
    let options = HostEngineOptions { threads, ..HostEngineOptions::default() };
    let manager = TransferManager::new([Arc::new(HostEngine::new(options)?) as _]);
    let from: Vec<u32> = (0..blocks).map(|n| (n * 7 + 3) % blocks).collect();
    let to: Vec<u32> = (0..blocks).map(|n| (n * 5 + 1) % blocks).collect();
    let (read, mut written) = (one_piece(bytes)?, one_piece(bytes)?);

    let mut moved = Ok(());
    let (terrane, memcpy) = settings.time_interleaved(
        || keep_failure(&mut moved, move_blocks(&manager, &source, &destination, &from, &to)),
        || copy_in_parts(&read, &mut written, threads),
    );
    moved?;
    let gigabytes = bytes as f64 * 1e-9;
    let higher = Direction::HigherIsBetter;
    let measured = Measurement::new(case, terrane.rate(gigabytes), "GB/s", higher)
        .with_baseline("memcpy of one piece", memcpy.rate(gigabytes).median);
    reporter.report(&match target {
        Some(share) => measured.at_least(share),
        None => measured.without_target("a copy of a short piece costs more a byte than memcpy"),
    })?;
    Ok(())
}

/// Measures a transfer of one block, from submit to the end of the wait.
fn small_transfer<W: Write>(settings: &Settings, reporter: &mut Reporter<W>) -> Result<()> {
    let piece = ByteCount::kib(32);
    let [source, destination] =
        [endpoint(LayoutKind::ALL[2], 4, 32, piece)?, endpoint(LayoutKind::ALL[0], 4, 32, piece)?];
    let engine = HostEngine::new(HostEngineOptions::default())?;
    let manager = TransferManager::new([Arc::new(engine) as _]);
    let bytes = 64 * piece.get();
    let (read, mut written) = (one_piece(bytes)?, one_piece(bytes)?);
    let mut moved = Ok(());
    let (terrane, memcpy) = settings.time_interleaved(
        || keep_failure(&mut moved, move_blocks(&manager, &source, &destination, &[1], &[2])),
        || written.copy_from_slice(&read),
    );
    moved?;
    let case = "one block of 2 MiB, submitted and waited for";
    let lower = Direction::LowerIsBetter;
    let measured = Measurement::new(case, terrane.scaled(1e6), "us", lower);
    let measured = measured.with_baseline("memcpy in place", memcpy.scaled(1e6).median);
    reporter.report(&measured.at_least(LEAST_SHARE_OF_ONE_BLOCK))?;
    Ok(())
}

fn move_blocks(
    manager: &TransferManager,
    source: &Endpoint,
    destination: &Endpoint,
    from: &[u32],
    to: &[u32],
) -> Result<()> {
    let transfer = Transfer::new(source, destination).blocks(from, to);
    let completion = manager.submit(transfer, ()).map_err(|rejected| anyhow!(rejected.cause))?;
    completion.wait().result.context("the transfer failed")?;
    Ok(())
}

fn endpoint(kind: LayoutKind, blocks: u32, layers: u32, piece: ByteCount) -> Result<Endpoint> {
    let config = LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(layers)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(u32::try_from(piece.get() / 32)?)
        .element(ElementFormat::Width(2))
        .build()?;
    let allocator = SystemAllocator::new(SystemOptions::default());
    let layout = LayoutBuilder::new(config).kind(kind).allocate(&allocator);
    Ok(Endpoint::new(layout.unregistered().build()?)?)
}

/// The first failure is the result of a case.
fn keep_failure(first: &mut Result<()>, next: Result<()>) {
    if first.is_ok() {
        *first = next;
    }
}

/// Memory for the baseline, from the same allocator as the blocks: with other pages, memcpy would
/// have another rate. Every page is touched.
fn one_piece(bytes: u64) -> Result<FilledMemory<SystemMemory>> {
    let allocator = SystemAllocator::new(SystemOptions::default());
    Ok(FilledMemory::new(&allocator, ByteCount::new(bytes), 1)?)
}

/// The baseline: each thread copies one contiguous part by memcpy.
fn copy_in_parts(source: &[u8], destination: &mut [u8], threads: NonZeroUsize) {
    let part = source.len().div_ceil(threads.get());
    thread::scope(|scope| {
        for (to, from) in destination.chunks_mut(part).zip(source.chunks(part)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
}

/// Measures the allocation of system memory by all threads and by one.
fn bring_up<W: Write>(
    bytes: ByteCount,
    threads: NonZeroUsize,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let case = format!("bring {bytes} of system memory up, {threads} threads");
    if !reporter.wants(&case) {
        return Ok(());
    }
    if threads.get() < 2 {
        reporter.skip(&case, "this process may use one processor only");
        return Ok(());
    }
    // Fewer repeats, because each takes a large part of a second.
    let settings = Settings { warm_up: 1, repeats: settings.repeats.min(5), ..settings.clone() };
    for (pages, huge_pages) in
        [("default pages", SystemOptions::default().huge_pages), ("4 KiB pages", HugePages::None)]
    {
        let up = |threads| {
            let first_touch = FirstTouch::Threads(threads);
            let options = SystemOptions { huge_pages, first_touch, ..SystemOptions::default() };
            let request = RegionRequest::new(bytes).aligned_to(Alignment::PAGE);
            SystemAllocator::new(options).allocate_memory(&request)
        };
        let (many, one) = settings.time_interleaved(|| up(threads), || up(NonZeroUsize::MIN));
        up(threads)?;
        let gigabytes = bytes.get() as f64 * 1e-9;
        let higher = Direction::HigherIsBetter;
        let rate: Spread = many.rate(gigabytes);
        let measured = Measurement::new(format!("{case}, {pages}"), rate, "GB/s", higher);
        let measured = measured.with_baseline("1 thread", one.rate(gigabytes).median);
        reporter.report(&measured.at_least(LEAST_SPEED_UP))?;
    }
    Ok(())
}
