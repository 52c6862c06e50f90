//! Mooncake's mixed sizes in a full pool. The caller frees a block after each refusal.

use std::io::Write;
use std::time::{Duration, Instant};

use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::ByteCount;
use terrane_pool::{Pool, PoolOptions, SizeClasses};

use crate::programs::mooncake_size;
use terrane_testkit::priced::PricedDevice as Upstream;
use terrane_testkit::random::Seeded;

const CAPACITY: u64 = 1 << 30;

const REFUSALS: usize = 20_000;

pub fn run<W: Write>(settings: &Settings, reporter: &mut Reporter<W>) -> anyhow::Result<()> {
    let policies = [
        ("default classes", SizeClasses::default()),
        ("powers of two", SizeClasses::PowerOfTwo),
        ("4 steps", SizeClasses::Steps4),
    ];
    for (policy, classes) in policies {
        let cases =
            ["held over requested", "a refusal"].map(|what| format!("full/{policy}/{what}"));
        if !cases.iter().any(|case| reporter.wants(case)) {
            continue;
        }
        let is_default = classes == SizeClasses::default();
        let (mut refusals, mut ratios) = (Vec::new(), Vec::new());
        for _ in 0..settings.repeats.max(1) {
            let (refusal, ratio) = fill(classes)?;
            refusals.push(refusal);
            ratios.push(ratio);
        }
        let lower = Direction::LowerIsBetter;
        let rows = [(ratios, "×", 1.25), (refusals, "ns", 500.0)];
        for (case, (values, unit, most)) in cases.into_iter().zip(rows) {
            let value = Spread::of(&values).unwrap_or(Spread::single(f64::NAN));
            let row = Measurement::new(case, value, unit, lower);
            reporter.report(&if is_default {
                row.within(most)
            } else {
                row.without_target("not the default")
            })?;
        }
    }
    Ok(())
}

/// Returns the median time of a refusal in nanoseconds, and the mean ratio of held to requested
/// bytes at refusals.
fn fill(classes: SizeClasses) -> anyhow::Result<(f64, f64)> {
    let upstream = Upstream::with_capacity(Duration::ZERO, CAPACITY);
    let pool = Pool::new(&upstream, PoolOptions { classes, ..PoolOptions::default() })?;
    let mut random = Seeded::new(3);
    let (mut live, mut requested) = (Vec::new(), 0);
    let (mut times, mut ratio) = (Vec::with_capacity(REFUSALS), 0.0);
    while times.len() < REFUSALS {
        let bytes = mooncake_size(&mut random);
        loop {
            let before = Instant::now();
            let result = pool.allocate_bytes(ByteCount::new(bytes));
            let time = before.elapsed();
            if let Ok(block) = result {
                requested += bytes;
                live.push((block, bytes));
                break;
            }
            times.push(time.as_secs_f64() * 1e9);
            ratio += upstream.live() as f64 / requested as f64;
            let (victim, bytes) = live.swap_remove(random.below(live.len()));
            requested -= bytes;
            drop(victim);
        }
    }
    let ratio = ratio / times.len() as f64;
    let median = Spread::of(&times).map_or(f64::NAN, |spread| spread.median);
    Ok((median, ratio))
}
