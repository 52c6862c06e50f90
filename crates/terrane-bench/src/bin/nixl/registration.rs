//! Memory that is registered.

use std::io::Write;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow};
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::{Allocate, ByteCount, DeviceId, Memory, RegionRequest, Register};
use terrane_cuda::{Context, DeviceAllocator, PinnedAllocator, PinnedOptions};
use terrane_storage::{SystemAllocator, SystemOptions};

use crate::MOST_TIME;
use crate::agents::{Agents, Times, over_sets};
use crate::ours;
use crate::raw::{Bare, Span, UCX};

/// What is registered, and with which backend.
#[derive(Debug, Clone, Copy)]
enum Kind {
    System,
    Pinned,
    Device,
    DeviceWithGds,
}

impl Kind {
    const ALL: [Self; 4] = [Self::System, Self::Pinned, Self::Device, Self::DeviceWithGds];

    fn case(self, bytes: ByteCount) -> String {
        match self {
            Self::System => format!("{bytes} registered"),
            Self::Pinned => format!("{bytes} of pinned memory registered"),
            Self::Device => format!("{bytes} of device memory registered"),
            Self::DeviceWithGds => format!("{bytes} of device memory registered with GDS"),
        }
    }

    const fn backend(self) -> &'static str {
        match self {
            Self::System | Self::Pinned | Self::Device => UCX,
            Self::DeviceWithGds => "GDS",
        }
    }

    fn allocate(self, bytes: ByteCount) -> Result<Box<dyn Memory>> {
        let request = RegionRequest::new(bytes);
        if let Self::System = self {
            return Ok(Box::new(
                SystemAllocator::new(SystemOptions::default()).allocate(&request)?,
            ));
        }
        let context = Context::primary(DeviceId::new(0))?;
        Ok(match self {
            Self::Pinned => {
                let pinned = PinnedAllocator::new(&context, PinnedOptions::default())?;
                Box::new(pinned.allocate(&request)?)
            }
            _ => Box::new(DeviceAllocator::new(&context).allocate(&request)?),
        })
    }
}

/// Registers the same memory through Terrane and through the bindings. What a machine without a device,
/// or without what a backend needs for one, cannot register is left out, with the reason.
pub fn measure<W: Write>(
    bytes: ByteCount,
    agents: Agents,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    for kind in Kind::ALL {
        let case = kind.case(bytes);
        if !reporter.wants(&case) {
            continue;
        }
        let times = of_sets(kind, bytes, agents, settings);
        let (terrane, [raw]) = match (kind, times) {
            (Kind::Pinned | Kind::Device | Kind::DeviceWithGds, Err(reason)) => {
                reporter.skip(&case, &format!("{reason:#}"));
                continue;
            }
            (_, times) => over_sets(&times.with_context(|| case.clone())?)?,
        };
        reporter.report(
            &Measurement::new(case, terrane.scaled(1e6), "us", Direction::LowerIsBetter)
                .beside("nixl-sys", raw * 1e6)
                .at_least(1.0 / MOST_TIME),
        )?;
    }
    Ok(())
}

fn of_sets(
    kind: Kind,
    bytes: ByteCount,
    agents: Agents,
    settings: &Settings,
) -> Result<Vec<Times<1>>> {
    let mut memory = kind.allocate(bytes)?;
    let mut medians = Vec::new();
    for first in agents.sets() {
        let (ours, raw) = agents.start(|| {
            first.create(
                || ours::agent("terrane-registration", kind.backend(), agents),
                || Bare::new("raw-registration", kind.backend(), agents),
            )
        })?;
        let times;
        (memory, times) = in_turns(memory, &ours, &raw, settings)?;
        medians.push(times);
    }
    Ok(medians)
}

/// The medians of both, in turns; that the memory is deregistered again in between is not counted.
fn in_turns(
    mut memory: Box<dyn Memory>,
    ours: &impl Register,
    raw: &Bare,
    settings: &Settings,
) -> Result<(Box<dyn Memory>, Times<1>)> {
    let span = Span::of(&memory)?;
    let (mut times, mut raw_times) = (Vec::new(), Vec::new());
    // Each takes microseconds: many rounds cost nothing.
    for round in 0..settings.warm_up + 20 * settings.repeats.max(1) {
        let started = Instant::now();
        let registered = ours.register(memory).map_err(|failed| anyhow!("{failed}"))?;
        let taken = started.elapsed().as_secs_f64();
        memory = registered.into_memory();
        let started = Instant::now();
        let registered = raw.register(&span)?;
        let raw_taken = started.elapsed().as_secs_f64();
        drop(registered);
        if round >= settings.warm_up {
            times.push(taken);
            raw_times.push(raw_taken);
        }
    }
    let median =
        |times: &[f64]| Ok::<_, anyhow::Error>(Spread::of(times).context("no round")?.median);
    Ok((memory, Times { terrane: median(&times)?, bindings: [median(&raw_times)?] }))
}
