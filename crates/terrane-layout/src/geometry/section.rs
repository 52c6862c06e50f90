//! A section: rows of one kind, and their strides.

use terrane_core::ByteCount;

use super::axis::{Axis, SectionName};
use super::index::RegionOffset;
use super::steps::AxisSteps;

/// A part of every block: its rows have one length and one set of strides.
///
/// K and V are two sections. So are quantised values and their scales. A section may lack an axis:
/// the recurrent state of a block has no tokens. Two layouts convert section by section, by name.
///
/// The element (block, layer, head, token, element) begins at the section's offset plus the
/// contribution of each axis ([`AxisSteps::place`]). Its region is the section's first region plus
/// the regions that the axes add.
///
/// ```
/// use terrane_layout::{Axis, AxisSteps, Geometry, Section, SectionName};
///
/// # fn main() -> Result<(), terrane_layout::LayoutError> {
/// // DeepSeek's indexer: 64 tokens of 128 bytes, then a scale of 4 bytes for each token.
/// let values = Section::new(SectionName::VALUES, 1)
///     .axis(Axis::Block, AxisSteps::new(100, 64 * 132))
///     .axis(Axis::Token, AxisSteps::new(64, 128))
///     .axis(Axis::Element, AxisSteps::new(128, 1));
/// let scales = Section::new(SectionName::SCALES, 4)
///     .at(0, 64 * 128)
///     .axis(Axis::Block, AxisSteps::new(100, 64 * 132))
///     .axis(Axis::Token, AxisSteps::new(64, 4));
/// let geometry = Geometry::from_sections([values, scales])?;
/// assert_eq!(geometry.block_bytes().get(), 64 * 132);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Section {
    name: SectionName,
    element_bytes: u32,
    states_heads: bool,
    first_region: u32,
    offset: u64,
    /// In the order of [`Axis::ALL`].
    steps: [AxisSteps; 5],
}

/// The shape of a section, without its position. Sections of equal shape convert into each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SectionShape {
    /// Layers; 1 if the section lacks the axis.
    pub layers: u32,
    /// Heads of a token, if they are stated.
    pub heads: Option<u32>,
    /// Tokens of a block; 1 if the section lacks the axis.
    pub tokens: u32,
    /// Elements of one head of one token, or of the whole row if heads are not stated.
    pub elements: u32,
    /// Bytes of an element, or of the smallest group of elements that is never split.
    pub element_bytes: u32,
}

impl SectionShape {
    /// The bytes of one head of one token, or of the whole row if heads are not stated.
    #[must_use]
    pub fn head_bytes(&self) -> u64 {
        u64::from(self.elements) * u64::from(self.element_bytes)
    }

    /// The bytes of one token in one layer. [`Geometry`](crate::Geometry) has checked the product.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        self.head_bytes().saturating_mul(self.heads.unwrap_or(1).into())
    }

    /// The bytes of all tokens of one block in one layer.
    #[must_use]
    pub fn piece_bytes(&self) -> u64 {
        self.row_bytes().saturating_mul(self.tokens.into())
    }
}

impl Section {
    /// A section of one element of `element_bytes` bytes, at the start of region 0.
    #[must_use]
    pub const fn new(name: SectionName, element_bytes: u32) -> Self {
        Self {
            name,
            element_bytes,
            states_heads: false,
            first_region: 0,
            offset: 0,
            steps: [AxisSteps::ABSENT; 5],
        }
    }

    /// Places the first element at `offset` bytes of `region`.
    #[must_use]
    pub const fn at(self, region: u32, offset: u64) -> Self {
        Self { first_region: region, offset, ..self }
    }

    /// Sets the strides of an axis. Setting [`Axis::Head`] states the heads of a token.
    #[must_use]
    pub const fn axis(mut self, axis: Axis, steps: AxisSteps) -> Self {
        self.steps[axis as usize] = steps;
        self.states_heads |= matches!(axis, Axis::Head);
        self
    }

    terrane_core::getters! {
        /// The name.
        name: SectionName,
        /// The region of the first element.
        #[inline]
        first_region: u32,
        /// Bytes from the start of the first region to the first element.
        #[inline]
        offset: u64,
        /// Whether the heads of a token are stated.
        states_heads: bool,
    }

    /// The strides of an axis.
    #[inline]
    #[must_use]
    pub const fn steps(&self, axis: Axis) -> &AxisSteps {
        &self.steps[axis as usize]
    }

    /// The shape of the section.
    #[must_use]
    pub fn shape(&self) -> SectionShape {
        // The geometry has checked that counts fit in 32 bits.
        let count = |axis| u32::try_from(self.steps(axis).count()).unwrap_or(u32::MAX);
        SectionShape {
            layers: count(Axis::Layer),
            heads: self.states_heads.then(|| count(Axis::Head)),
            tokens: count(Axis::Token),
            elements: count(Axis::Element),
            element_bytes: self.element_bytes,
        }
    }

    /// The start of the rows of a block and a layer: head, token and element are 0.
    ///
    /// Indices are not checked; for an index out of bounds, the result is meaningless.
    #[inline]
    #[must_use]
    pub fn begin(&self, block: u32, layer: u32) -> RegionOffset {
        RegionOffset { region: self.first_region, offset: self.offset }
            .plus(self.steps(Axis::Block).place(block))
            .plus(self.steps(Axis::Layer).place(layer))
    }

    /// The start of an element.
    ///
    /// Indices are not checked; for an index out of bounds, the result is meaningless.
    #[must_use]
    pub fn place(
        &self,
        [block, layer]: [u32; 2],
        [head, token, element]: [u32; 3],
    ) -> RegionOffset {
        self.begin(block, layer)
            .plus(self.steps(Axis::Head).place(head))
            .plus(self.steps(Axis::Token).place(token))
            .plus(self.steps(Axis::Element).place(element))
    }

    /// The same positions, with strides that have no meaning set to zero.
    #[must_use]
    pub(super) fn normal(self) -> Self {
        Self { steps: self.steps.map(AxisSteps::normal), ..self }
    }

    /// The bytes of an element.
    #[must_use]
    pub fn element_bytes(&self) -> ByteCount {
        ByteCount::new(self.element_bytes.into())
    }
}
