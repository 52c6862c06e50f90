//! Rates of this machine: memory, directories, and the bus.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_layout::{ElementFormat, LayoutConfig};
use terrane_plan::{CopyCost, Rates};
use terrane_storage::available_memory;

use super::finding::Finding;
use super::probe::{Measured, ProbeResult, probe_in_child_within};
use crate::error::Failure;
use crate::measure::bus::Bus;
use crate::measure::disk::DiskCase;
use crate::measure::host::{HostCase, touch_once};
use crate::measure::{Shape, Spread, times, times_interleaved};
use crate::restart::Restart;

/// Passes of each case. The report has the median.
const PASSES: u32 = 3;

/// The requests in flight to a disk.
const DEPTH: u32 = 32;

/// The time limit of the child process that measures the bus. Creating contexts takes a second or
/// two.
const BUS_TIMEOUT: Duration = Duration::from_secs(20);

/// Blocks of 2 MiB in 32 layers with K and V, as in Llama 3.1 8B.
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

/// Measures everything. A failure becomes a row of the result.
pub(crate) fn all(directories: &[PathBuf], size: ByteCount, restart: &Restart) -> Vec<Measured> {
    let mut rows = row("memory-copy", None, || {
        let shape = shape(size)?;
        let mut case = HostCase::new(&shape)?;
        copies(shape.blocks, shape.block_bytes(), 1, |blocks| case.load_some(blocks))
    });
    rows.extend(row("first-touch", None, || preparation(size, available_memory(), touch_once)));
    for directory in directories {
        let subject = directory.display().to_string();
        let case = shape(size).and_then(|shape| {
            let mut case = DiskCase::new(&shape, directory, DEPTH)?;
            // The first pass writes blocks that are only reserved, and does not count.
            case.pass(true)?;
            Ok((shape, case))
        });
        match case {
            Ok((shape, mut case)) => {
                for (key, is_write) in [("disk-write", true), ("disk-read", false)] {
                    rows.extend(row(key, Some(&subject), || {
                        copies(shape.blocks, shape.block_bytes(), DEPTH, |blocks| {
                            case.pass_some(is_write, blocks)
                        })
                    }));
                }
            }
            Err(error) => rows.extend(row("disk-write", Some(&subject), || Err(error))),
        }
    }
    let result = probe_in_child_within(
        restart,
        &["gpu-measure", "--size", &size.get().to_string()],
        BUS_TIMEOUT,
    );
    if result.measured.is_empty() {
        let reason = result.findings.into_iter().next().map(|finding| finding.detail);
        rows.push(Measured { error: reason, ..Measured::of("bus", None) });
    }
    rows.extend(result.measured);
    rows
}

/// Measures the bus, in the child process.
pub(crate) fn device(size: ByteCount) -> ProbeResult {
    if let Err(error) = terrane_cuda::probe() {
        let findings = vec![Finding::refused("gpu", error.to_string(), "plan without it")];
        return ProbeResult { findings, ..ProbeResult::default() };
    }
    let bus = shape(size).and_then(|shape| Ok((Bus::new(&shape, None)?, shape)));
    let measured = match bus {
        Ok((bus, shape)) => {
            let mut rows = Vec::new();
            // Each case reports its own failure.
            let _ = warm_up(&bus);
            for (key, to_host) in [("to-host", true), ("to-device", false)] {
                rows.extend(row(key, Some("device 0"), || {
                    copies(shape.blocks, shape.block_bytes(), 1, |blocks| {
                        bus.pass_some(to_host, blocks)
                    })
                }));
            }
            rows.extend(row("both-ways", Some("device 0"), || {
                let many = times(PASSES, || bus.both())?;
                Ok(Cost::of_one((shape.bytes() * 2, many)))
            }));
            rows.extend(row("pinned-bring-up", Some("device 0"), || {
                preparation(size, available_memory(), |size| bus.bring_up(size))
            }));
            rows
        }
        Err(error) => row("to-host", Some("device 0"), || Err(error)),
    };
    ProbeResult { measured, ..ProbeResult::default() }
}

/// Copies until an idle device has raised its clocks.
fn warm_up(bus: &Bus) -> Result<(), Failure> {
    const WARM_UP: Duration = Duration::from_millis(300);
    let begun = Instant::now();
    while begun.elapsed() < WARM_UP {
        bus.pass(true)?;
        bus.pass(false)?;
    }
    Ok(())
}

/// A fixed time and a rate.
struct Cost {
    /// The bytes of the larger measurement, and its seconds.
    bytes: u64,
    seconds: f64,
    rate: f64,
    fixed: f64,
}

impl Cost {
    /// The cost from one measurement, with a fixed time of zero.
    fn of_one((bytes, spread): (u64, Spread)) -> Self {
        let seconds = spread.median;
        Self { bytes, seconds, rate: bytes as f64 / seconds, fixed: 0.0 }
    }

    /// The cost from two measurements. The fixed part is at most a share of the larger time. If the
    /// larger measurement was not slower than the smaller one, its whole time counts as the rate.
    fn of_two(smaller: (u64, Spread), many: (u64, Spread), largest_share: f64) -> Self {
        let one = Self::of_one(many);
        let slope = (one.seconds - smaller.1.median) / many.0.saturating_sub(smaller.0) as f64;
        let fixed = one.seconds - one.bytes as f64 * slope;
        if !(slope > 0.0 && fixed > 0.0) {
            return one;
        }
        let fixed = fixed.min(one.seconds * largest_share);
        Self { rate: one.bytes as f64 / (one.seconds - fixed), fixed, ..one }
    }
}

/// The cost of copies: of all blocks, and of a quarter of them with the same number of requests in
/// flight. If a quarter of the blocks is fewer than `least`, requests would be unused, and only all
/// blocks are measured.
fn copies(
    blocks: u32,
    block_bytes: u64,
    least: u32,
    pass: impl FnMut(u32) -> Result<f64, Failure>,
) -> Result<Cost, Failure> {
    /// Times of few passes are noisy. With this limit, the rate is at most 5 % above the bytes per
    /// second of all blocks. Predictions for more blocks are at most 5 % too low.
    const LARGEST_SHARE: f64 = 1.0 / 21.0;
    let bytes = |blocks: u32| u64::from(blocks).saturating_mul(block_bytes);
    let pass = RefCell::new(pass);
    let run = |blocks: u32| (*pass.borrow_mut())(blocks);
    let quarter = blocks / 4;
    if quarter < least.max(1) {
        return Ok(Cost::of_one((bytes(blocks), times(PASSES, || run(blocks))?)));
    }
    let (all, smaller) = times_interleaved(PASSES, || run(blocks), || run(quarter))?;
    Ok(Cost::of_two((bytes(quarter), smaller), (bytes(blocks), all), LARGEST_SHARE))
}

/// The cost of preparing memory. The fixed part is a large share of a short preparation. So a
/// second size, of two to eight times the bytes, separates the fixed part from the rate.
fn preparation(
    size: ByteCount,
    free: Option<ByteCount>,
    seconds: impl Fn(ByteCount) -> Result<f64, Failure>,
) -> Result<Cost, Failure> {
    /// The time for one pass with the larger size, in seconds.
    const BUDGET: f64 = 0.4;
    const LARGEST: u64 = 8;
    /// A driver's fixed part can be as long as the rest. A larger share is noise.
    const LARGEST_SHARE: f64 = 0.5;
    let smaller = (size.get(), times(PASSES, || seconds(size))?);
    let in_time = (1..=LARGEST).rev().find(|&factor| smaller.1.median * factor as f64 <= BUDGET);
    let in_memory = free.map_or(LARGEST, |free| free.get() / 4 / size.get().max(1));
    let factor = in_time.unwrap_or(1).max(2).min(in_memory);
    if factor < 2 {
        return Ok(Cost::of_one(smaller));
    }
    let many = size.get().saturating_mul(factor);
    // No further pass is discarded: the first pass with the smaller size was.
    let passes = (0..PASSES).map(|_| seconds(ByteCount::new(many)));
    // The larger size may exceed an unknown limit, such as that of locked memory. Then only the
    // smaller size counts.
    Ok(match passes.collect::<Result<Vec<f64>, Failure>>() {
        Ok(passes) => Cost::of_two(smaller, (many, Spread::of(passes)), LARGEST_SHARE),
        Err(_) => Cost::of_one(smaller),
    })
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
            row.seconds = Some(cost.seconds);
            row.bytes_per_second = Some(cost.rate);
            row.fixed_seconds = Some(cost.fixed);
        }
        Err(error) => row.error = Some(error.to_string()),
    }
    vec![row]
}

/// The rates for a plan. If several directories were measured, the first is used.
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
        let cost = preparation(size, None, seconds).unwrap();
        assert_eq!(cost.bytes, size.get() * 7);
        assert!((cost.rate / 10e9 - 1.0).abs() < 1e-6, "{}", cost.rate);
        assert!((cost.fixed - 0.024).abs() < 1e-6, "{}", cost.fixed);
    }

    #[test]
    fn a_second_size_is_at_least_twice_the_first() {
        let size = ByteCount::mib(256);
        // If the sizes were almost equal, noise would be measured as a rate of terabytes.
        let seconds = |size: ByteCount| Ok(0.05 + (size.get() >> 20) as f64 * 1e-9);
        for (free, bytes) in [(1100, 256), (2047, 256), (2048, 512), (3100, 768)] {
            let cost = preparation(size, Some(ByteCount::mib(free)), seconds).unwrap();
            assert_eq!(cost.bytes, bytes << 20, "{free}");
            assert!(cost.rate <= cost.bytes as f64 / cost.seconds * 2.001, "{}", cost.rate);
        }
        // A slow preparation also has a second size.
        let slow = preparation(size, None, |size| Ok(size.get() as f64 / 1e8)).unwrap();
        assert_eq!(slow.bytes, 512 << 20);
    }

    #[test]
    fn a_second_size_that_is_refused_leaves_the_first() {
        let size = ByteCount::mib(256);
        let refused = || Failure::TooSmall { what: "memory", size, needed: size };
        let cost =
            preparation(
                size,
                None,
                |requested| if requested > size { Err(refused()) } else { Ok(0.01) },
            );
        let cost = cost.unwrap();
        assert_eq!((cost.bytes, cost.fixed), (size.get(), 0.0));
        assert_eq!(cost.rate, (256_u64 << 20) as f64 / 0.01);
        assert!(preparation(size, None, |_| Err(refused())).is_err());
    }

    #[test]
    fn a_rate_is_at_most_a_little_above_what_the_larger_pass_reached() {
        const BLOCK: u64 = 2 << 20;
        // A disk that serves one request in 6 ms, and 16 queued requests in 12 ms.
        let disk = |blocks: u32| Ok(0.006 + f64::from(blocks - 1) * 0.0004);
        let noise = |blocks: u32| Ok(if blocks == 128 { 0.096 } else { 0.094 });
        let line = |blocks: u32| Ok(0.0005 + f64::from(blocks) * 0.0007);
        let faster = |blocks: u32| Ok(f64::from(blocks).powf(1.3) * 1e-4);
        let cases: [&dyn Fn(u32) -> Result<f64, Failure>; 4] = [&disk, &noise, &line, &faster];
        for seconds in cases {
            for blocks in [2_u32, 16, 128, 1024] {
                let cost = copies(blocks, BLOCK, DEPTH, seconds).unwrap();
                let (bytes, elapsed) = (u64::from(blocks) * BLOCK, seconds(blocks).unwrap());
                let measured = bytes as f64 / elapsed;
                assert!(cost.rate >= measured * 0.999_999 && cost.rate < measured * 1.051);
                let predicted = cost.fixed + bytes as f64 / cost.rate;
                assert!((predicted / elapsed - 1.0).abs() < 1e-9);
                assert_eq!((cost.bytes, cost.seconds), (bytes, elapsed));
            }
        }
        // 16 blocks are fewer than the requests in flight, so no other number of blocks is
        // comparable.
        let costs = copies(16, BLOCK, DEPTH, disk).unwrap();
        assert_eq!((costs.rate, costs.fixed), ((16 * BLOCK) as f64 / 0.012, 0.0));
        // If the times are on a line, its fixed part is found.
        let many = copies(128, BLOCK, DEPTH, line).unwrap();
        assert!((many.fixed - 0.0005).abs() < 1e-9, "{}", many.fixed);
        for times in [1_u32, 2, 4, 8] {
            let bytes = u64::from(128 * times) * BLOCK;
            let off = (many.fixed + bytes as f64 / many.rate) / line(128 * times).unwrap() - 1.0;
            assert!(off.abs() < 0.1, "{off}");
        }
    }
}
