//! Why sections do not form a geometry.

use super::axis::{Axis, SectionName};

/// Why a set of sections was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// The number of sections is zero or too large.
    #[error("the block has {count} sections; pass 1 to {most}")]
    SectionCount {
        /// The number of sections that were passed.
        count: usize,
        /// The largest number.
        most: usize,
    },
    /// Two sections have the same name.
    #[error("two sections are named {section}; give each its own name")]
    DuplicateSection {
        /// The name.
        section: SectionName,
    },
    /// A count or a size is zero.
    #[error(
        "section {section}: the {axis} axis has a count or a size of zero; both are at least 1"
    )]
    Zero {
        /// The section.
        section: SectionName,
        /// The axis.
        axis: Axis,
    },
    /// A section and the layout have different numbers of positions on an axis.
    #[error(
        "section {section} has {count} positions on the {axis} axis, and the layout has \
         {expected}; make them equal (only the layer axis may be absent)"
    )]
    AxisCount {
        /// The section.
        section: SectionName,
        /// The axis.
        axis: Axis,
        /// The number of positions of the section.
        count: u64,
        /// The number of positions of the layout.
        expected: u32,
    },
    /// The bytes or positions of a section do not fit in a layout.
    #[error(
        "section {section}: the {axis} axis reaches past 2^63 − 1 bytes or 2^32 − 1 positions; \
         make a count or a stride smaller"
    )]
    TooLarge {
        /// The section.
        section: SectionName,
        /// The axis at which the limit is exceeded.
        axis: Axis,
    },
    /// Two axes of a section are not nested.
    #[error(
        "section {section}: the {outer} axis has a stride of {stride}, less than the {span} that \
         the {inner} axis spans; they first meet at {unit} {address}. A stride must be at least \
         the span of the axes inside it; interleaved strides are refused even if no bytes overlap"
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
        /// The first address, or region, that both use. If no two elements share bytes, it is the
        /// first address of the outer axis within the span.
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
        /// The first byte that both use.
        address: u64,
    },
    /// A section extends past its region.
    #[error(
        "section {section} ends at byte {end} of region {region}, which has {length} bytes; make \
         the region larger"
    )]
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
    /// No section uses a region.
    #[error("no section uses region {region} of {regions}; number the regions without gaps")]
    UnusedRegion {
        /// The region.
        region: u32,
        /// The number of regions.
        regions: usize,
    },
    /// A tensor form has a dimension too often, or lacks one.
    #[error("the tensor has the {dimension} dimension {times} times; it {expected}")]
    Dimension {
        /// The dimension.
        dimension: &'static str,
        /// The number of times.
        times: usize,
        /// The permitted number of times, as the rest of a sentence about the dimension.
        expected: &'static str,
    },
    /// A value is not a multiple of its divisor.
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
