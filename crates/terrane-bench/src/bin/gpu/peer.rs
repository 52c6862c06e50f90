//! Blocks from one device to another, beside a contiguous copy.

use std::io::Write;

use anyhow::{Context as _, Result};
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::{Allocate, ByteCount, DeviceId, RegionRequest};
use terrane_cuda::{Context, DeviceAllocator, probe};

use crate::raw::Raw;
use crate::rig::{Rig, endpoint, explain, in_turns, shuffled, transfer};
use crate::shapes::{ON_DEVICE, ON_HOST, shapes};

const CASE: &str = "from one device to another";

pub fn report<W: Write>(rig: &Rig, settings: &Settings, reporter: &mut Reporter<W>) -> Result<()> {
    let case = |shape: &crate::shapes::Shape| format!("{}, {CASE}", shape.title());
    if !shapes(rig.smoke).any(|shape| reporter.wants(&case(shape))) {
        return Ok(());
    }
    let own = rig.context.device().id;
    let other = probe()?.devices.into_iter().map(|device| device.id).find(|id| *id != own);
    let Some(other) = other else {
        reporter.skip(CASE, "there is one device only");
        return Ok(());
    };
    match connect(rig, other) {
        Ok((context, _raw)) => measure(rig, &context, settings, reporter),
        Err(error) => {
            reporter.skip(CASE, &format!("the devices do not reach each other: {error:#}"));
            Ok(())
        }
    }
}

/// The other device, with access to this one's memory and the other way round.
fn connect(rig: &Rig, other: DeviceId) -> Result<(Context, Raw)> {
    let context = Context::primary(other)?;
    let raw = Raw::open(other)?;
    let both = raw.enable_peer(&rig.raw).and_then(|()| rig.raw.enable_peer(&raw));
    rig.raw.make_current()?;
    both.map(|()| (context, raw))
}

fn measure<W: Write>(
    rig: &Rig,
    other: &Context,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let there = DeviceAllocator::new(other);
    for shape in shapes(rig.smoke) {
        let blocks = shape.blocks_of(rig.moved)?;
        let bytes = ByteCount::new(shape.block_bytes().get() * u64::from(blocks));
        let source = rig.on_device(shape, blocks, ON_DEVICE)?;
        let destination = endpoint(shape, blocks, ON_HOST, &there)?;
        let request = RegionRequest::new(bytes);
        let flat = (rig.flat(bytes)?, there.allocate(&request).context("the other device")?);
        let (read, written) = (shuffled(0..blocks, 3), shuffled(0..blocks, 5));
        let explanation = explain(&rig.manager, (&source, &read), (&destination, &written))?;
        let spreads = in_turns(
            settings,
            &mut [
                &mut || transfer(&rig.manager, (&source, &read), (&destination, &written)),
                &mut || {
                    let (to, from) = (flat.1.address().get(), flat.0.address().get());
                    // SAFETY: both live until the stream has been waited for.
                    unsafe { rig.raw.copy(&rig.stream, to, from, bytes.get()) }?;
                    Ok(rig.stream.synchronize()?)
                },
            ],
        )?;
        let [ours, copy] = spreads.as_slice() else { return Ok(()) };
        let gigabytes = bytes.get() as f64 * 1e-9;
        let case = format!("{}, {CASE}", shape.title());
        rig.predictions.report(&case, explanation.predicted, *ours, reporter)?;
        let measured =
            Measurement::new(case, ours.rate(gigabytes), "GB/s", Direction::HigherIsBetter);
        reporter.report(&measured.beside("contiguous copy", copy.rate(gigabytes).median))?;
    }
    Ok(())
}
