//! Sequences of allocations over a simulated device, for every policy.
//!
//! The mean is that of a whole run, the first or one that finds blocks cached, whichever is
//! faster, as for the baselines. The percentiles are of steps that were timed one by one in a
//! first run: each includes two readings of the clock, which are reported as a case of their own.

use std::io::Write;
use std::time::Instant;

use terrane_bench::{Direction, Measurement, Reporter, Spread, recorded};
use terrane_core::ByteCount;
use terrane_pool::adaptors::{TraceAction, TraceError, TraceEvent, TraceTime};
use terrane_pool::replay::{Program, RandomRules, ServingRules, Step};
use terrane_pool::{PoolOptions, SizeClasses};

use crate::baselines::{DashMapOfQueues, Malloc, MutexedTable, Offsets, Source, pool, simulated};

/// A KV block of 16 tokens, latent attention of 576 values of two bytes, and 8 layers.
const KV_BLOCK: ByteCount = ByteCount::kib(144);

/// Blocks to a slab: 9 MiB.
const SLAB: u32 = 64;

pub fn run<W: Write>(reporter: &mut Reporter<W>) -> anyhow::Result<()> {
    let lower = Direction::LowerIsBetter;
    reporter.report(&Measurement::new("replay/the clock", clock(), "ns", lower))?;
    for mib in [1, 4, 64] {
        // RMM's rules with N = 10,000.
        let rules = RandomRules {
            steps: 20_000,
            largest: ByteCount::mib(mib),
            seed: u64::from(mib),
            ..RandomRules::default()
        };
        let program = Program::random(&rules);
        geometric(reporter, &format!("random to {mib} MiB"), &program)?;
    }
    geometric(reporter, "recorded serving", &recorded::serving()?)?;
    geometric(reporter, "serving", &Program::serving(&ServingRules::default()))?;
    let classes = SizeClasses::ExactSlab { stride: KV_BLOCK, count: SLAB };
    let program = kv_blocks()?;
    let beside = baselines(&program);
    replay(reporter, "kv blocks", &program, &beside, ("exact slabs", classes, Some(1.001)))
}

fn geometric<W: Write>(
    reporter: &mut Reporter<W>,
    name: &str,
    program: &Program,
) -> anyhow::Result<()> {
    let beside = baselines(program);
    replay(reporter, name, program, &beside, ("powers of two", SizeClasses::PowerOfTwo, None))?;
    replay(reporter, name, program, &beside, ("4 steps", SizeClasses::Steps4, None))?;
    replay(reporter, name, program, &beside, ("8 steps", SizeClasses::Steps8, Some(1.25)))
}

/// Nanoseconds a step of everything that pools are measured beside.
fn baselines(program: &Program) -> Vec<(&'static str, f64)> {
    vec![
        ("the simulated device", mean(program, &simulated())),
        ("DashMap of ArrayQueues", mean(program, &DashMapOfQueues::new())),
        ("mutexed table", mean(program, &MutexedTable::new())),
        ("glibc malloc", mean(program, &Malloc)),
        ("offset-allocator", mean(program, &Offsets::new())),
    ]
}

/// Nanoseconds a step, of the whole program, the best of some runs.
fn mean<S: Source>(program: &Program, source: &S) -> f64 {
    let run = |_| {
        let mut slots: Vec<Option<S::Block>> = Vec::new();
        slots.resize_with(program.slots(), || None);
        let started = Instant::now();
        for step in program.steps() {
            match *step {
                Step::Allocate { slot, bytes } => {
                    if let Some(place) = slots.get_mut(slot) {
                        *place = Some(source.acquire(bytes.get()));
                    }
                }
                Step::Free { slot } => {
                    if let Some(block) = slots.get_mut(slot).and_then(Option::take) {
                        source.release(block);
                    }
                }
            }
        }
        let time = started.elapsed().as_secs_f64() * 1e9 / program.steps().len() as f64;
        slots.into_iter().flatten().for_each(|block| source.release(block));
        time
    };
    // The first run of each finds nothing cached, and its successors do.
    (0..RUNS).map(run).fold(f64::INFINITY, f64::min)
}

const RUNS: u32 = 3;

/// Reports the times of the steps, and the most held over the most asked for.
fn replay<W: Write>(
    reporter: &mut Reporter<W>,
    name: &str,
    program: &Program,
    baselines: &[(&'static str, f64)],
    (policy, classes, most): (&str, SizeClasses, Option<f64>),
) -> anyhow::Result<()> {
    let case = |what: &str| format!("replay/{name}/{policy}/{what}");
    let lower = Direction::LowerIsBetter;
    let options = PoolOptions { classes, ..PoolOptions::default() };
    let ours = pool(options.clone())?;
    let mut running = program.replay(&ours);
    let mut times = Vec::with_capacity(program.steps().len());
    let mut before = Instant::now();
    while running.step().is_some() {
        let now = Instant::now();
        times.push((now - before).as_secs_f64() * 1e9);
        before = Instant::now();
    }
    let asked = running.outcome().peak_asked;
    let held = ours.snapshot().peak_held;
    drop(running);

    times.sort_by(f64::total_cmp);
    let value = |value: f64| Spread::single(value);
    let mean = value(mean(program, &pool(options)?));
    for (baseline, time) in baselines {
        let case = case(&format!("mean beside {baseline}"));
        reporter.report(&Measurement::new(case, mean, "ns", lower).beside(*baseline, *time))?;
    }
    for (what, part) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)] {
        let time = value(percentile(&times, part));
        reporter.report(&Measurement::new(case(what), time, "ns", lower))?;
    }
    let ratio = value(held.get() as f64 / asked.get() as f64);
    let peak = Measurement::new(case("peak held over peak asked"), ratio, "×", lower);
    reporter.report(&match most {
        Some(most) => peak.within(most),
        None => peak,
    })?;
    Ok(())
}

fn percentile(sorted: &[f64], part: f64) -> f64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a place in a vector"
    )]
    let at = (sorted.len() as f64 * part) as usize;
    sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

fn clock() -> Spread {
    let times: Vec<_> = (0..1001)
        .map(|_| {
            let before = Instant::now();
            (Instant::now() - before).as_secs_f64() * 1e9
        })
        .collect();
    Spread::of(&times).unwrap_or(Spread::single(f64::NAN))
}

/// Requests that take KV blocks as they grow, and give all of them back at their end; at most
/// 16 GiB of them at once.
fn kv_blocks() -> Result<Program, TraceError> {
    let most = (16 << 30) / KV_BLOCK.get();
    let mut random = Random(11);
    let mut trace = Trace::default();
    let mut live = 0;
    let mut running: Vec<Vec<u64>> = Vec::new();
    for _ in 0..4_000 {
        let wanted = 1 + random.below(512);
        while live + wanted > most {
            let count = ByteCount::from_usize(running.len()).get();
            let ended = running.swap_remove(ByteCount::new(random.below(count)).to_usize());
            live -= ByteCount::from_usize(ended.len()).get();
            ended.into_iter().for_each(|block| trace.free(block));
        }
        live += wanted;
        running.push((0..wanted).map(|_| trace.allocate(KV_BLOCK.get())).collect());
    }
    Program::from_events(trace.0.into_iter().map(Ok))
}

/// Events as a tracing adaptor would have recorded them.
#[derive(Default)]
struct Trace(Vec<TraceEvent>);

impl Trace {
    fn allocate(&mut self, bytes: u64) -> u64 {
        let pointer = ByteCount::from_usize(self.0.len()).get() + 1;
        self.push(TraceAction::Allocate, pointer, bytes);
        pointer
    }

    fn free(&mut self, pointer: u64) {
        let allocated = ByteCount::new(pointer - 1).to_usize();
        let bytes = self.0.get(allocated).map_or(0, |event| event.size.get());
        self.push(TraceAction::Free, pointer, bytes);
    }

    fn push(&mut self, action: TraceAction, pointer: u64, bytes: u64) {
        let size = ByteCount::new(bytes);
        let time = TraceTime::default();
        self.0.push(TraceEvent { thread: 0, time, action, pointer, size, stream: 0 });
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}
