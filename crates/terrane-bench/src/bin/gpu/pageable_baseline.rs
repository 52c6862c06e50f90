//! The usual pattern of offloading in Rust engines: a pageable host tensor for each device tensor,
//! a copy for each block, and a synchronisation for each tensor.

use std::io::Write;

use anyhow::{Context as _, Result};
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::ByteCount;
use terrane_core::convert::to_u64;
use terrane_transfer::Endpoint;

use crate::bindings::Bindings;
use crate::blocks::Way;
use crate::setup::{Setup, address, interleaved, shuffled, transfer};
use crate::shapes::{ON_DEVICE, ON_HOST, shapes};
use terrane_cuda::Stream;

/// The minimum speedup over that pattern. Terrane makes no call for a single block.
const LEAST_TIMES: f64 = 5.0;

pub fn report<W: Write>(
    setup: &Setup,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let settings = setup.few(settings);
    for shape in shapes(setup.smoke) {
        for way in Way::ALL {
            let case = format!("{}, {}, compared with today's pattern", shape.title(), way.name());
            if !reporter.wants(&case) {
                continue;
            }
            let blocks = shape.blocks_of(setup.moved)?;
            let bytes = shape.block_bytes().get() * u64::from(blocks);
            let device = setup.on_device(shape, blocks * 2, ON_DEVICE)?;
            let host = setup.in_pinned(shape, blocks, ON_HOST)?;
            let mut on_device = shuffled(0..blocks * 2, 3);
            on_device.truncate(ByteCount::new(blocks.into()).to_usize());
            let on_host: Vec<u32> = (0..blocks).collect();
            let mut pageable = vec![1_u8; ByteCount::new(bytes).to_usize()];
            let (from, to) = match way {
                Way::ToHost => ((&device, &*on_device), (&host, &*on_host)),
                Way::ToDevice => ((&host, &*on_host), (&device, &*on_device)),
            };
            let spreads = interleaved(
                &settings,
                &mut [&mut || transfer(&setup.manager, from, to), &mut || {
                    today(&setup.bindings, &setup.stream, &device, &on_device, way, &mut pageable)
                }],
            )?;
            let [terrane, baseline] = spreads.as_slice() else { return Ok(()) };
            let gigabytes = bytes as f64 * 1e-9;
            let rate = terrane.rate(gigabytes);
            let measured = Measurement::new(case, rate, "GB/s", Direction::HigherIsBetter);
            let name = "pageable, a copy a block, a synchronise a tensor";
            let measured = measured.with_baseline(name, baseline.rate(gigabytes).median);
            reporter.report(&measured.at_least(LEAST_TIMES))?;
        }
    }
    Ok(())
}

/// Copies the blocks of one tensor, waits, and continues with the next tensor.
fn today(
    bindings: &Bindings,
    stream: &Stream,
    device: &Endpoint,
    blocks: &[u32],
    way: Way,
    host: &mut [u8],
) -> Result<()> {
    let geometry = device.layout().geometry();
    let piece = geometry.pieces().context("pieces of equal length")?.piece_bytes();
    let mut pieces = host.chunks_exact_mut(piece.to_usize());
    for layer in 0..geometry.num_layers() {
        for outer in 0..geometry.section_count() {
            for &block in blocks {
                let Some(host) = pieces.next() else { break };
                let host = to_u64(host.as_mut_ptr().expose_provenance());
                let device = address(device.layout().location(block, layer, outer)?)?;
                let (to, from) = match way {
                    Way::ToHost => (host, device),
                    Way::ToDevice => (device, host),
                };
                // SAFETY: both spans live until the stream has completed, and no other code uses
                // them.
                unsafe { bindings.copy(stream, to, from, piece.get()) }?;
            }
            stream.synchronize()?;
        }
    }
    Ok(())
}
