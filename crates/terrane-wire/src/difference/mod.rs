//! The first difference of two geometries.

pub(crate) mod field_value;

use std::fmt;

use terrane_core::ByteCount;
use terrane_core::convert::to_u64;
use terrane_layout::{Axis, Geometry, Section, SectionName, SectionShape};

use field_value::FieldValue;

/// The first difference of two geometries: in their sections and shapes, then in their strides, then
/// in their regions.
///
/// `None` means that each element has the same position in both, and that the fingerprints are equal.
///
/// ```
/// use terrane_layout::{ElementFormat, Geometry, LayoutConfig, LayoutKind};
/// use terrane_wire::first_difference;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = LayoutConfig::builder()
///     .num_blocks(1024)
///     .num_layers(32)
///     .outer_dim(2)
///     .page_size(16)
///     .inner_dim(1024)
///     .element(ElementFormat::Width(2))
///     .build()?;
/// let ours = Geometry::new(&config, LayoutKind::FullyContiguous)?;
/// let theirs = Geometry::new(&config.with_num_layers(16)?, LayoutKind::FullyContiguous)?;
/// let difference = first_difference(&ours, &theirs).ok_or("the same")?;
/// assert_eq!(difference.to_string(), "section k: num_layers is 32 here and 16 there");
/// # Ok(())
/// # }
/// ```
#[must_use]
pub fn first_difference(local: &Geometry, remote: &Geometry) -> Option<Difference> {
    let number = |geometry: &Geometry| FieldValue::Number(geometry.num_blocks().into());
    let alignment = |geometry: &Geometry| FieldValue::Alignment(geometry.block_alignment());
    let shapes = names_difference(local, remote)
        .or_else(|| Difference::of(GeometryField::NumBlocks, number(local), number(remote)))
        .or_else(|| {
            same_named_sections(local, remote)
                .find_map(|(ours, theirs)| counts_difference(ours, theirs))
        });
    shapes
        .or_else(|| {
            same_named_sections(local, remote)
                .find_map(|(ours, theirs)| strides_difference(ours, theirs))
        })
        .or_else(|| positions_difference(local, remote))
        .or_else(|| {
            Difference::of(GeometryField::BlockAlignment, alignment(local), alignment(remote))
        })
        .or_else(|| regions_difference(local, remote))
}

/// The first difference that prevents copies of whole blocks between two layouts: a section that
/// one of them lacks, or a section of another shape.
///
/// The number of blocks, their alignment and all strides may differ. If only one layout states heads,
/// rows are compared as a whole, and must be contiguous in both.
#[must_use]
pub fn first_shape_difference(local: &Geometry, remote: &Geometry) -> Option<Difference> {
    names_difference(local, remote).or_else(|| {
        same_named_sections(local, remote)
            .find_map(|(ours, theirs)| shapes_difference(ours, theirs))
    })
}

/// A field in which two geometries differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The section; `None` for a field of the whole layout.
    pub section: Option<SectionName>,
    /// The field.
    pub field: GeometryField,
    /// Its local value.
    pub local: FieldValue,
    /// Its remote value.
    pub remote: FieldValue,
}

impl Difference {
    fn of(field: GeometryField, local: FieldValue, remote: FieldValue) -> Option<Self> {
        (local != remote).then_some(Self { section: None, field, local, remote })
    }

    fn of_section(
        section: &Section,
        field: GeometryField,
        local: FieldValue,
        remote: FieldValue,
    ) -> Option<Self> {
        let difference = Self::of(field, local, remote)?;
        Some(Self { section: Some(section.name()), ..difference })
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(section) = self.section {
            write!(f, "section {section}: ")?;
        }
        write!(f, "{} is {} here and {} there", self.field, self.local, self.remote)
    }
}

/// A geometry that is not the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the layouts differ: {difference}; configure both sides alike")]
pub struct GeometryMismatch {
    /// The first difference.
    pub difference: Difference,
}

impl GeometryMismatch {
    pub(crate) fn unless_none(difference: Option<Difference>) -> Result<(), Self> {
        match difference {
            None => Ok(()),
            Some(difference) => Err(Self { difference }),
        }
    }
}

/// A field that two geometries can differ in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GeometryField {
    /// Whether the section exists.
    Section,
    /// Blocks of the layout.
    NumBlocks,
    /// Layers of a section.
    NumLayers,
    /// Tokens of a block.
    Tokens,
    /// Heads of a token.
    NumHeads,
    /// Elements of a head, or of a row without stated heads.
    Elements,
    /// Bytes of an element.
    ElementBytes,
    /// Bytes of one head of one token.
    HeadBytes,
    /// Elements of a whole row.
    RowElements,
    /// Bytes of a whole row.
    RowBytes,
    /// Bytes of all tokens of one block and layer.
    PieceBytes,
    /// Whether the bytes of a head, or of a row without stated heads, are contiguous.
    Rows,
    /// Strides of an axis.
    Strides(Axis),
    /// The region of the first element.
    FirstRegion,
    /// Bytes from the beginning of that region to the first element.
    Offset,
    /// The position of the section among the others.
    Position,
    /// The alignment of blocks and regions.
    BlockAlignment,
    /// The number of regions.
    Regions,
    /// The bytes of a region.
    RegionBytes(u32),
}

impl fmt::Display for GeometryField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Strides(axis) => write!(f, "the {axis} axis"),
            Self::RegionBytes(region) => write!(f, "the length of region {region}"),
            _ => f.pad(self.name()),
        }
    }
}

impl GeometryField {
    const fn name(self) -> &'static str {
        match self {
            Self::Section => "the section",
            Self::NumBlocks => "num_blocks",
            Self::NumLayers => "num_layers",
            Self::Tokens => "the number of tokens of a block",
            Self::NumHeads => "num_heads",
            Self::Elements => "the number of elements of a head",
            Self::ElementBytes => "the size of an element",
            Self::HeadBytes => "the size of a head",
            Self::RowElements => "the number of elements of a row",
            Self::RowBytes => "the size of a row",
            Self::PieceBytes => "the size of a piece",
            Self::Rows => "a row",
            Self::Strides(_) => "the strides",
            Self::FirstRegion => "the first region",
            Self::Offset => "the offset",
            Self::Position => "the position among the sections",
            Self::BlockAlignment => "block_alignment",
            Self::Regions => "the number of regions",
            Self::RegionBytes(_) => "the length of a region",
        }
    }
}

/// The sections of equal names.
fn same_named_sections<'a>(
    local: &'a Geometry,
    remote: &'a Geometry,
) -> impl Iterator<Item = (&'a Section, &'a Section)> {
    local.sections().iter().filter_map(|ours| Some((ours, remote.section(ours.name())?)))
}

fn names_difference(local: &Geometry, remote: &Geometry) -> Option<Difference> {
    let mut sections = local.sections().iter().chain(remote.sections());
    sections.find_map(|section| {
        let has =
            |geometry: &Geometry| FieldValue::Present(geometry.section(section.name()).is_some());
        Difference::of_section(section, GeometryField::Section, has(local), has(remote))
    })
}

fn first_field_difference<const N: usize>(
    section: &Section,
    fields: [(GeometryField, FieldValue, FieldValue); N],
) -> Option<Difference> {
    let mut fields = fields.into_iter();
    fields.find_map(|(field, ours, theirs)| Difference::of_section(section, field, ours, theirs))
}

fn number(number: u32) -> FieldValue {
    FieldValue::Number(number.into())
}

fn bytes(bytes: u32) -> FieldValue {
    FieldValue::Bytes(ByteCount::new(bytes.into()))
}

fn counts_difference(local: &Section, remote: &Section) -> Option<Difference> {
    let (ours, theirs) = (local.shape(), remote.shape());
    let heads = |shape: &SectionShape| shape.heads.map_or(FieldValue::NotStated, number);
    first_field_difference(
        local,
        [
            (GeometryField::NumLayers, number(ours.layers), number(theirs.layers)),
            (GeometryField::Tokens, number(ours.tokens), number(theirs.tokens)),
            (GeometryField::NumHeads, heads(&ours), heads(&theirs)),
            (GeometryField::Elements, number(ours.elements), number(theirs.elements)),
            (GeometryField::ElementBytes, bytes(ours.element_bytes), bytes(theirs.element_bytes)),
        ],
    )
}

/// Compares two sections as `terrane-transfer` does for copies of whole blocks.
fn shapes_difference(local: &Section, remote: &Section) -> Option<Difference> {
    let (ours, theirs) = (local.shape(), remote.shape());
    let counts = [
        (GeometryField::NumLayers, number(ours.layers), number(theirs.layers)),
        (GeometryField::Tokens, number(ours.tokens), number(theirs.tokens)),
    ];
    first_field_difference(local, counts).or_else(|| {
        let each = |of: fn(&SectionShape) -> u64| [of(&ours), of(&theirs)];
        let elements = |of: fn(&SectionShape) -> u64| {
            // One element is the whole head or row, however the other layout divides it.
            let is_known = ours.elements > 1 && theirs.elements > 1;
            if is_known { each(of).map(FieldValue::Number) } else { [FieldValue::NotStated; 2] }
        };
        let bytes = |of| each(of).map(|bytes| FieldValue::Bytes(ByteCount::new(bytes)));
        let (fields, is_alike) = if let (Some(here), Some(there)) = (ours.heads, theirs.heads) {
            let fields = [
                (GeometryField::NumHeads, [number(here), number(there)]),
                (GeometryField::Elements, elements(|shape| shape.elements.into())),
                (GeometryField::HeadBytes, bytes(SectionShape::head_bytes)),
            ];
            (fields, ours.elements == theirs.elements)
        } else {
            let row = |shape: &SectionShape| {
                u64::from(shape.elements) * u64::from(shape.heads.unwrap_or(1))
            };
            let fields = [
                (GeometryField::RowElements, elements(row)),
                (GeometryField::RowBytes, bytes(SectionShape::row_bytes)),
                (GeometryField::PieceBytes, bytes(SectionShape::piece_bytes)),
            ];
            (fields, ours.heads == theirs.heads && ours.elements == theirs.elements)
        };
        let fields = fields.map(|(field, [here, there])| (field, here, there));
        first_field_difference(local, fields)
            .or_else(|| if is_alike { None } else { rows_difference(local, remote) })
    })
}

/// Heads, or rows, are copied as a whole, so they must be contiguous in both.
fn rows_difference(local: &Section, remote: &Section) -> Option<Difference> {
    let whole_rows = !(local.states_heads() && remote.states_heads());
    let is_contiguous = |section: &Section| {
        let shape = section.shape();
        let follows = |axis, bytes: u64| {
            let steps = section.steps(axis);
            steps.count() == 1 || (steps.outer().count == 1 && steps.inner().stride == bytes)
        };
        follows(Axis::Element, shape.element_bytes.into())
            && (!whole_rows || follows(Axis::Head, shape.head_bytes()))
    };
    let (ours, theirs) = (is_contiguous(local), is_contiguous(remote));
    (!ours || !theirs).then(|| Difference {
        section: Some(local.name()),
        field: GeometryField::Rows,
        local: FieldValue::Contiguous(ours),
        remote: FieldValue::Contiguous(theirs),
    })
}

fn strides_difference(local: &Section, remote: &Section) -> Option<Difference> {
    let offset = |section: &Section| FieldValue::Bytes(ByteCount::new(section.offset()));
    let strides = |axis: Axis| {
        let steps = |section: &Section| FieldValue::steps(section.steps(axis));
        Difference::of_section(local, GeometryField::Strides(axis), steps(local), steps(remote))
    };
    let (ours, theirs) = (number(local.first_region()), number(remote.first_region()));
    Axis::ALL.into_iter().find_map(strides).or_else(|| {
        first_field_difference(
            local,
            [
                (GeometryField::FirstRegion, ours, theirs),
                (GeometryField::Offset, offset(local), offset(remote)),
            ],
        )
    })
}

fn positions_difference(local: &Geometry, remote: &Geometry) -> Option<Difference> {
    let place = |geometry: &Geometry, name: SectionName| {
        let position = geometry.sections().iter().position(|section| section.name() == name);
        FieldValue::Number(to_u64(position.unwrap_or_default()))
    };
    local.sections().iter().find_map(|section| {
        let (ours, theirs) = (place(local, section.name()), place(remote, section.name()));
        Difference::of_section(section, GeometryField::Position, ours, theirs)
    })
}

fn regions_difference(local: &Geometry, remote: &Geometry) -> Option<Difference> {
    let count = |geometry: &Geometry| number(geometry.region_count());
    let length = |geometry: &Geometry, region| FieldValue::Bytes(geometry.region_bytes(region));
    Difference::of(GeometryField::Regions, count(local), count(remote)).or_else(|| {
        (0..local.region_count()).find_map(|region| {
            let (ours, theirs) = (length(local, region), length(remote, region));
            Difference::of(GeometryField::RegionBytes(region), ours, theirs)
        })
    })
}
