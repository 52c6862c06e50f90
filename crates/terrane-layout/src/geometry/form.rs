//! The forms of the tensors in which engines store their caches.

use std::fmt;

use super::Geometry;
use super::axis::{Axis, SectionName};
use super::error::GeometryError;
use super::section::Section;
use super::steps::{AxisSteps, Step};
use crate::error::LayoutError;

/// A dimension of a cache's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorAxis {
    /// Sections of equal shape: K and V.
    Outer,
    /// An axis of every section.
    Of(Axis),
}

impl From<Axis> for TensorAxis {
    fn from(axis: Axis) -> Self {
        Self::Of(axis)
    }
}

impl TensorAxis {
    const fn name(self) -> &'static str {
        match self {
            Self::Outer => "outer",
            Self::Of(Axis::Block) => "block",
            Self::Of(Axis::Layer) => "layer",
            Self::Of(Axis::Head) => "head",
            Self::Of(Axis::Token) => "token",
            Self::Of(Axis::Element) => "element",
        }
    }
}

impl fmt::Display for TensorAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The shape of a cache's tensors, outermost dimension first, as engines write it.
///
/// Leading dimensions may be lists of tensors; each tensor is a region. A dimension that occurs
/// twice is split in two, as `D/x` and `x` in `[B, H, D/x, N, x]`. Strides are those of a
/// contiguous tensor, except for dimensions that are [padded](Self::padded).
///
/// ```
/// use terrane_layout::{Axis, Geometry, SectionName, TensorAxis, TensorForm};
///
/// # fn main() -> Result<(), terrane_layout::LayoutError> {
/// // vLLM, HND: a tensor [2, blocks, heads, tokens, head size] for each layer.
/// let form = TensorForm::new(&[SectionName::K, SectionName::V], 2)
///     .tensors(Axis::Layer, 32)
///     .dim(TensorAxis::Outer, 2)
///     .dim(Axis::Block, 1024)
///     .dim(Axis::Head, 8)
///     .dim(Axis::Token, 16)
///     .dim(Axis::Element, 128);
/// let geometry = Geometry::from_form(&form)?;
/// assert_eq!(geometry.region_count(), 32);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "pass the form to `Geometry::from_form`"]
pub struct TensorForm {
    sections: Vec<SectionName>,
    element_bytes: u32,
    dimensions: Vec<Dimension>,
}

#[derive(Clone, Copy, Debug)]
struct Dimension {
    axis: TensorAxis,
    count: u32,
    /// Whether each position is a tensor.
    is_list: bool,
    /// The stride in bytes, if the dimension is padded.
    stride: Option<u64>,
}

impl TensorForm {
    /// A form of sections whose elements have `element_bytes` bytes.
    pub fn new(sections: &[SectionName], element_bytes: u32) -> Self {
        Self { sections: sections.to_vec(), element_bytes, dimensions: Vec::new() }
    }

    /// A list of tensors, one for each position of `axis`.
    pub fn tensors(self, axis: impl Into<TensorAxis>, count: u32) -> Self {
        self.with(Dimension { axis: axis.into(), count, is_list: true, stride: None })
    }

    /// A dimension of each tensor, inside the dimensions added before.
    pub fn dim(self, axis: impl Into<TensorAxis>, count: u32) -> Self {
        self.with(Dimension { axis: axis.into(), count, is_list: false, stride: None })
    }

    /// Pads the last added dimension: `stride` is the distance between its positions, in bytes; for
    /// a list of tensors, in regions.
    pub fn padded(mut self, stride: u64) -> Self {
        if let Some(last) = self.dimensions.last_mut() {
            last.stride = Some(stride);
        }
        self
    }

    fn with(mut self, dimension: Dimension) -> Self {
        self.dimensions.push(dimension);
        self
    }

    /// The sections, with the strides of this form.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Geometry`] if a dimension is missing, occurs too often, or overflows.
    pub fn sections(&self) -> Result<Vec<Section>, LayoutError> {
        self.check()?;
        let strides = self.strides()?;
        let of = |axis: TensorAxis| {
            let found = self.dimensions.iter().zip(&strides);
            found.filter(move |(dimension, _)| dimension.axis == axis)
        };
        let (mut outer_regions, mut outer_stride) = (0, 0);
        if let Some((dimension, &stride)) = of(TensorAxis::Outer).next() {
            if dimension.is_list {
                outer_regions = stride;
            } else {
                outer_stride = stride;
            }
        }
        (0_u64..)
            .zip(&self.sections)
            .map(|(outer, &name)| {
                let too_large = || GeometryError::TooLarge { section: name, axis: Axis::Element };
                let region = u32::try_from(outer * outer_regions).map_err(|_| too_large())?;
                let offset = outer.checked_mul(outer_stride).ok_or_else(too_large)?;
                let mut section = Section::new(name, self.element_bytes).at(region, offset);
                for axis in Axis::ALL {
                    let mut parts = of(axis.into());
                    let Some(first) = parts.next() else { continue };
                    section = section.axis(axis, steps(first, parts.next()).ok_or_else(too_large)?);
                }
                Ok(section)
            })
            .collect()
    }

    /// The stride of each dimension: in bytes, or in regions for a list of tensors.
    fn strides(&self) -> Result<Vec<u64>, LayoutError> {
        let (mut bytes, mut regions) = (u64::from(self.element_bytes), 1_u64);
        let mut strides = Vec::with_capacity(self.dimensions.len());
        for dimension in self.dimensions.iter().rev() {
            let span = if dimension.is_list { &mut regions } else { &mut bytes };
            let stride = dimension.stride.unwrap_or(*span);
            strides.push(stride);
            *span = stride.checked_mul(dimension.count.into()).ok_or_else(|| {
                let axis = match dimension.axis {
                    TensorAxis::Outer => Axis::Element,
                    TensorAxis::Of(axis) => axis,
                };
                let section = self.sections.first().copied().unwrap_or(SectionName::OPAQUE);
                GeometryError::TooLarge { section, axis }
            })?;
        }
        strides.reverse();
        Ok(strides)
    }

    fn check(&self) -> Result<(), GeometryError> {
        let times = |axis| self.dimensions.iter().filter(|each| each.axis == axis).count();
        let refuse = |axis: TensorAxis, expected| {
            Err(GeometryError::Dimension { dimension: axis.name(), times: times(axis), expected })
        };
        let outers = self.dimensions.iter().filter(|each| each.axis == TensorAxis::Outer);
        let outers: Vec<u32> = outers.map(|each| each.count).collect();
        let sections = u32::try_from(self.sections.len()).unwrap_or(u32::MAX);
        match outers.as_slice() {
            [] if sections == 1 => {}
            [count] if *count == sections => {}
            _ => {
                return refuse(
                    TensorAxis::Outer,
                    "must occur once, with a position for each section",
                );
            }
        }
        for axis in Axis::ALL {
            if times(axis.into()) > 2 {
                return refuse(axis.into(), "may be split into at most two parts");
            }
        }
        if times(Axis::Block.into()) == 0 {
            return refuse(Axis::Block.into(), "must occur");
        }
        let listed_late = self
            .dimensions
            .windows(2)
            .any(|pair| matches!(pair, [first, second] if !first.is_list && second.is_list));
        if listed_late {
            return refuse(
                TensorAxis::Outer,
                "must come before all dimensions of tensors, as it is a list of tensors",
            );
        }
        Ok(())
    }
}

/// The steps of an axis that occurs once or twice; `None` if they cannot be described.
fn steps(
    (first, &stride): (&Dimension, &u64),
    second: Option<(&Dimension, &u64)>,
) -> Option<AxisSteps> {
    let inner = match second {
        Some((second, _)) if second.is_list => return None,
        Some((second, &stride)) => Step::new(second.count, stride),
        None => Step::ONE,
    };
    if first.is_list {
        return Some(AxisSteps::spread(first.count, u32::try_from(stride).ok()?, inner));
    }
    Some(match second {
        None => AxisSteps::new(first.count, stride),
        Some(_) => AxisSteps::split(Step::new(first.count, stride), inner),
    })
}

impl Geometry {
    /// The geometry of a cache whose tensors have this form.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Geometry`] names the invalid dimension or axes.
    pub fn from_form(form: &TensorForm) -> Result<Self, LayoutError> {
        Self::from_sections(form.sections()?)
    }
}
