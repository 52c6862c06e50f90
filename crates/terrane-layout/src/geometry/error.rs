//! Why sections are not a geometry.

use super::axis::{Axis, SectionName};

/// Why a set of sections was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// The number of sections is zero or too large.
    #[error("a block has 1 to {most} sections, and {count} were given")]
    SectionCount {
        /// The sections that were given.
        count: usize,
        /// The most that a block may have.
        most: usize,
    },
    /// Two sections have the same name.
    #[error("two sections are named {section}; give each its own name")]
    DuplicateSection {
        /// The name.
        section: SectionName,
    },
    /// A count or a size is zero.
    #[error("section {section}: the {axis} axis has a count or a size of zero; the least is 1")]
    Zero {
        /// The section.
        section: SectionName,
        /// The axis.
        axis: Axis,
    },
    /// A section has another number of positions on an axis than the layout.
    #[error(
        "section {section} has {count} positions on the {axis} axis, and the layout has \
         {expected}; only the layer axis may be absent"
    )]
    AxisCount {
        /// The section.
        section: SectionName,
        /// The axis.
        axis: Axis,
        /// The positions of the section.
        count: u64,
        /// The positions of the layout.
        expected: u32,
    },
    /// The bytes or positions of a section do not fit in a layout.
    #[error(
        "section {section}: the {axis} axis reaches past 2^63 - 1 bytes or 2^32 - 1 positions; \
         make a count or a stride smaller"
    )]
    TooLarge {
        /// The section.
        section: SectionName,
        /// The axis at which the limit is passed.
        axis: Axis,
    },
    /// Two axes of a section are not nested.
    #[error(
        "section {section}: the {outer} axis steps by {stride}, less than the {span} that the \
         {inner} axis spans; they first meet at {unit} {address}. A stride must be at least the span \
         of the axes inside it; interleaved strides are refused even if no bytes overlap"
    )]
    NotNested {
        /// The section.
        section: SectionName,
        /// The axis with the larger stride.
        outer: Axis,
        /// The axis with the next smaller stride.
        inner: Axis,
        /// The stride of the outer axis.
        stride: u64,
        /// The span of the inner axis and of all axes inside it.
        span: u64,
        /// `byte` of its region, or `region` if the axes are spread over regions.
        unit: &'static str,
        /// The first address, or region, that both reach. If no two elements share bytes, the first
        /// one of the outer axis that lies within the span.
        address: u64,
    },
    /// Two sections share bytes, or their strides are not nested.
    #[error(
        "sections {first} and {second} overlap or interleave at byte {address} of region {region}; \
         move one of them, or give both the same outer strides"
    )]
    SectionsOverlap {
        /// One section.
        first: SectionName,
        /// The other section.
        second: SectionName,
        /// A region that both use.
        region: u32,
        /// The first byte that both reach.
        address: u64,
    },
    /// A section ends behind its region.
    #[error("section {section} ends at byte {end} of region {region}, which has {length} bytes")]
    OutOfRegion {
        /// The section.
        section: SectionName,
        /// The region.
        region: u32,
        /// The end of the section's last byte.
        end: u64,
        /// The length of the region.
        length: u64,
    },
    /// A region has another number than any that sections use.
    #[error("no section uses region {region} of {regions}; number the regions without gaps")]
    UnusedRegion {
        /// The region.
        region: u32,
        /// The number of regions.
        regions: usize,
    },
    /// A tensor form has a dimension twice too often, or lacks one.
    #[error("the tensor has the {dimension} dimension {times} times; {expected}")]
    Dimension {
        /// The dimension.
        dimension: &'static str,
        /// How often it occurs.
        times: usize,
        /// How often it may occur.
        expected: &'static str,
    },
    /// A dimension does not divide evenly.
    #[error("{field} is {value}, not a multiple of {divisor}; choose another {field}")]
    NotDivided {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u32,
        /// The divisor.
        divisor: u32,
    },
}
