//! The cost of a reservation, compared with the cost of an incorrect one.
//!
//! `cargo run --release -p terrane-pool --example budget_cost`
//!
//! Prints nanoseconds for one reservation and its release, on one thread and on two.
#![allow(clippy::print_stdout, reason = "a tool for people")]

use std::hint::{self, black_box};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use terrane_core::ByteCount;
use terrane_pool::adaptors::Budget;

const ROUNDS: u32 = 20_000;
const BATCHES: usize = 200;
const BYTES: u64 = 4096;

/// Returns the nanoseconds of a round, of the slowest thread. Threads start each batch together.
/// The result is the best batch among those in which all threads ran in parallel for nine tenths of
/// the time. `NaN` if there is no such batch.
fn time<const THREADS: usize>(work: [&(dyn Fn() + Sync); THREADS]) -> f64 {
    let arrived = AtomicUsize::new(0);
    let arrived = &arrived;
    let times = thread::scope(|scope| {
        let threads = work.map(|work| {
            scope.spawn(move || {
                let batch = |number: usize| {
                    arrived.fetch_add(1, Ordering::AcqRel);
                    while arrived.load(Ordering::Acquire) < number * THREADS {
                        hint::spin_loop();
                    }
                    let start = Instant::now();
                    (0..ROUNDS).for_each(|_| work());
                    (start, Instant::now())
                };
                (1..=BATCHES).map(batch).collect::<Vec<_>>()
            })
        });
        threads.map(|thread| thread.join().unwrap_or_default())
    });
    let seconds = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64();
    let best = (0..BATCHES).filter_map(|batch| {
        let spans = times.iter().filter_map(|times| times.get(batch));
        let first_start = spans.clone().map(|span| span.0).min()?;
        let last_start = spans.clone().map(|span| span.0).max()?;
        let first_end = spans.clone().map(|span| span.1).min()?;
        let last_end = spans.clone().map(|span| span.1).max()?;
        let together = seconds(last_start, first_end) / seconds(first_start, last_end);
        let slowest = spans.map(|&(start, end)| seconds(start, end)).fold(0.0, f64::max);
        (together > 0.9).then_some(slowest * 1e9 / f64::from(ROUNDS))
    });
    best.fold(f64::NAN, f64::min)
}

/// Adds first, checks afterwards and subtracts on failure. This refuses requests that fit.
fn add_then_check(levels: &[&AtomicU64], limit: u64) {
    for (index, level) in levels.iter().enumerate() {
        if level.fetch_add(BYTES, Ordering::Relaxed) + BYTES > limit {
            for level in levels.iter().take(index + 1) {
                level.fetch_sub(BYTES, Ordering::Relaxed);
            }
            return;
        }
    }
    for level in levels {
        level.fetch_sub(BYTES, Ordering::Relaxed);
    }
}

fn main() {
    let limit = ByteCount::gib(64);
    let root = Budget::new("node", limit);
    let [device, pinned] = ["device", "pinned"].map(|tier| root.child(tier, limit));
    let pool = device.child("pool", limit);
    let reserve = |budget: &Budget| drop(black_box(budget.reserve(ByteCount::new(BYTES))));
    let (on_root, on_device) = (|| reserve(&root), || reserve(&device));
    let (on_pinned, on_pool) = (|| reserve(&pinned), || reserve(&pool));

    let counters = [AtomicU64::new(0), AtomicU64::new(0)];
    let one = || add_then_check(black_box(&[&counters[0]]), limit.get());
    let two = || add_then_check(black_box(&[&counters[0], &counters[1]]), limit.get());

    println!("{:<44}{:>10}{:>12}", "ns a reservation and its release", "1 thread", "2 threads");
    let row = |name, single, double| println!("{name:<44}{single:>10.1}{double:>12.1}");
    row("add, then check (wrong), 1 level", time([&one]), time([&one, &one]));
    row("add, then check (wrong), 2 levels", time([&two]), time([&two, &two]));
    row("a budget alone", time([&on_root]), time([&on_root, &on_root]));
    row("a part of one, the same part", time([&on_device]), time([&on_device, &on_device]));
    row("a part of one, another part each", time([&on_device]), time([&on_device, &on_pinned]));
    row("a part of a part", time([&on_pool]), time([&on_pool, &on_pool]));
}
