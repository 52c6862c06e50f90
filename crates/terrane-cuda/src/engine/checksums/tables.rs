//! The tables of a job's checksums: the kernels' input, and the sums.

use std::ops::Range;

use terrane_core::ByteCount;
use terrane_core::convert::to_u64;
use terrane_layout::RegionOffset;

use crate::engine::checksums::factors::FactorCache;
use crate::engine::checksums::limits::{LargestLaunch, SEGMENTS_PER_WARP};
use crate::engine::checksums::shape::{PieceOrder, SumShape};
use crate::engine::geometry::index;
use crate::engine::resources::device_mapping::DeviceMapping;
use crate::kernels::schedule::Divisor;
use crate::kernels::sum_arguments::{ROW_BYTES, SumLaunch};
use crate::kernels::width::CopyWidth;

/// The numbers of a job in the device's memory. First comes a sum for each pair, which begins with
/// zero, then a factor for each segment. The places of layers and of pairs follow. Pinned memory has
/// the same numbers, and then room for the finished sums.
#[derive(Debug)]
pub(crate) struct SumTables {
    pub(super) numbers: Vec<u64>,
    pub(super) width: CopyWidth,
    segmentation: Segmentation,
    counts: Counts,
}

/// How blocks are cut among warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segmentation {
    /// The bytes of a segment.
    bytes: u64,
    /// The segments of a block.
    count: u32,
}

/// The lengths of the tables.
#[derive(Clone, Copy, Debug)]
struct Counts {
    pairs: usize,
    segments: usize,
    layer_places: usize,
    places: usize,
}

/// The bytes of a number.
const NUMBER: u64 = 8;
/// The most bytes of a segment, which one warp sums in some 15 µs.
const LONGEST: u64 = 16 << 10;
/// The fewest bytes of a segment: four rows.
const SHORTEST: u64 = 4 * ROW_BYTES;
/// The most segments of a block.
const MAX_SEGMENTS: u64 = 1024;

impl Segmentation {
    /// Cuts blocks so that each warp of the largest launch sums a few segments, and all warps end
    /// at about the same time.
    fn of(shape: &SumShape, launch: LargestLaunch) -> Self {
        let block = shape.block_bytes.max(1);
        let share = launch.bytes / (u64::from(launch.warps) * u64::from(SEGMENTS_PER_WARP)).max(1);
        let bytes = share.clamp(SHORTEST, LONGEST).max(block / MAX_SEGMENTS);
        let bytes = bytes.next_multiple_of(ROW_BYTES);
        Self { bytes, count: u32::try_from(block.div_ceil(bytes)).unwrap_or(u32::MAX) }
    }
}

impl Counts {
    fn of(shape: &SumShape, pairs: usize, segmentation: Segmentation) -> Self {
        let sections = shape.sections.len();
        Self {
            pairs,
            segments: index(segmentation.count),
            layer_places: sections * index(shape.layer_count()),
            places: sections * pairs,
        }
    }

    /// The number of entries on the device.
    fn all(&self) -> usize {
        self.pairs + self.segments + self.layer_places + self.places
    }
}

impl SumTables {
    /// The bytes of memory, pinned and on the device, for this many pairs.
    pub(crate) fn bytes(shape: &SumShape, pairs: usize, launch: LargestLaunch) -> ByteCount {
        let segmentation = Segmentation::of(shape, launch);
        ByteCount::new(to_u64(Counts::of(shape, pairs, segmentation).all() + pairs) * NUMBER)
    }

    /// The tables for these blocks of an end; `None` if the device does not access the end.
    pub(crate) fn of(
        shape: &SumShape,
        mapping: &DeviceMapping,
        blocks: &[u32],
        launch: LargestLaunch,
        factors: &FactorCache,
    ) -> Option<Self> {
        let segmentation = Segmentation::of(shape, launch);
        let counts = Counts::of(shape, blocks.len(), segmentation);
        let mut numbers = Vec::with_capacity(counts.all());
        numbers.resize(counts.pairs, 0);
        factors.extend(&mut numbers, segmentation.bytes, counts.segments);
        let place = |piece: &PieceOrder, [block, layer]: [u32; 2]| {
            let RegionOffset { region, offset } = piece.section.begin(block, layer);
            mapping.copy_address(region, offset.checked_add(piece.token_offset)?)
        };
        for piece in &shape.sections {
            let first = place(piece, [0, 0])?;
            let layers = u32::try_from(piece.section.steps(terrane_layout::Axis::Layer).count());
            let layers = layers.ok()?;
            for layer in shape.layers.clone() {
                // A section without layers has one place.
                let layer = if layers > 1 { layer } else { 0 };
                numbers.push(place(piece, [0, layer])?.wrapping_sub(first));
            }
        }
        for &block in blocks {
            for piece in &shape.sections {
                numbers.push(place(piece, [block, 0])?);
            }
        }
        let addresses = numbers.iter().skip(counts.pairs + counts.segments).copied();
        let width = shape.width(addresses);
        Some(Self { numbers, width, segmentation, counts })
    }

    /// The bytes of the sums, which come first.
    pub(crate) fn sum_bytes(&self) -> ByteCount {
        ByteCount::new(to_u64(self.counts.pairs) * NUMBER)
    }

    /// The launch that adds the sums of some pairs, if the tables are at this address.
    pub(crate) fn launch(&self, shape: &SumShape, at: u64, pairs: Range<u32>) -> SumLaunch {
        let Counts { pairs: sums, segments, layer_places, .. } = self.counts;
        let place = |before: usize| at + to_u64(before) * NUMBER;
        let Segmentation { bytes, count } = self.segmentation;
        SumLaunch {
            sums: at,
            factors: place(sums),
            layer_places: place(sums + segments),
            places: place(sums + segments + layer_places),
            first_pair: pairs.start,
            units: (pairs.end - pairs.start).saturating_mul(count),
            // Exact: a row has whole words of any width.
            segment_words: u32::try_from(bytes >> self.width.index()).unwrap_or(u32::MAX),
            segments: Divisor::new(count),
            ..shape.launch(self.width)
        }
    }

    /// The segments of a block.
    pub(crate) fn segments(&self) -> u32 {
        self.segmentation.count
    }

    /// The most pairs of one launch, which counts their segments in 31 bits.
    pub(crate) fn most_pairs(&self) -> u32 {
        (Divisor::MAX / self.segmentation.count.max(1)).max(1)
    }
}
