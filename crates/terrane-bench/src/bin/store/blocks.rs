//! A get and a put of 64 blocks.

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::ByteCount;
use terrane_storage::{
    DiskFile, DiskOptions, IoBuffer, IoFile, IoQueue, IoQueueOptions, IoRequest,
};
use terrane_store::Store;
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use crate::file_tier::FileTier;
use crate::memory::{self, JOB};
use crate::{Arguments, fio};

/// The minimum share of the disk engine's rate.
const TARGET: f64 = 0.98;

/// The capacity of the store and of the baselines' file, in jobs.
const JOBS: u32 = 4;

pub fn measure<W: Write>(
    block: u32,
    arguments: &Arguments,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let name = |is_write: bool| {
        let verb = if is_write { "put" } else { "get" };
        format!("{verb} of {JOB} blocks of {} MiB", block >> 20)
    };
    if ![true, false].iter().any(|&is_write| reporter.wants(&name(is_write))) {
        return Ok(());
    }
    let folder = tempfile::tempdir_in(&arguments.directory)?;
    let mut setup = Setup::new(folder.path(), block)?;
    // The first passes write the reserved disk blocks for the first time. Then the engine measures
    // which method is faster.
    for _ in 0..2 * JOBS {
        for way in Way::ALL {
            setup.pass(way, true)?;
            setup.pass(way, false)?;
        }
    }
    for is_write in [true, false] {
        if reporter.wants(&name(is_write)) {
            setup.compare(&name(is_write), is_write, settings, reporter)?;
        }
    }
    Ok(())
}

/// The implementation that copies the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Store,
    Engine,
    Queue,
    FileTier,
}

impl Way {
    const ALL: [Self; 4] = [Self::Store, Self::Engine, Self::Queue, Self::FileTier];

    /// The index in [`ALL`](Self::ALL).
    const fn index(self) -> usize {
        match self {
            Self::Store => 0,
            Self::Engine => 1,
            Self::Queue => 2,
            Self::FileTier => 3,
        }
    }
}

struct Setup {
    store: Store,
    memory: Endpoint,
    ids: Vec<u32>,
    /// The keys of the last put, and the number of puts.
    keys: Vec<[u8; 36]>,
    puts: u64,
    manager: TransferManager,
    file: Endpoint,
    queue: RawQueue,
    file_tier: FileTier,
    path: std::path::PathBuf,
    block: u32,
    /// The part of the file that each implementation wrote last. Reads need written blocks, because
    /// a disk does not read the others: they are zeros.
    parts: [u32; Way::ALL.len()],
}

impl Setup {
    fn new(folder: &Path, block: u32) -> Result<Self> {
        let memory = memory::memory(JOB, block)?;
        let path = folder.join("file");
        let file = memory::file(&path, JOB * JOBS, block)?;
        Ok(Self {
            store: memory::disk_store(folder, &memory, JOB * JOBS)?,
            ids: (0..JOB).collect(),
            keys: Vec::new(),
            puts: 0,
            manager: memory::manager()?,
            queue: RawQueue::new(&path, &memory, block)?,
            file_tier: FileTier::new(&folder.join("tier"), block, JOB)?,
            memory,
            file,
            path,
            block,
            parts: [0; Way::ALL.len()],
        })
    }

    fn bytes(&self) -> u64 {
        u64::from(self.block) * u64::from(JOB)
    }

    /// Runs one job and returns its time in seconds.
    fn pass(&mut self, way: Way, is_write: bool) -> Result<f64> {
        let part = &mut self.parts[way.index()];
        *part = (*part + u32::from(is_write)) % JOBS;
        let first = *part * JOB;
        let begun;
        match way {
            Way::Store if is_write => {
                self.puts += 1;
                self.keys = memory::keys(self.puts, JOB);
                begun = Instant::now();
                memory::put(&self.store, &self.keys, &self.memory, &self.ids)?;
            }
            Way::Store => {
                begun = Instant::now();
                memory::get(&self.store, &self.keys, &self.memory, &self.ids)?;
            }
            Way::Engine => {
                let there: Vec<u32> = (first..first + JOB).collect();
                begun = Instant::now();
                let transfer = if is_write {
                    Transfer::new(&self.memory, &self.file).blocks(&self.ids, &there)
                } else {
                    Transfer::new(&self.file, &self.memory).blocks(&there, &self.ids)
                };
                let completion = self.manager.submit(transfer, ());
                completion.map_err(|rejected| anyhow!(rejected.cause))?.wait().result?;
            }
            Way::Queue => {
                begun = Instant::now();
                self.queue.pass(is_write, first)?;
            }
            Way::FileTier => {
                begun = Instant::now();
                self.file_tier.pass(is_write)?;
            }
        }
        Ok(begun.elapsed().as_secs_f64())
    }

    fn compare<W: Write>(
        &mut self,
        name: &str,
        is_write: bool,
        settings: &Settings,
        reporter: &mut Reporter<W>,
    ) -> Result<()> {
        let mut seconds = [const { Vec::new() }; Way::ALL.len()];
        for round in 0..usize::try_from(settings.repeats.max(1))? {
            // The order rotates from round to round, because a pass changes the state of the disk
            // for the next one.
            for index in 0..Way::ALL.len() {
                let index = (index + round) % Way::ALL.len();
                seconds[index].push(self.pass(Way::ALL[index], is_write)?);
            }
        }
        let gigabytes = self.bytes() as f64 / 1e9;
        let [ours, others @ ..] = &seconds;
        let rate = |seconds: &[f64]| {
            Spread::of(seconds).unwrap_or(Spread::single(f64::NAN)).rate(gigabytes)
        };
        // The median of the ratios of consecutive passes, because the rate of the disk changes over
        // time.
        let share = |theirs: &[f64]| {
            let ratios: Vec<f64> = theirs.iter().zip(ours).map(|(a, b)| a / b).collect();
            Spread::of(&ratios).unwrap_or(Spread::single(f64::NAN))
        };
        let row = |suffix: &str, value, unit| {
            let case = format!("{name}{suffix}");
            Measurement::new(case, value, unit, Direction::HigherIsBetter)
        };
        let [engine, queue, tier] = others;
        let first = row("", share(engine), "of the engine").with_baseline("disk engine alone", 1.0);
        reporter.report(&first.at_least(TARGET))?;
        for (suffix, seconds, baseline) in [
            (": rate", engine, "disk engine alone"),
            (": rate compared with the queue", queue, "queue of requests alone"),
            (": rate compared with a file tier", tier, "file a block, thread a request"),
        ] {
            let row = row(suffix, rate(ours), "GB/s").with_baseline(baseline, rate(seconds).median);
            reporter.report(&row.without_target("the rates behind the share of the engine"))?;
        }
        let suffix = ": rate compared with fio";
        if let Some(reason) = fio::reason_against() {
            reporter.skip(&format!("{name}{suffix}"), &reason);
            return Ok(());
        }
        let passes: Result<Vec<f64>> =
            (0..3).map(|_| fio::pass(&self.path, is_write, self.block, self.bytes())).collect();
        let fio = Spread::of(&passes?).context("fio was not run")?;
        let row = row(suffix, rate(ours), "GB/s").with_baseline("fio, io_uring", fio.median);
        Ok(reporter.report(&row.without_target("the rates behind the share of the engine"))?)
    }
}

/// A queue with one request for each block, and no other layer.
struct RawQueue {
    /// Drops before the memory and the file of its requests.
    queue: IoQueue,
    file: DiskFile,
    memory: Endpoint,
    block: u32,
}

impl RawQueue {
    fn new(path: &Path, memory: &Endpoint, block: u32) -> Result<Self> {
        let file = DiskFile::open_existing(path, ByteCount::ZERO, &DiskOptions::default())?;
        let queue = IoQueue::new(&IoQueueOptions::default())?;
        Ok(Self { queue, file, memory: memory.clone(), block })
    }

    #[expect(unsafe_code, reason = "the queue uses memory that the endpoint owns")]
    fn pass(&mut self, is_write: bool, first: u32) -> Result<()> {
        let handle = self.file.handle();
        let file = IoFile::direct(&handle).unwrap_or(IoFile::buffered(&handle));
        let base = self.memory.bases().first().and_then(|base| base.as_host());
        let base = base.context("no host memory")?;
        let block = ByteCount::new(self.block.into());
        let (mut next, mut completions) = (0, Vec::new());
        while next < JOB || self.queue.in_flight() > 0 {
            while next < JOB && self.queue.has_room() {
                let at = |index: u32| block.checked_mul("blocks", index.into());
                let address = base.checked_add(at(next)?).context("outside memory")?;
                let buffers = [IoBuffer { address, length: block }];
                let offset = at(first + next)?;
                let request = if is_write {
                    IoRequest::write(next.into(), file, offset, &buffers)
                } else {
                    IoRequest::read(next.into(), file, offset, &buffers)
                };
                // SAFETY: the endpoint owns the memory, nothing else uses it during this pass, and
                // the loop ends when all requests have completed.
                unsafe { self.queue.submit(&request) }?;
                next += 1;
            }
            self.queue.wait(None, &mut completions)?;
            for completion in completions.drain(..) {
                completion.outcome?;
            }
        }
        Ok(())
    }
}
