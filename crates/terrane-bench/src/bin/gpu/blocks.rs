//! Copies of many blocks between a layer-separate device layout and pinned memory. They are
//! compared with one contiguous copy, and with the raw methods for the same blocks.

use std::io::Write;
use std::ops::Range;

use anyhow::{Result, ensure};
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, Memory};
use terrane_cuda::DeviceMemory;
use terrane_testkit::pattern::Pattern;
use terrane_transfer::Endpoint;

use crate::methods::{Methods, NAMES};
use crate::setup::{Setup, address, explain, interleaved, shuffled, submit, transfer};
use crate::shapes::{ON_DEVICE, ON_HOST, Shape, shapes};

/// The target, as a share of the rate of one contiguous copy. The blocks are out of order on the
/// device and in order on the host.
const LEAST_SHARE: f64 = 0.97;
/// The same target with blocks out of order on both sides.
const LEAST_SCATTERED: f64 = 0.93;
/// The target for both directions at once, as a share of the total rate of two contiguous copies.
const LEAST_BOTH: f64 = 0.95;

/// The direction of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    ToHost,
    ToDevice,
}

impl Way {
    pub const ALL: [Self; 2] = [Self::ToHost, Self::ToDevice];

    pub const fn name(self) -> &'static str {
        match self {
            Self::ToHost => "device to pinned",
            Self::ToDevice => "pinned to device",
        }
    }
}

/// Both ends of the transfers of one shape, with twice as many blocks as a transfer copies.
struct Cell<'setup> {
    setup: &'setup Setup,
    device: Endpoint,
    host: Endpoint,
    flat: [DeviceMemory; 2],
    blocks: u32,
    bytes: ByteCount,
}

pub fn report<W: Write>(
    setup: &Setup,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    for shape in shapes(setup.smoke) {
        if !cases(shape).iter().any(|case| reporter.wants(case)) {
            continue;
        }
        let cell = Cell::new(setup, shape)?;
        cell.verify()?;
        for way in Way::ALL {
            cell.one_way(shape, way, settings, reporter)?;
        }
        cell.both_ways(shape, settings, reporter)?;
    }
    Ok(())
}

fn cases(shape: &Shape) -> Vec<String> {
    let title = shape.title();
    let both = format!("{title}, both directions at once");
    let mut cases = vec![format!("{both}, compared with kernels at once"), both];
    for way in Way::ALL {
        let case = format!("{title}, {}", way.name());
        cases.extend(NAMES.map(|name| format!("{case}, raw {name}")));
        cases.extend([
            format!("{case}, compared with the best raw method"),
            format!("{case}, both sides scattered"),
            format!("{case}, both sides scattered, compared with the best raw method"),
            case,
        ]);
    }
    cases
}

impl<'setup> Cell<'setup> {
    fn new(setup: &'setup Setup, shape: &Shape) -> Result<Self> {
        let blocks = shape.blocks_of(setup.moved)?;
        let bytes = ByteCount::new(shape.block_bytes().get() * u64::from(blocks));
        Ok(Self {
            setup,
            device: setup.on_device(shape, blocks * 2, ON_DEVICE)?,
            host: setup.in_pinned(shape, blocks * 2, ON_HOST)?,
            flat: [setup.flat(bytes)?, setup.flat(bytes)?],
            blocks,
            bytes,
        })
    }

    /// Half of the device's block ids, out of order: the first or the second half of the shuffled
    /// ids.
    fn on_device(&self, half: Range<u32>) -> Vec<u32> {
        let all = shuffled(0..self.blocks * 2, 3);
        let index = |number: u32| ByteCount::new(number.into()).to_usize();
        all.get(index(half.start)..index(half.end)).unwrap_or_default().to_vec()
    }

    fn first(&self) -> Range<u32> {
        0..self.blocks
    }

    fn second(&self) -> Range<u32> {
        self.blocks..self.blocks * 2
    }

    /// Copies blocks to the device and back to other blocks, and checks every byte of them.
    fn verify(&self) -> Result<()> {
        let (device, host) = (self.on_device(self.first()), self.first().collect::<Vec<_>>());
        let back: Vec<u32> = self.second().collect();
        let pattern = Pattern::new(7);
        pattern.fill_blocks(&self.host, &host)?;
        transfer(&self.setup.manager, (&self.host, &host), (&self.device, &device))?;
        transfer(&self.setup.manager, (&self.device, &device), (&self.host, &back))?;
        let layers = 0..self.host.layout().geometry().num_layers();
        let found = pattern.verify_blocks(&self.host, &back, &host, layers)?;
        ensure!(found.is_clean(), "blocks came back changed: {found}");
        Ok(())
    }

    /// Makes one contiguous copy of the same number of bytes between the flat memory and the pinned
    /// blocks.
    fn contiguous(&self, way: Way, half: usize, wait: bool) -> Result<()> {
        let region = self.host.layout().regions().first();
        let region = region.ok_or_else(|| anyhow::anyhow!("no region"))?;
        let offset = to_u64(half) * self.bytes.get();
        let host = address(region.location())? + offset;
        let flat = self.flat.get(half).ok_or_else(|| anyhow::anyhow!("no such half"))?;
        let device = flat.address().get();
        let stream = if half == 0 { &self.setup.stream } else { &self.setup.second_stream };
        let (to, from) = match way {
            Way::ToHost => (host, device),
            Way::ToDevice => (device, host),
        };
        // SAFETY: this value owns both spans, and nothing else uses them before the stream has been
        // waited for.
        unsafe { self.setup.bindings.copy(stream, to, from, self.bytes.get()) }?;
        if wait {
            stream.synchronize()?;
        }
        Ok(())
    }

    fn one_way<W: Write>(
        &self,
        shape: &Shape,
        way: Way,
        settings: &Settings,
        reporter: &mut Reporter<W>,
    ) -> Result<()> {
        let setup = self.setup;
        let (on_device, on_host) = (self.on_device(self.first()), self.first().collect::<Vec<_>>());
        let scattered = shuffled(self.first(), 5);
        let ends = |host: &'_ [u32]| -> [(Endpoint, Vec<u32>); 2] {
            let (device, host) =
                ((self.device.clone(), on_device.clone()), (self.host.clone(), host.to_vec()));
            if way == Way::ToHost { [device, host] } else { [host, device] }
        };
        let [source, destination] = ends(&on_host);
        let [scattered_source, scattered_destination] = ends(&scattered);
        let (from, to) = ((&source.0, &*source.1), (&destination.0, &*destination.1));
        let mut methods = Methods::new(setup, from, to)?;
        let explanation = explain(&self.setup.manager, from, to)?;
        let scattered_from = (&scattered_source.0, &*scattered_source.1);
        let scattered_to = (&scattered_destination.0, &*scattered_destination.1);
        let mut of_scattered = Methods::new(setup, scattered_from, scattered_to)?;
        let scattered_path =
            explain(&self.setup.manager, scattered_from, scattered_to)?.path().into_owned();

        let spreads = interleaved(
            settings,
            &mut [
                &mut || transfer(&self.setup.manager, from, to),
                &mut || self.contiguous(way, 0, true),
                &mut || transfer(&self.setup.manager, scattered_from, scattered_to),
                &mut || methods.kernel(setup),
                &mut || of_scattered.kernel(setup),
            ],
        )?;
        let [terrane, contiguous, scattered, kernel, kernel_scattered] = *spreads.as_slice() else {
            return Ok(());
        };
        let direct = self.with_copies(kernel, &mut methods, settings)?;
        let raw_of_scattered = self.with_copies(kernel_scattered, &mut of_scattered, settings)?;

        let case = format!("{}, {}", shape.title(), way.name());
        let limit = self.rate(contiguous).median;
        let beside_limit = |case: String, spread: Spread| {
            Measurement::new(case, self.rate(spread), "GB/s", Direction::HigherIsBetter)
                .with_baseline("contiguous DMA", limit)
        };
        reporter.report(&beside_limit(case.clone(), terrane).at_least(LEAST_SHARE))?;
        let name = format!("{case}, both sides scattered");
        reporter.report(&beside_limit(name.clone(), scattered).at_least(LEAST_SCATTERED))?;
        setup.predictions.report(&case, explanation.predicted, terrane, reporter)?;
        for (name, spread) in NAMES.into_iter().zip(direct) {
            let case = format!("{case}, raw {name}");
            match spread {
                Some(spread) => {
                    let measured = beside_limit(case, spread);
                    reporter.report(&measured.without_target("a baseline of other rows"))?;
                }
                None => reporter.skip(&case, "the driver has no cuMemcpyBatchAsync"),
            }
        }
        self.compare_with_best(&case, terrane, &explanation.path(), direct, reporter)?;
        self.compare_with_best(&name, scattered, &scattered_path, raw_of_scattered, reporter)
    }

    /// Adds the times of the raw methods, in the order of [`NAMES`]. Few repeats are enough,
    /// because the copies take long.
    fn with_copies(
        &self,
        kernel: Spread,
        methods: &mut Methods,
        settings: &Settings,
    ) -> Result<[Option<Spread>; 3]> {
        let (setup, few) = (self.setup, self.setup.few(settings));
        let each = interleaved(&few, &mut [&mut || methods.copy_each(setup)])?;
        let batched = match setup.bindings.has_batches() {
            true => interleaved(&few, &mut [&mut || methods.copy_batch(setup)])?,
            false => Vec::new(),
        };
        Ok([each.first().copied(), batched.first().copied(), Some(kernel)])
    }

    fn compare_with_best<W: Write>(
        &self,
        case: &str,
        terrane: Spread,
        path: &str,
        direct: [Option<Spread>; 3],
        reporter: &mut Reporter<W>,
    ) -> Result<()> {
        let rates = NAMES.into_iter().zip(direct);
        let rates = rates.filter_map(|(name, direct)| Some((name, self.rate(direct?).median)));
        let Some((name, rate)) = rates.max_by(|one, other| one.1.total_cmp(&other.1)) else {
            return Ok(());
        };
        let case = format!("{case}, compared with the best raw method");
        let measured =
            Measurement::new(case, self.rate(terrane), "GB/s", Direction::HigherIsBetter);
        let name = format!("{name}; terrane: {path}");
        Ok(reporter.report(&measured.with_baseline(name, rate).at_least(1.0))?)
    }

    fn both_ways<W: Write>(
        &self,
        shape: &Shape,
        settings: &Settings,
        reporter: &mut Reporter<W>,
    ) -> Result<()> {
        let out = (self.on_device(self.first()), self.first().collect::<Vec<_>>());
        let home = (self.on_device(self.second()), self.second().collect::<Vec<_>>());
        let (setup, device, host) = (self.setup, &self.device, &self.host);
        let raw_out = Methods::new(setup, (device, &out.0), (host, &out.1))?;
        let raw_home = Methods::new(setup, (host, &home.1), (device, &home.0))?;
        let spreads = interleaved(
            settings,
            &mut [
                &mut || {
                    let out = submit(&self.setup.manager, (device, &out.0), (host, &out.1))?;
                    let home = submit(&self.setup.manager, (host, &home.1), (device, &home.0))?;
                    out.wait().result?;
                    home.wait().result?;
                    Ok(())
                },
                &mut || {
                    self.contiguous(Way::ToHost, 0, false)?;
                    self.contiguous(Way::ToDevice, 1, false)?;
                    self.setup.stream.synchronize()?;
                    Ok(self.setup.second_stream.synchronize()?)
                },
                &mut || {
                    let streams = [(&raw_out, &setup.stream), (&raw_home, &setup.second_stream)];
                    Methods::kernels_at_once(setup, &streams)
                },
            ],
        )?;
        let [terrane, contiguous, kernels] = *spreads.as_slice() else { return Ok(()) };
        let sum = |spread: Spread| spread.rate(self.bytes.get() as f64 * 2e-9);
        let case = format!("{}, both directions at once", shape.title());
        let measured =
            |case| Measurement::new(case, sum(terrane), "GB/s", Direction::HigherIsBetter);
        let beside_limit =
            measured(case.clone()).with_baseline("contiguous DMAs", sum(contiguous).median);
        reporter.report(&beside_limit.at_least(LEAST_BOTH))?;
        let case = format!("{case}, compared with kernels at once");
        Ok(reporter
            .report(&measured(case).with_baseline("kernels", sum(kernels).median).at_least(1.0))?)
    }

    fn rate(&self, seconds: Spread) -> Spread {
        seconds.rate(self.bytes.get() as f64 * 1e-9)
    }
}
