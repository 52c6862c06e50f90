//! Transfers through bounce memory, compared with their two hops at once and each hop alone.
//!
//! The transfers copy between files and memory that reports itself as pinned, through system memory
//! on huge pages, with the disk and the host engine. Slots on small pages would make direct I/O slow,
//! because each page becomes a segment of a disk request.
//!
//! Both hops share the processors and the memory. So the baseline runs both hops at once, with the
//! same number of bytes, and neither waits for the other. The disk engine copies between the file and
//! memory with the layout of the slots. The host engine copies between that memory and other memory.
//! The difference to this baseline is the overhead of the relay. The slower hop alone is the limit of
//! hops that share nothing, such as those of a device and a disk.

#![forbid(unsafe_code)]

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use clap::Parser;
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread, run};
use terrane_core::ByteCount;
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_storage::{DiskAllocator, DiskOptions, SystemAllocator, SystemOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
};
use terrane_transfer::{Completion, Endpoint, Transfer, TransferManager};

/// Measures transfers through bounce memory.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// The directory of the file; its disk is measured
    #[arg(long, default_value = "target")]
    directory: PathBuf,
    /// The size of the copies of each case, in MiB
    #[arg(long, default_value_t = 1024)]
    size_mib: u32,
    /// The size of a bounce slot, in MiB
    #[arg(long, default_value_t = 16)]
    slot_mib: u32,
    /// The number of bounce slots
    #[arg(long, default_value_t = 8)]
    slots: usize,
}

/// The minimum share of the rate of both hops at once.
const TARGET: f64 = 0.95;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    run("relay", &arguments.settings, |settings, reporter| measure(&arguments, settings, reporter))
}

fn measure<W: Write>(
    arguments: &Arguments,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    const NAME: &str = "blocks of 32 layers of 64 KiB";
    if !reporter.wants(NAME) {
        return Ok(());
    }
    let setup = Setup::new(arguments)?;
    // The passes of this loop are not measured. They write the reserved disk blocks for the first
    // time and touch the memory, and the engines measure which method is faster.
    for is_write in [true, false, true, false, true, false] {
        for way in Way::ALL {
            setup.pass(way, is_write)?;
        }
    }
    for is_write in [true, false] {
        let mut rates = [const { Vec::new() }; Way::ALL.len()];
        // The order rotates from round to round, because a pass changes the state of the disk for
        // the next one.
        for round in 0..settings.repeats.max(1) {
            let mut order: Vec<_> = rates.iter_mut().zip(Way::ALL).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for (rates, way) in order {
                rates.push(setup.pass(way, is_write)?);
            }
        }
        let spreads = rates.map(|rates| Spread::of(&rates).unwrap_or(Spread::single(f64::NAN)));
        let [relayed, both, disk, host] = spreads;
        let slower = match disk.median < host.median {
            true => ("disk hop alone", disk.median),
            false => ("host hop alone", host.median),
        };
        let direction = if is_write { "to the file" } else { "from the file" };
        let measured = |way: &str, spread| {
            let name = format!("{way} {direction}, {NAME}");
            Measurement::new(name, spread, "GB/s", Direction::HigherIsBetter)
        };
        let is_relayed =
            measured("relayed", relayed).with_baseline("both hops at once", both.median);
        reporter.report(&is_relayed.at_least(TARGET))?;
        let both = measured("both hops at once", both).with_baseline(slower.0, slower.1);
        reporter.report(&both.without_target("the baseline of the row before"))?;
    }
    Ok(())
}

/// The engine of a pass.
#[derive(Clone, Copy)]
enum Way {
    Relayed,
    BothAtOnce,
    DiskAlone,
    HostAlone,
}

impl Way {
    const ALL: [Self; 4] = [Self::Relayed, Self::BothAtOnce, Self::DiskAlone, Self::HostAlone];
}

/// A file and memory with the same blocks, and the engines that copy between them.
struct Setup {
    relayed: TransferManager,
    disk_alone: TransferManager,
    host_alone: TransferManager,
    memory: Endpoint,
    disk: Endpoint,
    /// Memory with the layouts of the file and of the slots, one for each hop.
    others: [Endpoint; 2],
    ids: Vec<u32>,
}

impl Setup {
    fn new(arguments: &Arguments) -> Result<Self> {
        let config = LayoutConfig::builder()
            .num_blocks(arguments.size_mib / 2)
            .num_layers(32)
            .outer_dim(2)
            .page_size(16)
            .inner_dim(1024)
            .element(ElementFormat::Width(2))
            .build()?;
        let files = DiskAllocator::new(&arguments.directory, DiskOptions::default())
            .with_context(|| format!("cannot make a file in {:?}", arguments.directory))?;
        let builder = LayoutBuilder::new(config).fully_contiguous().allocate(&files);
        let disk = Endpoint::new(builder.unregistered().build()?)?;
        let system = SystemAllocator::new(SystemOptions::default());
        // The slots need the page size of real pinned memory, which is huge.
        let pinned = HeapAllocator::pinned();
        let builder = LayoutBuilder::new(config).kind(LayoutKind::ALL[1]).allocate(&pinned);
        let memory = Endpoint::new(builder.unregistered().build()?)?;

        let other = || -> Result<Endpoint> {
            let builder = LayoutBuilder::new(config).fully_contiguous().allocate(&system);
            Ok(Endpoint::new(builder.unregistered().build()?)?)
        };
        let others = [other()?, other()?];

        let disk_engine = Arc::new(DiskEngine::new(&DiskEngineOptions::default())?);
        let host_engine = Arc::new(HostEngine::new(HostEngineOptions::default())?);
        let options =
            RelayOptions { slot_bytes: ByteCount::mib(arguments.slot_mib), slots: arguments.slots };
        let relay = RelayEngine::new(disk_engine, host_engine, system, &options)?;
        // Separate engines, because each engine learns from its transfers.
        let disk_alone = DiskEngine::new(&DiskEngineOptions::default())?;
        let host_alone = HostEngine::new(HostEngineOptions::default())?;
        Ok(Self {
            relayed: TransferManager::new([Arc::new(relay) as _]),
            disk_alone: TransferManager::new([Arc::new(disk_alone) as _]),
            host_alone: TransferManager::new([Arc::new(host_alone) as _]),
            memory,
            disk,
            others,
            ids: (0..config.num_blocks()).collect(),
        })
    }

    /// Copies the blocks once. Returns GB/s.
    fn pass(&self, way: Way, is_write: bool) -> Result<f64> {
        let Self { relayed, disk_alone, host_alone, memory, disk, others, .. } = self;
        let [of_disk, of_host] = others;
        let by_disk = (disk_alone, of_disk, disk);
        let by_host = (host_alone, memory, of_host);
        let begun = Instant::now();
        let submitted = match way {
            Way::Relayed => vec![self.submit((relayed, memory, disk), is_write)?],
            Way::BothAtOnce => {
                vec![self.submit(by_disk, is_write)?, self.submit(by_host, is_write)?]
            }
            Way::DiskAlone => vec![self.submit(by_disk, is_write)?],
            Way::HostAlone => vec![self.submit(by_host, is_write)?],
        };
        for completion in submitted {
            completion.wait().result.context("the transfer failed")?;
        }
        let bytes = self.disk.layout().geometry().total_bytes().get();
        Ok(bytes as f64 / begun.elapsed().as_secs_f64() / 1e9)
    }

    /// Submits a pass to the file if `is_write`, otherwise from the file.
    fn submit(
        &self,
        (manager, memory, other): (&TransferManager, &Endpoint, &Endpoint),
        is_write: bool,
    ) -> Result<Completion<()>> {
        let (from, to) = if is_write { (memory, other) } else { (other, memory) };
        let transfer = Transfer::new(from, to).blocks(&self.ids, &self.ids);
        manager.submit(transfer, ()).map_err(|rejected| anyhow!(rejected.cause))
    }
}
