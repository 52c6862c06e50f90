//! Copies of blocks from one engine's format to another's, within the device and to and from pinned
//! memory.

use std::io::Write;

use anyhow::Result;
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::{Allocate, ByteCount, Region, RegionRequest};
use terrane_cuda::DeviceMemory;
use terrane_layout::formats::vllm::PackedOrder;
use terrane_layout::formats::{paged, sglang, vllm};
use terrane_layout::{Geometry, LayoutBuilder, LayoutConfig, LayoutError, TokenOrder};
use terrane_transfer::Endpoint;

use crate::setup::{Setup, device_address, explain, interleaved, shuffled, transfer};
use crate::shapes::{Shape, shapes};

/// The target of a transfer between device and pinned memory, as a share of the rate of a
/// contiguous copy.
const LEAST_TO_PINNED: f64 = 0.95;
/// The target of a transfer within the device, as a share of the rate of a plain copy.
const LEAST_WITHIN: f64 = 0.85;

/// Larger than the copies over the bus, because a small copy within the device is too short to
/// measure.
const TIMES_MOVED: u64 = 8;

type Format = fn(&LayoutConfig) -> Result<Geometry, LayoutError>;

/// K and V side by side in each row, with one tensor per layer.
fn packed(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    vllm::packed(config, PackedOrder::Lbnhc)
}

/// K and V side by side in each row, in whole pages.
fn packed_pages(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    vllm::packed(config, PackedOrder::Blnhc)
}

/// Tokens adjacent: V has cells of one element, and K of eight.
fn vllm_v0(config: &LayoutConfig) -> Result<Geometry, LayoutError> {
    paged::vllm_v0(config, 8)
}

pub fn report<W: Write>(
    setup: &Setup,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let wide = Some(LEAST_WITHIN);
    let within: [(&str, Format, Format, Option<f64>); 6] = [
        ("packed to split K and V", packed, vllm::nhd, wide),
        ("split to packed K and V", vllm::nhd, packed, wide),
        ("page_head to layer separate", sglang::page_head, sglang::device, wide),
        ("layer separate to page_head", sglang::device, sglang::page_head, wide),
        ("token-major to paged attention", vllm::nhd, vllm_v0, None),
        ("paged attention to token-major", vllm_v0, vllm::nhd, None),
    ];
    let over_wire: [(&str, Format, Format, bool); 6] = [
        ("packed to split K and V", packed, vllm::cross_layer, true),
        ("split to packed K and V", vllm::nhd, packed_pages, true),
        ("layer separate to page_head", sglang::device, sglang::page_head, true),
        ("split pages to packed K and V", vllm::cross_layer, packed, false),
        ("packed pages to split K and V", packed_pages, vllm::nhd, false),
        ("page_head to layer separate", sglang::page_head, sglang::device, false),
    ];
    // The shapes of a smoke run have no heads.
    let most = if setup.smoke { 1 } else { usize::MAX };
    for shape in shapes(false).filter(|shape| shape.has_heads()).take(most) {
        for (name, from, to, least) in within {
            let case = format!("{}, within the device, {name}", shape.title());
            if !reporter.wants(&case) {
                continue;
            }
            let (free, _) = setup.context.memory()?;
            let most = (setup.moved.get() * TIMES_MOVED).min(free.get() / 8);
            let moved = if setup.smoke { setup.moved } else { ByteCount::new(most) };
            let ends = Ends::new(shape, moved, (from, &setup.device), (to, &setup.device))?;
            let flat = [setup.flat(ends.bytes)?, setup.flat(ends.bytes)?];
            let address = |memory: &DeviceMemory| memory.address().get();
            let flat_addresses = flat.each_ref().map(address);
            let baseline = Baseline { name: "device copy", least };
            ends.measure(setup, settings, reporter, &case, flat_addresses, &baseline)?;
        }
        for (name, from, to, to_host) in over_wire {
            let way = if to_host { "device to pinned" } else { "pinned to device" };
            let case = format!("{}, {way}, {name}", shape.title());
            if !reporter.wants(&case) {
                continue;
            }
            let ends = if to_host {
                Ends::new(shape, setup.moved, (from, &setup.device), (to, &setup.pinned))?
            } else {
                Ends::new(shape, setup.moved, (from, &setup.pinned), (to, &setup.device))?
            };
            let on_device = setup.flat(ends.bytes)?;
            let request = RegionRequest::new(ends.bytes).labelled("contiguous");
            let on_host = Region::new(setup.pinned.allocate(&request)?);
            let (device, host) = (on_device.address().get(), device_address(&on_host)?);
            let (from, to) = if to_host { (device, host) } else { (host, device) };
            let baseline = Baseline { name: "contiguous DMA", least: Some(LEAST_TO_PINNED) };
            ends.measure(setup, settings, reporter, &case, [from, to], &baseline)?;
        }
    }
    Ok(())
}

/// The baseline of a case.
struct Baseline {
    name: &'static str,
    /// `None` if V is copied element by element.
    least: Option<f64>,
}

/// Both ends of a case.
struct Ends {
    source: Endpoint,
    destination: Endpoint,
    blocks: u32,
    bytes: ByteCount,
}

impl Ends {
    fn new<A: Allocate, B: Allocate>(
        shape: &Shape,
        bytes: ByteCount,
        (from, source): (Format, &A),
        (to, destination): (Format, &B),
    ) -> Result<Self> {
        let blocks = shape.blocks_of(bytes)?;
        let config = shape.in_order(blocks, TokenOrder::TokenMajor)?;
        let bytes = ByteCount::new(shape.block_bytes().get() * u64::from(blocks));
        Ok(Self {
            source: endpoint(from(&config)?, source)?,
            destination: endpoint(to(&config)?, destination)?,
            blocks,
            bytes,
        })
    }

    /// Measures the transfer and a contiguous copy alternately.
    fn measure<W: Write>(
        &self,
        setup: &Setup,
        settings: &Settings,
        reporter: &mut Reporter<W>,
        case: &str,
        [flat_from, flat_to]: [u64; 2],
        baseline: &Baseline,
    ) -> Result<()> {
        let (read, written) = (shuffled(0..self.blocks, 3), shuffled(0..self.blocks, 5));
        let ends = [(&self.source, &read[..]), (&self.destination, &written[..])];
        let explanation = explain(&setup.manager, ends[0], ends[1])?;
        let spreads = interleaved(
            settings,
            &mut [&mut || transfer(&setup.manager, ends[0], ends[1]), &mut || {
                // SAFETY: the caller owns both spans, and the stream is waited for.
                unsafe {
                    setup.bindings.copy(&setup.stream, flat_to, flat_from, self.bytes.get())
                }?;
                Ok(setup.stream.synchronize()?)
            }],
        )?;
        let [terrane, copy] = spreads.as_slice() else { return Ok(()) };
        setup.predictions.report(case, explanation.predicted, *terrane, reporter)?;
        let gigabytes = self.bytes.get() as f64 * 1e-9;
        let rate = terrane.rate(gigabytes);
        let measured = Measurement::new(case, rate, "GB/s", Direction::HigherIsBetter)
            .with_baseline(baseline.name, copy.rate(gigabytes).median);
        let measured = match baseline.least {
            Some(least) => measured.at_least(least),
            None => measured.without_target("accesses of two bytes limit it, and not the memory"),
        };
        Ok(reporter.report(&measured)?)
    }
}

fn endpoint(geometry: Geometry, allocator: &impl Allocate) -> Result<Endpoint> {
    let layout = LayoutBuilder::from_geometry(geometry).allocate(allocator).unregistered();
    Ok(Endpoint::new(layout.build()?)?)
}
