//! In what two geometries differ.

use std::fmt;

use terrane_core::{Alignment, ByteCount};
use terrane_layout::{ElementFormat, LayoutConfig, LayoutKind, TokenOrder};

/// The first field in which two geometries differ, in the order in which a config states them; the
/// kind is last, as the same blocks can be laid out in any.
///
/// `None` means that the two have one fingerprint.
///
/// ```
/// use terrane_layout::{ElementFormat, LayoutConfig, LayoutKind};
/// use terrane_wire::first_difference;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let ours = LayoutConfig::builder()
///     .num_blocks(1024)
///     .num_layers(32)
///     .outer_dim(2)
///     .page_size(16)
///     .inner_dim(1024)
///     .element(ElementFormat::Width(2))
///     .build()?;
/// let theirs = ours.with_num_layers(16)?;
/// let kind = LayoutKind::FullyContiguous;
/// let difference = first_difference((&ours, kind), (&theirs, kind)).ok_or("the same")?;
/// assert_eq!(difference.to_string(), "num_layers is 32 here and 16 there");
/// # Ok(())
/// # }
/// ```
#[must_use]
pub fn first_difference(
    local: (&LayoutConfig, LayoutKind),
    remote: (&LayoutConfig, LayoutKind),
) -> Option<Difference> {
    fields(local)
        .into_iter()
        .zip(fields(remote))
        .find_map(|((field, local), (_, remote))| Difference::of(field, local, remote))
}

/// The first field that keeps whole blocks from being moved between two layouts, as
/// `terrane-transfer` sees it: the number of blocks, their alignment, the kind, and the order of
/// tokens and stated heads may differ.
///
/// Heads that a transfer names, and layers that it lands elsewhere, let it move parts of blocks
/// between layouts that differ here.
#[must_use]
pub fn first_shape_difference(local: &LayoutConfig, remote: &LayoutConfig) -> Option<Difference> {
    shape(local, remote)
        .into_iter()
        .zip(shape(remote, local))
        .find_map(|((field, local), (_, remote))| Difference::of(field, local, remote))
}

/// A field in which two geometries differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The field.
    pub field: GeometryField,
    /// Its value here.
    pub local: FieldValue,
    /// Its value there.
    pub remote: FieldValue,
}

impl Difference {
    fn of(field: GeometryField, local: FieldValue, remote: FieldValue) -> Option<Self> {
        (local != remote).then_some(Self { field, local, remote })
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
    /// Blocks.
    NumBlocks,
    /// Layers.
    NumLayers,
    /// 2 for K and V, 1 for a latent.
    OuterDim,
    /// Tokens a block.
    PageSize,
    /// Elements for each token, layer and outer.
    InnerDim,
    /// How elements are stored.
    Element,
    /// The heads of a token's row.
    NumHeads,
    /// The elements of a head.
    HeadDim,
    /// The bytes of a head of one token.
    HeadBytes,
    /// The bytes of one block, layer and outer.
    PieceBytes,
    /// Whether tokens or heads are outermost within a piece.
    TokenOrder,
    /// What block strides are rounded up to a multiple of.
    BlockAlignment,
    /// Which dimensions are outermost.
    Kind,
}

impl fmt::Display for GeometryField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::NumBlocks => "num_blocks",
            Self::NumLayers => "num_layers",
            Self::OuterDim => "outer_dim",
            Self::PageSize => "page_size",
            Self::InnerDim => "inner_dim",
            Self::Element => "element",
            Self::NumHeads => "num_heads",
            Self::HeadDim => "head_dim",
            Self::HeadBytes => "bytes a head",
            Self::PieceBytes => "bytes a piece",
            Self::TokenOrder => "token_order",
            Self::BlockAlignment => "block_alignment",
            Self::Kind => "kind",
        })
    }
}

/// What a field of a geometry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FieldValue {
    /// It is not stated.
    NotStated,
    /// A number.
    Number(u32),
    /// A number of bytes.
    Bytes(ByteCount),
    /// How elements are stored.
    Element(ElementFormat),
    /// An order of tokens and heads.
    TokenOrder(TokenOrder),
    /// An alignment.
    Alignment(Alignment),
    /// A kind.
    Kind(LayoutKind),
}

impl FieldValue {
    fn if_stated(number: Option<u32>) -> Self {
        number.map_or(Self::NotStated, Self::Number)
    }
}

impl fmt::Display for FieldValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotStated => f.pad("not stated"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Bytes(bytes) => write!(f, "{}", bytes.get()),
            Self::Element(element) => write!(f, "{element}"),
            Self::TokenOrder(order) => write!(f, "{order}"),
            Self::Alignment(alignment) => write!(f, "{alignment}"),
            Self::Kind(kind) => write!(f, "{kind}"),
        }
    }
}

type Fields<const N: usize> = [(GeometryField, FieldValue); N];

/// Every field of a geometry.
fn fields((config, kind): (&LayoutConfig, LayoutKind)) -> Fields<10> {
    [
        (GeometryField::NumBlocks, FieldValue::Number(config.num_blocks())),
        (GeometryField::NumLayers, FieldValue::Number(config.num_layers())),
        (GeometryField::OuterDim, FieldValue::Number(config.outer_dim())),
        (GeometryField::PageSize, FieldValue::Number(config.page_size())),
        (GeometryField::InnerDim, FieldValue::Number(config.inner_dim())),
        (GeometryField::Element, FieldValue::Element(config.element())),
        (GeometryField::NumHeads, FieldValue::if_stated(config.num_heads())),
        (GeometryField::TokenOrder, FieldValue::TokenOrder(config.token_order())),
        (GeometryField::BlockAlignment, FieldValue::Alignment(config.block_alignment())),
        (GeometryField::Kind, FieldValue::Kind(kind)),
    ]
}

/// The fields of `config` that decide whether its blocks are those of `other`.
fn shape(config: &LayoutConfig, other: &LayoutConfig) -> Vec<(GeometryField, FieldValue)> {
    let mut shape = vec![
        (GeometryField::NumLayers, FieldValue::Number(config.num_layers())),
        (GeometryField::OuterDim, FieldValue::Number(config.outer_dim())),
        (GeometryField::PageSize, FieldValue::Number(config.page_size())),
    ];
    if config.num_heads().is_some() && other.num_heads().is_some() {
        let head_bytes = config.head_bytes().unwrap_or_default();
        shape.extend([
            (GeometryField::HeadDim, FieldValue::if_stated(config.head_dim())),
            (GeometryField::HeadBytes, FieldValue::Bytes(head_bytes)),
            (GeometryField::NumHeads, FieldValue::if_stated(config.num_heads())),
        ]);
    } else {
        shape.extend([
            (GeometryField::InnerDim, FieldValue::Number(config.inner_dim())),
            (GeometryField::PieceBytes, FieldValue::Bytes(config.piece_bytes())),
            // Where one side has them head-major, the other has to say how many heads there are.
            (GeometryField::TokenOrder, FieldValue::TokenOrder(config.token_order())),
        ]);
    }
    shape
}
