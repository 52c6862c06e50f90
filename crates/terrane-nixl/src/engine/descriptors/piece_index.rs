//! The indices of a layout's pieces, in the order of their addresses.

use smallvec::SmallVec;
use terrane_core::ByteCount;
use terrane_layout::{Geometry, RegionOffset};

/// Assigns each piece of a layout an index: region by region, and by address within a region.
/// Evenly spaced pieces have consecutive indices, and NIXL stores such pieces as one stride.
#[derive(Debug)]
pub(in crate::engine) struct PieceIndex {
    regions: u32,
    /// The pieces of each region.
    pieces: u64,
    pub(in crate::engine) piece_bytes: ByteCount,
    /// From the longest stride to the shortest.
    dimensions: SmallVec<[Dimension; 3]>,
}

/// Pieces, or groups of them, that are one stride apart.
#[derive(Clone, Copy, Debug)]
struct Dimension {
    stride: u64,
    count: u64,
    /// The number of pieces within a stride.
    pieces: u64,
}

impl PieceIndex {
    /// `None` if the rows of a block and a layer do not form one piece.
    pub(in crate::engine) fn of(geometry: &Geometry) -> Option<Self> {
        let pieces_of = geometry.pieces()?;
        let dimensions = [
            (pieces_of.block_stride(), geometry.num_blocks()),
            (pieces_of.layer_stride(), geometry.num_layers()),
            (pieces_of.outer_stride(), geometry.section_count()),
        ];
        let mut strides: SmallVec<[(u64, u64); 3]> = dimensions
            .into_iter()
            // Layers in separate regions have no stride.
            .filter(|(stride, count)| *count > 1 && !stride.is_zero())
            .map(|(stride, count)| (stride.get(), u64::from(count)))
            .collect();
        strides.sort_unstable();
        let mut dimensions: SmallVec<[Dimension; 3]> = SmallVec::new();
        let mut pieces = 1;
        for (stride, count) in strides {
            match dimensions.last_mut() {
                // Groups without a gap between them form one group.
                Some(inner) if inner.stride * inner.count == stride => inner.count *= count,
                _ => dimensions.push(Dimension { stride, count, pieces }),
            }
            pieces *= count;
        }
        dimensions.reverse();
        let (regions, piece_bytes) = (geometry.region_count(), pieces_of.piece_bytes());
        Some(Self { regions, pieces, piece_bytes, dimensions })
    }

    /// The number of pieces.
    pub(in crate::engine) fn count(&self) -> u64 {
        self.pieces.saturating_mul(self.regions.into())
    }

    /// The index of the piece that begins there; `None` if none does, or if the index exceeds
    /// NIXL's range.
    #[inline]
    pub(in crate::engine) fn index_of(&self, at: RegionOffset) -> Option<i32> {
        if at.region >= self.regions {
            return None;
        }
        let (mut number, mut rest) = (u64::from(at.region) * self.pieces, at.offset);
        for dimension in &self.dimensions {
            let steps = rest / dimension.stride;
            if steps >= dimension.count {
                return None;
            }
            number += steps * dimension.pieces;
            rest -= steps * dimension.stride;
        }
        (rest == 0).then(|| i32::try_from(number).ok()).flatten()
    }

    /// The starts of the pieces, in the order of their indices.
    pub(in crate::engine) fn starts(&self) -> impl Iterator<Item = RegionOffset> {
        (0..self.regions).flat_map(move |region| {
            (0..self.pieces).map(move |number| RegionOffset { region, offset: self.offset(number) })
        })
    }

    /// The offset of a piece in its region, by its index there.
    fn offset(&self, number: u64) -> u64 {
        let (mut offset, mut rest) = (0, number);
        for dimension in &self.dimensions {
            offset += rest / dimension.pieces * dimension.stride;
            rest %= dimension.pieces;
        }
        offset
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects by panicking")]

    use terrane_core::Alignment;
    use terrane_layout::{BlockDimension, ElementFormat, LayoutConfig, LayoutKind};

    use super::*;

    const KINDS: [LayoutKind; 3] = [
        LayoutKind::FullyContiguous,
        LayoutKind::LayerSeparate { block_dimension: BlockDimension::First },
        LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second },
    ];

    /// Pieces of 192 bytes.
    fn geometries() -> impl Iterator<Item = Geometry> {
        let shapes = [1, 2, 5].into_iter().flat_map(|blocks| {
            [1, 3].into_iter().flat_map(move |layers| [1, 2].map(|outers| (blocks, layers, outers)))
        });
        shapes.flat_map(|(blocks, layers, outers)| {
            // Without gaps between blocks, and with some.
            [Alignment::new(64).unwrap(), Alignment::PAGE].into_iter().flat_map(move |alignment| {
                let config = LayoutConfig::builder().num_blocks(blocks).num_layers(layers);
                let config = config.outer_dim(outers).page_size(4).inner_dim(24);
                let config = config.element(ElementFormat::Width(2)).block_alignment(alignment);
                let config = config.build().unwrap();
                KINDS.map(move |kind| Geometry::new(&config, kind).unwrap())
            })
        })
    }

    #[test]
    fn each_piece_has_its_own_index_in_address_order() {
        for geometry in geometries() {
            let index = PieceIndex::of(&geometry).unwrap();
            let mut expected = Vec::new();
            for block in 0..geometry.num_blocks() {
                for layer in 0..geometry.num_layers() {
                    for outer in 0..geometry.section_count() {
                        expected.push(geometry.offset(block, layer, outer));
                    }
                }
            }
            expected.sort_unstable();
            let places: Vec<RegionOffset> = index.starts().collect();
            assert_eq!(places, expected, "{geometry:?}");
            let count = u64::try_from(places.len()).unwrap();
            assert_eq!(index.count(), count, "{geometry:?}");
            for (number, place) in (0..).zip(places) {
                assert_eq!(index.index_of(place), Some(number), "{geometry:?}");
            }
        }
    }

    #[test]
    fn positions_that_begin_no_piece_have_no_index() {
        for geometry in geometries() {
            let index = PieceIndex::of(&geometry).unwrap();
            for place in index.starts() {
                for off in [1, 64, 191] {
                    let within = RegionOffset { offset: place.offset + off, ..place };
                    assert_eq!(index.index_of(within), None, "{geometry:?}");
                }
            }
            let end = RegionOffset { region: 0, offset: geometry.region_bytes(0).get() };
            let beyond = RegionOffset { region: geometry.region_count(), offset: 0 };
            assert_eq!([end, beyond].map(|at| index.index_of(at)), [None; 2], "{geometry:?}");
        }
    }

    #[test]
    fn evenly_spaced_pieces_are_one_dimension() {
        let config = LayoutConfig::builder().num_blocks(7).num_layers(3).outer_dim(2).page_size(16);
        let config = config.inner_dim(32).element(ElementFormat::Width(2)).build().unwrap();
        let geometry = Geometry::new(&config, LayoutKind::FullyContiguous).unwrap();
        assert_eq!(PieceIndex::of(&geometry).unwrap().dimensions.len(), 1);
    }

    #[test]
    fn indices_beyond_the_range_of_nixl_are_none() {
        let config = LayoutConfig::builder().num_blocks(u32::MAX).num_layers(1).outer_dim(1);
        let config = config.page_size(1).inner_dim(8).element(ElementFormat::Width(2));
        let config = config.build().unwrap();
        let geometry = Geometry::new(&config, LayoutKind::FullyContiguous).unwrap();
        let index = PieceIndex::of(&geometry).unwrap();
        let last = u32::try_from(i32::MAX).unwrap();
        assert_eq!(index.index_of(geometry.offset(last, 0, 0)), Some(i32::MAX));
        assert_eq!(index.index_of(geometry.offset(last + 1, 0, 0)), None);
    }
}
