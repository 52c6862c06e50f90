//! Layouts of pages whose content is unknown.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use terrane_interop::dlpack::ImportedTensor;
use terrane_interop::tensors::{StridedForm, StridedTensor, adopt_strided_parts};
use terrane_layout::{Axis, PhysicalLayout, SectionName};

use crate::errors::{StoreError, text};
use crate::tensors::{self, Origin};

/// Tensors of equal shape, as a tuple in Python: addresses, bytes of a page, sizes and strides of the blocks.
pub(crate) type PagePart<'py> = (Bound<'py, PyAny>, u64, Vec<u64>, Vec<u64>);

/// The layout of a group of layers, with a section for each part.
///
/// # Safety
///
/// As for [`Origin::tensors`], including the bytes between the pages.
pub(crate) unsafe fn layout(origin: &Origin, parts: &[PagePart<'_>]) -> PyResult<PhysicalLayout> {
    let mut sections = Vec::with_capacity(parts.len());
    for (number, part) in parts.iter().enumerate() {
        // SAFETY: the caller's promise.
        sections.push(unsafe { section(origin, number, part) }?);
    }
    let sections: Vec<_> = sections.iter().map(|(form, tensors)| (form, &tensors[..])).collect();
    let builder = adopt_strided_parts(&sections).map_err(refused)?;
    builder.unregistered().build().map_err(refused)
}

/// The section of a part, and its tensors.
///
/// # Safety
///
/// As for [`layout`].
unsafe fn section(
    origin: &Origin,
    number: usize,
    (pointers, page_bytes, blocks, block_strides): &PagePart<'_>,
) -> PyResult<(StridedForm, Vec<StridedTensor>)> {
    let (dimensions, strides) = (blocks.len(), block_strides.len());
    if !matches!(dimensions, 1 | 2) || strides != dimensions {
        return Err(PyValueError::new_err(format!(
            "part {number} has {dimensions} sizes and {strides} strides; pass [blocks], or [chunks, blocks], and a stride for each"
        )));
    }
    let sizes: Vec<u64> = blocks.iter().copied().chain([*page_bytes]).collect();
    let strides: Vec<u64> = block_strides.iter().copied().chain([1]).collect();
    let shape = tensors::shape(1, &sizes, Some(&strides))?;
    // SAFETY: the caller's promise.
    let imported = unsafe { origin.tensors(pointers, &shape) }?;
    let name = SectionName::new(&format!("page{number}")).map_err(refused)?;
    let layers = u32::try_from(imported.len()).unwrap_or(u32::MAX);
    let form = StridedForm::new(&[name]).tensors(Axis::Layer, layers);
    let form = (0..dimensions).fold(form, |form, _| form.dim(Axis::Block)).dim(Axis::Element);
    let tensor = |tensor: &ImportedTensor| {
        // SAFETY: the caller's promise.
        let memory = unsafe { tensor.memory_with_gaps() }.map_err(refused)?;
        StridedTensor::from_memory(memory, 1, sizes.clone(), strides.clone()).map_err(refused)
    };
    Ok((form, imported.iter().map(tensor).collect::<PyResult<_>>()?))
}

fn refused(error: impl std::error::Error) -> PyErr {
    StoreError::new_err(text(&error))
}
