//! The expected bytes of a transfer, computed byte by byte.
//!
//! An [`Image`] is a copy of all bytes of a layout, including padding. The positions of pieces are
//! computed here from the documented formulas by naive indexing, so an error in the geometry's code
//! is not repeated.

use std::ops::Range;

use terrane_layout::{
    BlockDimension, ElementFormat, Geometry, LayoutConfig, LayoutKind, TokenOrder,
};
use terrane_transfer::Endpoint;

use crate::pattern::PieceAccess;
use crate::regions::RegionBytes;

/// All bytes of a layout's regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    config: LayoutConfig,
    kind: LayoutKind,
    regions: Vec<Vec<u8>>,
}

/// The config and the kind of a layout. An imported layout has only sections; for such a layout,
/// this returns a config and a kind with the same positions.
///
/// # Panics
///
/// If no config describes the layout.
#[must_use]
#[track_caller]
pub fn origin(end: &Endpoint) -> (LayoutConfig, LayoutKind) {
    let geometry = end.layout().geometry();
    let found = geometry.origin().copied().or_else(|| same_places(geometry));
    found.unwrap_or_else(|| panic!("no config gives this layout: {geometry:?}"))
}

/// The elements of a group, which a section does not state.
const GROUP: u32 = 32;

fn same_places(geometry: &Geometry) -> Option<(LayoutConfig, LayoutKind)> {
    let shape = geometry.sections().first()?.shape();
    let (heads, bytes) = (shape.heads.unwrap_or(1), shape.element_bytes);
    let width = u8::try_from(bytes).ok().filter(|&width| width <= 8).map(ElementFormat::Width);
    let rows = ElementFormat::RowBytes(bytes.checked_mul(heads)?.checked_mul(shape.elements)?);
    let groups = ElementFormat::BlockScaled { elements: GROUP, bytes };
    for element in [width, Some(groups), Some(rows)].into_iter().flatten() {
        let group = if element == groups { GROUP } else { 1 };
        for (order, kind) in
            TokenOrder::ALL.into_iter().flat_map(|order| LayoutKind::ALL.map(|kind| (order, kind)))
        {
            let config = LayoutConfig::builder()
                .num_blocks(geometry.num_blocks())
                .num_layers(geometry.num_layers())
                .outer_dim(geometry.section_count())
                .page_size(shape.tokens)
                .inner_dim(shape.elements * heads * group)
                .element(element)
                .block_alignment(geometry.block_alignment())
                .token_order(order);
            let config = shape.heads.map_or(config, |heads| config.num_heads(heads)).build();
            if let Ok(config) = config
                && Geometry::new(&config, kind).is_ok_and(|same| same == *geometry)
            {
                return Some((config, kind));
            }
        }
    }
    None
}

/// The position of a piece: the region, and the bytes in it.
#[must_use]
pub fn place(
    config: &LayoutConfig,
    kind: LayoutKind,
    [block, layer, outer]: [u32; 3],
) -> (usize, Range<usize>) {
    let index = |index: u32| usize::try_from(index).expect("64 bits");
    let (block, layer, outer) = (index(block), index(layer), index(outer));
    let (blocks, layers) = (index(config.num_blocks()), index(config.num_layers()));
    let outers = index(config.outer_dim());
    let row = config.element().row_bytes(config.inner_dim()).expect("a valid config");
    let piece = index(config.page_size()) * row.to_usize();
    let alignment = usize::try_from(config.block_alignment().get()).expect("64 bits");
    let (region, begin) = match kind {
        LayoutKind::FullyContiguous => {
            let stride = (layers * outers * piece).next_multiple_of(alignment);
            (0, block * stride + (layer * outers + outer) * piece)
        }
        LayoutKind::LayerSeparate { block_dimension: BlockDimension::First } => {
            let stride = (outers * piece).next_multiple_of(alignment);
            (layer, block * stride + outer * piece)
        }
        LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second } => {
            let stride = piece.next_multiple_of(alignment);
            (layer, (outer * blocks + block) * stride)
        }
    };
    (region, begin..begin + piece)
}

/// The bytes of one head of one token within its piece.
///
/// # Panics
///
/// If the config states no heads.
#[must_use]
pub fn place_in_piece(config: &LayoutConfig, token: u32, head: u32) -> Range<usize> {
    let index = |index: u32| usize::try_from(index).expect("64 bits");
    let (token, head) = (index(token), index(head));
    let tokens = index(config.page_size());
    let heads = index(config.num_heads().expect("heads are stated"));
    let row = config.element().row_bytes(config.inner_dim()).expect("a valid config");
    let bytes = row.to_usize() / heads;
    // As an array `[tokens][heads]` or `[heads][tokens]`.
    let place = match config.token_order() {
        TokenOrder::TokenMajor => token * heads + head,
        TokenOrder::HeadMajor => head * tokens + token,
    };
    place * bytes..(place + 1) * bytes
}

impl Image {
    /// The current bytes of an endpoint. No transfer may be writing them.
    #[must_use]
    pub fn of(end: &Endpoint, access: &dyn PieceAccess) -> Self {
        Self::made_of(end, RegionBytes::of(end, access))
    }

    /// Overwrites all bytes of an endpoint, including padding, with random ones, and returns them.
    pub fn scribble(end: &Endpoint, access: &dyn PieceAccess, seed: u64) -> Self {
        Self::made_of(end, RegionBytes::scribble(end, access, seed))
    }

    fn made_of(end: &Endpoint, bytes: RegionBytes) -> Self {
        let (config, kind) = origin(end);
        Self { config, kind, regions: bytes.regions().to_vec() }
    }

    /// Applies a transfer from `source` to this image: head by head, if both state their heads.
    pub fn transfer(&mut self, source: &Self, from: &[u32], to: &[u32], layers: Range<u32>) {
        if let (Some(read), Some(written)) = (source.config.num_heads(), self.config.num_heads()) {
            assert_eq!(read, written, "as many heads");
            return self.transfer_heads(source, from, to, layers, [0..read, 0..written]);
        }
        assert_eq!(from.len(), to.len(), "equally many source blocks and destination blocks");
        for (&from, &to) in from.iter().zip(to) {
            for layer in layers.clone() {
                for outer in 0..self.config.outer_dim() {
                    let (region, bytes) = place(&source.config, source.kind, [from, layer, outer]);
                    let piece = &source.regions[region][bytes];
                    let (region, bytes) = place(&self.config, self.kind, [to, layer, outer]);
                    self.regions[region][bytes].copy_from_slice(piece);
                }
            }
        }
    }

    /// Applies a transfer of these heads to this image.
    pub fn transfer_heads(
        &mut self,
        source: &Self,
        from: &[u32],
        to: &[u32],
        layers: Range<u32>,
        [read, written]: [Range<u32>; 2],
    ) {
        assert_eq!(from.len(), to.len(), "equally many source blocks and destination blocks");
        assert_eq!(read.len(), written.len(), "equally many source heads and destination heads");
        for (&from, &to) in from.iter().zip(to) {
            for layer in layers.clone() {
                for outer in 0..self.config.outer_dim() {
                    let (region, piece) = place(&source.config, source.kind, [from, layer, outer]);
                    let piece = &source.regions[region][piece];
                    let (region, bytes) = place(&self.config, self.kind, [to, layer, outer]);
                    let target = &mut self.regions[region][bytes];
                    for token in 0..self.config.page_size() {
                        for (read, written) in read.clone().zip(written.clone()) {
                            let bytes = &piece[place_in_piece(&source.config, token, read)];
                            target[place_in_piece(&self.config, token, written)]
                                .copy_from_slice(bytes);
                        }
                    }
                }
            }
        }
    }

    /// Panics unless one layer of these blocks is equal in memory and in this image.
    ///
    /// Other layers may be written at the same time. The caller ensures that this one is not.
    #[track_caller]
    pub fn assert_layer(
        &self,
        end: &Endpoint,
        access: &dyn PieceAccess,
        blocks: &[u32],
        layer: u32,
    ) {
        for &block in blocks {
            for outer in 0..self.config.outer_dim() {
                let (region, expected) = place(&self.config, self.kind, [block, layer, outer]);
                let expected = &self.regions[region][expected];
                let at = end.layout().location(block, layer, outer).expect("a piece of the layout");
                let mut found = vec![0; expected.len()];
                // SAFETY: the layout keeps the region alive, and nothing writes this layer.
                unsafe { access.read(at, &mut found) }.expect("the region is readable");
                assert!(found == expected, "block {block} layer {layer} outer {outer} differs");
            }
        }
    }

    /// Panics with the first byte that differs.
    #[track_caller]
    pub fn assert_equals(&self, expected: &Self, what: &str) {
        assert_eq!(self.regions.len(), expected.regions.len(), "{what}: number of regions");
        for (number, (found, expected)) in self.regions.iter().zip(&expected.regions).enumerate() {
            assert_eq!(found.len(), expected.len(), "{what}: bytes of region {number}");
            // Compared as slices, because comparing single bytes is slow without optimisation.
            if found == expected {
                continue;
            }
            if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
                let differing = found.iter().zip(expected).filter(|(a, b)| a != b).count();
                panic!(
                    "{what}: byte {at} of region {number} ({}) is {:#04x}, expected {:#04x}; \
                     {differing} bytes of the region differ",
                    self.owner_of(number, at),
                    found[at],
                    expected[at]
                );
            }
        }
    }

    /// Describes the piece that contains a byte.
    fn owner_of(&self, region: usize, at: usize) -> String {
        for block in 0..self.config.num_blocks() {
            for layer in 0..self.config.num_layers() {
                for outer in 0..self.config.outer_dim() {
                    let (r, bytes) = place(&self.config, self.kind, [block, layer, outer]);
                    if r == region && bytes.contains(&at) {
                        let offset = at - bytes.start;
                        return format!("block {block} layer {layer} outer {outer} @ {offset}");
                    }
                }
            }
        }
        "padding".to_owned()
    }
}
