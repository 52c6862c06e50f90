//! Copies of blocks from one device to another, compared with a plain kernel that copies the same
//! pieces and with one contiguous copy. Also the slowdown of a matrix product on either device
//! during these copies.

mod plain;
mod products;

use std::io::Write;
use std::path::Path;

use anyhow::{Context as _, Result};
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_core::{Allocate, ByteCount, DeviceId, RegionRequest};
use terrane_cuda::{Context, DeviceAllocator, Stream, probe};
use terrane_transfer::{Endpoint, TransferManager};

use crate::bindings::Bindings;
use crate::setup::{Setup, endpoint, explain, interleaved, shuffled, transfer};
use crate::shapes::{BLOCK_IS_PIECE, ON_DEVICE, ON_HOST, Shape, shapes};
use plain::{Plain, PlainCopy, THREAD_BLOCKS};

const CASE: &str = "from one device to another";

/// The target, as a share of the rate of the plain kernel with its better number of thread blocks.
const LEAST_SHARE: f64 = 0.98;

/// Larger than the copies over the bus to the host, which is slower.
const TIMES_MOVED: u64 = 2;

pub fn report<W: Write>(
    setup: &Setup,
    cublas: Option<&Path>,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let mut cases: Vec<String> = all_shapes(setup).map(case).collect();
    cases.extend(products::cases());
    if !cases.iter().any(|case| reporter.wants(case)) {
        return Ok(());
    }
    let own = setup.context.device().id;
    let other = probe()?.devices.into_iter().map(|device| device.id).find(|id| *id != own);
    let Some(other) = other else {
        reporter.skip(CASE, "there is one device only");
        return Ok(());
    };
    match Peer::connect(setup, other) {
        Ok(peer) => {
            measure(setup, &peer, settings, reporter)?;
            let measured = products::report(setup, &peer, cublas, settings, reporter);
            setup.bindings.make_current()?;
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

fn all_shapes(setup: &Setup) -> impl Iterator<Item = &'static Shape> + use<> {
    shapes(setup.smoke).chain([&BLOCK_IS_PIECE])
}

/// The other device. Each device has access to the memory of the other.
struct Peer {
    context: Context,
    bindings: Bindings,
    stream: Stream,
    device: DeviceAllocator,
    /// A manager over the engines of both devices.
    manager: TransferManager,
}

impl Peer {
    fn connect(setup: &Setup, other: DeviceId) -> Result<Self> {
        let context = Context::primary(other)?;
        let bindings = Bindings::open(other)?;
        let both = bindings
            .enable_peer(&setup.bindings)
            .and_then(|()| setup.bindings.enable_peer(&bindings));
        setup.bindings.make_current()?;
        both?;
        let (stream, device) = (Stream::new(&context)?, DeviceAllocator::new(&context));
        let manager = setup.manager_with(&context)?;
        Ok(Self { context, bindings, stream, device, manager })
    }
}

/// Blocks of one shape, out of order on both devices: layer separate on this device, contiguous on
/// the other.
struct Ends {
    source: Endpoint,
    destination: Endpoint,
    read: Vec<u32>,
    written: Vec<u32>,
    bytes: ByteCount,
}

impl Ends {
    /// Allocates `room` times as many blocks as a transfer copies.
    fn new(setup: &Setup, peer: &Peer, shape: &Shape, room: u32) -> Result<Self> {
        let moved = if setup.smoke { setup.moved.get() } else { setup.moved.get() * TIMES_MOVED };
        let blocks = shape.blocks_of(ByteCount::new(moved))?;
        let all = blocks * room;
        Ok(Self {
            source: setup.on_device(shape, all, ON_DEVICE)?,
            destination: endpoint(shape, all, ON_HOST, &peer.device)?,
            read: shuffled(0..all, 3),
            written: shuffled(0..all, 5),
            bytes: ByteCount::new(shape.block_bytes().get() * u64::from(blocks)),
        })
    }
}

fn measure<W: Write>(
    setup: &Setup,
    peer: &Peer,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let plain = Plain::new(setup)?;
    for shape in all_shapes(setup) {
        if !reporter.wants(&case(shape)) {
            continue;
        }
        let ends = Ends::new(setup, peer, shape, 1)?;
        let bytes = ends.bytes;
        let (source, destination) =
            ((&ends.source, &*ends.read), (&ends.destination, &*ends.written));
        let copy = PlainCopy::new(setup, source, destination)?;
        let flat_there = peer.device.allocate(&RegionRequest::new(bytes));
        let (flat, flat_there) = (setup.flat(bytes)?, flat_there.context("the other device")?);
        let explanation = explain(&peer.manager, source, destination)?;
        let contiguous = || {
            let (to, from) = (flat_there.address().get(), flat.address().get());
            // SAFETY: both live until the stream has been waited for.
            unsafe { setup.bindings.copy(&setup.stream, to, from, bytes.get()) }?;
            Ok(setup.stream.synchronize()?)
        };
        let kernel = |thread_blocks| {
            plain.submit(&setup.stream, &copy, thread_blocks)?;
            Ok(setup.stream.synchronize()?)
        };
        let [few, many] = THREAD_BLOCKS;
        let spreads = interleaved(
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
        let [terrane, few, many, contiguous] = rates.as_slice() else { return Ok(()) };
        let took = spreads.first().copied().context("nothing was timed")?;
        setup.predictions.report(&case(shape), explanation.predicted, took, reporter)?;
        let higher = Direction::HigherIsBetter;
        let measured = |case| Measurement::new(case, *terrane, "GB/s", higher);
        let best = few.median.max(many.median);
        let row = measured(case(shape)).with_baseline("plain kernel", best).at_least(LEAST_SHARE);
        reporter.report(&row)?;
        let row = measured(format!("{}, compared with a contiguous copy", case(shape)))
            .with_baseline("contiguous copy", contiguous.median);
        reporter.report(&row.without_target("no kernel reaches it, the plain one neither"))?;
    }
    Ok(())
}
