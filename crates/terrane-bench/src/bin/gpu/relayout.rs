//! Copies of blocks from one layout of a device to another, compared with a plain copy of the same
//! number of bytes.

use std::io::Write;

use anyhow::Result;
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::ByteCount;
use terrane_layout::TokenOrder::{HeadMajor, TokenMajor};
use terrane_layout::{LayoutKind, TokenOrder};
use terrane_transfer::Endpoint;

use crate::setup::{Setup, endpoint_of, explain, interleaved, shuffled, transfer};
use crate::shapes::{BLOCK_FIRST, ON_DEVICE, ON_HOST, Shape, shapes};

/// The target, as a share of the rate of a plain copy within the device.
const LEAST_SHARE: f64 = 0.90;

/// Larger than the copies over the bus, because a small copy within the device is too short to
/// measure.
const TIMES_MOVED: u64 = 8;

/// The layout kind of blocks, and the order of tokens and heads within a piece if it is stated.
type Form = (LayoutKind, Option<TokenOrder>);

const fn whole(kind: LayoutKind) -> Form {
    (kind, None)
}

fn on_device(setup: &Setup, shape: &Shape, blocks: u32, (kind, order): Form) -> Result<Endpoint> {
    match order {
        None => setup.on_device(shape, blocks, kind),
        Some(order) => endpoint_of(shape.in_order(blocks, order)?, kind, &setup.device),
    }
}

pub fn report<W: Write>(
    setup: &Setup,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let pairs: [(&str, Form, Form); 6] = [
        ("layer separate to block contiguous", whole(ON_DEVICE), whole(ON_HOST)),
        ("block contiguous to layer separate", whole(ON_HOST), whole(ON_DEVICE)),
        ("block first to outer first", whole(BLOCK_FIRST), whole(ON_DEVICE)),
        ("outer first to block first", whole(ON_DEVICE), whole(BLOCK_FIRST)),
        ("token-major to head-major", (ON_DEVICE, Some(TokenMajor)), (ON_HOST, Some(HeadMajor))),
        ("head-major to token-major", (ON_HOST, Some(HeadMajor)), (ON_DEVICE, Some(TokenMajor))),
    ];
    let (free, _) = setup.context.memory()?;
    // Two layouts and two flat buffers, with memory left for other allocations.
    let most = free.get() / 8;
    let bytes = if setup.smoke {
        setup.moved
    } else {
        ByteCount::new((setup.moved.get() * TIMES_MOVED).min(most))
    };
    for shape in shapes(setup.smoke) {
        for (name, from, to) in pairs {
            let case = format!("{}, within the device, {name}", shape.title());
            if !reporter.wants(&case) || (from.1.is_some() && !shape.has_heads()) {
                continue;
            }
            let blocks = shape.blocks_of(bytes)?;
            let bytes = ByteCount::new(shape.block_bytes().get() * u64::from(blocks));
            let [source, destination] =
                [from, to].map(|form| on_device(setup, shape, blocks, form));
            let (source, destination) = (source?, destination?);
            let flat = [setup.flat(bytes)?, setup.flat(bytes)?].map(|memory| {
                let address = memory.address().get();
                (memory, address)
            });
            let [(_from_memory, flat_from), (_to_memory, flat_to)] = &flat;
            let (read, written) = (shuffled(0..blocks, 3), shuffled(0..blocks, 5));
            let explanation = explain(&setup.manager, (&source, &read), (&destination, &written))?;
            let spreads = interleaved(
                settings,
                &mut [
                    &mut || transfer(&setup.manager, (&source, &read), (&destination, &written)),
                    &mut || {
                        // SAFETY: `flat` owns both spans, and the stream is waited for.
                        unsafe {
                            setup.bindings.copy(&setup.stream, *flat_to, *flat_from, bytes.get())
                        }?;
                        Ok(setup.stream.synchronize()?)
                    },
                ],
            )?;
            let [terrane, copy] = spreads.as_slice() else { return Ok(()) };
            let gigabytes = bytes.get() as f64 * 1e-9;
            setup.predictions.report(&case, explanation.predicted, *terrane, reporter)?;
            let rate = terrane.rate(gigabytes);
            let measured = Measurement::new(case, rate, "GB/s", Direction::HigherIsBetter)
                .with_baseline("device copy", copy.rate(gigabytes).median)
                .at_least(LEAST_SHARE);
            reporter.report(&measured)?;
        }
    }
    Ok(())
}
