//! Interference: the slowdown of a large matrix product during a transfer on the same device.

use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

use anyhow::{Context as _, Result, anyhow};
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::ByteCount;
use terrane_cuda::{CopyPath, Event, Timing};
use terrane_transfer::{Endpoint, TransferManager};

use crate::blocks::Way;
use crate::product::Product;
use crate::setup::{Setup, shuffled, submit};
use crate::shapes::{ON_DEVICE, ON_HOST, USUAL};

/// The minimum ratio of the slowdown by the direct kernel to the slowdown by staging.
const LEAST_TIMES: f64 = 3.0;

/// A smaller slowdown cannot be distinguished from noise.
pub const LEAST_SEEN: f64 = 0.001;

pub fn report<W: Write>(
    setup: &Setup,
    cublas: Option<&Path>,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let case = |way: Way| format!("slowdown of a matrix product, {}, staged", way.name());
    if !Way::ALL.iter().any(|way| reporter.wants(&case(*way))) {
        return Ok(());
    }
    let size = if setup.smoke { 32 } else { 8192 };
    let product = match Product::new(&setup.bindings, &setup.device, &setup.stream, cublas, size) {
        Ok(product) => product,
        Err(error) => {
            reporter.skip("slowdown of a matrix product", &format!("{error:#}"));
            return Ok(());
        }
    };
    for way in Way::ALL {
        let alone = timed(setup, &product, settings)?;
        let slowed = |path| during_transfers(setup, &product, way, path, settings);
        let (staged, direct) = (slowed(CopyPath::Staged)?, slowed(CopyPath::Direct)?);
        let slowdown = |with: Spread| {
            let share = |seconds: f64| (seconds / alone.median - 1.0).max(LEAST_SEEN) * 100.0;
            Spread { median: share(with.median), min: share(with.min), max: share(with.max) }
        };
        let lower = Direction::LowerIsBetter;
        let case = format!("{} ({})", case(way), product.name());
        let measured = Measurement::new(case, slowdown(staged), "%", lower)
            .with_baseline("direct kernel", slowdown(direct).median)
            .at_least(LEAST_TIMES);
        reporter.report(&measured)?;
    }
    Ok(())
}

/// Measures the seconds of one product on the device.
fn timed(setup: &Setup, product: &Product<'_>, settings: &Settings) -> Result<Spread> {
    const PRODUCTS: u32 = 8;
    let [begin, end] =
        [Event::new(&setup.context, Timing::On)?, Event::new(&setup.context, Timing::On)?];
    let mut seconds = Vec::new();
    for round in 0..settings.warm_up + settings.repeats.max(1) {
        begin.record(&setup.stream)?;
        for _ in 0..PRODUCTS {
            product.submit(&setup.stream)?;
        }
        end.record(&setup.stream)?;
        end.wait()?;
        if round >= settings.warm_up {
            seconds.push(end.elapsed_since(&begin)?.as_secs_f64() / f64::from(PRODUCTS));
        }
    }
    Ok(Spread::of(&seconds).unwrap_or(Spread::single(f64::NAN)))
}

/// Measures a product while a thread copies blocks all the time by one path.
fn during_transfers(
    setup: &Setup,
    product: &Product<'_>,
    way: Way,
    path: CopyPath,
    settings: &Settings,
) -> Result<Spread> {
    let shape = &USUAL;
    let blocks = shape.blocks_of(setup.moved)?;
    let manager = setup.forced(path)?;
    let half = ByteCount::new(u64::from(blocks)).to_usize();
    let device = setup.on_device(shape, blocks * 2, ON_DEVICE)?;
    let host = setup.in_pinned(shape, blocks * 2, ON_HOST)?;
    let ids = shuffled(0..blocks * 2, 3);
    let halves = ids.split_at(half);
    let stop = AtomicBool::new(false);
    let (began, begun) = mpsc::channel();
    thread::scope(|scope| {
        let mover = scope.spawn(|| move_on(&manager, &device, &host, way, halves, &stop, &began));
        // The measurement starts after the first transfer has started. An error of the copying
        // thread is reported after `join`.
        let measured =
            begun.recv().context("nothing moved").and_then(|()| timed(setup, product, settings));
        stop.store(true, Ordering::Relaxed);
        let moved = mover.join().map_err(|_| anyhow!("the thread that moves blocks panicked"))?;
        moved.and(measured)
    })
}

/// Copies blocks, with two transfers in flight, until `stop` is set.
fn move_on(
    manager: &TransferManager,
    device: &Endpoint,
    host: &Endpoint,
    way: Way,
    (first, second): (&[u32], &[u32]),
    stop: &AtomicBool,
    began: &mpsc::Sender<()>,
) -> Result<()> {
    let start = |ids: &[u32]| match way {
        Way::ToHost => submit(manager, (device, ids), (host, ids)),
        Way::ToDevice => submit(manager, (host, ids), (device, ids)),
    };
    let mut in_flight = start(first)?;
    let mut next = second;
    let mut last = first;
    while !stop.load(Ordering::Relaxed) {
        let following = start(next)?;
        in_flight.wait().result?;
        in_flight = following;
        std::mem::swap(&mut next, &mut last);
        // The receiver is dropped once one transfer has ended.
        let _ = began.send(());
    }
    in_flight.wait().result?;
    Ok(())
}
