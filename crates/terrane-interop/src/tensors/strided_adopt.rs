//! Builds a layout over strided tensors.

use smallvec::SmallVec;
use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, ForeignMemory, Location, Region, Span};
use terrane_layout::state::{Adopted, NeedsRegistration};
use terrane_layout::{
    Axis, AxisSteps, Geometry, LayoutBuilder, RegionOffset, Section, Step, TensorAxis,
};

use super::list_strides::{AxisPart, along, moved};
use super::strided::{Dimension, Source};
use super::{StridedError, StridedForm, StridedTensor};
use crate::dlpack::ImportError;

/// Builds a layout over tensors of any strides. In the returned builder, only the choice of
/// registration is left.
///
/// Each tensor is a region. Tensors whose bytes interleave, such as views of one tensor, form one
/// region together. The strides of the sections are those of the tensors. The tensors of a list
/// must be at equal distances. The builder keeps the tensors alive.
///
/// ```
/// use std::sync::Arc;
///
/// use terrane_core::{HostAddress, Location, StorageKind};
/// use terrane_interop::tensors::{StridedForm, StridedTensor, adopt_strided};
/// use terrane_layout::{Axis, SectionName, TensorAxis};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // [blocks 3, tokens 4, K and V 2, elements 8] of two bytes, of another library.
/// let owner = Arc::new([0_u16; 3 * 4 * 2 * 8]);
/// let address = Location::Host(HostAddress::new(std::ptr::NonNull::from(&*owner)));
/// let at = (StorageKind::System, address);
/// // SAFETY: the array owns the bytes and does not move them; nothing else uses them meanwhile.
/// let tensor = unsafe { StridedTensor::from_raw(at, 2, [3, 4, 2, 8], [64, 16, 8, 1], owner) }?;
/// let form = StridedForm::new(&[SectionName::K, SectionName::V])
///     .dim(Axis::Block)
///     .dim(Axis::Token)
///     .dim(TensorAxis::Outer)
///     .dim(Axis::Element);
/// let layout = adopt_strided(&form, &[tensor])?.unregistered().build()?;
/// assert_eq!(layout.geometry().block_bytes().get(), 4 * 2 * 8 * 2);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// [`StridedError`] names the tensor or the dimension. Strides that overlap or are not nested are
/// [`StridedError::Layout`].
pub fn adopt_strided(
    form: &StridedForm,
    tensors: &[StridedTensor],
) -> Result<LayoutBuilder<NeedsRegistration<Adopted>>, StridedError> {
    adopt_strided_parts(&[(form, tensors)])
}

/// Like [`adopt_strided`], for a cache whose sections have tensors of different forms.
///
/// For example, paged attention has keys `[B, H, D/x, N, x]` and values `[B, H, D, N]`. The section
/// K and its tensors have one form, and V has another form. Tensors are counted over all parts.
///
/// # Errors
///
/// As for [`adopt_strided`].
pub fn adopt_strided_parts(
    parts: &[(&StridedForm, &[StridedTensor])],
) -> Result<LayoutBuilder<NeedsRegistration<Adopted>>, StridedError> {
    let tensors: Vec<StridedTensor> =
        parts.iter().flat_map(|(_, tensors)| tensors.iter().cloned()).collect();
    let mut begin = 0;
    for (form, of_part) in parts {
        form.check(of_part, begin, tensors.first())?;
        begin += of_part.len();
    }
    let groups = groups(&tensors);
    let places = places(&tensors, &groups);
    let (mut sections, mut begin) = (Vec::new(), 0);
    for (form, of_part) in parts {
        let end = begin + of_part.len();
        let form_tensors =
            FormTensors { tensors: of_part, places: places.get(begin..end).unwrap_or(&[]), begin };
        sections.extend(form.sections_of(form_tensors)?);
        begin = end;
    }
    let geometry = Geometry::from_sections(sections)?;
    let regions = groups.iter().map(|group| group.region(&tensors));
    let regions = regions.collect::<Result<Vec<Region>, _>>()?;
    Ok(LayoutBuilder::from_geometry(geometry).adopt(regions))
}

/// The tensors of one form.
#[derive(Clone, Copy)]
struct FormTensors<'a> {
    tensors: &'a [StridedTensor],
    places: &'a [RegionOffset],
    /// The number of tensors of the earlier forms.
    begin: usize,
}

/// The parts of an axis, the outermost first.
type AxisParts = SmallVec<[AxisPart; 4]>;

impl StridedForm {
    fn check(
        &self,
        tensors: &[StridedTensor],
        begin: usize,
        first: Option<&StridedTensor>,
    ) -> Result<(), StridedError> {
        let counts = self.lists.iter().map(|&(_, count)| u64::from(count));
        let expected = counts.fold(1, u64::saturating_mul);
        let found = tensors.len();
        let first = first.filter(|_| to_u64(found) == expected && found > 0);
        let first = first.ok_or(StridedError::TensorCount { expected, found })?;
        let axes = self.lists.iter().map(|&(axis, _)| axis);
        let axes = axes.chain(self.dimensions.iter().filter_map(|dimension| match dimension {
            Dimension::Of(axis) => Some(*axis),
            _ => None,
        }));
        let outers = axes.filter(|&axis| axis == TensorAxis::Outer).count();
        let sections = self.sections.len();
        if outers > 1 || (outers == 0 && sections != 1) {
            let expected = "pass it once, with a position for each section";
            return Err(StridedError::Dimension {
                axis: TensorAxis::Outer,
                times: outers,
                expected,
            });
        }
        for (tensor, each) in (begin..).zip(tensors) {
            let (rank, found) = (self.dimensions.len(), each.sizes.len());
            if rank != found {
                return Err(StridedError::Rank { expected: rank, found });
            }
            let (expected, found) = (first.span.kind, each.span.kind);
            if expected != found {
                return Err(StridedError::MixedMemory { tensor, expected, found });
            }
        }
        Ok(())
    }

    /// The number of tensors from one position of a list to the next.
    fn list_stride(&self, list: usize) -> usize {
        let inner = self.lists.iter().skip(list + 1);
        // The number of tensors was compared with the product before.
        inner.map(|&(_, count)| ByteCount::new(count.into()).to_usize()).product()
    }

    fn sections_of(&self, form_tensors: FormTensors<'_>) -> Result<Vec<Section>, StridedError> {
        let FormTensors { tensors, places, .. } = form_tensors;
        let outer_list = self.lists.iter().position(|&(axis, _)| axis == TensorAxis::Outer);
        if let Some(&(axis, count)) = outer_list.and_then(|list| self.lists.get(list))
            && ByteCount::new(count.into()).to_usize() != self.sections.len()
        {
            let expected = "pass it with a position for each section";
            return Err(StridedError::Dimension { axis, times: self.sections.len(), expected });
        }
        let mut sections = Vec::with_capacity(self.sections.len());
        for (outer, &name) in (0_u64..).zip(&self.sections) {
            let skipped = outer_list
                .map_or(0, |list| self.list_stride(list) * ByteCount::new(outer).to_usize());
            let missing = || StridedError::TensorCount { expected: 0, found: tensors.len() };
            let tensor = tensors.get(skipped).ok_or_else(missing)?;
            let place = places.get(skipped).ok_or_else(missing)?;
            let (mut axes, lists) =
                (self.dimension_steps(tensor)?, self.list_parts(skipped, places)?);
            self.check_alike(form_tensors, skipped, &lists)?;
            let mut offset = place.offset;
            if outer_list.is_none()
                && let Some(part) = axes.outer
            {
                let Step { count, stride } = part;
                if ByteCount::new(count.into()).to_usize() != self.sections.len() {
                    let expected = "pass it with a position for each section";
                    let (axis, times) = (TensorAxis::Outer, self.sections.len());
                    return Err(StridedError::Dimension { axis, times, expected });
                }
                // This is within the span of the tensor.
                offset += outer * stride;
            }
            let element_bytes = axes.group(tensor.element_bytes, self.unit)?;
            let mut section = Section::new(name, element_bytes).at(place.region, offset);
            for (axis, parts) in axes.of.into_iter() {
                let mut all: AxisParts = SmallVec::new();
                let of_axis = lists.iter().filter(|(list, _)| *list == TensorAxis::Of(axis));
                let is_listed = of_axis.clone().next().is_some();
                of_axis.for_each(|(_, parts)| all.extend(parts.iter().copied()));
                if parts.is_empty() && !is_listed {
                    continue;
                }
                all.extend(parts.into_iter().map(AxisPart::Bytes));
                section = section.axis(axis, axis_steps(axis, all)?);
            }
            sections.push(section);
        }
        Ok(sections)
    }

    /// The parts of each list: the distances of its tensors, from the tensor at `first` on.
    fn list_parts(
        &self,
        first: usize,
        places: &[RegionOffset],
    ) -> Result<Vec<(TensorAxis, AxisParts)>, StridedError> {
        let mut steps = Vec::new();
        for (list, &(axis, count)) in self.lists.iter().enumerate() {
            if axis == TensorAxis::Outer {
                continue;
            }
            let (stride, count) = (self.list_stride(list), ByteCount::new(count.into()).to_usize());
            let line = places.iter().skip(first).step_by(stride.max(1)).take(count).copied();
            let line: Vec<RegionOffset> = line.collect();
            steps.push((axis, along(&line).ok_or(StridedError::Uneven { axis })?));
        }
        Ok(steps)
    }

    /// Checks every tensor of the section whose first tensor is `first`: its shape and its
    /// position.
    fn check_alike(
        &self,
        form_tensors: FormTensors<'_>,
        first: usize,
        lists: &[(TensorAxis, AxisParts)],
    ) -> Result<(), StridedError> {
        let FormTensors { tensors, places, begin: before } = form_tensors;
        let (Some(model), Some(&begin)) = (tensors.get(first), places.get(first)) else {
            return Ok(());
        };
        for (tensor, (each, &place)) in tensors.iter().zip(places).enumerate() {
            let (mut expected, mut is_mine, mut axis) = (Some(begin), true, TensorAxis::Outer);
            let mut parts = lists.iter();
            for (list, &(of, count)) in self.lists.iter().enumerate() {
                let count = ByteCount::new(count.into()).to_usize().max(1);
                let position = tensor / self.list_stride(list).max(1) % count;
                if of == TensorAxis::Outer {
                    is_mine &= position == first / self.list_stride(list).max(1) % count;
                } else if let Some((_, parts)) = parts.next() {
                    let position = to_u64(position);
                    expected = expected.and_then(|at| moved(at, parts, position));
                    axis = of;
                }
            }
            if !is_mine {
                continue;
            }
            let of = |tensor: &StridedTensor| (tensor.element_bytes, tensor.sizes.clone());
            let far = |tensor: &StridedTensor| -> SmallVec<[u64; 6]> {
                // Along a dimension of one position, strides have no effect.
                let steps = tensor.sizes.iter().zip(&tensor.strides);
                steps.map(|(&size, &stride)| if size == 1 { 0 } else { stride }).collect()
            };
            if of(each) != of(model) || far(each) != far(model) {
                return Err(StridedError::Differs { tensor: before + tensor });
            }
            if expected != Some(place) {
                return Err(StridedError::Uneven { axis });
            }
        }
        Ok(())
    }

    /// The axis steps that the dimensions of a tensor describe.
    fn dimension_steps(&self, tensor: &StridedTensor) -> Result<TensorSteps, StridedError> {
        let of = Axis::ALL.map(|axis| (axis, SmallVec::new()));
        let mut parts = TensorSteps { outer: None, of };
        let dimensions = self.dimensions.iter().enumerate();
        let sizes = tensor.sizes.iter().zip(&tensor.strides);
        for ((dimension, what), (&size, &stride)) in dimensions.zip(sizes) {
            let too_large = || StridedError::TooLarge { dimension };
            let stride = stride.checked_mul(tensor.element_bytes.into()).ok_or_else(too_large)?;
            let count = u32::try_from(size).map_err(|_| too_large())?;
            let refused = |expected| StridedError::Size { dimension, size, expected };
            match *what {
                Dimension::Of(TensorAxis::Outer) => parts.outer = Some(Step::new(count, stride)),
                Dimension::Of(TensorAxis::Of(axis)) => parts.push(axis, Step::new(count, stride)),
                Dimension::Joined { outer, inner, count: inside } => {
                    let groups =
                        count.checked_div(inside).filter(|groups| groups * inside == count);
                    let groups =
                        groups.ok_or_else(|| refused(format!("a multiple of {inside}")))?;
                    let far = stride.checked_mul(inside.into()).ok_or_else(too_large)?;
                    parts.push(outer, Step::new(groups, far));
                    parts.push(inner, Step::new(inside, stride));
                }
                Dimension::One if size == 1 => {}
                Dimension::One => return Err(refused("1".to_owned())),
            }
        }
        Ok(parts)
    }
}

/// The steps of each axis within a tensor, outermost first.
struct TensorSteps {
    outer: Option<Step>,
    of: [(Axis, SmallVec<[Step; 2]>); 5],
}

impl TensorSteps {
    fn push(&mut self, axis: Axis, step: Step) {
        let parts = self.of.iter_mut().find(|(of, _)| *of == axis);
        parts.into_iter().for_each(|(_, parts)| parts.push(step));
    }

    /// Converts groups of `unit` bytes to elements, and returns the bytes of an element.
    fn group(&mut self, element_bytes: u32, unit: Option<u32>) -> Result<u32, StridedError> {
        let Some(unit) = unit.filter(|&unit| unit != element_bytes) else {
            return Ok(element_bytes);
        };
        let element = self.of.iter_mut().find(|(axis, _)| *axis == Axis::Element);
        let last = element.and_then(|(_, parts)| parts.last_mut());
        let one = u64::from(element_bytes);
        let contiguous = last.as_ref().filter(|step| step.count == 1 || step.stride == one);
        let bytes = contiguous.map_or(one, |step| one * u64::from(step.count));
        let refused = StridedError::Groups { bytes, unit };
        let groups =
            bytes.checked_div(unit.into()).filter(|groups| groups * u64::from(unit) == bytes);
        match (last, groups.and_then(|groups| u32::try_from(groups).ok())) {
            (Some(step), Some(groups)) if groups > 0 => {
                *step = Step::new(groups, unit.into());
                Ok(unit)
            }
            _ => Err(refused),
        }
    }
}

/// The strides of an axis from its parts. Adjacent contiguous parts are joined.
fn axis_steps(axis: Axis, parts: AxisParts) -> Result<AxisSteps, StridedError> {
    let mut joined: AxisParts = SmallVec::new();
    for part in parts.into_iter().filter(|part| part.count() != 1) {
        match (joined.last_mut(), part) {
            (Some(AxisPart::Bytes(outer)), AxisPart::Bytes(inner))
                if inner.stride.checked_mul(inner.count.into()) == Some(outer.stride) =>
            {
                let count = outer.count.checked_mul(inner.count);
                let too_large = StridedError::Split { axis: axis.into(), parts: 2 };
                *outer = Step::new(count.ok_or(too_large)?, inner.stride);
            }
            _ => joined.push(part),
        }
    }
    match joined.as_slice() {
        [] => Ok(AxisSteps::ABSENT),
        [AxisPart::Bytes(step)] => Ok(AxisSteps::new(step.count, step.stride)),
        [AxisPart::Regions { count, regions }] => {
            Ok(AxisSteps::spread(*count, *regions, Step::ONE))
        }
        [AxisPart::Regions { count, regions }, AxisPart::Bytes(inner)] => {
            Ok(AxisSteps::spread(*count, *regions, *inner))
        }
        [AxisPart::Bytes(outer), AxisPart::Bytes(inner)] => Ok(AxisSteps::split(*outer, *inner)),
        parts => Err(StridedError::Split { axis: axis.into(), parts: parts.len() }),
    }
}

/// Tensors whose bytes interleave, and their span from the first byte to the last.
struct Group {
    members: Vec<usize>,
    span: Span,
}

/// A tensor's address as a number, with its address space: the host's, or a device's.
fn address(location: Location) -> Option<(u64, u64)> {
    match location {
        Location::Host(address) => Some((0, address.get())),
        Location::Device { device, address } => Some((1 + u64::from(device.get()), address.get())),
        _ => None,
    }
}

/// The groups, in the order of their first tensors.
fn groups(tensors: &[StridedTensor]) -> Vec<Group> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&tensor| tensors.get(tensor).and_then(|each| address(each.span.location)));
    let mut groups: Vec<Group> = Vec::new();
    for tensor in order {
        let Some(span) = tensors.get(tensor).map(|tensor| tensor.span) else { continue };
        match groups.last_mut() {
            Some(group) if group.span.overlaps(&span) => {
                let begin = |span: &Span| address(span.location).map_or(0, |(_, at)| at);
                let ahead = begin(&span).saturating_sub(begin(&group.span));
                // The span of both, within their address space.
                let end = ByteCount::new(ahead.saturating_add(span.length.get()));
                group.span.length = group.span.length.max(end);
                group.members.push(tensor);
            }
            _ => groups.push(Group { members: vec![tensor], span }),
        }
    }
    groups.iter_mut().for_each(|group| group.members.sort_unstable());
    groups.sort_by_key(|group| group.members.first().copied());
    groups
}

fn places(tensors: &[StridedTensor], groups: &[Group]) -> Vec<RegionOffset> {
    let mut places = vec![RegionOffset { region: 0, offset: 0 }; tensors.len()];
    for (region, group) in (0_u32..).zip(groups) {
        for &member in &group.members {
            let at = tensors.get(member).and_then(|tensor| address(tensor.span.location));
            let begin = address(group.span.location);
            let offset = at.zip(begin).map_or(0, |((_, at), (_, begin))| at.saturating_sub(begin));
            if let Some(place) = places.get_mut(member) {
                *place = RegionOffset { region, offset };
            }
        }
    }
    places
}

impl Group {
    /// The memory of a group whose elements were proved not to overlap.
    fn region(&self, tensors: &[StridedTensor]) -> Result<Region, StridedError> {
        let members: Vec<(usize, &StridedTensor)> =
            self.members.iter().filter_map(|&at| Some((at, tensors.get(at)?))).collect();
        let refused = |tensor, source| StridedError::Memory { tensor, source };
        if let [(tensor, only)] = members.as_slice() {
            return match &only.source {
                Source::Memory(region) => Ok(region.clone()),
                Source::Imported(imported) => {
                    let memory = imported.memory().map_err(|source| refused(*tensor, source))?;
                    Ok(Region::new(memory))
                }
            };
        }
        let mut bytes = 0_u64;
        let mut only_elements = None;
        for &(tensor, each) in &members {
            bytes = bytes.saturating_add(each.element_bytes_in_all().unwrap_or(u64::MAX));
            if let Source::Imported(imported) = &each.source {
                if imported.is_read_only() {
                    return Err(refused(tensor, ImportError::ReadOnly));
                }
                only_elements = only_elements.or(Some((tensor, imported.shape().elements())));
            }
        }
        if let Some((tensor, elements)) = only_elements
            && bytes != self.span.length.get()
        {
            let bytes = self.span.length;
            return Err(refused(tensor, ImportError::Gaps { elements, bytes }));
        }
        let owners: Vec<Source> = members.iter().map(|(_, each)| each.source.clone()).collect();
        // SAFETY: consecutive spans of the tensors overlap, so each byte of the span is in a
        // tensor's span. If only elements were promised, they fill the span: the geometry's proof
        // shows that no two elements share a byte, and the elements have as many bytes as the span.
        // The owners keep the promises for each tensor, and no tensor is read-only.
        Ok(Region::new(unsafe { ForeignMemory::new(self.span, owners) }))
    }
}
