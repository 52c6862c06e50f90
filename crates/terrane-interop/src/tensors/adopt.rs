//! The tensors of an engine as a layout.

use terrane_core::{ByteCount, ForeignMemory, Location, Region, Span};
use terrane_layout::state::{Adopted, NeedsRegistration};
use terrane_layout::{
    BlockDimension, Geometry, LayoutBuilder, LayoutConfig, LayoutConfigBuilder, LayoutError,
    LayoutKind, Part,
};

use super::steps::{Step, steps};
use super::{KvAxis, KvError, KvForm, TensorName};
use crate::dlpack::{ImportError, ImportedTensor};

/// The tensors of an engine, in the order of the layers.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum KvTensors<'a> {
    /// One a layer, with K and V, or the latent.
    Together(&'a [ImportedTensor]),
    /// K and V of each layer.
    Apart {
        /// Of K.
        keys: &'a [ImportedTensor],
        /// Of V.
        values: &'a [ImportedTensor],
    },
}

/// A layout over the tensors of an engine: its builder, which lacks but whether to register.
///
/// Every size of every tensor is compared with `config`, and every stride with the orders that a
/// layout can have: all layers as tensors of their own, blocks or outers first, or parts of one
/// tensor, block by block. The builder keeps the tensors.
///
/// K and V as tensors [apart](KvTensors::Apart) are layers of their own: 2·l is K of layer l,
/// 2·l + 1 is V, and the layout has one outer. Blocks of such a layout are the same bytes in the
/// same order as those of one with two outers.
///
/// ```
/// use terrane_interop::tensors::{KvError, KvForm, KvTensors, adopt_kv};
/// use terrane_interop::dlpack::ImportedTensor;
/// use terrane_layout::{BuildFailed, LayoutConfig, PhysicalLayout};
///
/// /// What vLLM calls `kv_caches`, one tensor a layer.
/// fn over(
///     config: &LayoutConfig,
///     kv_caches: &[ImportedTensor],
/// ) -> Result<Result<PhysicalLayout, BuildFailed>, KvError> {
///     let tensors = KvTensors::Together(kv_caches);
///     Ok(adopt_kv(config, &KvForm::VLLM, tensors)?.unregistered().build())
/// }
/// ```
///
/// # Errors
///
/// [`KvError`] names the tensor, the axis, what was expected and what was found. With gaps between
/// blocks, as a [block alignment](LayoutConfig::block_alignment) has them, it is
/// [`KvError::Memory`]: see [`adopt_kv_with_gaps`].
pub fn adopt_kv(
    config: &LayoutConfig,
    form: &KvForm,
    tensors: KvTensors<'_>,
) -> Result<LayoutBuilder<NeedsRegistration<Adopted>>, KvError> {
    adopt(config, form, tensors, false, &|tensor, _| tensor.memory())
}

/// As [`adopt_kv`], with the bytes that lie between blocks, and behind the last one as far as the
/// [block alignment](LayoutConfig::block_alignment) reaches.
///
/// # Errors
///
/// As for [`adopt_kv`].
///
/// # Safety
///
/// For as long as the layout lives, the bytes between elements of each tensor, and the padding
/// behind its last block (or behind the last block of all, if the tensors are parts of one), are as the
/// elements are: of the same live allocation, initialised if they
/// are the host's, and nobody uses them who does not synchronise with the users of the layout.
pub unsafe fn adopt_kv_with_gaps(
    config: &LayoutConfig,
    form: &KvForm,
    tensors: KvTensors<'_>,
) -> Result<LayoutBuilder<NeedsRegistration<Adopted>>, KvError> {
    adopt(config, form, tensors, true, &|tensor, region_bytes| {
        if tensor.is_read_only() {
            return Err(ImportError::ReadOnly);
        }
        let span = tensor.span();
        let span = Span { length: span.length.max(region_bytes), ..span };
        // SAFETY: whoever imported the tensor promised it of its elements, and the caller of what
        // lies between and behind them, for as long as the tensor is not released; it is the owner.
        Ok(unsafe { ForeignMemory::new(span, tensor.clone()) })
    })
}

/// How a tensor becomes memory, of a region of so many bytes.
type ToMemory<'a> =
    &'a dyn Fn(&ImportedTensor, ByteCount) -> Result<ForeignMemory<ImportedTensor>, ImportError>;

/// `gaps_promised` is the promise of [`adopt_kv_with_gaps`].
fn adopt(
    config: &LayoutConfig,
    form: &KvForm,
    tensors: KvTensors<'_>,
    gaps_promised: bool,
    to_memory: ToMemory<'_>,
) -> Result<LayoutBuilder<NeedsRegistration<Adopted>>, KvError> {
    let (config, tensors) = in_order(config, form, tensors)?;
    check_alike(&tensors)?;
    let kind = kind_of(&config, form, &tensors)?;
    let region_bytes = Geometry::new(&config, kind)?.region_bytes();
    let regions = match kind {
        LayoutKind::FullyContiguous if tensors.len() > 1 => {
            vec![joined(&config, &tensors, gaps_promised)?]
        }
        _ => tensors
            .iter()
            .map(|&(tensor, imported)| {
                let memory = to_memory(imported, region_bytes);
                memory.map(Region::new).map_err(|source| KvError::Memory { tensor, source })
            })
            .collect::<Result<_, _>>()?,
    };
    Ok(LayoutBuilder::new(config).kind(kind).adopt(regions))
}

type Named<'a> = (TensorName, &'a ImportedTensor);

/// The tensors in the order of the layout's layers, and the layout that they are of.
fn in_order<'a>(
    config: &LayoutConfig,
    form: &KvForm,
    tensors: KvTensors<'a>,
) -> Result<(LayoutConfig, Vec<Named<'a>>), KvError> {
    let layers = config.num_layers();
    let count = |what, found: usize| match u32::try_from(found) {
        Ok(found) if found == layers => Ok(()),
        _ => Err(KvError::TensorCount { what, expected: layers, found }),
    };
    let (has_outer, outer_dim) = (form.has_outer(), config.outer_dim());
    match tensors {
        KvTensors::Together(tensors) => {
            if !has_outer && outer_dim > 1 {
                let given = "one tensor a layer was given";
                return Err(KvError::Outers { has_outer, outer_dim, given });
            }
            count("the tensors", tensors.len())?;
            let named = (0..layers).map(TensorName::Layer).zip(tensors).collect();
            Ok((*config, named))
        }
        KvTensors::Apart { keys, values } => {
            if has_outer || outer_dim != 2 {
                let given = "K and V were given apart";
                return Err(KvError::Outers { has_outer, outer_dim, given });
            }
            count("the K tensors", keys.len())?;
            count("the V tensors", values.len())?;
            let pairs = (0..layers).zip(keys.iter().zip(values));
            let named = pairs.flat_map(|(layer, (key, value))| {
                [(TensorName::Key(layer), key), (TensorName::Value(layer), value)]
            });
            let twice = ByteCount::product(&[("num_layers", layers.into()), ("K and V", 2)])
                .map_err(LayoutError::from)?;
            let twice = u32::try_from(twice.get())
                .map_err(|_| LayoutError::TooLarge { bytes: config.total_bytes() })?;
            let builder = LayoutConfigBuilder::from(*config).outer_dim(1).num_layers(twice);
            Ok((builder.build()?, named.collect()))
        }
    }
}

/// Whether all tensors have one type of element, which strides can tell the place of, and are in one
/// memory.
fn check_alike(tensors: &[Named<'_>]) -> Result<(), KvError> {
    let Some((_, first)) = tensors.first() else { return Ok(()) };
    for &(tensor, imported) in tensors {
        let (expected, found) = (first.shape().element(), imported.shape().element());
        if expected != found {
            return Err(KvError::MixedElements { tensor, expected, found });
        }
        // A layout has the lanes of an element next to each other.
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

/// The order in which all the tensors have the blocks and outers of `config`.
///
/// If there is none, the error is that of the order which the form's axes suggest.
fn kind_of(
    config: &LayoutConfig,
    form: &KvForm,
    tensors: &[Named<'_>],
) -> Result<LayoutKind, KvError> {
    let first = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
    let second = LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };
    let place = |axis| form.axes().iter().position(|&other| other == axis);
    let outer_first = place(KvAxis::Outer).zip(place(KvAxis::Block)).is_some_and(|(o, b)| o < b);
    let suggested = if outer_first { second } else { first };
    let other = if outer_first { first } else { second };
    let expected = match fits(config, suggested, form, tensors) {
        Ok(()) => return Ok(suggested),
        Err(error) => error,
    };
    for kind in [other, LayoutKind::FullyContiguous] {
        if fits(config, kind, form, tensors).is_ok() {
            return Ok(kind);
        }
    }
    Err(expected)
}

fn fits(
    config: &LayoutConfig,
    kind: LayoutKind,
    form: &KvForm,
    tensors: &[Named<'_>],
) -> Result<(), KvError> {
    let geometry = Geometry::new(config, kind)?;
    for &(tensor, imported) in tensors {
        let steps = steps(config, &geometry, form, imported.shape().element())?;
        check_tensor(tensor, imported, &steps)?;
    }
    Ok(())
}

fn check_tensor(
    tensor: TensorName,
    imported: &ImportedTensor,
    steps: &[Step],
) -> Result<(), KvError> {
    let shape = imported.shape();
    let (sizes, strides) = (shape.sizes(), shape.strides());
    if sizes.len() != steps.len() {
        return Err(KvError::Rank { tensor, expected: steps.len(), found: sizes.len() });
    }
    for (axis, (&Step { axis: what, size: expected, .. }, &found)) in
        steps.iter().zip(sizes).enumerate()
    {
        if u64::try_from(found) != Ok(expected) {
            return Err(KvError::Size { tensor, axis, what, expected, found });
        }
    }
    for (axis, (step, &found)) in steps.iter().zip(strides).enumerate() {
        let &Step { axis: what, size, stride: expected } = step;
        // Along an axis of one element, strides lead nowhere.
        if size > 1 && u64::try_from(found) != Ok(expected) {
            return Err(KvError::Stride { tensor, axis, what, expected, found });
        }
    }
    Ok(())
}

/// One region for tensors that are parts of one: block by block, each with all layers.
///
/// There is no gap that is not another layer's, as each layer begins where the one before it ends
/// within a block, but the padding between blocks: that has to have been promised.
fn joined(
    config: &LayoutConfig,
    tensors: &[Named<'_>],
    gaps_promised: bool,
) -> Result<Region, KvError> {
    let geometry = Geometry::new(config, LayoutKind::FullyContiguous)?;
    let mut layers = (0..).zip(tensors);
    let Some((_, &(first_name, first))) = layers.next() else {
        return Err(KvError::TensorCount { what: "the tensors", expected: 1, found: 0 });
    };
    let base = first.location();
    for (layer, &(tensor, imported)) in layers {
        if imported.is_read_only() {
            return Err(KvError::Memory { tensor, source: ImportError::ReadOnly });
        }
        let offset = ByteCount::new(geometry.offset(0, layer, 0).offset);
        if base.checked_add(offset) != Some(imported.location()) {
            let found = ByteCount::new(distance(base, imported.location()));
            return Err(KvError::Place { tensor, expected: offset, found });
        }
    }
    if first.is_read_only() {
        return Err(KvError::Memory { tensor: first_name, source: ImportError::ReadOnly });
    }
    let length = geometry.region_bytes();
    if geometry.block_stride() != config.block_bytes() && !gaps_promised {
        let (elements, bytes) = (first.shape().elements(), length);
        let source = ImportError::Gaps { elements, bytes };
        return Err(KvError::Memory { tensor: first_name, source });
    }
    base.checked_add(length)
        .ok_or(LayoutError::AddressOverflow { part: Part::Base, offset: length })?;
    let span = Span { length, ..first.span() };
    let owners: Vec<ImportedTensor> =
        tensors.iter().map(|&(_, imported)| imported.clone()).collect();
    // SAFETY: every byte of the span is an element of one of the tensors, as they begin one after
    // the other, a layer apart, and their strides are those of blocks with all layers; or it is
    // padding of a block, of which the caller of `adopt_kv_with_gaps` has promised the same. None is
    // read-only; whoever imported them promised the rest, for as long as they are not released, and
    // they are the owners.
    Ok(Region::new(unsafe { ForeignMemory::new(span, owners) }))
}

/// How many bytes the second place is behind the first, of one memory.
fn distance(first: Location, second: Location) -> u64 {
    let number = |location| match location {
        Location::Host(address) => address.get(),
        Location::Device { address, .. } => address.get(),
        _ => 0,
    };
    number(second).saturating_sub(number(first))
}
