//! Runs random sizes, threads, trims and faults for a while, and then checks that the accounts are
//! exact.
//!
//! `cargo xtask soak --seconds 60`, or `cargo run --release -p terrane-pool --example soak --
//! --seconds 60 --seed 1`.
//!
//! Prints one line and exits with 0 if every byte was accounted for.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::panic,
    reason = "a tool for people, which stops at the first error"
)]

mod pools;
mod stacks;

#[path = "../../tests/it/heap.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod heap;
#[path = "../../tests/it/support.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod support;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_pool::SizeClasses;

/// The time that one policy or stack runs before the next one.
const TURN: Duration = Duration::from_millis(400);

/// The options of the command line.
struct Plan {
    seconds: u64,
    seed: u64,
    threads: u64,
}

fn main() -> ExitCode {
    let plan = Plan { seconds: 60, seed: 1, threads: 4 };
    let Some(plan) = arguments(plan, std::env::args().skip(1)) else {
        println!("usage: soak [--seconds N] [--seed N] [--threads N]");
        return ExitCode::FAILURE;
    };
    let (mut of_pools, mut of_stacks) = (0, 0);
    // Each policy runs repeatedly for a short time, so pools are created and dropped as well.
    let started = Instant::now();
    let mut round = plan.seed;
    while started.elapsed() < Duration::from_secs(plan.seconds) {
        let slab = SizeClasses::ExactSlab { stride: ByteCount::kib(36), count: 64 };
        let policies = [SizeClasses::PowerOfTwo, SizeClasses::Steps4, SizeClasses::Steps8, slab];
        for classes in policies {
            of_pools += pools::soak(classes, round, plan.threads, TURN);
            round += 1;
        }
        of_stacks += stacks::soak(round, plan.threads, TURN);
    }
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "soak: {of_pools} blocks of pools and {of_stacks} of a stack of adaptors \
         in {seconds:.1} s, every byte accounted for"
    );
    ExitCode::SUCCESS
}

fn arguments(mut plan: Plan, mut words: impl Iterator<Item = String>) -> Option<Plan> {
    while let Some(word) = words.next() {
        let number = words.next()?.parse().ok()?;
        match word.as_str() {
            "--seconds" => plan.seconds = number,
            "--seed" => plan.seed = number,
            "--threads" => plan.threads = number,
            _ => return None,
        }
    }
    (plan.threads > 0).then_some(plan)
}
