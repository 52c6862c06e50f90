//! Measures the cost of each path for a calibration.

use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_core::{Alignment, BoxedCause, ByteCount, Region, RegionRequest};
use terrane_layout::{
    BlockDimension, ElementFormat, Geometry, LayoutBuilder, LayoutConfig, LayoutKind,
};
use terrane_transfer::calibration::{Calibration, CopyPath, Direction, PathCost};
use terrane_transfer::{
    CopyEngine, CopyJob, Declined, DeviceOrder, Endpoint, Quote, Transfer, TransferError,
    TransferManager, TransferOptions, TransferPlan,
};

use crate::engine::DeviceEngine;
use crate::engine::options::DeviceEngineOptions;
use crate::engine::submit::batch;
use crate::error::CudaError;
use crate::memory::device::DeviceAllocator;
use crate::memory::pinned::PinnedAllocator;
use crate::memory::pinned::options::PinnedOptions;
use crate::runtime::context::Context;

/// Options of a measurement.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CalibrationOptions {
    /// The size of the largest transfers. The measurement allocates four times as much device
    /// memory, and twice as much pinned memory.
    pub bytes: ByteCount,
    /// The number of repetitions of each transfer. The lower quartile is the result.
    pub repetitions: u32,
    /// Whether to measure paths to another device, if there is one. The first device with enough
    /// room is taken, and twice as many bytes are allocated there. Access to its memory stays
    /// enabled, as after a transfer.
    pub peers: bool,
    /// The options of the measured engine. Its forced path is ignored.
    pub engine: DeviceEngineOptions,
}

impl Default for CalibrationOptions {
    /// 128 MiB, 9 repetitions, another device included.
    fn default() -> Self {
        let engine = DeviceEngineOptions::default();
        Self { bytes: ByteCount::mib(128), repetitions: 9, peers: true, engine }
    }
}

/// The bytes of a token of one layer.
const ROW: u64 = 256;

/// A transfer's shape: blocks of a number of layers, each in one piece of a number of bytes.
#[derive(Clone, Copy, Debug)]
struct Cells {
    blocks: u64,
    layers: u32,
    piece: u64,
}

/// The transfers from which the cost of a path is derived: an almost empty one, few large pieces,
/// many long pieces, and many short pieces.
///
/// Costs that are small beside the cost of the bytes are derived from differences between transfers
/// of equal size. The number of pieces is large, so that other disturbances are small for each
/// piece.
fn shapes(path: CopyPath, all: u64) -> [Cells; 4] {
    let of = |layers: u32, piece: u64, bytes: u64| Cells {
        blocks: (bytes / (u64::from(layers) * piece)).max(1),
        layers,
        piece: piece.min(all / u64::from(layers)),
    };
    let nothing = Cells { blocks: 1, layers: 2, piece: 4 << 10 };
    // The fixed cost decides which kernel path takes a single block. It is therefore measured with
    // a block of a real model's size. With a few KiB, each path is some microseconds faster, but
    // not by the same amount.
    let block = Cells { blocks: 1, layers: 64, piece: 8 << 10 };
    match path {
        // Here the pieces are blocks.
        CopyPath::Staged => {
            [block, of(8, 1 << 20, all), of(8, 8 << 10, all / 2), of(2, 4 << 10, all / 8)]
        }
        CopyPath::Direct | CopyPath::Relayout | CopyPath::Peer => {
            [block, of(8, 1 << 20, all), of(32, 64 << 10, all), of(64, 2 << 10, all)]
        }
        // Each copy of the driver takes microseconds, so a few of them suffice.
        CopyPath::Contiguous | CopyPath::CopyEach | CopyPath::Batched => {
            [nothing, of(1, 16 << 20, 1), of(32, 64 << 10, all), of(64, 4 << 10, all / 16)]
        }
    }
}

impl CalibrationOptions {
    /// Measures the paths on a device, in about a second. It moves some hundred MiB of its own
    /// memory each way. Other work on the device at the same time distorts the figures.
    ///
    /// Paths that it does not measure keep the built-in figures. These are paths that the driver
    /// lacks, and paths between devices if no other device has enough memory.
    ///
    /// # Errors
    ///
    /// The errors of memory, streams and kernels.
    pub fn measure(&self, context: &Context) -> Result<Calibration, CudaError> {
        measure(context, self.clone())
    }
}

fn measure(context: &Context, mut options: CalibrationOptions) -> Result<Calibration, CudaError> {
    // Each shape gets at least a few blocks.
    options.bytes = options.bytes.max(ByteCount::mib(1));
    options.engine.learns = false;
    let bytes = options.bytes.checked_mul("ends", 2)?;
    let request = RegionRequest::new(bytes).aligned_to(Alignment::PAGE).labelled("calibration");
    let device = DeviceAllocator::new(context);
    let bench = Bench {
        engine: Arc::new(DeviceEngine::new(context, options.engine.clone())?),
        first: Region::new(device.allocate_memory(&request)?),
        second: Region::new(device.allocate_memory(&request)?),
        peer: if options.peers { find_peer(context, &request)? } else { None },
        pinned: Region::new(
            PinnedAllocator::new(context, PinnedOptions::default())?.allocate_memory(&request)?,
        ),
        options,
    };
    let driver = context.driver().version()?.to_string();
    let mut calibration = Calibration::built_in().of_device(&context.device().name, driver);
    for direction in Direction::ALL {
        let kernel = match (direction, &bench.peer) {
            (Direction::ToPeer | Direction::FromPeer, None) => continue,
            (Direction::ToPeer | Direction::FromPeer, Some(_)) => &[CopyPath::Peer][..],
            (Direction::WithinDevice, _) => &[CopyPath::Relayout],
            _ => &[CopyPath::Direct, CopyPath::Staged],
        };
        let kernel = if bench.engine.has_kernels() { kernel } else { &[] };
        for &path in kernel.iter().chain(&[CopyPath::Batched, CopyPath::CopyEach]) {
            if path == CopyPath::Batched && !batch::is_supported(context) {
                continue;
            }
            let refused = |source: BoxedCause| match source.downcast() {
                Ok(error) => *error,
                Err(source) => CudaError::Calibration { path: path.name(), source: source.into() },
            };
            // Kernels may be unable to access another device.
            let Some(samples) = bench.samples(direction, path).map_err(refused)? else { continue };
            let cost = fit(&samples);
            calibration.set(direction, path, cost);
            if path == CopyPath::CopyEach {
                calibration.set(direction, CopyPath::Contiguous, cost);
            }
        }
    }
    Ok(calibration)
}

/// Memory of the first other device with enough memory; `None` if there is none. Other processes
/// may use those devices, so a full one is no error of this device.
fn find_peer(context: &Context, request: &RegionRequest) -> Result<Option<Region>, CudaError> {
    let own = context.device().id;
    for device in context.driver().devices()? {
        if device.id == own {
            continue;
        }
        let found = Context::primary(device.id).and_then(|peer| {
            Ok(Region::new(DeviceAllocator::new(&peer).allocate_memory(request)?))
        });
        match found {
            Ok(peer) => return Ok(Some(peer)),
            Err(error) => tracing::debug!(device = %device.id, %error, "not measured as a peer"),
        }
    }
    Ok(None)
}

struct Bench {
    engine: Arc<DeviceEngine>,
    first: Region,
    second: Region,
    peer: Option<Region>,
    pinned: Region,
    options: CalibrationOptions,
}

/// Warm-up transfers, which do not count.
const WARM_UPS: u32 = 2;

/// A measured transfer.
#[derive(Clone, Copy)]
struct Sample {
    seconds: f64,
    bytes: f64,
    pieces: f64,
}

impl Bench {
    /// `None` if the path does not serve the direction here.
    fn samples(
        &self,
        direction: Direction,
        path: CopyPath,
    ) -> Result<Option<[Sample; 4]>, BoxedCause> {
        let mut samples = [Sample { seconds: 0.0, bytes: 0.0, pieces: 0.0 }; 4];
        for (sample, cells) in samples.iter_mut().zip(shapes(path, self.options.bytes.get())) {
            let Some(found) = self.sample(direction, path, cells)? else { return Ok(None) };
            *sample = found;
        }
        Ok(Some(samples))
    }

    /// The duration of some transfers of scattered blocks. It is the lower quartile, because
    /// disturbances never make a transfer shorter.
    fn sample(
        &self,
        direction: Direction,
        path: CopyPath,
        Cells { blocks, layers, piece }: Cells,
    ) -> Result<Option<Sample>, BoxedCause> {
        let of_block = u64::from(layers) * piece;
        let blocks = u32::try_from(blocks)?;
        // Every second block of twice the number, so that no two are adjacent.
        let shape = config(blocks.saturating_mul(2), layers, piece)?;
        let ids: Vec<u32> = (0..blocks).map(|block| block * 2 + 1).collect();
        let apart = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
        let here = adopt(&self.first, shape, apart)?;
        let whole = match (direction, &self.peer) {
            (Direction::WithinDevice, _) => &self.second,
            (Direction::ToPeer | Direction::FromPeer, Some(peer)) => peer,
            _ => &self.pinned,
        };
        let there = adopt(whole, shape, LayoutKind::FullyContiguous)?;
        let (from, to) = match direction {
            Direction::ToDevice | Direction::FromPeer => (&there, &here),
            _ => (&here, &there),
        };
        let forced: Arc<dyn CopyEngine> =
            Arc::new(Forced { engine: Arc::clone(&self.engine), path });
        let manager = TransferManager::new([forced]);
        let transfer = || {
            let transfer = Transfer::new(from, to).blocks(&ids, &ids);
            transfer.device_order(DeviceOrder::AlreadySynchronised)
        };
        if let Err(TransferError::NoEngine { .. }) = manager.explain(&transfer()) {
            return Ok(None);
        }
        let mut times = Vec::new();
        // The first ones allocate the resources that the others reuse.
        for _ in 0..WARM_UPS + self.options.repetitions.max(1) {
            let begun = Instant::now();
            let completion = manager.submit(transfer(), ()).map_err(|rejected| rejected.cause)?;
            completion.wait().result?;
            times.push(begun.elapsed());
        }
        let warm_ups = usize::try_from(WARM_UPS)?;
        let mut counted: Vec<Duration> = times.into_iter().skip(warm_ups).collect();
        counted.sort_unstable();
        let quartile = counted.get(counted.len() / 4).copied().unwrap_or_default();
        let pieces = match path {
            CopyPath::Staged => u64::from(blocks),
            _ => u64::from(blocks) * u64::from(layers),
        };
        let bytes = u64::from(blocks) * of_block;
        let (seconds, bytes, pieces) = (quartile.as_secs_f64(), bytes as f64, pieces as f64);
        Ok(Some(Sample { seconds, bytes, pieces }))
    }
}

/// A rate in bytes per second that no memory exceeds.
const FASTEST: f64 = 2e13;

/// Finds the cost that explains the samples of [`shapes`].
fn fit([nothing, whole, long, short]: &[Sample; 4]) -> PathCost {
    let of_piece = |sample: &Sample, fixed: f64, per_byte: f64| {
        ((sample.seconds - fixed - sample.bytes * per_byte) / sample.pieces).max(0.0)
    };
    let (mut fixed, mut per_piece, mut per_short, mut per_byte) = (0.0, 0.0, 0.0, 0.0);
    // Each value is derived from the others. A few rounds suffice, because one value dominates each
    // sample.
    for _ in 0..32 {
        let of_bytes = whole.seconds - fixed - whole.pieces * per_piece;
        per_byte = (of_bytes / whole.bytes).clamp(1.0 / FASTEST, 1e-6);
        per_piece = of_piece(long, fixed, per_byte);
        per_short = of_piece(short, fixed, per_byte);
        fixed = (nothing.seconds - nothing.pieces * per_short - nothing.bytes * per_byte).max(0.0);
    }
    // Rounded to picoseconds and to whole numbers, which a file stores exactly.
    let picoseconds = |seconds: f64| (seconds * 1e12).round() / 1e3;
    PathCost {
        fixed: Duration::try_from_secs_f64((fixed * 1e9).round() * 1e-9).unwrap_or_default(),
        per_piece_ns: picoseconds(per_piece),
        per_short_piece_ns: picoseconds(per_short),
        bytes_per_second: (1.0 / per_byte).round(),
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

/// Blocks at the beginning of a region.
fn adopt(region: &Region, shape: LayoutConfig, kind: LayoutKind) -> Result<Endpoint, BoxedCause> {
    let geometry = Geometry::new(&shape, kind)?;
    let bytes = geometry.region_bytes(0);
    let mut regions = Vec::new();
    for number in 0..geometry.region_count() {
        let first = bytes.checked_mul("region", number.into())?;
        regions.push(region.view(first, bytes)?);
    }
    let layout = LayoutBuilder::new(shape).kind(kind).adopt(regions).unregistered().build()?;
    Ok(Endpoint::new(layout)?)
}

/// An engine that copies by one path only.
#[derive(Debug)]
struct Forced {
    engine: Arc<DeviceEngine>,
    path: CopyPath,
}

// SAFETY: the inner engine copies, and its guarantees apply.
unsafe impl CopyEngine for Forced {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        self.engine.quote_by(plan, options, Some(self.path))
    }

    fn submit(&self, job: CopyJob) {
        self.engine.submit(job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fit_finds_the_cost_behind_the_samples() {
        let cost = PathCost {
            fixed: Duration::from_micros(9),
            per_piece_ns: 350.0,
            per_short_piece_ns: 2400.0,
            bytes_per_second: 55e9,
        };
        let samples = shapes(CopyPath::CopyEach, 128 << 20).map(|cells| {
            let pieces = cells.blocks * u64::from(cells.layers);
            let bytes = pieces * cells.piece;
            let seconds = cost.predict(bytes, pieces);
            Sample { seconds, bytes: bytes as f64, pieces: pieces as f64 }
        });
        let found = fit(&samples);
        assert!(found.fixed.abs_diff(cost.fixed) < Duration::from_nanos(100), "{found:?}");
        assert!((found.per_piece_ns / 350.0 - 1.0).abs() < 0.02, "{found:?}");
        assert!((found.per_short_piece_ns / 2400.0 - 1.0).abs() < 0.02, "{found:?}");
        assert!((found.bytes_per_second / 55e9 - 1.0).abs() < 0.02, "{found:?}");
    }

    #[test]
    fn contradictory_samples_give_finite_costs() {
        let nothing = Sample { seconds: 0.0, bytes: 1.0, pieces: 1.0 };
        let found = fit(&[nothing; 4]);
        assert!(found.bytes_per_second.is_finite() && found.predict(1 << 30, 1) >= 0.0);
    }
}
