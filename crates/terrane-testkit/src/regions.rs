//! All bytes of a layout's regions, with any strides.

use std::ops::Range;

use terrane_core::{Location, Memory};
use terrane_layout::{Axis, Geometry, RegionOffset, Section};
use terrane_transfer::Endpoint;

use crate::pattern::PieceAccess;
use crate::random::Seeded;

/// All bytes of a layout's regions, including padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionBytes(Vec<Vec<u8>>);

/// The parts that a transfer copies.
#[derive(Clone, Debug)]
pub struct Copied {
    /// Blocks of the source.
    pub from: Vec<u32>,
    /// Blocks of the destination.
    pub to: Vec<u32>,
    /// Layers, by equal numbers at both ends.
    pub layers: Range<u32>,
    /// Heads of the source and of the destination; all if `None`.
    pub heads: Option<[Range<u32>; 2]>,
    /// Tokens of the source and of the destination; all if `None`.
    pub tokens: Option<[Range<u32>; 2]>,
}

impl RegionBytes {
    /// The current bytes of an endpoint. No transfer may be writing them.
    #[must_use]
    pub fn of(end: &Endpoint, access: &dyn PieceAccess) -> Self {
        let blocks: Vec<u32> = (0..end.layout().geometry().num_blocks()).collect();
        let _hold = end.hold_for_read(&blocks).expect("nothing in flight writes the blocks");
        let read = |region: &dyn Memory| {
            let mut bytes = vec![0; region.length().to_usize()];
            // SAFETY: the layout keeps the region alive, and no transfer writes its blocks.
            unsafe { access.read(region.location(), &mut bytes) }.expect("the region is readable");
            bytes
        };
        Self(end.layout().regions().iter().map(|region| read(region)).collect())
    }

    /// Overwrites all bytes of an endpoint, including padding, with random ones, and returns them.
    pub fn scribble(end: &Endpoint, access: &dyn PieceAccess, seed: u64) -> Self {
        let all: Vec<u32> = (0..end.layout().geometry().num_blocks()).collect();
        // A block that a failed transfer left incomplete may be read after this, because all of it
        // is overwritten below.
        drop(end.hold_for_write(&all).expect("no transfer uses the blocks"));
        let mut image = Self::of(end, access);
        let mut random = Seeded::new(seed);
        let _hold = end.hold_for_write(&all).expect("nothing in flight uses the blocks");
        for (bytes, region) in image.0.iter_mut().zip(end.layout().regions()) {
            for chunk in bytes.chunks_mut(8) {
                chunk.copy_from_slice(&random.next_u64().to_le_bytes()[..chunk.len()]);
            }
            write_all(access, region.location(), bytes);
        }
        image
    }

    /// The bytes of each region.
    #[must_use]
    pub fn regions(&self) -> &[Vec<u8>] {
        &self.0
    }

    /// The bytes of each region, mutable.
    pub fn regions_mut(&mut self) -> &mut [Vec<u8>] {
        &mut self.0
    }

    /// Applies a transfer to these bytes: element by element, section by section.
    ///
    /// # Panics
    ///
    /// If the destination lacks a section.
    pub fn convert(&mut self, to: &Geometry, source: &Self, from: &Geometry, copied: &Copied) {
        for section in from.sections() {
            let other = to.section(section.name()).expect("both have the section");
            let of = |ranges: &Option<[Range<u32>; 2]>, axis| match ranges {
                Some([from, to]) => from.clone().zip(to.clone()).collect::<Vec<_>>(),
                None => (0..count(section, axis)).map(|index| (index, index)).collect(),
            };
            let layers: Vec<u32> = match count(section, Axis::Layer) {
                1 => vec![0],
                _ => copied.layers.clone().collect(),
            };
            let (heads, tokens) = (of(&copied.heads, Axis::Head), of(&copied.tokens, Axis::Token));
            let width = section.element_bytes().to_usize();
            for (&block, &to_block) in copied.from.iter().zip(&copied.to) {
                for &layer in &layers {
                    for &(head, to_head) in &heads {
                        for &(token, to_token) in &tokens {
                            for element in 0..count(section, Axis::Element) {
                                let from = section.place([block, layer], [head, token, element]);
                                let to =
                                    other.place([to_block, layer], [to_head, to_token, element]);
                                let ((a, b), (c, d)) = (at(from), at(to));
                                self.0[c][d..d + width].copy_from_slice(&source.0[a][b..b + width]);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Panics with the first byte that differs.
    #[track_caller]
    pub fn assert_equals(&self, expected: &Self, what: &str) {
        assert_eq!(self.0.len(), expected.0.len(), "{what}: number of regions");
        for (number, (found, expected)) in self.0.iter().zip(&expected.0).enumerate() {
            assert_eq!(found.len(), expected.len(), "{what}: bytes of region {number}");
            if found == expected {
                continue;
            }
            let differ = |(a, b): &(&u8, &u8)| a != b;
            let differing = found.iter().zip(expected).filter(differ).count();
            if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
                panic!(
                    "{what}: byte {at} of region {number} is {:#04x}, expected {:#04x}; \
                     {differing} bytes of the region differ",
                    found[at], expected[at]
                );
            }
        }
    }
}

fn count(section: &Section, axis: Axis) -> u32 {
    u32::try_from(section.steps(axis).count()).expect("counts have 32 bits")
}

fn at(place: RegionOffset) -> (usize, usize) {
    let region = usize::try_from(place.region).expect("64 bits");
    (region, usize::try_from(place.offset).expect("64 bits"))
}

fn write_all(access: &dyn PieceAccess, at: Location, bytes: &[u8]) {
    // SAFETY: the caller holds the layout's blocks, which excludes transfers.
    unsafe { access.write(at, bytes) }.expect("the region is writable");
}
