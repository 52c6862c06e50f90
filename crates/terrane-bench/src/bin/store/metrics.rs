//! The cost of the counters of a transfer.

use std::hint::black_box;
use std::io::Write;

use anyhow::{Result, ensure};
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::metrics::{HISTOGRAM_CELLS, ShardedCounters};

/// The maximum nanoseconds for a transfer, without its time stamps.
const COUNTERS_NS: f64 = 20.0;

/// The counters of a successful transfer: itself, its bytes, two times, pieces and runs.
const COUNTERS: usize = 6;

/// The number of transfers of one measured call.
const TRANSFERS: u32 = 64 * 1024;

pub fn measure<W: Write>(settings: &Settings, reporter: &mut Reporter<W>) -> Result<()> {
    let case = "counters of a transfer, besides its time stamps";
    if !reporter.wants(case) {
        return Ok(());
    }
    let counters = ShardedCounters::new(COUNTERS + HISTOGRAM_CELLS);
    let spread = settings.time_batch(TRANSFERS, || {
        for transfer in 0..u64::from(TRANSFERS) {
            let transfer = black_box(transfer);
            counters.update(|shard| {
                (0..COUNTERS).for_each(|cell| shard.add(cell, transfer));
                shard.record(COUNTERS, transfer);
            });
        }
    });
    ensure!(counters.get(0) > 0, "nothing was counted");
    let row = Measurement::new(case, spread.scaled(1e9), "ns", Direction::LowerIsBetter);
    Ok(reporter.report(&row.within(COUNTERS_NS))?)
}
