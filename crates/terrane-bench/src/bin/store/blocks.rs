//! A get and a put of 64 blocks.
//!
//! The disk engine, the queue and fio use the slab file of the store, because the place of a file on
//! the disk decides up to 10 % of a rate. Their writes damage the blocks of the store, so a put
//! precedes each measurement.

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

/// The number of folders that the passes are divided among, for several places on the disk.
const FOLDERS: u32 = 5;

/// The bytes that the pairs with the disk engine move in a repeat. A pair spreads by 10 %, so the
/// median of 400 pairs is within 1 % of the true one.
const BYTES_OF_A_REPEAT: u64 = 1 << 30;

/// The implementations that the store is compared with, and the names of their rows.
const BASELINES: [(Way, &str, &str); 3] = [
    (Way::Engine, ": rate", "disk engine alone"),
    (Way::Queue, ": rate compared with the queue", "queue of requests alone"),
    (Way::FileTier, ": rate compared with a file tier", "file a block, thread a request"),
];

/// The times of the store and of a baseline, pair by pair, in seconds.
#[derive(Default)]
struct Pairs {
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

/// The times of one direction.
#[derive(Default)]
struct Times {
    pairs: [Pairs; BASELINES.len()],
    fio: Vec<f64>,
}

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
    let mut cases = Vec::from([true, false].map(|is_write| (is_write, Times::default())));
    cases.retain(|&(is_write, _)| reporter.wants(&name(is_write)));
    if cases.is_empty() {
        return Ok(());
    }
    let folders = settings.repeats.clamp(1, FOLDERS);
    let no_fio = fio::reason_against();
    for _ in 0..folders {
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
        let repeats = settings.repeats.div_ceil(folders);
        for (is_write, times) in &mut cases {
            setup.pass(Way::Store, true)?;
            for (pairs, (way, ..)) in times.pairs.iter_mut().zip(BASELINES) {
                let count = if way == Way::Engine { setup.pairs_of_a_repeat() } else { 1 };
                setup.compare(way, *is_write, repeats.saturating_mul(count), pairs)?;
            }
            if no_fio.is_none() {
                times.fio.push(fio::rate(&setup.path, *is_write, block, setup.bytes())?);
            }
        }
    }
    for (is_write, times) in &cases {
        let bytes = u64::from(block) * u64::from(JOB);
        report(&name(*is_write), (bytes, times), no_fio.as_deref(), reporter)?;
    }
    Ok(())
}

fn report<W: Write>(
    name: &str,
    (bytes, times): (u64, &Times),
    no_fio: Option<&str>,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let gigabytes = bytes as f64 / 1e9;
    let spread = |values: &[f64]| Spread::of(values).context("no pass");
    let rate = |seconds: &[f64]| spread(seconds).map(|spread| spread.rate(gigabytes));
    let row = |suffix: &str, value, unit| {
        let case = format!("{name}{suffix}");
        Measurement::new(case, value, unit, Direction::HigherIsBetter)
    };
    for (Pairs { ours, theirs }, (way, suffix, baseline)) in times.pairs.iter().zip(BASELINES) {
        if way == Way::Engine {
            // The median of the ratios of the pairs, because the rate of the disk changes over time.
            let ratios: Vec<f64> = theirs.iter().zip(ours).map(|(a, b)| a / b).collect();
            let row = row("", spread(&ratios)?, "of the engine").with_baseline(baseline, 1.0);
            reporter.report(&row.at_least(TARGET))?;
        }
        let row = row(suffix, rate(ours)?, "GB/s").with_baseline(baseline, rate(theirs)?.median);
        reporter.report(&row.without_target("the rates behind the share of the engine"))?;
    }
    let suffix = ": rate compared with fio";
    if let Some(reason) = no_fio {
        reporter.skip(&format!("{name}{suffix}"), reason);
        return Ok(());
    }
    let [engine, ..] = &times.pairs;
    let fio = spread(&times.fio)?.median;
    let row = row(suffix, rate(&engine.ours)?, "GB/s").with_baseline("fio, io_uring", fio);
    Ok(reporter.report(&row.without_target("the rates behind the share of the engine"))?)
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
    /// The part of its file that each implementation used last.
    parts: [u32; Way::ALL.len()],
}

impl Setup {
    fn new(folder: &Path, block: u32) -> Result<Self> {
        let memory = memory::memory(JOB, block)?;
        let store = memory::disk_store(folder, &memory, JOB * JOBS)?;
        let path = memory::slab(folder)?;
        let file = memory::file(&path, JOB * JOBS, block)?;
        Ok(Self {
            store,
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

    fn pairs_of_a_repeat(&self) -> u32 {
        u32::try_from(BYTES_OF_A_REPEAT / self.bytes().max(1)).unwrap_or(u32::MAX).max(1)
    }

    /// Runs one job and returns its time in seconds.
    fn pass(&mut self, way: Way, is_write: bool) -> Result<f64> {
        let part = &mut self.parts[way.index()];
        *part = (*part + 1) % JOBS;
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

    /// Runs the store and a baseline alternately, and adds their times.
    ///
    /// A pass changes the state of the disk for the next one. So the order changes from pair to pair:
    /// each comes after a pass of its own and after one of the other equally often.
    fn compare(&mut self, way: Way, is_write: bool, count: u32, pairs: &mut Pairs) -> Result<()> {
        for _ in 0..count {
            let is_first = pairs.ours.len().is_multiple_of(2);
            for is_ours in [is_first, !is_first] {
                let seconds = self.pass(if is_ours { Way::Store } else { way }, is_write)?;
                let list = if is_ours { &mut pairs.ours } else { &mut pairs.theirs };
                list.push(seconds);
            }
        }
        Ok(())
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
