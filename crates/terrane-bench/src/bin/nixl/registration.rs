//! Registration of memory.

use std::io::Write;

use anyhow::{Context as _, Result, anyhow};
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::{Allocate, ByteCount, DeviceId, Memory, RegionRequest, Register};
use terrane_cuda::{Context, DeviceAllocator, PinnedAllocator, PinnedOptions};
use terrane_storage::{SystemAllocator, SystemOptions};

use crate::agents::{Agents, First, Times, over_sets};
use crate::bindings::{Bare, Span, UCX};
use crate::interleave::{interleaved, timed};
use crate::terrane;

/// The maximum extra time of a registration over the bindings alone, in microseconds. Terrane's
/// part does not depend on the size of the memory. A registration with the bindings alone takes a
/// few microseconds.
const MOST_MORE: f64 = 1.0;

/// The registered memory, and the backend.
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

/// Registers the same memory by Terrane and by the bindings. If a case needs a device or a backend
/// that the machine lacks, the case is skipped with the reason.
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
        let (terrane, [bindings]) = match (kind, times) {
            (Kind::Pinned | Kind::Device | Kind::DeviceWithGds, Err(reason)) => {
                reporter.skip(&case, &format!("{reason:#}"));
                continue;
            }
            (_, times) => over_sets(&times.with_context(|| case.clone())?)?,
        };
        reporter.report(
            &Measurement::new(case, terrane.scaled(1e6), "us", Direction::LowerIsBetter)
                .with_baseline("nixl-sys and 1 us", bindings * 1e6 + MOST_MORE)
                .at_least(1.0),
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
    // Each call takes microseconds, so many rounds are cheap.
    let often = Settings { repeats: 20 * settings.repeats.max(1), ..settings.clone() };
    let mut memory = kind.allocate(bytes)?;
    let mut medians = Vec::new();
    for first in agents.sets() {
        let (terrane, bindings) = agents.start(|| {
            first.create(
                || terrane::agent("terrane-registration", kind.backend(), agents),
                || Bare::new("raw-registration", kind.backend(), agents),
            )
        })?;
        let times;
        (memory, times) = registered(memory, &terrane, &bindings, &often, first)?;
        medians.push(times);
    }
    Ok(medians)
}

/// Returns the interleaved medians of both. The time of deregistrations is not counted.
fn registered(
    memory: Box<dyn Memory>,
    terrane: &impl Register,
    bindings: &Bare,
    settings: &Settings,
    first: First,
) -> Result<(Box<dyn Memory>, Times<1>)> {
    let span = Span::of(&memory)?;
    let mut memory = Some(memory);
    let [terrane, bindings] = interleaved(
        settings,
        first,
        [
            &mut || {
                let owned = memory.take().context("the memory was not returned")?;
                let registering = || terrane.register(owned).map_err(|failed| anyhow!("{failed}"));
                let (taken, registered) = timed(registering)?;
                memory = Some(registered.into_memory());
                Ok(taken)
            },
            &mut || {
                let (taken, _registered) = timed(|| bindings.register(&span))?;
                Ok(taken)
            },
        ],
    )?;
    let memory = memory.context("the memory was not returned")?;
    Ok((memory, Times { terrane, bindings: [bindings] }))
}
