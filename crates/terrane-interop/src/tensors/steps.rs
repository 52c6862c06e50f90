//! How many elements each axis of a form has in a layout, and how many bytes apart they are.

use terrane_layout::{ElementFormat, Geometry, LayoutConfig, TokenOrder};

use super::{KvAxis, KvError, KvForm};
use crate::dlpack::ElementType;

/// An axis of a form in a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) axis: KvAxis,
    pub(super) size: u64,
    /// In elements.
    pub(super) stride: u64,
}

/// The parts of a token's row, in bytes.
struct Row {
    element: u64,
    row: u64,
    heads: Option<u64>,
}

impl Row {
    /// The elements are those of the configuration; where it has none of its own, they are bytes.
    fn of(config: &LayoutConfig, element: ElementType) -> Result<Self, KvError> {
        let refused = || KvError::Element { expected: config.element(), found: element };
        let width = element.width().map(terrane_core::ByteCount::get).ok_or_else(refused)?;
        let fits = match config.element() {
            ElementFormat::Width(own) => width == u64::from(own),
            _ => width == 1,
        };
        if !fits {
            return Err(refused());
        }
        let row = config.element().row_bytes(config.inner_dim())?.get();
        Ok(Self { element: width, row, heads: config.num_heads().map(u64::from) })
    }
}

/// What each axis of `form` is in a layout of this geometry. Indices of the layer are not among
/// them: it is where the tensor begins.
pub(super) fn steps(
    config: &LayoutConfig,
    geometry: &Geometry,
    form: &KvForm,
    element: ElementType,
) -> Result<Vec<Step>, KvError> {
    let row = Row::of(config, element)?;
    let axes = form.axes().iter();
    axes.map(|&axis| {
        let (size, bytes) = place(config, geometry, &row, axis)?;
        if !bytes.is_multiple_of(row.element) {
            let bytes = terrane_core::ByteCount::new(bytes);
            return Err(KvError::NotWhole { what: axis, bytes, element });
        }
        Ok(Step { axis, size, stride: bytes / row.element })
    })
    .collect()
}

/// The size of an axis, and how many bytes one index is from the next. All products are at most
/// those of a piece, or the geometry's, which have been checked.
fn place(
    config: &LayoutConfig,
    geometry: &Geometry,
    row: &Row,
    axis: KvAxis,
) -> Result<(u64, u64), KvError> {
    let (blocks, page) = (u64::from(config.num_blocks()), u64::from(config.page_size()));
    let heads = || row.heads.ok_or(KvError::HeadsNotStated);
    // Of one head of one token.
    let head = || Ok::<_, KvError>(row.row / heads()?.max(1));
    let token = || match config.token_order() {
        TokenOrder::TokenMajor => Ok::<_, KvError>(row.row),
        TokenOrder::HeadMajor => head(),
    };
    Ok(match axis {
        KvAxis::Outer => (u64::from(config.outer_dim()), geometry.outer_stride().get()),
        KvAxis::Block => (blocks, geometry.block_stride().get()),
        KvAxis::Token => (page, token()?),
        KvAxis::Slot => {
            let (block, token) = (geometry.block_stride().get(), token()?);
            let stride = match (blocks, page) {
                (_, 1) => block,
                (1, _) => token,
                _ if token.checked_mul(page) == Some(block) => token,
                _ => {
                    let (inner, outer) = (KvAxis::Token, KvAxis::Block);
                    return Err(KvError::NotJoined { axis, inner, outer });
                }
            };
            // At most the bytes of the layout.
            (blocks * page, stride)
        }
        KvAxis::Head => {
            let stride = match config.token_order() {
                TokenOrder::TokenMajor => head()?,
                TokenOrder::HeadMajor => head()? * page,
            };
            (heads()?, stride)
        }
        KvAxis::Dim => (head()? / row.element, row.element),
        KvAxis::Row => {
            let apart = config.token_order() == TokenOrder::HeadMajor && page > 1;
            if apart && heads()? > 1 {
                let (inner, outer) = (KvAxis::Dim, KvAxis::Head);
                return Err(KvError::NotJoined { axis, inner, outer });
            }
            (row.row / row.element, row.element)
        }
        KvAxis::One => (1, row.element),
    })
}
