//! The size and the stride of each axis of an axis order in a layout.

use terrane_core::ByteCount;
use terrane_layout::{Axis, Geometry, Section, SectionName, Step};

use super::{KvAxis, KvAxisOrder, KvError};
use crate::dlpack::ElementType;

/// An axis of an axis order in a layout, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AxisStride {
    pub(super) size: u64,
    pub(super) stride: u64,
}

/// The axes of `axis_order`, which are the same in every layer of a geometry. A tensor begins with
/// a layer.
pub(super) fn strides(
    geometry: &Geometry,
    axis_order: &KvAxisOrder,
    element: ElementType,
) -> Result<Vec<AxisStride>, KvError> {
    let Some(first) = geometry.sections().first() else {
        return Err(KvError::Sections { sections: 0 });
    };
    let axes = |section: &Section| {
        let axes = [Axis::Block, Axis::Head, Axis::Token, Axis::Element];
        axes.map(|axis| *section.steps(axis))
    };
    // Tensors of several sections are named K and V by position.
    let names: Vec<SectionName> = geometry.sections().iter().map(Section::name).collect();
    if names.len() > 1 && names != [SectionName::K, SectionName::V] {
        return Err(KvError::Sections { sections: names.len() });
    }
    let alike = |other: &Section| other.shape() == first.shape() && axes(other) == axes(first);
    if !geometry.sections().iter().all(alike) {
        return Err(KvError::Sections { sections: geometry.sections().len() });
    }
    let steps = SectionSteps::of(geometry, first, element)?;
    axis_order
        .axes()
        .iter()
        .map(|&axis| {
            let Step { count, stride: bytes } = steps.step(axis)?;
            if !bytes.is_multiple_of(steps.width) && count > 1 {
                let bytes = ByteCount::new(bytes);
                return Err(KvError::NotWhole { what: axis, bytes, element });
            }
            // Along an axis of one position, a stride has no effect.
            let stride = if count == 1 { 1 } else { bytes / steps.width };
            Ok(AxisStride { size: count.into(), stride })
        })
        .collect()
}

/// The steps of the axes of one section, with elements of `width` bytes.
struct SectionSteps<'a> {
    geometry: &'a Geometry,
    section: &'a Section,
    element: Step,
    width: u64,
}

impl<'a> SectionSteps<'a> {
    fn of(
        geometry: &'a Geometry,
        section: &'a Section,
        element: ElementType,
    ) -> Result<Self, KvError> {
        let expected = section.element_bytes();
        let refused = || KvError::Element { expected, found: element };
        let width = element.width().filter(|width| !width.is_zero()).ok_or_else(refused)?.get();
        let own = single(section, Axis::Element, KvAxis::Dim)?;
        let bytes = expected.get();
        let step = if width == bytes {
            Step::new(own.count, if own.count == 1 { bytes } else { own.stride })
        } else if width == 1 && (own.count == 1 || own.stride == bytes) {
            // The bytes of a group are adjacent.
            let count = u64::from(own.count).checked_mul(bytes);
            let count = count.and_then(|count| u32::try_from(count).ok()).ok_or_else(refused)?;
            Step::new(count, 1)
        } else {
            return Err(refused());
        };
        Ok(Self { geometry, section, element: step, width })
    }

    fn step(&self, axis: KvAxis) -> Result<Step, KvError> {
        let head = || {
            if self.section.states_heads() {
                single(self.section, Axis::Head, axis)
            } else {
                Err(KvError::HeadsNotStated)
            }
        };
        match axis {
            KvAxis::Outer => self.outer(),
            KvAxis::Block => single(self.section, Axis::Block, axis),
            KvAxis::Token => single(self.section, Axis::Token, axis),
            KvAxis::Slot => {
                let block = single(self.section, Axis::Block, KvAxis::Block)?;
                let token = single(self.section, Axis::Token, KvAxis::Token)?;
                joined(axis, (KvAxis::Block, block), (KvAxis::Token, token))
            }
            KvAxis::Head => head(),
            KvAxis::Dim => head().map(|_| self.element),
            KvAxis::Row => match head() {
                Ok(head) => joined(axis, (KvAxis::Head, head), (KvAxis::Dim, self.element)),
                Err(KvError::HeadsNotStated) => Ok(self.element),
                Err(other) => Err(other),
            },
            KvAxis::One => Ok(Step::ONE),
        }
    }

    /// The distance between sections, which must be equal for all.
    fn outer(&self) -> Result<Step, KvError> {
        let sections = self.geometry.sections();
        let count = u32::try_from(sections.len()).unwrap_or(u32::MAX);
        let refused = || KvError::Sections { sections: sections.len() };
        let stride = match sections {
            [first, second, ..] => second.offset().checked_sub(first.offset()),
            _ => Some(0),
        };
        let stride = stride.ok_or_else(refused)?;
        let layers = |section: &Section| *section.steps(Axis::Layer);
        let at = (0_u64..).zip(sections);
        let mut place = at.map(|(outer, section)| {
            let offset = outer.checked_mul(stride)?.checked_add(self.section.offset())?;
            let same = section.first_region() == self.section.first_region()
                && layers(section) == layers(self.section);
            Some(same && section.offset() == offset)
        });
        if place.all(|fits| fits == Some(true)) {
            Ok(Step::new(count, stride))
        } else {
            Err(refused())
        }
    }
}

/// The steps of an axis with one part in one region.
fn single(section: &Section, axis: Axis, what: KvAxis) -> Result<Step, KvError> {
    let steps = section.steps(axis);
    if steps.outer().count == 1 { Ok(steps.inner()) } else { Err(KvError::Split { axis: what }) }
}

/// Joins two axes, if the positions of the inner axis fill a position of the outer one.
fn joined(
    axis: KvAxis,
    (outer, far): (KvAxis, Step),
    (inner, near): (KvAxis, Step),
) -> Result<Step, KvError> {
    let refused = KvError::NotJoined { axis, inner, outer };
    let Some(count) = far.count.checked_mul(near.count) else { return Err(refused) };
    if far.count == 1 {
        return Ok(near);
    }
    if near.count == 1 {
        return Ok(far);
    }
    if near.stride.checked_mul(near.count.into()) == Some(far.stride) {
        Ok(Step::new(count, near.stride))
    } else {
        Err(refused)
    }
}
