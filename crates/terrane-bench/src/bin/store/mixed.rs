//! Loads during stores.

use std::collections::VecDeque;
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use terrane_bench::{Direction, Measurement, Reporter, Spread};
use terrane_store::{Blocks, Job, JobOptions, Refused, Store};
use terrane_transfer::Endpoint;

use crate::fio::{self, Mix};
use crate::{Arguments, memory};

const BLOCK: u32 = 1 << 20;

/// The number of blocks of a load and of a store.
const BLOCKS: u32 = 16;

/// The number of resident loads.
const LOADS: u32 = 32;

/// The number of puts in flight.
const PUTS: usize = 4;

/// The maximum ratio of the 99th percentile to that of fio.
const AT_MOST: f64 = 1.2;

/// The minimum share of the rate of stores alone.
const STORES: f64 = 0.4;

pub fn measure<W: Write>(arguments: &Arguments, reporter: &mut Reporter<W>) -> Result<()> {
    let loads = "loads of 16 blocks of 1 MiB under stores, 99th percentile";
    let stores = "stores under loads";
    if !reporter.wants(loads) && !reporter.wants(stores) {
        return Ok(());
    }
    let folder = tempfile::tempdir_in(&arguments.directory)?;
    let setup = Setup::new(folder.path())?;
    let window = Duration::from_secs(arguments.seconds.max(1).into());
    setup.stores(Instant::now() + window / 2)?;
    let idle = setup.idle(window / 4)?;
    let alone = setup.stores(Instant::now() + window / 2)?;
    let rate = idle / 2.0;
    let until = Instant::now() + window;
    let (latencies, mixed) = thread::scope(|scope| {
        let stores = scope.spawn(|| setup.stores(until));
        let latencies = setup.loads(rate, until)?;
        let mixed = stores.join().map_err(|_| anyhow!("the stores panicked"))??;
        anyhow::Ok((latencies, mixed))
    })?;
    let p99 = percentile(&latencies, 0.99).context("no load was measured")? * 1e3;
    let p99 = Measurement::new(loads, Spread::single(p99), "ms", Direction::LowerIsBetter);
    match fio::reason_against() {
        Some(reason) => {
            reporter.skip("loads under stores compared with fio", &reason);
            reporter.report(&p99.without_target("fio, the baseline, is not installed"))?;
        }
        None => {
            let path = folder.path().join("file");
            let half = u64::from(BLOCK) * u64::from(LOADS * BLOCKS);
            // Writes the file before fio reads it.
            drop(memory::create(&path, 2 * LOADS * BLOCKS, BLOCK)?);
            fio::fill(&path, BLOCK, 2 * half)?;
            let mix = Mix {
                path: &path,
                load: u64::from(BLOCK * BLOCKS),
                loads_a_second: rate,
                store: BLOCK.into(),
                store_rate: mixed * 1e9,
                store_depth: PUTS * usize::try_from(BLOCKS)?,
                half,
                seconds: arguments.seconds.max(1),
            };
            let (fio, fio_stores) = mix.run()?;
            reporter.report(
                &p99.with_baseline("fio, the same rates", fio * 1e3).at_least(1.0 / AT_MOST),
            )?;
            let case = format!("{stores}: rate compared with fio");
            let row =
                Measurement::new(case, Spread::single(mixed), "GB/s", Direction::HigherIsBetter);
            let row = row.with_baseline("fio, the same rates", fio_stores);
            reporter.report(&row.without_target("says whether fio reached the rate"))?;
        }
    }
    let row = Measurement::new(stores, Spread::single(mixed), "GB/s", Direction::HigherIsBetter);
    reporter.report(&row.with_baseline("stores alone", alone).at_least(STORES))?;
    let half = percentile(&latencies, 0.5).context("no load was measured")? * 1e3;
    let case = "loads under stores, median";
    let row = Measurement::new(case, Spread::single(half), "ms", Direction::LowerIsBetter);
    let row = row.with_baseline("loads alone", 1e3 / idle);
    Ok(reporter.report(&row.without_target("explains the 99th percentile"))?)
}

fn percentile(sorted: &[f64], share: f64) -> Option<f64> {
    let index = (sorted.len() as f64 * share).floor().min(sorted.len() as f64 - 1.0);
    sorted.iter().copied().nth(format!("{index:.0}").parse().ok()?)
}

struct Setup {
    store: Store,
    /// The keys of the loads.
    keys: Vec<[u8; 36]>,
    target: Endpoint,
    source: Endpoint,
}

impl Setup {
    fn new(folder: &std::path::Path) -> Result<Self> {
        let source = memory::memory(BLOCKS * u32::try_from(PUTS)?, BLOCK)?;
        let target = memory::memory(BLOCKS, BLOCK)?;
        // Half of the slots are for stores.
        let store = memory::disk_store(folder, &target, 2 * LOADS * BLOCKS)?;
        let keys = memory::keys(0, LOADS * BLOCKS);
        let setup = Self { store, keys, target, source };
        let ids: Vec<u32> = (0..BLOCKS).collect();
        for keys in setup.keys.chunks(ids.len()) {
            memory::put(&setup.store, keys, &setup.source, &ids)?;
        }
        Ok(setup)
    }

    /// Runs loads one after the other. Returns loads per second.
    fn idle(&self, window: Duration) -> Result<f64> {
        let (begun, mut count) = (Instant::now(), 0.0);
        while begun.elapsed() < window {
            self.load(count)?;
            count += 1.0;
        }
        Ok(count / begun.elapsed().as_secs_f64())
    }

    fn load(&self, number: f64) -> Result<()> {
        let ids: Vec<u32> = (0..BLOCKS).collect();
        let groups: Vec<&[[u8; 36]]> = self.keys.chunks(ids.len()).collect();
        let index: usize = format!("{:.0}", number % f64::from(LOADS)).parse()?;
        let keys = groups.get(index % groups.len()).context("no such load")?;
        memory::get(&self.store, keys, &self.target, &ids)
    }

    /// Runs loads at a rate. Returns their sorted times in seconds.
    fn loads(&self, rate: f64, until: Instant) -> Result<Vec<f64>> {
        let (begun, mut latencies) = (Instant::now(), Vec::new());
        let mut number = 0.0;
        while Instant::now() < until {
            let due = begun + Duration::from_secs_f64(number / rate);
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let started = Instant::now();
            self.load(number)?;
            latencies.push(started.elapsed().as_secs_f64());
            number += 1.0;
        }
        latencies.sort_by(f64::total_cmp);
        Ok(latencies)
    }

    /// Puts blocks as fast as the store accepts them. Returns GB/s. Leases keep the keys of the
    /// loads resident.
    fn stores(&self, until: Instant) -> Result<f64> {
        let _lease = self.store.acquire(0, &self.keys, Duration::from_secs(600));
        let (begun, mut bytes) = (Instant::now(), 0.0);
        let mut running: VecDeque<Job> = VecDeque::new();
        let nanos = begun.duration_since(*START).as_nanos();
        let mut generation = u64::try_from(nanos)? + 1;
        while Instant::now() < until {
            while running.len() < PUTS {
                generation += 1;
                let place = u32::try_from(generation % PUTS as u64)? * BLOCKS;
                let ids: Vec<u32> = (place..place + BLOCKS).collect();
                let blocks = Blocks::new(&self.source, &ids);
                let keys = memory::keys(generation, BLOCKS);
                let job = self.store.put(&keys, blocks, JobOptions::new(), ());
                running.push_back(job.map_err(|refused: Refused<()>| anyhow!(refused.cause))?);
            }
            if let Some(job) = running.pop_front() {
                bytes += memory::finish(Ok::<_, Refused<()>>(job))?.bytes.get() as f64;
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        for job in running {
            memory::finish(Ok::<_, Refused<()>>(job))?;
        }
        Ok(bytes / seconds / 1e9)
    }
}

static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
