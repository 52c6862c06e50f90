//! The sizes of the axes of an axis order, by a configuration.

use terrane_core::ByteCount;
use terrane_layout::{ElementFormat, LayoutConfig};

use super::{KvAxis, KvError};
use crate::dlpack::ElementType;

/// The parts of a token's row, in bytes.
pub(super) struct RowSizes {
    element: u64,
    row: u64,
    heads: Option<u64>,
}

impl RowSizes {
    /// The row, if `config` allows tensors with these elements. If the configuration has groups or
    /// rows of bytes, the elements are bytes.
    pub(super) fn of(config: &LayoutConfig, element: ElementType) -> Result<Self, KvError> {
        let expected = match config.element() {
            ElementFormat::Width(own) => ByteCount::new(own.into()),
            _ => ByteCount::new(1),
        };
        let found = element.width().filter(|&width| width == expected);
        let width = found.ok_or(KvError::Element { expected, found: element })?;
        Self::new(config, width.get())
    }

    pub(super) fn new(config: &LayoutConfig, element: u64) -> Result<Self, KvError> {
        let row = config.element().row_bytes(config.inner_dim())?.get();
        Ok(Self { element: element.max(1), row, heads: config.num_heads().map(u64::from) })
    }

    /// The elements of one head of one token, if heads are stated.
    pub(super) fn head_elements(&self) -> Option<u32> {
        let bytes = self.row.checked_div(self.heads?)?;
        u32::try_from(bytes.checked_div(self.element)?).ok()
    }

    /// The size of an axis. All products are at most the bytes of a layout, which were checked.
    pub(super) fn size(&self, config: &LayoutConfig, axis: KvAxis) -> Result<u64, KvError> {
        let (blocks, page) = (u64::from(config.num_blocks()), u64::from(config.page_size()));
        Ok(match axis {
            KvAxis::Outer => config.outer_dim().into(),
            KvAxis::Block => blocks,
            KvAxis::Token => page,
            KvAxis::Slot => blocks * page,
            KvAxis::Head => self.heads.ok_or(KvError::HeadsNotStated)?,
            KvAxis::Dim => {
                let heads = self.heads.ok_or(KvError::HeadsNotStated)?;
                self.row / heads.max(1) / self.element
            }
            KvAxis::Row => self.row / self.element,
            KvAxis::One => 1,
        })
    }
}
