//! The time of a hit: by one thread, by two threads, by a producer and a consumer, and on a stream.

use std::hint::black_box;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::{ByteCount, RegionRequest};
use terrane_pool::{Pool, PoolOptions, StreamId};

use crate::baselines::{DashMapOfQueues, Limit, Malloc, MutexedTable, Offsets, Source, pool};
use crate::pairing::{LOAD, LOADS, Ring, side_by_side};
use terrane_testkit::priced::PricedDevice as Upstream;
use terrane_testkit::simulated::SimulatedStreams;

/// Pairs in one measured round.
const PAIRS: u32 = 10_000;

/// The rounds of each repetition: many short ones, see [`crate::pairing`].
const ROUNDS: u32 = 12;

/// The sizes of staging and scratch memory, 4 to 512 KiB.
const SIZES: [u64; 8] =
    [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10];

const DASHMAP: &str = "DashMap of ArrayQueues";

pub fn run<W: Write>(settings: &Settings, reporter: &mut Reporter<W>) -> anyhow::Result<()> {
    let (upstream, options) = (Upstream::new(Duration::ZERO), PoolOptions::default());
    let limit = Limit::of(&options);
    let terrane = pool(&upstream, options)?;
    let dashmap = DashMapOfQueues::new(&upstream, limit);
    let table = MutexedTable::new(&upstream, limit);
    let offsets = Offsets::new(&upstream, limit);

    // Alternately, so that interference affects all equally.
    let mut alone = Rounds::default();
    let mut together = Rounds::default();
    for round in 0..settings.warm_up + settings.repeats.max(1) {
        let mut one = Rounds::default();
        for _ in 0..ROUNDS {
            one.push([
                pairs(&terrane),
                pairs(&dashmap),
                pairs(&table),
                pairs(&Malloc),
                pairs(&offsets),
            ]);
        }
        let two =
            [by_two(&terrane), by_two(&dashmap), by_two(&table), by_two(&Malloc), by_two(&offsets)];
        if round >= settings.warm_up {
            alone.extend(one.0);
            together.extend(two);
        }
    }
    let [one, others @ ..] = alone.spreads();
    let [two, others_of_two @ ..] = together.spreads();
    let names = [DASHMAP, "mutexed table", "glibc malloc", "offset-allocator"];
    let lower = Direction::LowerIsBetter;
    reporter.report(&Measurement::new("hit/1 thread", one, "ns", lower).within(10.0))?;
    for (name, other) in names.iter().zip(&others) {
        let case = format!("hit/1 thread compared with {name}");
        let row = Measurement::new(case, one, "ns", lower).with_baseline(*name, other.median);
        reporter.report(&row.without_target("`hit/1 thread` has the target"))?;
    }
    let scaling = Measurement::new("hit/2 threads, each", two, "ns", lower)
        .with_baseline("1 thread", one.median)
        .at_least(1.0 / 1.3);
    reporter.report(&scaling)?;
    for (name, other) in names.iter().zip(&others_of_two) {
        let case = format!("hit/2 threads compared with {name}");
        let compared = Measurement::new(case, two, "ns", lower).with_baseline(*name, other.median);
        let compared = if *name == DASHMAP {
            compared.at_least(15.0)
        } else {
            compared.without_target("the design that is replaced has the target")
        };
        reporter.report(&compared)?;
    }
    labelled(settings, reporter, &terrane)
}

/// The nanoseconds per pair of each allocator, for each round.
#[derive(Default)]
struct Rounds([Vec<f64>; 5]);

impl Rounds {
    fn push(&mut self, values: [f64; 5]) {
        for (all, value) in self.0.iter_mut().zip(values) {
            all.push(value);
        }
    }

    fn extend(&mut self, values: [Vec<f64>; 5]) {
        for (all, values) in self.0.iter_mut().zip(values) {
            all.extend(values);
        }
    }

    fn spreads(&self) -> [Spread; 5] {
        self.0.each_ref().map(|all| Spread::of(all).unwrap_or(Spread::single(f64::NAN)))
    }
}

/// The nanoseconds per pair of one thread.
fn pairs<S: Source>(source: &S) -> f64 {
    let started = Instant::now();
    let mut sizes = SIZES.iter().cycle();
    for _ in 0..PAIRS {
        let bytes = sizes.next().copied().unwrap_or(SIZES[0]);
        source.release(black_box(source.acquire(black_box(bytes))));
    }
    started.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
}

/// The nanoseconds per pair of one of two threads, for each round.
fn by_two<S: Source>(source: &S) -> Vec<f64> {
    let other = || {
        black_box(pairs(source));
    };
    side_by_side(ROUNDS, || pairs(source), other)
}

fn labelled<W: Write>(
    settings: &Settings,
    reporter: &mut Reporter<W>,
    pool: &Pool<&Upstream>,
) -> anyhow::Result<()> {
    let request = RegionRequest::new(ByteCount::kib(64)).labelled("scratch");
    let time = settings.time_batch(PAIRS, || {
        for _ in 0..PAIRS {
            let _ = black_box(terrane_core::Allocate::allocate(pool, black_box(&request)));
        }
    });
    let case = "hit/1 thread, labelled request";
    let measured = Measurement::new(case, time.scaled(1e9), "ns", Direction::LowerIsBetter);
    reporter
        .report(&measured.without_target("the cost of a label, in addition to `hit/1 thread`"))?;
    Ok(())
}

/// An allocator without any work, to measure the channel alone.
struct Nothing;

impl Source for Nothing {
    type Block = u64;

    fn acquire(&self, bytes: u64) -> u64 {
        bytes
    }

    fn release(&self, block: u64) {
        black_box(block);
    }
}

/// The number of loads of one measured round.
const HANDED_OVER: usize = 64;

/// The nanoseconds per block that this thread acquires and another one releases, for each round.
fn handed_over<S: Source>(source: &S) -> Vec<f64> {
    let bytes = 64 << 10;
    let ring = Ring::new();
    let send = || {
        let started = Instant::now();
        for load in 0..HANDED_OVER {
            ring.send(load, |blocks| {
                blocks.extend((0..LOAD).map(|_| source.acquire(black_box(bytes))));
            });
        }
        ring.wait_until_empty();
        started.elapsed().as_secs_f64() * 1e9 / (HANDED_OVER * LOAD) as f64
    };
    let receive = || {
        for load in 0..HANDED_OVER {
            ring.receive(load, |blocks| {
                blocks.drain(..).for_each(|block| source.release(block));
            });
        }
    };
    side_by_side(ROUNDS, send, receive)
}

/// Measures blocks that one thread acquires and another one releases.
pub fn handover<W: Write>(settings: &Settings, reporter: &mut Reporter<W>) -> anyhow::Result<()> {
    let (upstream, options) = (Upstream::new(Duration::ZERO), PoolOptions::default());
    let limit = Limit::of(&options);
    let (terrane, malloc) = (pool(&upstream, options)?, Malloc);
    let dashmap = DashMapOfQueues::new(&upstream, limit);
    let table = MutexedTable::new(&upstream, limit);
    let mut rounds = Rounds::default();
    for round in 0..settings.warm_up + settings.repeats.max(1) {
        let values = [
            handed_over(&terrane),
            handed_over(&dashmap),
            handed_over(&table),
            handed_over(&malloc),
            handed_over(&Nothing),
        ];
        if round >= settings.warm_up {
            rounds.extend(values);
        }
    }
    let [time, dashmap, table, malloc, channel] = rounds.spreads();
    let lower = Direction::LowerIsBetter;
    let channel = Measurement::new("handover/the channel alone", channel, "ns", lower);
    reporter.report(&channel.without_target("part of every other row of this group"))?;
    let case = |name: &str| {
        let case = format!("handover/compared with {name}");
        Measurement::new(case, time, "ns", Direction::LowerIsBetter)
    };
    reporter.report(&case(DASHMAP).with_baseline(DASHMAP, dashmap.median).at_least(2.0))?;
    let row = case("mutexed table").with_baseline("mutexed table", table.median);
    reporter.report(&row.without_target("the design that is replaced has the target"))?;
    let row = case("glibc malloc").with_baseline("glibc malloc", malloc.median);
    reporter.report(&row.without_target("the design that is replaced has the target"))?;
    // The minimum is the number of blocks in transit. The pool adds two magazines and the shared
    // queue between them.
    let way = LOAD * (LOADS + 2);
    let blocks = terrane.snapshot().peak_held.get() / (64 << 10);
    let peak = Spread::single(blocks as f64);
    let bounded =
        Measurement::new("handover/peak blocks", peak, "blocks", Direction::LowerIsBetter)
            .within(2.0 * way as f64);
    reporter.report(&bounded)?;
    Ok(())
}

/// Measures a block that is acquired and released on a stream while the stream is busy.
pub fn stream<W: Write>(settings: &Settings, reporter: &mut Reporter<W>) -> anyhow::Result<()> {
    let streams = SimulatedStreams::new(1);
    let stream = StreamId::new(1);
    streams.submit(stream, || {});
    let fences = Arc::new(streams.clone());
    let upstream = Upstream::new(Duration::ZERO);
    let pool = Pool::with_fences(&upstream, PoolOptions::default(), fences)?;
    let request = RegionRequest::new(ByteCount::kib(64));
    let time = settings.time_batch(PAIRS, || {
        for _ in 0..PAIRS {
            let _ = black_box(pool.allocate_on(stream, black_box(&request)));
        }
    });
    let case = "stream/hit on the same stream";
    let measured = Measurement::new(case, time.scaled(1e9), "ns", Direction::LowerIsBetter);
    reporter.report(&measured.without_target("`bench gpu` has the target"))?;
    streams.run_all();
    Ok(())
}
