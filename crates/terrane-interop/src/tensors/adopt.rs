//! Adopts the tensors of an engine as a layout.

use terrane_layout::state::{Adopted, NeedsRegistration};
use terrane_layout::{
    Axis, Geometry, LayoutBuilder, LayoutConfig, LayoutKind, SectionName, TensorAxis,
};

use super::row::RowSizes;
use super::{
    KvAxis, KvAxisOrder, KvError, StridedError, StridedForm, StridedTensor, TensorName,
    adopt_strided,
};
use crate::dlpack::ImportedTensor;

/// The tensors of an engine, in the order of the layers.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum KvTensors<'a> {
    /// One for each layer, with K and V, or the latent.
    Together(&'a [ImportedTensor]),
    /// K and V of each layer.
    Apart {
        /// The tensors of K.
        keys: &'a [ImportedTensor],
        /// The tensors of V.
        values: &'a [ImportedTensor],
    },
}

/// Returns the builder of a layout over an engine's tensors. Only the choice of registration is
/// left.
///
/// Every size of every tensor is compared with `config`. The strides are those of the tensors,
/// independently of the order in `config`, so any nested strides are accepted. See
/// [`adopt_strided`], which this calls. The builder keeps the tensors alive.
///
/// ```
/// use terrane_interop::tensors::{KvError, KvAxisOrder, KvTensors, adopt_kv};
/// use terrane_interop::dlpack::ImportedTensor;
/// use terrane_layout::{BuildFailed, LayoutConfig, PhysicalLayout};
///
/// /// vLLM's `kv_caches`, one tensor a layer.
/// fn over(
///     config: &LayoutConfig,
///     kv_caches: &[ImportedTensor],
/// ) -> Result<Result<PhysicalLayout, BuildFailed>, KvError> {
///     let tensors = KvTensors::Together(kv_caches);
///     Ok(adopt_kv(config, &KvAxisOrder::VLLM, tensors)?.unregistered().build())
/// }
/// ```
///
/// # Errors
///
/// [`KvError`] names the tensor, the axis, the expected value and the actual value. Strides that
/// are not nested, or layers at unequal distances, are [`KvError::Strided`]. Gaps between elements
/// that no other tensor fills are [`KvError::Memory`]. If you know who uses the gaps, pass
/// [`ImportedTensor::memory_with_gaps`] to [`StridedTensor::from_memory`] and [`adopt_strided`].
pub fn adopt_kv(
    config: &LayoutConfig,
    axis_order: &KvAxisOrder,
    tensors: KvTensors<'_>,
) -> Result<LayoutBuilder<NeedsRegistration<Adopted>>, KvError> {
    let tensors = in_order(config, axis_order, tensors)?;
    check_alike(&tensors)?;
    for &(tensor, imported) in &tensors {
        check_sizes(tensor, imported, config, axis_order)?;
    }
    let strided = tensors.iter().map(|(_, imported)| StridedTensor::from_imported(imported));
    let strided = strided.collect::<Result<Vec<_>, _>>();
    let strided = strided.map_err(|source| KvError::Strided { source })?;
    let width = strided.first().map_or(1, |tensor| tensor.element_bytes);
    let form = strided_form(config, axis_order, width)?;
    adopt_strided(&form, &strided).map_err(|source| match source {
        StridedError::Memory { tensor, source } => {
            let tensor = tensors.get(tensor).map_or(TensorName::Layer(0), |&(name, _)| name);
            KvError::Memory { tensor, source }
        }
        source => KvError::Strided { source },
    })
}

type Named<'a> = (TensorName, &'a ImportedTensor);

/// The tensors in the order of a [`StridedForm`]: all tensors of K come before all tensors of V.
fn in_order<'a>(
    config: &LayoutConfig,
    axis_order: &KvAxisOrder,
    tensors: KvTensors<'a>,
) -> Result<Vec<Named<'a>>, KvError> {
    let layers = config.num_layers();
    let count = |what, found: usize| match u32::try_from(found) {
        Ok(found) if found == layers => Ok(()),
        _ => Err(KvError::TensorCount { what, expected: layers, found }),
    };
    let (has_outer, outer_dim) = (axis_order.has_outer(), config.outer_dim());
    match tensors {
        KvTensors::Together(tensors) => {
            if !has_outer && outer_dim > 1 {
                let given = "one tensor for each layer was passed";
                return Err(KvError::Outers { has_outer, outer_dim, given });
            }
            count("tensors", tensors.len())?;
            Ok((0..layers).map(TensorName::Layer).zip(tensors).collect())
        }
        KvTensors::Apart { keys, values } => {
            if has_outer || outer_dim != 2 {
                let given = "K and V were passed as separate tensors";
                return Err(KvError::Outers { has_outer, outer_dim, given });
            }
            count("K tensors", keys.len())?;
            count("V tensors", values.len())?;
            let keys = (0..layers).map(TensorName::Key).zip(keys);
            Ok(keys.chain((0..layers).map(TensorName::Value).zip(values)).collect())
        }
    }
}

/// Checks that all tensors have the same kind of memory, and one element type that strides can
/// address.
fn check_alike(tensors: &[Named<'_>]) -> Result<(), KvError> {
    let Some((_, first)) = tensors.first() else { return Ok(()) };
    for &(tensor, imported) in tensors {
        let (expected, found) = (first.shape().element(), imported.shape().element());
        if expected != found {
            return Err(KvError::MixedElements { tensor, expected, found });
        }
        // In a layout, the lanes of an element are adjacent.
        if imported.shape().is_padded() && !found.fills_bytes() {
            return Err(KvError::Padded { tensor, element: found });
        }
        let (expected, found) = (first.kind(), imported.kind());
        if expected != found {
            return Err(KvError::MixedMemory { tensor, expected, found });
        }
    }
    Ok(())
}

/// Checks the dimensions of a tensor against the configuration.
fn check_sizes(
    tensor: TensorName,
    imported: &ImportedTensor,
    config: &LayoutConfig,
    axis_order: &KvAxisOrder,
) -> Result<(), KvError> {
    let row = RowSizes::of(config, imported.shape().element())?;
    let (axes, sizes) = (axis_order.axes(), imported.shape().sizes());
    if sizes.len() != axes.len() {
        return Err(KvError::Rank { tensor, expected: axes.len(), found: sizes.len() });
    }
    for (axis, (&what, &found)) in axes.iter().zip(sizes).enumerate() {
        let expected = row.size(config, what)?;
        if u64::try_from(found) != Ok(expected) {
            return Err(KvError::Size { tensor, axis, what, expected, found });
        }
    }
    Ok(())
}

/// Converts an axis order to dimensions of strided tensors with elements of `width` bytes.
fn strided_form(
    config: &LayoutConfig,
    axis_order: &KvAxisOrder,
    width: u32,
) -> Result<StridedForm, KvError> {
    let names: &[SectionName] = match config.outer_dim() {
        1 => &[SectionName::LATENT],
        _ => &[SectionName::K, SectionName::V],
    };
    let mut strided = StridedForm::new(names);
    if !axis_order.has_outer() && config.outer_dim() > 1 {
        strided = strided.tensors(TensorAxis::Outer, config.outer_dim());
    }
    strided = strided.tensors(Axis::Layer, config.num_layers());
    let row = RowSizes::new(config, width.into())?;
    for &axis in axis_order.axes() {
        strided = match axis {
            KvAxis::Outer => strided.dim(TensorAxis::Outer),
            KvAxis::Block => strided.dim(Axis::Block),
            KvAxis::Token => strided.dim(Axis::Token),
            KvAxis::Slot => strided.joined(Axis::Block, Axis::Token, config.page_size()),
            KvAxis::Head => strided.dim(Axis::Head),
            KvAxis::Dim => strided.dim(Axis::Element),
            KvAxis::Row => match row.head_elements() {
                Some(elements) => strided.joined(Axis::Head, Axis::Element, elements),
                None => strided.dim(Axis::Element),
            },
            KvAxis::One => strided.one(),
        };
    }
    let geometry = Geometry::new(config, LayoutKind::FullyContiguous)?;
    let unit = geometry.sections().first().map(terrane_layout::Section::element_bytes);
    let unit = unit.and_then(|unit| u32::try_from(unit.get()).ok());
    Ok(strided.grouped(unit.unwrap_or(width)))
}
