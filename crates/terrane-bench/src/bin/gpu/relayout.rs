//! Blocks from one layout of a device to another, beside a plain copy of as many bytes.

use std::io::Write;

use anyhow::Result;
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::ByteCount;
use terrane_layout::LayoutKind;

use crate::rig::{Rig, in_turns, shuffled, transfer};
use crate::shapes::{BLOCK_FIRST, ON_DEVICE, ON_HOST, shapes};

/// Of what a plain copy within the device reaches.
const LEAST_SHARE: f64 = 0.90;

/// More than over the wire: at the rate of the device, less is over before it has begun.
const TIMES_MOVED: u64 = 8;

pub fn report<W: Write>(rig: &Rig, settings: &Settings, reporter: &mut Reporter<W>) -> Result<()> {
    let pairs: [(&str, LayoutKind, LayoutKind); 4] = [
        ("layer separate to block contiguous", ON_DEVICE, ON_HOST),
        ("block contiguous to layer separate", ON_HOST, ON_DEVICE),
        ("block first to outer first", BLOCK_FIRST, ON_DEVICE),
        ("outer first to block first", ON_DEVICE, BLOCK_FIRST),
    ];
    let (free, _) = rig.context.memory()?;
    // Two layouts and two flat buffers, and room for others.
    let most = free.get() / 8;
    let bytes = if rig.smoke {
        rig.moved
    } else {
        ByteCount::new((rig.moved.get() * TIMES_MOVED).min(most))
    };
    for shape in shapes(rig.smoke) {
        for (name, from, to) in pairs {
            let case = format!("{}, within the device, {name}", shape.title());
            if !reporter.wants(&case) {
                continue;
            }
            let blocks = shape.blocks_of(bytes)?;
            let bytes = ByteCount::new(shape.block_bytes().get() * u64::from(blocks));
            let source = rig.on_device(shape, blocks, from)?;
            let destination = rig.on_device(shape, blocks, to)?;
            let flat = [rig.flat(bytes)?, rig.flat(bytes)?].map(|memory| {
                let address = memory.address().get();
                (memory, address)
            });
            let [(_from_memory, flat_from), (_to_memory, flat_to)] = &flat;
            let (read, written) = (shuffled(0..blocks, 3), shuffled(0..blocks, 5));
            let spreads = in_turns(
                settings,
                &mut [
                    &mut || transfer(&rig.manager, (&source, &read), (&destination, &written)),
                    &mut || {
                        // SAFETY: both spans live in `flat`, and the stream is waited for.
                        unsafe { rig.raw.copy(&rig.stream, *flat_to, *flat_from, bytes.get()) }?;
                        Ok(rig.stream.synchronize()?)
                    },
                ],
            )?;
            let [ours, copy] = spreads.as_slice() else { return Ok(()) };
            let gigabytes = bytes.get() as f64 * 1e-9;
            let rate = ours.rate(gigabytes);
            let measured = Measurement::new(case, rate, "GB/s", Direction::HigherIsBetter)
                .beside("device copy", copy.rate(gigabytes).median)
                .at_least(LEAST_SHARE);
            reporter.report(&measured)?;
        }
    }
    Ok(())
}
