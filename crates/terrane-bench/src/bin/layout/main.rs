//! The arithmetic of layouts: the times of an address and of a plan, and the overhead in memory.

#![forbid(unsafe_code)]

mod plans;

use std::hint::black_box;
use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread, run};
use terrane_core::{Alignment, Limits};
use terrane_layout::{
    BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, LayoutPlan,
    PhysicalLayout,
};
use terrane_testkit::memory::HeapAllocator;

/// Measures the arithmetic of layouts.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
}

/// A model of 80 layers with separate keys and values, in pages of 16 tokens of 128 16-bit
/// elements.
const BLOCKS: u32 = 64;
const LAYERS: u32 = 80;
const OUTER: u32 = 2;
const PAGE: u32 = 16;
const INNER: u32 = 128;

/// The number of addresses per measured call: enough to hide the clock, and few enough for the
/// indices to stay cached.
const ADDRESSES: u32 = 4096;

/// The maximum time of an address.
const MOST_NANOSECONDS: f64 = 2.0;

/// The reason why a row that shows the baseline of a limited case has no target.
const LIMITED_ABOVE: &str = "the same case has a limit in the row before";

/// The maximum memory of a block-contiguous layout for each byte of its blocks.
const MOST_HELD: f64 = 1.001;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    run("layout", &arguments.settings, |settings, reporter| {
        for (name, kind) in kinds() {
            addresses(name, kind, settings, reporter)?;
        }
        plans::measure(settings, reporter)?;
        held_memory(reporter)
    })
}

fn kinds() -> [(&'static str, LayoutKind); 3] {
    let separate = |block_dimension| LayoutKind::LayerSeparate { block_dimension };
    [
        ("fully contiguous", LayoutKind::FullyContiguous),
        ("layer separate, block first", separate(BlockDimension::First)),
        ("layer separate, outer first", separate(BlockDimension::Second)),
    ]
}

fn config() -> Result<LayoutConfig> {
    let builder = LayoutConfig::builder().num_blocks(BLOCKS).num_layers(LAYERS).outer_dim(OUTER);
    let builder = builder.page_size(PAGE).inner_dim(INNER).element(ElementFormat::Width(2));
    Ok(builder.build()?)
}

/// Measures the address of (block, layer, outer) with checked indices. The limit is fixed, and the
/// second row has the same arithmetic written by hand.
fn addresses<W: Write>(
    name: &str,
    kind: LayoutKind,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let allocator = HeapAllocator::system();
    let builder = LayoutBuilder::new(config()?).kind(kind).allocate(&allocator);
    let layout = builder.unregistered().build()?;
    let by_hand = ByHand::of(&layout)?;
    let indices = indices();

    let (terrane, baseline) = settings.time_interleaved(
        || {
            let addresses = black_box(&indices).iter().map(|&(block, layer, outer)| {
                layout.host_address(block, layer, outer).map_or(0, |address| address.get())
            });
            addresses.fold(0, |sum: u64, address| sum ^ address)
        },
        || {
            let addresses = black_box(&indices)
                .iter()
                .map(|&(block, layer, outer)| by_hand.address(block, layer, outer).unwrap_or(0));
            addresses.fold(0, |sum: u64, address| sum ^ address)
        },
    );
    let nanoseconds = |seconds: Spread| seconds.scaled(1e9 / f64::from(ADDRESSES));
    let measured =
        |case: String| Measurement::new(case, nanoseconds(terrane), "ns", Direction::LowerIsBetter);
    reporter.report(&measured(format!("address, {name}")).within(MOST_NANOSECONDS))?;
    let compared = measured(format!("address compared with arithmetic by hand, {name}"));
    let compared = compared.with_baseline("by hand", nanoseconds(baseline).median);
    reporter.report(&compared.without_target(LIMITED_ABOVE))?;
    Ok(())
}

/// The formula of the layout kind with its strides in variables, as written by hand for one layout.
/// It checks only the layer index.
struct ByHand {
    bases: Vec<u64>,
    block_stride: u64,
    outer_stride: u64,
}

impl ByHand {
    fn of(layout: &PhysicalLayout) -> Result<Self> {
        let address = |block, layer, outer| {
            let address = layout.host_address(block, layer, outer);
            address.map(|address| address.get()).context("the layout is not in host memory")
        };
        let origin = address(0, 0, 0)?;
        Ok(Self {
            bases: (0..LAYERS).map(|layer| address(0, layer, 0)).collect::<Result<_>>()?,
            block_stride: address(1, 0, 0)? - origin,
            outer_stride: address(0, 0, 1)? - origin,
        })
    }

    fn address(&self, block: u32, layer: u32, outer: u32) -> Option<u64> {
        let base = self.bases.get(usize::try_from(layer).ok()?)?;
        Some(base + u64::from(block) * self.block_stride + u64::from(outer) * self.outer_stride)
    }
}

/// (block, layer, outer) triples in an order that no stride predicts.
fn indices() -> Vec<(u32, u32, u32)> {
    /// A prime that does not divide the number of pieces, so that no piece repeats.
    const STEP: u32 = 7919;
    (0..ADDRESSES)
        .map(|number| number * STEP % (BLOCKS * LAYERS * OUTER))
        .map(|piece| (piece / (LAYERS * OUTER), piece / OUTER % LAYERS, piece % OUTER))
        .collect()
}

/// Measures the memory for each byte of blocks. The layout has 4,000 blocks of a model with latent
/// attention (61 layers, pieces of 18,432 bytes, 4.5 GB in all) in huge pages. Few of these sizes
/// divide evenly.
fn held_memory<W: Write>(reporter: &mut Reporter<W>) -> Result<()> {
    let limits =
        Limits { alignment: Alignment::PAGE, granule: Alignment::HUGE_PAGE, ..Limits::NONE };
    let builder = LayoutConfig::builder().num_blocks(4000).num_layers(61).outer_dim(1);
    let builder = builder.page_size(16).inner_dim(576).element(ElementFormat::Width(2));
    let config = builder.build()?;
    for (name, kind) in kinds() {
        let plan = LayoutPlan::new(&config, kind, limits)?;
        let held = Spread::single(1.0 + plan.padding().ratio());
        let case = format!("memory held for each byte of blocks, {name}");
        let measurement = Measurement::new(case, held, "bytes", Direction::LowerIsBetter);
        reporter.report(&measurement.within(MOST_HELD))?;
    }
    Ok(())
}
