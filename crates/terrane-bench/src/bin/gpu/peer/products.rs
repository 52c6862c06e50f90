//! Interference of copies between devices: their slowdown of a matrix product on each of the two
//! devices.

use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow};
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_cuda::{Context, Event, Stream, Timing};
use terrane_transfer::TransferManager;

use super::plain::{Plain, PlainCopy, THREAD_BLOCKS};
use super::{CASE, Ends, Peer};
use crate::bindings::Bindings;
use crate::interference::LEAST_SEEN;
use crate::product::Product;
use crate::setup::{Setup, submit};
use crate::shapes::USUAL;

/// The number of interleaved rounds.
const ROUNDS: usize = 3;

/// The number of products between two events.
const PRODUCTS: u32 = 8;

/// The names of the devices in the cases.
const DEVICES: [&str; 2] = ["source", "destination"];

pub fn cases() -> impl Iterator<Item = String> {
    DEVICES.into_iter().map(slowed).chain([worst(), rate()])
}

fn slowed(device: &str) -> String {
    format!("slowdown of a matrix product on the {device}, {CASE}")
}

fn worst() -> String {
    format!("slowdown of the slower matrix product, {CASE}")
}

fn rate() -> String {
    format!("{}, {CASE}, during matrix products", USUAL.title())
}

/// The copies that run at the same time as the products.
#[derive(Clone, Copy)]
enum Copies {
    Nothing,
    /// By the plain kernel, with this number of thread blocks.
    Plain(u32),
    Terrane,
}

const COPIES: [Copies; 4] = [
    Copies::Nothing,
    Copies::Plain(THREAD_BLOCKS[0]),
    Copies::Plain(THREAD_BLOCKS[1]),
    Copies::Terrane,
];

pub fn report<W: Write>(
    setup: &Setup,
    peer: &Peer,
    cublas: Option<&Path>,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    if !cases().any(|case| reporter.wants(&case)) {
        return Ok(());
    }
    let size = if setup.smoke { 32 } else { 8192 };
    let here = Place { bindings: &setup.bindings, context: &setup.context, stream: &setup.stream };
    let there = Place { bindings: &peer.bindings, context: &peer.context, stream: &peer.stream };
    let products = Product::new(&setup.bindings, &setup.device, &setup.stream, cublas, size)
        .and_then(|own| {
            Ok([own, Product::new(&peer.bindings, &peer.device, &peer.stream, cublas, size)?])
        });
    setup.bindings.make_current()?;
    let products = match products {
        Ok(products) => products,
        Err(error) => {
            reporter.skip("matrix products on two devices", &format!("{error:#}"));
            return Ok(());
        }
    };
    let mover = Mover::new(setup, peer)?;
    let mut results = COPIES.map(|_| Results::default());
    for _ in 0..ROUNDS {
        for (copies, results) in COPIES.into_iter().zip(&mut results) {
            mover.during(copies, results, || time(&[here, there], &products, settings))?;
        }
    }
    let name = products.first().map_or("", |product| product.name());
    let reported = report_found(&results, name, reporter);
    let [own, others] = products;
    drop(own);
    peer.bindings.make_current()?;
    drop(others);
    reported
}

fn report_found<W: Write>(
    [alone, few, many, terrane]: &[Results; 4],
    name: &str,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let row = |case: String, slowdown, least| {
        let case = format!("{case} ({name})");
        Measurement::new(case, slowdown, "%", Direction::LowerIsBetter)
            .with_baseline("plain kernel", least)
    };
    let slowdowns = [few, many, terrane].map(|results| results.slowdowns(alone));
    let [few_slowed, many_slowed, ours_slowed] = slowdowns;
    let (few_slowed, many_slowed, ours_slowed) = (few_slowed?, many_slowed?, ours_slowed?);
    let plain =
        few_slowed.into_iter().zip(many_slowed).map(|(few, many)| few.median.min(many.median));
    for (device, (slowdown, least)) in DEVICES.into_iter().zip(ours_slowed.into_iter().zip(plain)) {
        let row = row(slowed(device), slowdown, least);
        reporter.report(&row.without_target("each kernel slows down the device that runs it"))?;
    }
    let least = slower(few_slowed).median.min(slower(many_slowed).median);
    reporter.report(&row(worst(), slower(ours_slowed), least).at_least(1.0))?;
    let rate_of = |results: &Results| Spread::of(&results.rates).context("nothing was moved");
    let best = rate_of(few)?.median.max(rate_of(many)?.median);
    let measured = Measurement::new(rate(), rate_of(terrane)?, "GB/s", Direction::HigherIsBetter);
    let measured = measured.with_baseline("plain kernel", best);
    Ok(reporter.report(&measured.without_target("it explains the slowdown"))?)
}

/// A device that runs products.
#[derive(Clone, Copy)]
struct Place<'a> {
    bindings: &'a Bindings,
    context: &'a Context,
    stream: &'a Stream,
}

/// The measurements during one kind of copies.
#[derive(Default)]
struct Results {
    /// The seconds of a product on each device.
    seconds: [Vec<f64>; 2],
    /// The rates of the copies at the same time, in GB/s.
    rates: Vec<f64>,
}

impl Results {
    /// The slowdown of a product on each device, in percent of its time without copies.
    fn slowdowns(&self, alone: &Self) -> Result<[Spread; 2]> {
        let [own, others] = &self.seconds;
        let [own_alone, others_alone] = &alone.seconds;
        Ok([slowdown(own, own_alone)?, slowdown(others, others_alone)?])
    }
}

fn slowdown(seconds: &[f64], alone: &[f64]) -> Result<Spread> {
    let of = |seconds| Spread::of(seconds).context("nothing was timed");
    let (Spread { median, min, max }, alone) = (of(seconds)?, of(alone)?.median);
    let share = |seconds: f64| (seconds / alone - 1.0).max(LEAST_SEEN) * 100.0;
    Ok(Spread { median: share(median), min: share(min), max: share(max) })
}

/// The larger slowdown of the two devices.
fn slower([own, others]: [Spread; 2]) -> Spread {
    if own.median > others.median { own } else { others }
}

/// Measures the seconds of a product, on both devices at once.
fn time(
    places: &[Place<'_>; 2],
    products: &[Product<'_>; 2],
    settings: &Settings,
) -> Result<[Vec<f64>; 2]> {
    let mut marks = Vec::new();
    for place in places {
        let mark = || Event::new(place.context, Timing::On);
        marks.push((mark()?, mark()?));
    }
    let mut seconds = [Vec::new(), Vec::new()];
    for round in 0..settings.warm_up + settings.repeats.max(1) {
        for ((place, product), (begin, end)) in places.iter().zip(products).zip(&marks) {
            place.bindings.make_current()?;
            begin.record(place.stream)?;
            for _ in 0..PRODUCTS {
                product.submit(place.stream)?;
            }
            end.record(place.stream)?;
        }
        for ((begin, end), seconds) in marks.iter().zip(&mut seconds) {
            end.wait()?;
            if round >= settings.warm_up {
                seconds.push(end.elapsed_since(begin)?.as_secs_f64() / f64::from(PRODUCTS));
            }
        }
    }
    Ok(seconds)
}

/// Copies blocks to the other device all the time, with two transfers in flight.
struct Mover<'setup> {
    manager: &'setup TransferManager,
    bindings: &'setup Bindings,
    context: &'setup Context,
    plain: Plain<'setup>,
    /// The blocks of each of the two transfers.
    copies: [PlainCopy; 2],
    ends: Ends,
}

impl<'setup> Mover<'setup> {
    fn new(setup: &'setup Setup, peer: &'setup Peer) -> Result<Self> {
        let ends = Ends::new(setup, peer, &USUAL, 2)?;
        let [first, second] = ends.halves().map(|(read, written)| {
            PlainCopy::new(setup, (&ends.source, read), (&ends.destination, written))
        });
        Ok(Self {
            manager: &peer.manager,
            bindings: &setup.bindings,
            context: &setup.context,
            plain: Plain::new(setup)?,
            copies: [first?, second?],
            ends,
        })
    }

    /// Measures something while blocks are copied.
    fn during(
        &self,
        copies: Copies,
        results: &mut Results,
        measure: impl FnOnce() -> Result<[Vec<f64>; 2]>,
    ) -> Result<()> {
        let stop = AtomicBool::new(false);
        let (began, begun) = mpsc::channel();
        let (measured, rate) = thread::scope(|scope| {
            let mover = scope.spawn(|| {
                let (begin, mut ended) = (Instant::now(), 0_u32);
                let until = || {
                    ended += 1;
                    // The receiver is dropped once one transfer has ended.
                    let _ = began.send(());
                    stop.load(Ordering::Relaxed)
                };
                match copies {
                    Copies::Nothing => drop(began.send(())),
                    Copies::Plain(thread_blocks) => self.by_plain_kernel(thread_blocks, until)?,
                    Copies::Terrane => self.by_transfers(until)?,
                }
                let bytes = self.ends.bytes.get() as f64 * f64::from(ended);
                anyhow::Ok(bytes * 1e-9 / begin.elapsed().as_secs_f64())
            });
            // The measurement starts after the first copy has started. An error of the copying
            // thread is reported after `join`.
            let measured = begun.recv().context("nothing moved").and_then(|()| measure());
            stop.store(true, Ordering::Relaxed);
            (measured, mover.join())
        });
        let rate = rate.map_err(|_| anyhow!("the thread that moves blocks panicked"))??;
        for (all, new) in results.seconds.iter_mut().zip(measured?) {
            all.extend(new);
        }
        results.rates.push(rate);
        Ok(())
    }

    /// Copies by transfers. Calls `until` after each transfer and stops when it returns true.
    fn by_transfers(&self, mut until: impl FnMut() -> bool) -> Result<()> {
        let Ends { source, destination, .. } = &self.ends;
        let start = |(read, written)| submit(self.manager, (source, read), (destination, written));
        let mut halves = self.ends.halves();
        let mut in_flight = start(halves[0])?;
        loop {
            let following = start(halves[1])?;
            in_flight.wait().result?;
            in_flight = following;
            halves.swap(0, 1);
            if until() {
                in_flight.wait().result?;
                return Ok(());
            }
        }
    }

    /// Copies by the plain kernel. Calls `until` after each launch and stops when it returns true.
    fn by_plain_kernel(&self, thread_blocks: u32, mut until: impl FnMut() -> bool) -> Result<()> {
        self.bindings.make_current()?;
        let streams = [Stream::new(self.context)?, Stream::new(self.context)?];
        let start = |lane: usize| {
            let (stream, copy) =
                streams.get(lane).zip(self.copies.get(lane)).context("two lanes")?;
            self.plain.submit(stream, copy, thread_blocks)?;
            anyhow::Ok(stream)
        };
        let mut in_flight = start(0)?;
        for lane in [1, 0].into_iter().cycle() {
            let following = start(lane)?;
            in_flight.synchronize()?;
            in_flight = following;
            if until() {
                break;
            }
        }
        Ok(in_flight.synchronize()?)
    }
}

impl Ends {
    /// Returns the source and destination blocks of each of two transfers.
    fn halves(&self) -> [(&[u32], &[u32]); 2] {
        let (first, second) = self.read.split_at(self.read.len() / 2);
        let (third, fourth) = self.written.split_at(self.written.len() / 2);
        [(first, third), (second, fourth)]
    }
}
