//! Rates of this machine: memory, directories, and the bus.

use std::path::PathBuf;
use std::time::Duration;

use terrane_core::ByteCount;
use terrane_layout::{ElementFormat, LayoutConfig};
use terrane_plan::{CopyCost, Rates};

use super::answer::{Answer, Measured, ask_within};
use super::finding::Finding;
use crate::error::Failure;
use crate::measure::bus::Bus;
use crate::measure::disk::DiskCase;
use crate::measure::host::{HostCase, first_touch};
use crate::measure::{Shape, Spread};
use crate::restart::Restart;

/// Passes of each case. The median counts.
const PASSES: u32 = 3;

/// The time that the child has for the bus: contexts take a second or two.
const BUS_TIMEOUT: Duration = Duration::from_secs(20);

/// Blocks of 2 MiB in 32 layers, K and V: those of Llama 3.1 8B.
fn shape(bytes: ByteCount) -> Result<Shape, Failure> {
    let config = LayoutConfig::builder()
        .num_blocks(1)
        .num_layers(32)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(1024)
        .element(ElementFormat::Width(2))
        .build()?;
    Shape::of_config(&config, bytes)
}

/// Measures everything. A failure is a row, not an end.
pub(crate) fn all(directories: &[PathBuf], size: ByteCount, restart: &Restart) -> Vec<Measured> {
    let mut rows = row("memory-copy", None, || {
        let mut case = HostCase::new(&shape(size)?)?;
        let blocks = case.times(PASSES, |case| case.load())?;
        let one = case.times(PASSES, |case| case.one_block())?;
        Ok(cost(case.bytes(), blocks, Some((case.block_bytes(), one))))
    });
    rows.extend(row("first-touch", None, || {
        Ok(cost(size.get(), first_touch(size, PASSES)?, None))
    }));
    for directory in directories {
        let subject = directory.display().to_string();
        let case = shape(size).and_then(|shape| DiskCase::new(&shape, directory, 32));
        // The first pass writes blocks that are only reserved, and does not count.
        let case = case.and_then(|mut case| case.pass(true).map(|_| case));
        match case {
            Ok(mut case) => {
                for (key, is_write) in [("disk-write", true), ("disk-read", false)] {
                    rows.extend(row(key, Some(&subject), || {
                        let times = crate::measure::times(PASSES, || case.pass(is_write))?;
                        let one = crate::measure::times(PASSES, || case.one_block(is_write))?;
                        Ok(cost(case.bytes(), times, Some((case.block_bytes(), one))))
                    }));
                }
            }
            Err(error) => rows.extend(row("disk-write", Some(&subject), || Err(error))),
        }
    }
    let answer =
        ask_within(restart, &["gpu-measure", "--size", &size.get().to_string()], BUS_TIMEOUT);
    if answer.measured.is_empty() {
        let reason = answer.findings.into_iter().next().map(|finding| finding.detail);
        rows.push(Measured { error: reason, ..Measured::of("bus", None) });
    }
    rows.extend(answer.measured);
    rows
}

/// The bus, in the child process.
pub(crate) fn device(size: ByteCount) -> Answer {
    if let Err(error) = terrane_cuda::probe() {
        let findings = vec![Finding::refused("gpu", error.to_string(), "plan without it")];
        return Answer { findings, ..Answer::default() };
    }
    let bus = shape(size).and_then(|shape| Bus::new(&shape, None));
    let measured = match bus {
        Ok(bus) => {
            let mut rows = Vec::new();
            for (key, to_host) in [("to-host", true), ("to-device", false)] {
                rows.extend(row(key, Some("device 0"), || {
                    let times = crate::measure::times(PASSES, || bus.pass(to_host))?;
                    let one = crate::measure::times(PASSES, || bus.one_block(to_host))?;
                    Ok(cost(bus.bytes(), times, Some((bus.block_bytes(), one))))
                }));
            }
            rows.extend(row("both-ways", Some("device 0"), || {
                Ok(cost(bus.bytes() * 2, crate::measure::times(PASSES, || bus.both())?, None))
            }));
            rows.extend(row("pinned-bring-up", Some("device 0"), || {
                let times = crate::measure::times(PASSES, || bus.bring_up(size))?;
                Ok(cost(size.get(), times, None))
            }));
            rows
        }
        Err(error) => row("to-host", Some("device 0"), || Err(error)),
    };
    Answer { measured, ..Answer::default() }
}

struct Cost {
    bytes: u64,
    rate: f64,
    fixed: Option<f64>,
}

fn cost(bytes: u64, seconds: Spread, one: Option<(u64, Spread)>) -> Cost {
    let rate = bytes as f64 / seconds.median;
    let fixed = one.map(|(bytes, seconds)| (seconds.median - bytes as f64 / rate).max(0.0));
    Cost { bytes, rate, fixed }
}

fn row(
    key: &str,
    subject: Option<&str>,
    measure: impl FnOnce() -> Result<Cost, Failure>,
) -> Vec<Measured> {
    let mut row = Measured::of(key, subject);
    match measure() {
        Ok(cost) => {
            row.bytes = cost.bytes;
            row.bytes_per_second = Some(cost.rate);
            row.fixed_seconds = cost.fixed;
        }
        Err(error) => row.error = Some(error.to_string()),
    }
    vec![row]
}

/// The rates of a plan. Of several directories, the first counts.
pub(crate) fn rates(measured: &[Measured]) -> Option<Rates> {
    let find =
        |key: &str| measured.iter().find(|row| row.key == key && row.bytes_per_second.is_some());
    let rate = |key: &str| find(key)?.bytes_per_second;
    let cost = |key: &str| {
        let row = find(key)?;
        let fixed_seconds = row.fixed_seconds.unwrap_or(0.0);
        Some(CopyCost { fixed_seconds, bytes_per_second: row.bytes_per_second? })
    };
    find("memory-copy")?;
    // Bring-up is a touch and then a registration, so the registration has what the touch leaves of the time.
    let registration =
        rate("pinned-bring-up").zip(rate("first-touch")).and_then(|(both, touch)| {
            let seconds = 1.0 / both - 1.0 / touch;
            (seconds > 0.0).then(|| 1.0 / seconds)
        });
    Some(Rates {
        name: "terrane doctor --measure on this machine".to_owned(),
        is_measured: true,
        to_device: cost("to-device"),
        to_host: cost("to-host"),
        within_host: cost("memory-copy"),
        disk_read: cost("disk-read"),
        disk_write: cost("disk-write"),
        first_touch_bytes_per_second: rate("first-touch"),
        registration_bytes_per_second: registration,
    })
}
