//! The position of every piece, relative to its region. This is pure arithmetic.

mod axis;
mod canonical;
mod decode_error;
pub(crate) mod encoding;
mod error;
mod form;
mod index;
mod kinds;
mod page;
mod pieces;
mod proof;
mod regions;
mod section;
mod steps;
mod stretches;

use std::sync::Arc;

use terrane_core::convert::to_usize;
use terrane_core::{Alignment, ByteCount};

pub use axis::{Axis, InvalidSectionName, SectionName};
pub use decode_error::{DecodeError, EncodedCount};
pub use encoding::GeometryLimits;
pub use error::GeometryError;
pub use form::{TensorAxis, TensorForm};
pub use index::{Index, IndexOutOfRange, RegionOffset};
pub(crate) use kinds::element_bytes_and_count;
pub use page::Page;
pub use pieces::PieceStrides;
pub use section::{Section, SectionShape};
pub use steps::{AxisSteps, Step};
pub use stretches::Stretches;

use crate::config::LayoutConfig;
use crate::config::field::LARGEST_LAYOUT;
use crate::error::LayoutError;
use crate::kind::LayoutKind;
use crate::verify::findings::PieceIndex;
use proof::Proved;
use regions::RegionLengths;

/// The most sections of a block.
const MOST_SECTIONS: usize = 16;

/// The strides of a layout: the sections of a block, with a proof that they are within their
/// regions and do not overlap.
///
/// A geometry has no memory, and does not depend on the locations of the regions.
///
/// # The proof
///
/// The strides of a section, sorted, must be nested: each is at least the span of all axes inside
/// it. Interleaved strides are refused even if no bytes overlap. Sections must not share a byte. A
/// section may use the rows or gaps of another section if both have the same outer strides. It is
/// refused if it is among many positions of another section with different strides. So the proof
/// takes a few operations for any number of blocks. All sums are checked here once, so addresses of
/// indices within bounds never overflow.
///
/// Two geometries are equal if each element has the same position in both, and their regions have
/// equal lengths and alignments.
#[derive(Clone, Debug)]
pub struct Geometry {
    num_blocks: u32,
    num_layers: u32,
    /// The strides of all pieces, if they are regular.
    pieces: Option<PieceStrides>,
    page: Option<Page>,
    sections: Arc<[Section]>,
    regions: RegionLengths,
    block_alignment: Alignment,
    block_bytes: ByteCount,
    total_bytes: ByteCount,
    origin: Option<(LayoutConfig, LayoutKind)>,
}

impl Geometry {
    /// The geometry of `config` in the order `kind`.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] or [`LayoutError::TooLarge`] if the regions, with the padding of
    /// the block alignment, exceed [`LARGEST_LAYOUT`].
    pub fn new(config: &LayoutConfig, kind: LayoutKind) -> Result<Self, LayoutError> {
        let (sections, region_bytes) = kinds::sections(config, kind)?;
        let regions = match kind {
            LayoutKind::FullyContiguous => 1,
            LayoutKind::LayerSeparate { .. } => config.num_layers(),
        };
        let regions = RegionLengths::Equal { count: regions, bytes: region_bytes.get() };
        let bytes = regions.total()?;
        if bytes > LARGEST_LAYOUT {
            return Err(LayoutError::TooLarge { bytes });
        }
        let geometry = Self::checked(&sections, Some(regions))?;
        let block_alignment = config.block_alignment();
        Ok(Self { block_alignment, origin: Some((*config, kind)), ..geometry })
    }

    /// The geometry of these sections. Each region is as long as its sections need.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Geometry`] names the invalid section, axes and address.
    pub fn from_sections(sections: impl IntoIterator<Item = Section>) -> Result<Self, LayoutError> {
        Self::checked(&collect(sections), None)
    }

    /// The geometry of these sections in regions of these lengths, in bytes.
    ///
    /// # Errors
    ///
    /// As from [`from_sections`](Self::from_sections), and [`GeometryError::OutOfRegion`] or
    /// [`GeometryError::UnusedRegion`].
    pub fn from_sections_in(
        sections: impl IntoIterator<Item = Section>,
        region_bytes: &[ByteCount],
    ) -> Result<Self, LayoutError> {
        Self::checked(&collect(sections), Some(RegionLengths::each(region_bytes)))
    }

    /// Blocks that no section describes. They are moved whole and convert into no other layout.
    ///
    /// # Errors
    ///
    /// As from [`from_sections`](Self::from_sections).
    pub fn opaque(num_blocks: u32, block_bytes: u32) -> Result<Self, LayoutError> {
        let section = Section::new(SectionName::OPAQUE, 1)
            .axis(Axis::Block, AxisSteps::new(num_blocks, block_bytes.into()))
            .axis(Axis::Element, AxisSteps::new(block_bytes, 1));
        Self::from_sections([section])
    }

    /// The same geometry, whose regions must begin at multiples of `alignment`.
    #[must_use]
    pub fn with_block_alignment(self, alignment: Alignment) -> Self {
        Self { block_alignment: alignment, ..self }
    }

    fn checked(sections: &[Section], regions: Option<RegionLengths>) -> Result<Self, LayoutError> {
        let count = sections.len();
        let Some(first) = sections.first().filter(|_| count <= MOST_SECTIONS) else {
            return Err(GeometryError::SectionCount { count, most: MOST_SECTIONS }.into());
        };
        let proved: Vec<Proved> = sections.iter().map(proof::prove).collect::<Result<_, _>>()?;
        let num_blocks = axis_count(first, Axis::Block);
        let layers = sections.iter().map(|section| axis_count(section, Axis::Layer));
        let num_layers = layers.max().unwrap_or(1);
        let mut block_bytes = ByteCount::ZERO;
        for section in sections {
            same_count(section, Axis::Block, num_blocks)?;
            if axis_count(section, Axis::Layer) != 1 {
                same_count(section, Axis::Layer, num_layers)?;
            }
            let shape = section.shape();
            // The span of one region fits; the bytes of all regions may not.
            let piece = ByteCount::new(shape.piece_bytes());
            let bytes = piece.checked_mul("num_layers", shape.layers.into())?;
            block_bytes = block_bytes.checked_add(bytes)?;
        }
        let mut pairs = sections.iter().zip(&proved);
        while let Some(section) = pairs.next() {
            for other in pairs.clone() {
                if section.0.name() == other.0.name() {
                    let section = other.0.name();
                    return Err(GeometryError::DuplicateSection { section }.into());
                }
                proof::prove_apart(section, other)?;
            }
        }
        let regions = RegionLengths::of(sections, &proved, regions)?;
        let bytes = regions.total()?;
        if bytes > LARGEST_LAYOUT {
            return Err(LayoutError::TooLarge { bytes });
        }
        let nests: Vec<_> = proved.into_iter().map(|proved| proved.bytes).collect();
        Ok(Self {
            num_blocks,
            num_layers,
            pieces: PieceStrides::of(sections),
            page: Page::of(sections, &nests),
            sections: sections.into(),
            regions,
            block_alignment: Alignment::BYTE,
            block_bytes,
            total_bytes: block_bytes.checked_mul("num_blocks", num_blocks.into())?,
            origin: None,
        })
    }

    /// The sections of a block.
    #[inline]
    #[must_use]
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// A section by its name.
    #[must_use]
    pub fn section(&self, name: SectionName) -> Option<&Section> {
        self.sections.iter().find(|section| section.name() == name)
    }

    /// The strides of pieces, if every (block, layer, section) is one contiguous piece and all
    /// pieces are at equal distances.
    #[inline]
    #[must_use]
    pub const fn pieces(&self) -> Option<&PieceStrides> {
        self.pieces.as_ref()
    }

    /// The pages of the blocks, if each block is contiguous within one region and separate from all
    /// others.
    #[inline]
    #[must_use]
    pub fn page(&self) -> Option<&Page> {
        self.page.as_ref().filter(|page| page.is_whole())
    }

    /// The pages of the blocks, if each block is separate from all others: in one part, or in one
    /// part for each section.
    #[must_use]
    pub const fn pages(&self) -> Option<&Page> {
        self.page.as_ref()
    }

    /// The start of the rows of (`block`, `layer`, `section`).
    ///
    /// Indices are not checked. For an index out of bounds, the result is meaningless, but the call
    /// is safe and never panics. Use [`try_offset`](Self::try_offset) for untrusted indices.
    #[inline]
    #[must_use]
    pub fn offset(&self, block: u32, layer: u32, section: u32) -> RegionOffset {
        match &self.pieces {
            Some(pieces) => pieces.offset(block, layer, section),
            None => self.offset_in_section(block, layer, section),
        }
    }

    /// The start of the rows of (`block`, `layer`, `section`).
    ///
    /// # Errors
    ///
    /// [`IndexOutOfRange`] names the first index that is out of range, with its value and its
    /// bound.
    #[inline]
    pub fn try_offset(
        &self,
        block: u32,
        layer: u32,
        section: u32,
    ) -> Result<RegionOffset, IndexOutOfRange> {
        let in_range =
            block < self.num_blocks && layer < self.num_layers && section < self.section_count();
        if in_range {
            Ok(self.offset(block, layer, section))
        } else {
            Err(self.out_of_range(block, layer, section))
        }
    }

    /// The start of a stretch. Indices are not checked; for an index out of bounds, the result is
    /// meaningless.
    #[must_use]
    pub fn place_of(&self, piece: PieceIndex) -> RegionOffset {
        let mut at = self.offset(piece.block, piece.layer, piece.section);
        if self.pieces.is_none()
            && let Some(section) = self.sections.get(to_usize(piece.section.into()))
        {
            at = at.plus(Stretches::of(section).place(piece.stretch.into()));
        }
        at
    }

    fn offset_in_section(&self, block: u32, layer: u32, section: u32) -> RegionOffset {
        let section = self.sections.get(to_usize(section.into()));
        section.map_or(RegionOffset::ZERO, |section| {
            let layer = if axis_count(section, Axis::Layer) == 1 { 0 } else { layer };
            section.begin(block, layer)
        })
    }

    #[cold]
    fn out_of_range(&self, block: u32, layer: u32, section: u32) -> IndexOutOfRange {
        let (index, value, bound) = if block >= self.num_blocks {
            (Index::Block, block, self.num_blocks)
        } else if layer >= self.num_layers {
            (Index::Layer, layer, self.num_layers)
        } else {
            (Index::Section, section, self.section_count())
        };
        IndexOutOfRange { index, value, bound }
    }

    /// The config and the order, if this geometry was created from them.
    #[must_use]
    pub const fn origin(&self) -> Option<&(LayoutConfig, LayoutKind)> {
        self.origin.as_ref()
    }

    terrane_core::getters! {
        /// The number of blocks, B.
        #[inline]
        num_blocks: u32,
        /// The number of layers, L.
        #[inline]
        num_layers: u32,
        /// The bytes of one block over all layers and sections, without padding.
        block_bytes: ByteCount,
        /// The bytes of all blocks, without padding.
        total_bytes: ByteCount,
        /// Regions must begin at multiples of this.
        block_alignment: Alignment,
    }

    /// The number of sections of a block.
    #[inline]
    #[must_use]
    pub fn section_count(&self) -> u32 {
        u32::try_from(self.sections.len()).unwrap_or(u32::MAX)
    }

    /// The number of regions.
    #[inline]
    #[must_use]
    pub fn region_count(&self) -> u32 {
        self.regions.count()
    }

    /// The bytes of a region, padding included; zero if it does not exist.
    #[must_use]
    pub fn region_bytes(&self, region: u32) -> ByteCount {
        self.regions.get(region)
    }

    /// The bytes of all regions together, without padding between them.
    #[must_use]
    pub fn all_region_bytes(&self) -> ByteCount {
        // The constructor has checked the sum.
        self.regions.total().unwrap_or(LARGEST_LAYOUT)
    }

    /// A number of bytes such that no block crosses a multiple of it within a region. `None` if no
    /// such number exists.
    #[must_use]
    pub fn block_unit(&self) -> Option<ByteCount> {
        let first = self.sections.first()?.steps(Axis::Block);
        let unit = (first.outer().count == 1).then_some(first.inner().stride)?;
        let fits = |section: &Section| {
            let steps = proof::prove(section).ok()?.bytes.steps;
            let (inside, outside): (Vec<_>, Vec<_>) =
                steps.iter().partition(|step| step.axis != Axis::Block && step.stride < unit);
            let far = |sum: u64, step: &&proof::NestedStep| sum + step.stride * (step.count - 1);
            let span = inside.iter().fold(section.element_bytes().get(), far);
            let fits = outside.iter().all(|step| step.stride.is_multiple_of(unit))
                && section.offset() % unit + span <= unit;
            fits.then_some(())
        };
        let all_fit = unit > 0 && self.sections.iter().all(|section| fits(section).is_some());
        all_fit.then_some(ByteCount::new(unit))
    }

    /// The largest power of two that divides the offset and the length of every contiguous stretch.
    ///
    /// If regions begin at multiples of it, every stretch begins and ends at a multiple.
    #[must_use]
    pub fn alignment_class(&self) -> Alignment {
        let bits = self.sections.iter().fold(0, |bits, section| {
            let stretches = Stretches::of(section);
            let outside = [Axis::Block, Axis::Layer].map(|axis| section.steps(axis));
            let steps = outside.into_iter().flat_map(|steps| steps.parts());
            // A stride over one position is ignored. The bitwise or keeps the lowest bit of all.
            let strides = steps.filter(|(count, _)| *count > 1).map(|(_, step)| step.offset);
            strides
                .chain(stretches.strides())
                .fold(bits | section.offset() | stretches.bytes(), |bits, stride| bits | stride)
        });
        Alignment::of(bits)
    }

    /// The start and the length of the last element of a block in the last layer of a section.
    pub(crate) fn last_element(&self, section: &Section, block: u32) -> (RegionOffset, u64) {
        let shape = section.shape();
        let last = [shape.heads.unwrap_or(1), shape.tokens, shape.elements].map(|count| count - 1);
        (section.place([block, shape.layers - 1], last), section.element_bytes().get())
    }

    /// A short description for labels and errors.
    #[must_use]
    pub fn label(&self) -> String {
        match self.origin {
            Some((_, kind)) => kind.to_string(),
            None => {
                let names: Vec<_> =
                    self.sections.iter().map(|each| each.name().to_string()).collect();
                format!("sections {}", names.join(", "))
            }
        }
    }
}

impl PartialEq for Geometry {
    fn eq(&self, other: &Self) -> bool {
        let sections = |geometry: &Self| -> Vec<Section> {
            geometry.sections.iter().map(|section| section.normal()).collect()
        };
        self.block_alignment == other.block_alignment
            && self.regions == other.regions
            && sections(self) == sections(other)
    }
}

impl Eq for Geometry {}

fn collect(sections: impl IntoIterator<Item = Section>) -> Vec<Section> {
    // One more than the maximum is enough to detect too many.
    sections.into_iter().take(MOST_SECTIONS + 1).collect()
}

/// The number of positions on an axis. The proof has checked that it fits in 32 bits.
pub(crate) fn axis_count(section: &Section, axis: Axis) -> u32 {
    u32::try_from(section.steps(axis).count()).unwrap_or(u32::MAX)
}

fn same_count(section: &Section, axis: Axis, expected: u32) -> Result<(), GeometryError> {
    let count = section.steps(axis).count();
    if count == u64::from(expected) {
        return Ok(());
    }
    Err(GeometryError::AxisCount { section: section.name(), axis, count, expected })
}

#[cfg(test)]
mod tests;
