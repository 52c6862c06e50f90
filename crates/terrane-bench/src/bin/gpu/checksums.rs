//! The cost of checksums that the device computes: transfers with and without checksums.

use std::io::Write;

use anyhow::{Context as _, Result, anyhow, ensure};
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::ByteCount;
use terrane_testkit::pattern::Pattern;
use terrane_transfer::{Checksums, DeviceOrder, Endpoint, Transfer, TransferManager};

use crate::blocks::Way;
use crate::setup::{Setup, interleaved, shuffled, transfer};
use crate::shapes::{ON_DEVICE, ON_HOST, Shape, shapes};

/// The targets are shares of the rate without checksums.
///
/// In transfers to the host, the device computes checksums while the bus is busy. In transfers to
/// the device, the checksums of the last chunk follow the chunk. Both take a few microseconds of a
/// large transfer.
const LEAST_LARGE: f64 = 0.97;
/// Sixteen blocks occupy the bus for some hundred microseconds. The tables, the first kernel and
/// the checksums take about fifteen.
const LEAST_SIXTEEN: f64 = 0.90;
/// One block occupies the bus for seven to forty microseconds. In a transfer to the device, the
/// same fifteen microseconds follow.
const LEAST_ONE: f64 = 0.45;
/// Within the device, a copy reads and writes at the rate of the memory. A kernel that computes
/// checksums reads at half of that rate at most.
const LEAST_WITHIN: f64 = 0.40;

/// Larger than the copies over the bus, because a small copy within the device is too short to
/// measure.
const TIMES_MOVED: u64 = 4;

/// The number of copied blocks.
#[derive(Clone, Copy)]
enum Amount {
    Blocks(u32),
    All,
}

impl Amount {
    const ALL: [Self; 3] = [Self::Blocks(1), Self::Blocks(16), Self::All];

    fn name(self) -> String {
        match self {
            Self::Blocks(1) => String::from("1 block"),
            Self::Blocks(number) => format!("{number} blocks"),
            Self::All => String::from("all blocks"),
        }
    }

    const fn least(self) -> f64 {
        match self {
            Self::Blocks(1) => LEAST_ONE,
            Self::Blocks(_) => LEAST_SIXTEEN,
            Self::All => LEAST_LARGE,
        }
    }
}

pub fn report<W: Write>(
    setup: &Setup,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    for shape in shapes(setup.smoke) {
        over_the_wire(setup, shape, settings, reporter)?;
        within_the_device(setup, shape, settings, reporter)?;
    }
    Ok(())
}

fn over_the_wire<W: Write>(
    setup: &Setup,
    shape: &Shape,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let case = |way: Way, amount: Amount| {
        format!("{}, {}, {}, with checksums", shape.title(), way.name(), amount.name())
    };
    let mut cases = Way::ALL.into_iter().flat_map(|way| Amount::ALL.map(|amount| (way, amount)));
    if !cases.clone().any(|(way, amount)| reporter.wants(&case(way, amount))) {
        return Ok(());
    }
    // A simulated device takes a second for the checksums of eight blocks.
    let blocks = if setup.smoke { 2 } else { shape.blocks_of(setup.moved)?.max(16) };
    let device = setup.on_device(shape, blocks, ON_DEVICE)?;
    let host = setup.in_pinned(shape, blocks, ON_HOST)?;
    Pattern::new(7).fill_blocks(&host, &(0..blocks).collect::<Vec<_>>())?;
    let all = shuffled(0..blocks, 3);
    cases.try_for_each(|(way, amount)| {
        let case = case(way, amount);
        if !reporter.wants(&case) {
            return Ok(());
        }
        let (count, settings) = match amount {
            Amount::Blocks(count) => (count.min(blocks), setup.many(settings)),
            Amount::All => (blocks, settings.clone()),
        };
        let length = ByteCount::new(count.into()).to_usize();
        let on_device = all.get(..length).unwrap_or_default();
        let on_host: Vec<u32> = (0..count).collect();
        let ends = match way {
            Way::ToHost => [(&device, on_device), (&host, &on_host[..])],
            Way::ToDevice => [(&host, &on_host[..]), (&device, on_device)],
        };
        // The device has the same bytes as the host, so both directions have the same checksums.
        transfer(&setup.manager, (&host, &on_host), (&device, on_device))?;
        let [there, back] = [ends, [ends[1], ends[0]]].map(|ends| sums(&setup.manager, ends));
        ensure!(there? == back?, "{case}: the checksums of both ways differ");
        measure(setup, &settings, reporter, (case, amount.least()), ends)
    })
}

fn within_the_device<W: Write>(
    setup: &Setup,
    shape: &Shape,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let case = format!("{}, within the device, all blocks, with checksums", shape.title());
    if !reporter.wants(&case) {
        return Ok(());
    }
    let (free, _) = setup.context.memory()?;
    let times = if setup.smoke { 1 } else { TIMES_MOVED };
    let bytes = ByteCount::new((setup.moved.get() * times).min(free.get() / 8));
    let blocks = shape.blocks_of(bytes)?;
    let [from, to] = [ON_DEVICE, ON_HOST].map(|kind| setup.on_device(shape, blocks, kind));
    let (from, to) = (from?, to?);
    let (read, written) = (shuffled(0..blocks, 3), shuffled(0..blocks, 5));
    let ends = [(&from, &read[..]), (&to, &written[..])];
    measure(setup, settings, reporter, (case, LEAST_WITHIN), ends)
}

/// Measures the rates with and without checksums alternately.
fn measure<W: Write>(
    setup: &Setup,
    settings: &Settings,
    reporter: &mut Reporter<W>,
    (case, least): (String, f64),
    ends: [(&Endpoint, &[u32]); 2],
) -> Result<()> {
    let [source, destination] = ends;
    let (end, ids) = source;
    let block = end.layout().geometry().block_bytes().get();
    let gigabytes = (block * u64::try_from(ids.len())?) as f64 * 1e-9;
    let spreads = interleaved(
        settings,
        &mut [&mut || sums(&setup.manager, ends).map(drop), &mut || {
            transfer(&setup.manager, source, destination)
        }],
    )?;
    let [with, without] = spreads.as_slice() else { return Ok(()) };
    let rate = with.rate(gigabytes);
    let measured = Measurement::new(case, rate, "GB/s", Direction::HigherIsBetter)
        .with_baseline("without checksums", without.rate(gigabytes).median)
        .at_least(least);
    Ok(reporter.report(&measured)?)
}

/// Copies blocks that no other code accesses, and returns their checksums.
fn sums(
    manager: &TransferManager,
    [(source, from), (destination, to)]: [(&Endpoint, &[u32]); 2],
) -> Result<Box<[u64]>> {
    let transfer = Transfer::new(source, destination)
        .blocks(from, to)
        .device_order(DeviceOrder::AlreadySynchronised)
        .checksums(Checksums::Compute);
    let completion = manager.submit(transfer, ()).map_err(|rejected| anyhow!(rejected.cause))?;
    let report = completion.wait().result.context("the transfer failed")?;
    report.checksums.context("the transfer has no checksums")
}
