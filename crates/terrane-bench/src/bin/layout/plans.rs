//! The time to plan a transfer, compared with a look-up of every span in the layouts.

use std::hint::black_box;
use std::io::Write;

use anyhow::Result;
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::Span;
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_testkit::memory::HeapAllocator;
use terrane_transfer::{Endpoint, Planner, Transfer};

use crate::LIMITED_ABOVE;

const LAYERS: u32 = 64;

/// The maximum time to plan a small transfer of 16 blocks in 64 regions.
const MOST_MICROSECONDS: f64 = 3.0;

/// The maximum time per span of a large transfer.
const MOST_NANOSECONDS_A_SPAN: f64 = 3.0;

/// The number of calls of a measured repeat, enough to hide the clock.
const CALLS: u32 = 64;

pub fn measure<W: Write>(settings: &Settings, reporter: &mut Reporter<W>) -> Result<()> {
    for (name, kinds) in [
        ("layer separate to layer separate", [LayoutKind::ALL[1], LayoutKind::ALL[1]]),
        ("layer separate to fully contiguous", [LayoutKind::ALL[1], LayoutKind::ALL[0]]),
        ("fully contiguous to layer separate", [LayoutKind::ALL[0], LayoutKind::ALL[1]]),
    ] {
        for blocks in [16, 1024] {
            case(name, kinds, blocks, settings, reporter)?;
        }
    }
    Ok(())
}

fn case<W: Write>(
    name: &str,
    kinds: [LayoutKind; 2],
    blocks: u32,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let case = |what: &str| format!("{what}, {blocks} blocks of {LAYERS} layers, {name}");
    let planned = if blocks == 16 { case("plan") } else { case("plan a span") };
    let compared = case("plan compared with naive");
    if !reporter.wants(&planned) && !reporter.wants(&compared) {
        return Ok(());
    }
    let [source, destination] = [endpoint(kinds[0], blocks)?, endpoint(kinds[1], blocks)?];
    let transfer = scattered(&source, &destination, blocks);
    let planner = Planner::new();
    let (terrane, naive) = settings.time_interleaved(
        || {
            for _ in 0..CALLS {
                black_box(planner.plan(black_box(&transfer)).map(|plan| plan.runs().len()).ok());
            }
        },
        || {
            for _ in 0..CALLS {
                black_box(every_span(&source, &destination, blocks).len());
            }
        },
    );
    let a_call = 1.0 / f64::from(CALLS);
    let a_span = a_call / f64::from(blocks * LAYERS);
    let lower = Direction::LowerIsBetter;
    if blocks == 16 {
        let plan = Measurement::new(planned, terrane.scaled(1e6 * a_call), "us", lower);
        reporter.report(&plan.within(MOST_MICROSECONDS))?;
    } else {
        let span = Measurement::new(planned, terrane.scaled(1e9 * a_span), "ns", lower);
        reporter.report(&span.within(MOST_NANOSECONDS_A_SPAN))?;
    }
    let compared = Measurement::new(compared, terrane.scaled(1e6 * a_call), "us", lower);
    let compared = compared.with_baseline("a look-up a span", naive.scaled(1e6 * a_call).median);
    reporter.report(&compared.without_target(LIMITED_ABOVE))?;
    Ok(())
}

fn endpoint(kind: LayoutKind, blocks: u32) -> Result<Endpoint> {
    let config = LayoutConfig::builder()
        .num_blocks(2 * blocks)
        .num_layers(LAYERS)
        .outer_dim(1)
        .page_size(16)
        .inner_dim(8)
        .element(ElementFormat::Width(2))
        .build()?;
    let allocator = HeapAllocator::system();
    Ok(Endpoint::new(
        LayoutBuilder::new(config).kind(kind).allocate(&allocator).unregistered().build()?,
    )?)
}

/// Selects every other block, in an order in which no two neighbours can be joined.
fn scattered(source: &Endpoint, destination: &Endpoint, blocks: u32) -> Transfer {
    let (from, to) = ids(blocks);
    Transfer::new(source, destination).blocks(&from, &to)
}

fn ids(blocks: u32) -> (Vec<u32>, Vec<u32>) {
    let from = (0..blocks).map(|n| (n * 7 + 3) % blocks * 2).collect();
    let to = (0..blocks).map(|n| (n * 5 + 1) % blocks * 2 + 1).collect();
    (from, to)
}

/// The baseline without a planner: looks up every span in both layouts.
fn every_span(source: &Endpoint, destination: &Endpoint, blocks: u32) -> Vec<(Span, Span)> {
    let (from, to) = ids(blocks);
    let pairs = from.iter().zip(&to);
    let spans = pairs.flat_map(|(&from, &to)| {
        (0..LAYERS).filter_map(move |layer| {
            let read = source.layout().span(from, layer, 0).ok()?;
            Some((read, destination.layout().span(to, layer, 0).ok()?))
        })
    });
    spans.collect()
}
