//! Blocks from one device to another: beside a plain kernel that copies the same pieces, and beside
//! one contiguous copy; and how much a matrix product on either device slows down meanwhile.

mod plain;
mod products;

use std::io::Write;
use std::path::Path;

use anyhow::{Context as _, Result};
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::{Allocate, ByteCount, DeviceId, RegionRequest};
use terrane_cuda::{Context, DeviceAllocator, Stream, probe};
use terrane_transfer::{Endpoint, TransferManager};

use crate::raw::Raw;
use crate::rig::{Rig, endpoint, explain, in_turns, shuffled, transfer};
use crate::shapes::{BLOCK_IS_PIECE, ON_DEVICE, ON_HOST, Shape, shapes};
use plain::{Plain, PlainCopy, THREAD_BLOCKS};

const CASE: &str = "from one device to another";

/// Of the rate of the plain kernel, with the better of its numbers of thread blocks.
const LEAST_SHARE: f64 = 0.98;

/// More than over the wire to the host, which is slower.
const TIMES_MOVED: u64 = 2;

pub fn report<W: Write>(
    rig: &Rig,
    cublas: Option<&Path>,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let mut cases: Vec<String> = all_shapes(rig).map(case).collect();
    cases.extend(products::cases());
    if !cases.iter().any(|case| reporter.wants(case)) {
        return Ok(());
    }
    let own = rig.context.device().id;
    let other = probe()?.devices.into_iter().map(|device| device.id).find(|id| *id != own);
    let Some(other) = other else {
        reporter.skip(CASE, "there is one device only");
        return Ok(());
    };
    match Peer::connect(rig, other) {
        Ok(peer) => {
            measure(rig, &peer, settings, reporter)?;
            let measured = products::report(rig, &peer, cublas, settings, reporter);
            rig.raw.make_current()?;
            measured
        }
        Err(error) => {
            reporter.skip(CASE, &format!("the devices do not reach each other: {error:#}"));
            Ok(())
        }
    }
}

fn case(shape: &Shape) -> String {
    format!("{}, {CASE}", shape.title())
}

fn all_shapes(rig: &Rig) -> impl Iterator<Item = &'static Shape> + use<> {
    shapes(rig.smoke).chain([&BLOCK_IS_PIECE])
}

/// The other device. Each reaches the memory of the other.
struct Peer {
    context: Context,
    raw: Raw,
    stream: Stream,
    device: DeviceAllocator,
    /// Over the engines of both devices.
    manager: TransferManager,
}

impl Peer {
    fn connect(rig: &Rig, other: DeviceId) -> Result<Self> {
        let context = Context::primary(other)?;
        let raw = Raw::open(other)?;
        let both = raw.enable_peer(&rig.raw).and_then(|()| rig.raw.enable_peer(&raw));
        rig.raw.make_current()?;
        both?;
        let (stream, device) = (Stream::new(&context)?, DeviceAllocator::new(&context));
        let manager = rig.beside(&context)?;
        Ok(Self { context, raw, stream, device, manager })
    }
}

/// Blocks of one shape in order on neither device: layer separate here, whole on the other.
struct Ends {
    source: Endpoint,
    destination: Endpoint,
    read: Vec<u32>,
    written: Vec<u32>,
    bytes: ByteCount,
}

impl Ends {
    /// As many blocks as are moved at once, out of `room` times as many.
    fn new(rig: &Rig, peer: &Peer, shape: &Shape, room: u32) -> Result<Self> {
        let moved = if rig.smoke { rig.moved.get() } else { rig.moved.get() * TIMES_MOVED };
        let blocks = shape.blocks_of(ByteCount::new(moved))?;
        let all = blocks * room;
        Ok(Self {
            source: rig.on_device(shape, all, ON_DEVICE)?,
            destination: endpoint(shape, all, ON_HOST, &peer.device)?,
            read: shuffled(0..all, 3),
            written: shuffled(0..all, 5),
            bytes: ByteCount::new(shape.block_bytes().get() * u64::from(blocks)),
        })
    }
}

fn measure<W: Write>(
    rig: &Rig,
    peer: &Peer,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let plain = Plain::new(rig)?;
    for shape in all_shapes(rig) {
        if !reporter.wants(&case(shape)) {
            continue;
        }
        let ends = Ends::new(rig, peer, shape, 1)?;
        let bytes = ends.bytes;
        let (source, destination) =
            ((&ends.source, &*ends.read), (&ends.destination, &*ends.written));
        let copy = PlainCopy::new(rig, source, destination)?;
        let flat_there = peer.device.allocate(&RegionRequest::new(bytes));
        let (flat, flat_there) = (rig.flat(bytes)?, flat_there.context("the other device")?);
        let explanation = explain(&peer.manager, source, destination)?;
        let contiguous = || {
            let (to, from) = (flat_there.address().get(), flat.address().get());
            // SAFETY: both live until the stream has been waited for.
            unsafe { rig.raw.copy(&rig.stream, to, from, bytes.get()) }?;
            Ok(rig.stream.synchronize()?)
        };
        let kernel = |thread_blocks| {
            plain.submit(&rig.stream, &copy, thread_blocks)?;
            Ok(rig.stream.synchronize()?)
        };
        let [few, many] = THREAD_BLOCKS;
        let spreads = in_turns(
            settings,
            &mut [
                &mut || transfer(&peer.manager, source, destination),
                &mut || kernel(few),
                &mut || kernel(many),
                &mut || contiguous(),
            ],
        )?;
        let rates: Vec<_> =
            spreads.iter().map(|spread| spread.rate(bytes.get() as f64 * 1e-9)).collect();
        let [ours, few, many, contiguous] = rates.as_slice() else { return Ok(()) };
        let took = spreads.first().copied().context("nothing was timed")?;
        rig.predictions.report(&case(shape), explanation.predicted, took, reporter)?;
        let higher = Direction::HigherIsBetter;
        let measured = |case| Measurement::new(case, *ours, "GB/s", higher);
        let best = few.median.max(many.median);
        let row = measured(case(shape)).beside("plain kernel", best).at_least(LEAST_SHARE);
        reporter.report(&row)?;
        let row = measured(format!("{}, beside a contiguous copy", case(shape)))
            .beside("contiguous copy", contiguous.median);
        reporter.report(&row.without_target("no kernel reaches it, the plain one neither"))?;
    }
    Ok(())
}
