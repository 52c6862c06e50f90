//! Transfers of few blocks: their latency, and the time that a submit takes the caller.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::Result;
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_transfer::DeviceOrder;

use crate::blocks::Way;
use crate::by_hand::ByHand;
use crate::methods::{Methods, NAMES};
use crate::setup::{Setup, explain, interleaved, shuffled, submit_after, transfer};
use crate::shapes::{ON_DEVICE, ON_HOST, Shape, shapes};

/// The maximum ratio of a transfer's time to the time of the best raw method.
const MOST_TIMES: f64 = 1.15;

/// The maximum ratio of the time of a submit of 16 blocks to the time of the same driver calls by
/// hand.
const MOST_TIMES_BY_HAND: f64 = 1.5;

/// The number of blocks of each layout.
const BLOCKS: u32 = 32;

pub fn report<W: Write>(
    setup: &Setup,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let settings = setup.many(settings);
    for shape in shapes(setup.smoke) {
        for way in Way::ALL {
            for blocks in [1, 8] {
                waited_for(setup, shape, way, blocks, &settings, reporter)?;
            }
            for caller in [Caller::Awake, Caller::OfStream, Caller::Slept] {
                submitted(setup, shape, way, caller, &settings, reporter)?;
            }
        }
    }
    Ok(())
}

fn waited_for<W: Write>(
    setup: &Setup,
    shape: &Shape,
    way: Way,
    blocks: usize,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let case = format!("{}, {}, {blocks} of {BLOCKS} blocks", shape.title(), way.name());
    if !reporter.wants(&case) {
        return Ok(());
    }
    let ids = |seed| {
        let mut ids = shuffled(0..BLOCKS, seed);
        ids.truncate(blocks);
        ids
    };
    let device = (setup.on_device(shape, BLOCKS, ON_DEVICE)?, ids(3));
    let host = (setup.in_pinned(shape, BLOCKS, ON_HOST)?, ids(5));
    let (source, destination) =
        if way == Way::ToHost { (&device, &host) } else { (&host, &device) };
    let (from, to) = ((&source.0, &*source.1), (&destination.0, &*destination.1));
    let methods = Methods::new(setup, from, to)?;
    let explanation = explain(&setup.manager, from, to)?;
    let path = explanation.path();

    let with_batches = setup.bindings.has_batches();
    let mut batches = Methods::new(setup, from, to)?;
    let spreads = interleaved(
        settings,
        &mut [
            &mut || transfer(&setup.manager, from, to),
            &mut || methods.copy_each(setup),
            &mut || if with_batches { batches.copy_batch(setup) } else { Ok(()) },
            &mut || methods.kernel(setup),
        ],
    )?;
    let Some((terrane, direct)) = spreads.split_first() else { return Ok(()) };
    let best = NAMES
        .into_iter()
        .zip(direct)
        .filter(|(name, _)| with_batches || *name != "batched copies")
        .min_by(|one, other| one.1.median.total_cmp(&other.1.median));
    let Some((name, best)) = best else { return Ok(()) };
    setup.predictions.report(&case, explanation.predicted, *terrane, reporter)?;
    let measured = Measurement::new(case, terrane.scaled(1e6), "us", Direction::LowerIsBetter)
        .with_baseline(format!("{name}; terrane: {path}"), best.median * 1e6)
        .at_least(1.0 / MOST_TIMES);
    Ok(reporter.report(&measured)?)
}

/// The state of the submitting thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Caller {
    /// A thread that does not sleep during its transfers, such as the scheduler of a model's steps.
    Awake,
    /// The same thread. The transfer waits for a stream whose work has completed.
    OfStream,
    /// A thread that slept until the previous transfer had ended.
    Slept,
}

impl Caller {
    fn title(self) -> &'static str {
        match self {
            Self::Awake => "",
            Self::OfStream => " after an idle stream",
            Self::Slept => " by a thread that may have slept",
        }
    }
}

/// Measures the time of the calling thread in `submit` for 16 blocks.
fn submitted<W: Write>(
    setup: &Setup,
    shape: &Shape,
    way: Way,
    caller: Caller,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let case = format!("{}, {}, submit of 16 blocks{}", shape.title(), way.name(), caller.title());
    if !reporter.wants(&case) {
        return Ok(());
    }
    let device = setup.on_device(shape, BLOCKS, ON_DEVICE)?;
    let host = setup.in_pinned(shape, BLOCKS, ON_HOST)?;
    let (mut on_device, mut on_host) = (shuffled(0..BLOCKS, 3), shuffled(0..BLOCKS, 5));
    on_device.truncate(16);
    on_host.truncate(16);
    let (from, to) = match way {
        Way::ToHost => ((&device, &*on_device), (&host, &*on_host)),
        Way::ToDevice => ((&host, &*on_host), (&device, &*on_device)),
    };
    setup.stream.synchronize()?;
    let order = if caller == Caller::OfStream {
        setup.stream.order()
    } else {
        DeviceOrder::AlreadySynchronised
    };
    let path = explain(&setup.manager, from, to)?.path().into_owned();
    let queries_idle = caller == Caller::OfStream;
    let ends = ((&device, &*on_device), (&host, &*on_host));
    let mut by_hand = ByHand::new(setup, way, &path, ends.0, ends.1, queries_idle)?;
    let (mut terrane, mut baseline) = (Vec::new(), Vec::new());
    for round in 0..settings.warm_up + settings.repeats.max(1) {
        let order = order.clone();
        let begin = Instant::now();
        let completion = submit_after(order, &setup.manager, from, to)?;
        let took = begin.elapsed().as_secs_f64();
        while caller != Caller::Slept && !completion.has_ended() {
            spin_for(BETWEEN_LOOKS);
        }
        completion.wait().result?;
        let begin = Instant::now();
        by_hand.submit(setup)?;
        let took_by_hand = begin.elapsed().as_secs_f64();
        while !by_hand.has_ended()? {
            spin_for(BETWEEN_LOOKS);
        }
        if round >= settings.warm_up {
            terrane.push(took);
            baseline.push(took_by_hand);
        }
    }
    let spread = |all: &[f64]| Spread::of(all).unwrap_or(Spread::single(f64::NAN)).scaled(1e6);
    let measured = Measurement::new(case, spread(&terrane), "us", Direction::LowerIsBetter)
        .with_baseline(format!("the same calls by hand; {path}"), spread(&baseline).median);
    let measured = match caller {
        Caller::Awake | Caller::OfStream => measured.at_least(1.0 / MOST_TIMES_BY_HAND),
        Caller::Slept => measured.without_target(
            "a processor that slept makes the calls several times as slow, and only Terrane's processor slept",
        ),
    };
    Ok(reporter.report(&measured)?)
}

/// The pause between two completion checks of a thread that does not sleep.
const BETWEEN_LOOKS: Duration = Duration::from_micros(20);

fn spin_for(time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        std::hint::spin_loop();
    }
}
