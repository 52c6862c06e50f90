//! Measuring what paths cost.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_core::{Alignment, BoxedCause, ByteCount, Region, RegionRequest};
use terrane_layout::{
    BlockDimension, ElementFormat, Geometry, LayoutBuilder, LayoutConfig, LayoutKind,
};
use terrane_transfer::{
    CopyEngine, CopyJob, Declined, DeviceOrder, Endpoint, Quote, Terms, Transfer, TransferManager,
    TransferPlan,
};

use super::{Calibration, Direction, PathCost};
use crate::context::Context;
use crate::engine::choice::Choice;
use crate::engine::options::{CopyPath, DeviceEngineOptions};
use crate::engine::{DeviceEngine, batch};
use crate::error::CudaError;
use crate::memory::{DeviceAllocator, PinnedAllocator, PinnedOptions};

/// How a calibration is measured.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CalibrationOptions {
    /// What the largest transfers move. Four times as much is taken of the device's memory, and
    /// twice as much of pinned memory.
    pub bytes: ByteCount,
    /// How often each transfer is repeated; the median counts.
    pub repetitions: u32,
    /// The engine whose paths are measured; which path it is to take does not matter.
    pub engine: DeviceEngineOptions,
}

impl Default for CalibrationOptions {
    /// 128 MiB, 7 times.
    fn default() -> Self {
        let engine = DeviceEngineOptions::default();
        Self { bytes: ByteCount::mib(128), repetitions: 7, engine }
    }
}

/// Layers, and the bytes of a piece, of transfers of short pieces.
const SHORT: (u32, u64) = (4, 4 << 10);

/// The bytes of a token of one layer.
const ROW: u64 = 256;

/// The same of transfers of long pieces, with 128 of them in `all` bytes if that makes them no
/// longer than a MiB, and with 16 times as many.
fn long_shapes(all: u64) -> [(u32, u64); 2] {
    let piece = |most: u64, parts: u64| (all / parts).next_power_of_two().clamp(4 << 10, most);
    [(8, piece(1 << 20, 128)), (16, piece(64 << 10, 2048))]
}

pub(super) fn measure(
    context: &Context,
    options: &CalibrationOptions,
) -> Result<Calibration, CudaError> {
    let mut options = options.clone();
    // Some blocks of every shape at least.
    options.bytes = options.bytes.max(ByteCount::mib(1));
    options.engine.learns = false;
    let room = options.bytes.checked_mul("ends", 2)?;
    let request = RegionRequest::new(room).aligned_to(Alignment::PAGE).labelled("calibration");
    let device = DeviceAllocator::new(context);
    let bench = Bench {
        engine: Arc::new(DeviceEngine::new(context, options.engine.clone())?),
        first: Region::new(device.bring_up(&request)?),
        second: Region::new(device.bring_up(&request)?),
        pinned: Region::new(
            PinnedAllocator::new(context, PinnedOptions::default())?.bring_up(&request)?,
        ),
        options,
    };
    let mut calibration = Calibration::built_in();
    calibration.device.clone_from(&context.device().name);
    calibration.driver = context.driver().version()?.to_string();
    for direction in [Direction::ToDevice, Direction::ToHost, Direction::WithinDevice] {
        let kernel = match direction {
            Direction::WithinDevice => &[CopyPath::Relayout][..],
            _ => &[CopyPath::Direct, CopyPath::Staged],
        };
        for &path in kernel.iter().chain(&[CopyPath::Batched, CopyPath::CopyEach]) {
            if path == CopyPath::Batched && !batch::is_there(context) {
                continue;
            }
            let cost = bench.cost(direction, path).map_err(|source| match source.downcast() {
                Ok(error) => *error,
                Err(source) => CudaError::Calibration { path: path.name(), source: source.into() },
            })?;
            calibration.set(direction, path, cost);
            if path == CopyPath::CopyEach {
                calibration.set(direction, CopyPath::Contiguous, cost);
            }
        }
    }
    Ok(calibration)
}

struct Bench {
    engine: Arc<DeviceEngine>,
    first: Region,
    second: Region,
    pinned: Region,
    options: CalibrationOptions,
}

/// A transfer that was measured.
#[derive(Clone, Copy)]
struct Sample {
    seconds: f64,
    bytes: f64,
    pieces: f64,
}

impl Bench {
    fn cost(&self, direction: Direction, path: CopyPath) -> Result<PathCost, BoxedCause> {
        let all = self.options.bytes.get();
        let [huge, long] = long_shapes(all);
        let huge = self.sample(direction, path, huge, all)?;
        let long = self.sample(direction, path, long, all)?;
        let short = self.sample(direction, path, SHORT, all / 8)?;
        let one = self.sample(direction, path, SHORT, 1)?;
        Ok(fit(&huge, &long, &short, &one))
    }

    /// The median of some transfers of scattered blocks, one at least, of `bytes` in all.
    fn sample(
        &self,
        direction: Direction,
        path: CopyPath,
        (layers, piece): (u32, u64),
        bytes: u64,
    ) -> Result<Sample, BoxedCause> {
        let of_block = u64::from(layers) * piece;
        let blocks = u32::try_from((bytes / of_block).max(1))?;
        // Every other block of twice as many, so that none touch.
        let shape = config(blocks.saturating_mul(2), layers, piece)?;
        let ids: Vec<u32> = (0..blocks).map(|block| block * 2 + 1).collect();
        let apart = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
        let here = adopt(&self.first, shape, apart)?;
        let whole = if direction == Direction::WithinDevice { &self.second } else { &self.pinned };
        let there = adopt(whole, shape, LayoutKind::FullyContiguous)?;
        let (from, to) =
            if direction == Direction::ToDevice { (&there, &here) } else { (&here, &there) };
        let forced: Arc<dyn CopyEngine> =
            Arc::new(Forced { engine: Arc::clone(&self.engine), path });
        let manager = TransferManager::new([forced]);
        let mut times = Vec::new();
        // The first one brings up what the others find.
        for _ in 0..=self.options.repetitions.max(1) {
            let transfer = Transfer::new(from, to).blocks(&ids, &ids);
            let transfer = transfer.device_order(DeviceOrder::AlreadySynchronised);
            let begun = Instant::now();
            let completion = manager.submit(transfer, ()).map_err(|rejected| rejected.cause)?;
            completion.wait().result?;
            times.push(begun.elapsed());
        }
        let mut counted: Vec<Duration> = times.into_iter().skip(1).collect();
        counted.sort_unstable();
        let median = counted.get(counted.len() / 2).copied().unwrap_or_default();
        let pieces = match path {
            CopyPath::Staged => u64::from(blocks),
            _ => u64::from(blocks) * u64::from(layers),
        };
        let bytes = u64::from(blocks) * of_block;
        Ok(Sample { seconds: median.as_secs_f64(), bytes: bytes as f64, pieces: pieces as f64 })
    }
}

/// Finds the cost that explains the samples: `huge` and `long` have as many bytes in few and in
/// many pieces, `short` has short pieces, and `one` hardly anything.
fn fit(huge: &Sample, long: &Sample, short: &Sample, one: &Sample) -> PathCost {
    let per_piece = (long.seconds - huge.seconds).max(0.0) / (long.pieces - huge.pieces).max(1.0);
    let (mut fixed, mut per_short, mut per_byte) = (0.0, 0.0, 0.0);
    // Each from the others; a few rounds are enough, as each sample is mostly one of them.
    for _ in 0..8 {
        per_byte = ((huge.seconds - fixed - huge.pieces * per_piece) / huge.bytes).max(1e-15);
        let of_pieces = short.seconds - one.seconds - (short.bytes - one.bytes) * per_byte;
        per_short = of_pieces.max(0.0) / (short.pieces - one.pieces).max(1.0);
        fixed = (one.seconds - one.pieces * per_short - one.bytes * per_byte).max(0.0);
    }
    let time = |seconds: f64| Duration::try_from_secs_f64(seconds.min(1.0)).unwrap_or_default();
    PathCost {
        fixed: time(fixed),
        per_piece: time(per_piece),
        per_short_piece: time(per_short),
        // A whole number, which a file holds as it is.
        bytes_per_second: (1.0 / per_byte).clamp(1e6, 1e15).round(),
    }
}

fn config(blocks: u32, layers: u32, piece: u64) -> Result<LayoutConfig, BoxedCause> {
    let config = LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(layers)
        .outer_dim(1)
        .page_size(u32::try_from(piece / ROW)?)
        .inner_dim(128)
        .element(ElementFormat::Width(2));
    Ok(config.build()?)
}

/// Blocks over the beginning of a region.
fn adopt(region: &Region, shape: LayoutConfig, kind: LayoutKind) -> Result<Endpoint, BoxedCause> {
    let geometry = Geometry::new(&shape, kind)?;
    let bytes = geometry.region_bytes();
    let mut regions = Vec::new();
    for number in 0..geometry.region_count() {
        let first = bytes.checked_mul("region", number.into())?;
        regions.push(region.view(first, bytes)?);
    }
    let layout = LayoutBuilder::new(shape).kind(kind).adopt(regions).unregistered().build()?;
    Ok(Endpoint::new(layout)?)
}

/// An engine that takes one path.
#[derive(Debug)]
struct Forced {
    engine: Arc<DeviceEngine>,
    path: CopyPath,
}

// SAFETY: all that is done is done by the engine, whose promise it is.
unsafe impl CopyEngine for Forced {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn quote(&self, plan: &TransferPlan, terms: &Terms) -> Result<Quote, Declined> {
        let Choice { path, predicted, reason } =
            self.engine.choose(plan, terms, Some(self.path))?;
        Ok(Quote { path: Cow::Borrowed(path.name()), reason, predicted })
    }

    fn submit(&self, job: CopyJob) {
        self.engine.submit(job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fit_finds_the_cost_that_made_the_samples() {
        let cost = PathCost {
            fixed: Duration::from_micros(9),
            per_piece: Duration::from_nanos(350),
            per_short_piece: Duration::from_nanos(2400),
            bytes_per_second: 55e9,
        };
        let sample = |bytes: u64, pieces: u64| Sample {
            seconds: cost.predict(bytes, pieces),
            bytes: bytes as f64,
            pieces: pieces as f64,
        };
        let (all, some) = (128 << 20, 16 << 20);
        let found =
            fit(&sample(all, 128), &sample(all, 2048), &sample(some, 4096), &sample(16 << 10, 4));
        let near = |a: Duration, b: Duration| a.abs_diff(b) < Duration::from_nanos(300);
        assert!(near(found.fixed, cost.fixed), "{found:?}");
        assert!(near(found.per_piece, cost.per_piece), "{found:?}");
        assert!(near(found.per_short_piece, cost.per_short_piece), "{found:?}");
        assert!((found.bytes_per_second / 55e9 - 1.0).abs() < 0.01, "{found:?}");
    }

    #[test]
    fn nonsense_makes_no_nonsense() {
        let nothing = Sample { seconds: 0.0, bytes: 1.0, pieces: 1.0 };
        let found = fit(&nothing, &nothing, &nothing, &nothing);
        assert!(found.bytes_per_second.is_finite() && found.predict(1 << 30, 1) >= 0.0);
    }
}
