//! The allocation of pinned memory, compared with the driver's own allocation.

use std::io::Write;
use std::time::Instant;

use anyhow::Result;
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::{ByteCount, RegionRequest};

use crate::setup::Setup;

/// The minimum speedup over `cuMemHostAlloc`.
const LEAST_TIMES: f64 = 6.0;

pub fn report<W: Write>(
    setup: &Setup,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let bytes = if setup.smoke { ByteCount::mib(8) } else { ByteCount::gib(8) };
    let case = format!("bring {bytes} of pinned memory up");
    if !reporter.wants(&case) {
        return Ok(());
    }
    let request = RegionRequest::new(bytes);
    let (mut terrane, mut driver) = (Vec::new(), Vec::new());
    for round in 0..=settings.repeats.clamp(1, 3) {
        let begin = Instant::now();
        let memory = setup.pinned.allocate_memory(&request)?;
        let took = begin.elapsed().as_secs_f64();
        drop(memory);
        let drivers = setup.bindings.host_alloc(bytes)?;
        if round > 0 {
            terrane.push(took);
            driver.push(drivers);
        }
    }
    let gigabytes = bytes.get() as f64 * 1e-9;
    let rate =
        |seconds: &[f64]| Spread::of(seconds).unwrap_or(Spread::single(f64::NAN)).rate(gigabytes);
    let measured = Measurement::new(case, rate(&terrane), "GB/s", Direction::HigherIsBetter)
        .with_baseline("cuMemHostAlloc", rate(&driver).median)
        .at_least(LEAST_TIMES);
    Ok(reporter.report(&measured)?)
}
