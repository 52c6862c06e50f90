//! Rates of this machine: memory, directories, and the bus.

use std::path::PathBuf;
use std::time::Duration;

use terrane_core::ByteCount;
use terrane_layout::{ElementFormat, LayoutConfig};
use terrane_plan::{CopyCost, Rates};
use terrane_storage::available_memory;

use super::answer::{Answer, Measured, ask_within};
use super::finding::Finding;
use crate::error::Failure;
use crate::measure::bus::Bus;
use crate::measure::disk::DiskCase;
use crate::measure::host::{HostCase, touch_once};
use crate::measure::{Shape, Spread, times};
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
        Ok(Cost::of((case.block_bytes(), one), (case.bytes(), blocks)))
    });
    rows.extend(row("first-touch", None, || preparation(size, touch_once)));
    for directory in directories {
        let subject = directory.display().to_string();
        let case = shape(size).and_then(|shape| DiskCase::new(&shape, directory, 32));
        // The first pass writes blocks that are only reserved, and does not count.
        let case = case.and_then(|mut case| case.pass(true).map(|_| case));
        match case {
            Ok(mut case) => {
                for (key, is_write) in [("disk-write", true), ("disk-read", false)] {
                    rows.extend(row(key, Some(&subject), || {
                        let many = times(PASSES, || case.pass(is_write))?;
                        let one = times(PASSES, || case.one_block(is_write))?;
                        Ok(Cost::of((case.block_bytes(), one), (case.bytes(), many)))
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
                    let many = times(PASSES, || bus.pass(to_host))?;
                    let one = times(PASSES, || bus.one_block(to_host))?;
                    Ok(Cost::of((bus.block_bytes(), one), (bus.bytes(), many)))
                }));
            }
            rows.extend(row("both-ways", Some("device 0"), || {
                let many = times(PASSES, || bus.both())?;
                Ok(Cost::of((0, Spread::of(vec![0.0])), (bus.bytes() * 2, many)))
            }));
            rows.extend(row("pinned-bring-up", Some("device 0"), || {
                preparation(size, |size| bus.bring_up(size))
            }));
            rows
        }
        Err(error) => row("to-host", Some("device 0"), || Err(error)),
    };
    Answer { measured, ..Answer::default() }
}

/// A fixed time and a rate, from two sizes.
struct Cost {
    bytes: u64,
    rate: f64,
    fixed: f64,
}

impl Cost {
    /// The line through a few bytes and many. If many took no longer, all of their time counts as their rate's.
    fn of(few: (u64, Spread), many: (u64, Spread)) -> Self {
        let (bytes, seconds) = (many.0, many.1.median);
        let more = bytes.saturating_sub(few.0) as f64;
        let rate = more / (seconds - few.1.median);
        let fixed = seconds - bytes as f64 / rate;
        if rate.is_finite() && rate > 0.0 && fixed >= 0.0 {
            return Self { bytes, rate, fixed };
        }
        Self { bytes, rate: bytes as f64 / seconds, fixed: 0.0 }
    }
}

/// The cost of preparing memory. The fixed part is a large share of a short preparation, so a second size, of up to
/// eight times the bytes, separates it from the rate.
fn preparation(
    size: ByteCount,
    seconds: impl Fn(ByteCount) -> Result<f64, Failure>,
) -> Result<Cost, Failure> {
    /// The time of one pass with the larger size.
    const BUDGET: f64 = 0.4;
    const LARGEST: u64 = 8;
    let few = (size.get(), times(PASSES, || seconds(size))?);
    let factor = (1..=LARGEST).rev().find(|&factor| few.1.median * factor as f64 <= BUDGET);
    let left = available_memory().map_or(u64::MAX, |left| left.get() / 4);
    let many = size.get().saturating_mul(factor.unwrap_or(2).max(2)).min(left);
    if many <= size.get() {
        return Ok(Cost::of((0, Spread::of(vec![0.0])), few));
    }
    // No pass is left out: the first one with the smaller size was.
    let passes = (0..PASSES).map(|_| seconds(ByteCount::new(many)));
    let passes: Vec<f64> = passes.collect::<Result<_, Failure>>()?;
    Ok(Cost::of(few, (many, Spread::of(passes))))
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
            row.fixed_seconds = Some(cost.fixed);
        }
        Err(error) => row.error = Some(error.to_string()),
    }
    vec![row]
}

/// The rates of a plan. The first of several directories counts.
pub(crate) fn rates(measured: &[Measured]) -> Option<Rates> {
    let find =
        |key: &str| measured.iter().find(|row| row.key == key && row.bytes_per_second.is_some());
    let cost = |key: &str| {
        let row = find(key)?;
        let fixed_seconds = row.fixed_seconds.unwrap_or(0.0);
        Some(CopyCost { fixed_seconds, bytes_per_second: row.bytes_per_second? })
    };
    find("memory-copy")?;
    Some(Rates {
        name: "terrane doctor --measure on this machine".to_owned(),
        is_measured: true,
        to_device: cost("to-device"),
        to_host: cost("to-host"),
        within_host: cost("memory-copy"),
        disk_read: cost("disk-read"),
        disk_write: cost("disk-write"),
        first_touch: cost("first-touch"),
        pinned_bring_up: cost("pinned-bring-up"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_sizes_separate_the_fixed_time_from_the_rate() {
        let seconds = |size: ByteCount| Ok(0.024 + size.get() as f64 / 10e9);
        let size = ByteCount::mib(256);
        let cost = preparation(size, seconds).unwrap();
        assert_eq!(cost.bytes, size.get() * 7);
        assert!((cost.rate / 10e9 - 1.0).abs() < 1e-6, "{}", cost.rate);
        assert!((cost.fixed - 0.024).abs() < 1e-6, "{}", cost.fixed);
    }

    #[test]
    fn times_that_do_not_grow_have_no_fixed_part() {
        let one = Spread::of(vec![1.0]);
        let cost = Cost::of((1 << 20, one), (1 << 30, one));
        assert_eq!((cost.rate, cost.fixed), ((1_u64 << 30) as f64, 0.0));
    }
}
