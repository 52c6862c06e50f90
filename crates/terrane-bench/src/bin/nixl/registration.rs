//! Memory that is registered.

use std::io::Write;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::{Allocate, ByteCount, Memory, RegionRequest, Register};
use terrane_storage::{SystemAllocator, SystemOptions};

use crate::{ours, raw};

/// Of the time that the bindings alone take, Terrane's may be so much.
const MOST_TIME: f64 = 1.02;

/// Registers the same memory through Terrane and through the bindings, in turns; that it is
/// deregistered again in between is not counted.
pub fn measure<W: Write>(
    bytes: ByteCount,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let case = format!("{bytes} registered");
    if !reporter.wants(&case) {
        return Ok(());
    }
    let ours = ours::agent("terrane-registration")?;
    let (raw, _backend, options) = raw::agent("raw-registration")?;
    let request = RegionRequest::new(bytes);
    let mut memory = SystemAllocator::new(SystemOptions::default()).allocate(&request)?;
    let address = memory.location().as_host().context("system memory is the host's")?;
    let span = raw::Span::new(address.get(), memory.length().get())?;
    let (mut times, mut raw_times) = (Vec::new(), Vec::new());
    // Each takes microseconds: many rounds cost nothing.
    for round in 0..settings.warm_up + 20 * settings.repeats.max(1) {
        let started = Instant::now();
        let registered = ours.register(memory).map_err(|failed| anyhow!("{failed}"))?;
        let taken = started.elapsed().as_secs_f64();
        memory = registered.into_memory();
        let started = Instant::now();
        let registered = raw.register_memory(&span, Some(&options))?;
        let raw_taken = started.elapsed().as_secs_f64();
        drop(registered);
        if round >= settings.warm_up {
            times.push(taken);
            raw_times.push(raw_taken);
        }
    }
    let spread = |times: &[f64]| Spread::of(times).context("there is a round");
    let lower = Direction::LowerIsBetter;
    reporter.report(
        &Measurement::new(case, spread(&times)?.scaled(1e6), "us", lower)
            .beside("nixl-sys", spread(&raw_times)?.scaled(1e6).median)
            .at_least(1.0 / MOST_TIME),
    )?;
    Ok(())
}
