//! The time of a reservation.

use std::hint::black_box;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::ByteCount;
use terrane_pool::adaptors::Budget;

use crate::pairing::side_by_side;

const PAIRS: u32 = 10_000;

/// The rounds of each repetition: many short ones, see [`crate::pairing`].
const ROUNDS: u32 = 8;

/// The baseline of budgets: an addition and a subtraction. A real limit of this kind would refuse
/// requests that fit while a larger one fails.
const COUNTER: &str = "a shared counter";
const REASON: &str = "the counter refuses nothing; it shows the cost of the shared cache lines";

pub fn run<W: Write>(settings: &Settings, reporter: &mut Reporter<W>) -> anyhow::Result<()> {
    let root = Budget::new("all", ByteCount::gib(16));
    let device = root.child("device", ByteCount::gib(8));
    let counter = AtomicU64::new(0);
    let count = || {
        for _ in 0..PAIRS {
            counter.fetch_add(black_box(1 << 20), Ordering::Relaxed);
            counter.fetch_sub(black_box(1 << 20), Ordering::Relaxed);
        }
    };
    let [counted_alone, counted_together] = both(settings, &count);
    let lower = Direction::LowerIsBetter;
    for (name, budget) in [("one budget", &root), ("a budget and its parent", &device)] {
        let [alone, together] = both(settings, &|| reserve(budget));
        let case = format!("budget/{name}, 1 thread");
        let alone = Measurement::new(case, alone, "ns", lower);
        let alone = alone.with_baseline(COUNTER, counted_alone.median);
        reporter.report(&alone.without_target(REASON))?;
        let case = format!("budget/{name}, 2 threads, each");
        let together = Measurement::new(case, together, "ns", lower);
        let together = together.with_baseline(COUNTER, counted_together.median);
        reporter.report(&together.without_target(REASON))?;
    }
    Ok(())
}

/// Nanoseconds per pair, of one thread alone and of one of two threads.
fn both(settings: &Settings, work: &(impl Fn() + Sync)) -> [Spread; 2] {
    let timed = || {
        let started = Instant::now();
        work();
        started.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
    };
    let repeats = settings.warm_up + settings.repeats.max(1);
    let alone: Vec<_> = (0..repeats * ROUNDS).map(|_| timed()).collect();
    let together: Vec<_> = (0..repeats).flat_map(|_| side_by_side(ROUNDS, timed, work)).collect();
    [alone, together].map(|times| Spread::of(&times).unwrap_or(Spread::single(f64::NAN)))
}

/// Reserves and releases. Every request fits, so a refusal is a bug.
fn reserve(budget: &Budget) {
    for _ in 0..PAIRS {
        match budget.reserve(black_box(ByteCount::mib(1))) {
            Ok(reservation) => drop(black_box(reservation)),
            Err(refusal) => unreachable!("it fits: {refusal}"),
        }
    }
}
