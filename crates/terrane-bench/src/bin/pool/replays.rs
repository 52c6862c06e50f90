//! Sequences of allocations for every policy, compared with the other designs.
//!
//! All designs allocate from the same kind of [`Upstream`], once with the cost of a driver and once
//! without cost. They have the same cache limit. A mean covers whole runs, including the first run
//! with an empty cache. The percentiles are of individually timed steps. They include a reading of
//! the clock, which is a separate case.

use std::io::Write;
use std::time::{Duration, Instant};

use terrane_bench::replay::{Program, Step};
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_pool::{Pool, PoolOptions, SizeClasses};

use crate::baselines::{DashMapOfQueues, Limit, Malloc, MutexedTable, Offsets, Source, pool};
use crate::pairing::{LongRound, until_undisturbed};
use crate::programs;
use terrane_testkit::priced::{DRIVER, PricedDevice as Upstream};

/// The target of the default classes: at most 0.8 of the time of the best of three other designs.
const TARGET: f64 = 1.25;

/// The maximum of the timed hits, in nanoseconds.
const HITS: f64 = 2_000.0;

pub fn run<W: Write>(settings: &Settings, reporter: &mut Reporter<W>) -> anyhow::Result<()> {
    let clock = Measurement::new("replay/the clock", clock(), "ns", Direction::LowerIsBetter);
    reporter.report(&clock.without_target("part of every percentile"))?;
    let by_default = SizeClasses::default();
    let others = [("powers of two", SizeClasses::PowerOfTwo), ("4 steps", SizeClasses::Steps4)];
    for (name, program) in programs::of_mixed_sizes()? {
        beside_others(settings, reporter, &name, &program, by_default)?;
        percentiles(reporter, &name, &program, by_default)?;
        held(reporter, &format!("{name}/default classes"), &program, by_default, Some(1.25))?;
        for (policy, classes) in others {
            held(reporter, &format!("{name}/{policy}"), &program, classes, None)?;
        }
    }
    let (name, program) = ("kv blocks", programs::kv_blocks()?);
    beside_others(settings, reporter, name, &program, programs::KV_SLABS)?;
    percentiles(reporter, name, &program, programs::KV_SLABS)?;
    held(reporter, "kv blocks/exact slabs", &program, programs::KV_SLABS, Some(1.001))
}

/// The nanoseconds per step for each round, of the pool and of the other designs.
type Means = [Vec<f64>; 5];

/// The rounds in which the scheduler preempted a thread.
#[derive(Default)]
struct Disturbed {
    discarded: u32,
    /// Rounds that count, because no repetition was undisturbed.
    counted: u32,
}

const DESIGNS: [&str; 4] =
    ["DashMap of ArrayQueues", "offset-allocator", "glibc malloc", "mutexed table"];

fn beside_others<W: Write>(
    settings: &Settings,
    reporter: &mut Reporter<W>,
    name: &str,
    program: &Program,
    classes: SizeClasses,
) -> anyhow::Result<()> {
    for (price, pair) in [("660 ns", DRIVER), ("free", Duration::ZERO)] {
        for threads in [1, 2] {
            let case = format!("replay/{name}/upstream {price}/{threads} threads");
            if !reporter.wants(&case) {
                continue;
            }
            let (means, disturbed) = means(settings, program, classes, pair, threads)?;
            let [terrane, others @ ..] =
                means.map(|all| Spread::of(&all).unwrap_or(Spread::single(f64::NAN)));
            let row = |what: &str| {
                Measurement::new(format!("{case}/{what}"), terrane, "ns", Direction::LowerIsBetter)
            };
            // The mutexed table is only reported. The target is about the three designs that users have: the design
            // that the pool replaces, an allocator of offsets behind a mutex, and malloc.
            let [dashmap, offsets, malloc, _] = others;
            let best = dashmap.median.min(offsets.median).min(malloc.median);
            let compared = row("compared with the best of three");
            reporter.report(&compared.with_baseline("the best of three", best).at_least(TARGET))?;
            for (design, other) in DESIGNS.iter().zip(others) {
                let row =
                    row(&format!("compared with {design}")).with_baseline(*design, other.median);
                reporter.report(&row.without_target("the best of three has the target"))?;
            }
            if threads > 1 {
                report_disturbed(reporter, &case, &disturbed)?;
            }
        }
    }
    Ok(())
}

/// Reports the rounds in which a thread was preempted, so that a reader can judge the other rows.
fn report_disturbed<W: Write>(
    reporter: &mut Reporter<W>,
    case: &str,
    disturbed: &Disturbed,
) -> anyhow::Result<()> {
    let Disturbed { discarded, counted } = *disturbed;
    for (what, rounds) in [("discarded", discarded), ("counted", counted)] {
        let case = format!("{case}/disturbed rounds that are {what}");
        let rounds = Spread::single(f64::from(rounds));
        let row = Measurement::new(case, rounds, "rounds", Direction::LowerIsBetter);
        reporter.report(&row.without_target("it depends on the load of the machine"))?;
    }
    Ok(())
}

fn means(
    settings: &Settings,
    program: &Program,
    classes: SizeClasses,
    pair: Duration,
    threads: u32,
) -> anyhow::Result<(Means, Disturbed)> {
    let options = PoolOptions { classes, ..PoolOptions::default() };
    let limit = Limit::of(&options);
    let upstream = Upstream::new(pair);
    let terrane = pool(&upstream, options)?;
    let dashmap = DashMapOfQueues::new(&upstream, limit);
    let offsets = Offsets::new(&upstream, limit);
    let table = MutexedTable::new(&upstream, limit);
    let (mut means, mut disturbed) = (Means::default(), Disturbed::default());
    // Alternately, so that interference affects all equally.
    for _ in 0..settings.repeats.max(1) {
        let round = [
            mean(program, &terrane, threads, &mut disturbed),
            mean(program, &dashmap, threads, &mut disturbed),
            mean(program, &offsets, threads, &mut disturbed),
            mean(program, &Malloc, threads, &mut disturbed),
            mean(program, &table, threads, &mut disturbed),
        ];
        means.iter_mut().zip(round).for_each(|(all, round)| all.push(round));
    }
    Ok((means, disturbed))
}

/// The nanoseconds per step of a whole run, by each of one or two threads.
fn mean<S: Source>(program: &Program, source: &S, threads: u32, disturbed: &mut Disturbed) -> f64 {
    let once = || time(program, source);
    if threads == 1 {
        return once();
    }
    let other = || {
        once();
    };
    let Some(LongRound { value, discarded, is_disturbed }) = until_undisturbed(once, other) else {
        unreachable!("a round has a result");
    };
    disturbed.discarded += discarded;
    disturbed.counted += u32::from(is_disturbed);
    value
}

fn time<S: Source>(program: &Program, source: &S) -> f64 {
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
}

/// Reports percentiles of the steps without a call of the upstream, and of all steps.
fn percentiles<W: Write>(
    reporter: &mut Reporter<W>,
    name: &str,
    program: &Program,
    classes: SizeClasses,
) -> anyhow::Result<()> {
    let upstream = Upstream::new(DRIVER);
    let terrane = pool(&upstream, PoolOptions { classes, ..PoolOptions::default() })?;
    // The second run has cached blocks.
    time(program, &terrane);
    let (mut hits, mut all) = timed(program, &terrane, &upstream);
    let lower = Direction::LowerIsBetter;
    for (kind, times) in [("hits", &mut hits), ("steps", &mut all)] {
        times.sort_by(f64::total_cmp);
        for (what, part) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)] {
            let time = Spread::single(percentile(times, part));
            let row = Measurement::new(format!("replay/{name}/{kind}/{what}"), time, "ns", lower);
            reporter.report(&if kind == "hits" && what == "p99.9" {
                row.within(HITS)
            } else {
                row.without_target("the 99.9th percentile of hits has the target")
            })?;
        }
    }
    Ok(())
}

/// Returns the nanoseconds of each step without a call of the upstream, and of each step.
fn timed(
    program: &Program,
    terrane: &Pool<&Upstream>,
    upstream: &Upstream,
) -> (Vec<f64>, Vec<f64>) {
    let (mut hits, mut all) = (Vec::new(), Vec::with_capacity(program.steps().len()));
    let mut running = program.replay(terrane);
    let mut calls = upstream.calls();
    let mut before = Instant::now();
    while running.step().is_some() {
        let time = before.elapsed().as_secs_f64() * 1e9;
        all.push(time);
        if upstream.calls() == calls {
            hits.push(time);
        }
        calls = upstream.calls();
        before = Instant::now();
    }
    (hits, all)
}

/// Reports the ratio of the peaks of held and requested bytes.
fn held<W: Write>(
    reporter: &mut Reporter<W>,
    name: &str,
    program: &Program,
    classes: SizeClasses,
    most: Option<f64>,
) -> anyhow::Result<()> {
    let upstream = Upstream::new(Duration::ZERO);
    let terrane = pool(&upstream, PoolOptions { classes, ..PoolOptions::default() })?;
    let requested = program.replay(&terrane).run().peak_requested;
    let ratio = Spread::single(terrane.snapshot().peak_held.get() as f64 / requested.get() as f64);
    let case = format!("replay/{name}/peak held over peak requested");
    let row = Measurement::new(case, ratio, "×", Direction::LowerIsBetter);
    reporter.report(&match most {
        Some(most) => row.within(most),
        None => row.without_target("not the default"),
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
