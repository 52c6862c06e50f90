//! Tensor shapes written as letters.

use terrane_core::convert::to_usize;

use crate::config::LayoutConfig;
use crate::error::LayoutError;
use crate::geometry::{
    Axis, Geometry, GeometryError, Section, SectionName, TensorAxis, TensorForm,
    element_bytes_and_count,
};

/// The sizes of a config's dimensions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) blocks: u32,
    pub(super) layers: u32,
    pub(super) outers: u32,
    pub(super) tokens: u32,
    pub(super) heads: Option<u32>,
    /// Elements of a head, or of a row if heads are not stated.
    pub(super) elements: u32,
    pub(super) element_bytes: u32,
}

impl Sizes {
    pub(super) fn of(config: &LayoutConfig) -> Self {
        let (element_bytes, row) = element_bytes_and_count(config);
        Self {
            blocks: config.num_blocks(),
            layers: config.num_layers(),
            outers: config.outer_dim(),
            tokens: config.page_size(),
            heads: config.num_heads(),
            elements: row / config.num_heads().unwrap_or(1),
            element_bytes,
        }
    }

    /// The heads, for formats without contiguous token rows.
    pub(super) fn stated_heads(&self) -> Result<u32, LayoutError> {
        self.heads.ok_or(LayoutError::HeadsNotStated)
    }

    /// The names of the sections.
    pub(super) fn names(&self) -> &'static [SectionName] {
        if self.outers == 1 { &[SectionName::LATENT] } else { &[SectionName::K, SectionName::V] }
    }

    /// The form of a shape in the letters of [`formats`](super). Lists of tensors are before `|`.
    pub(super) fn form(&self, shape: &str) -> Result<TensorForm, LayoutError> {
        self.split_form(shape, None)
    }

    /// As [`form`](Self::form), for shapes in which `C` is chunks of blocks and `B` the blocks of
    /// one chunk.
    pub(super) fn split_form(
        &self,
        shape: &str,
        blocks_per_chunk: Option<u32>,
    ) -> Result<TensorForm, LayoutError> {
        let (lists, dimensions) = shape.split_once('|').unwrap_or(("", shape));
        let mut form = TensorForm::new(self.names(), self.element_bytes);
        for letter in lists.chars() {
            if let Some((axis, count)) = self.dimension(letter, None)? {
                form = form.tensors(axis, count);
            }
        }
        let mut letters = dimensions.chars().peekable();
        while let Some(letter) = letters.next() {
            if letter == 'H' && self.heads.is_none() {
                // Without stated heads, the row must stay whole.
                if letters.peek() != Some(&'D') {
                    return Err(LayoutError::HeadsNotStated);
                }
                continue;
            }
            if let Some((axis, count)) = self.dimension(letter, blocks_per_chunk)? {
                form = form.dim(axis, count);
            }
        }
        Ok(form)
    }

    fn dimension(
        &self,
        letter: char,
        blocks_per_chunk: Option<u32>,
    ) -> Result<Option<(TensorAxis, u32)>, LayoutError> {
        Ok(Some(match letter {
            'B' => (Axis::Block.into(), blocks_per_chunk.unwrap_or(self.blocks)),
            'C' => {
                let chunks = divide("num_blocks", self.blocks, blocks_per_chunk.unwrap_or(1))?;
                (Axis::Block.into(), chunks)
            }
            'L' => (Axis::Layer.into(), self.layers),
            '2' if self.outers > 1 => (TensorAxis::Outer, self.outers),
            'N' => (Axis::Token.into(), self.tokens),
            'H' => (Axis::Head.into(), self.stated_heads()?),
            'D' => (Axis::Element.into(), self.elements),
            _ => return Ok(None),
        }))
    }

    /// A geometry of contiguous tensors.
    pub(super) fn geometry(&self, shape: &str) -> Result<Geometry, LayoutError> {
        Geometry::from_form(&self.form(shape)?)
    }

    /// The sections of tensors of one section each, such as K or V alone.
    pub(super) fn one(&self, name: SectionName) -> TensorForm {
        TensorForm::new(&[name], self.element_bytes)
    }

    /// Refuses a config with another number of outers.
    pub(super) fn of_outers(self, outers: u32) -> Result<Self, LayoutError> {
        if self.outers == outers {
            return Ok(self);
        }
        let expected = if outers == 1 { "must be 1, a latent" } else { "must be 2, K and V" };
        let times = to_usize(self.outers.into());
        Err(GeometryError::Dimension { dimension: "outer", times, expected }.into())
    }
}

/// `value / divisor`.
///
/// # Errors
///
/// [`GeometryError::NotDivided`], also for a divisor of zero.
pub(super) fn divide(field: &'static str, value: u32, divisor: u32) -> Result<u32, LayoutError> {
    match value.checked_div(divisor) {
        Some(quotient) if quotient * divisor == value => Ok(quotient),
        _ => Err(GeometryError::NotDivided { field, value, divisor }.into()),
    }
}

/// The sections of `form`, shifted by whole regions and bytes.
pub(super) fn moved(
    form: &TensorForm,
    region: u32,
    offset: u64,
) -> Result<Vec<Section>, LayoutError> {
    form.sections()?
        .into_iter()
        .map(|section| {
            let name = section.name();
            let too_large = || GeometryError::TooLarge { section: name, axis: Axis::Element };
            let region = section.first_region().checked_add(region).ok_or_else(too_large)?;
            let offset = section.offset().checked_add(offset).ok_or_else(too_large)?;
            Ok(section.at(region, offset))
        })
        .collect()
}
