//! Views of a layout as the tensors of an engine.

use terrane_core::{ByteCount, Region};
use terrane_layout::{LayoutError, PhysicalLayout};
use terrane_transfer::{Access, Endpoint};

use super::strides::strides;
use super::{KvAxisOrder, KvError, TensorName};
use crate::dlpack::blocks::{self, HeldBlocks};
use crate::dlpack::{ElementType, ExportError, TensorExport, TensorShape};

/// One tensor of a layout in an engine's axis order: a shape, and its bytes.
#[derive(Clone, Debug)]
pub struct KvView {
    /// The name of the tensor.
    pub name: TensorName,
    /// The bytes from its first element to its last. Bytes between the elements may belong to other
    /// tensors.
    pub region: Region,
    /// Its shape and strides.
    pub shape: TensorShape,
}

/// The tensors of `layout` in the axis order of an engine, in the order of the layers. There is one
/// for each layer, or two (K and V) if the axis order has no outer axis.
///
/// # Errors
///
/// [`KvError::Element`] if the elements have another width than the layout's, and are not bytes.
/// Groups of elements and rows are bytes. [`KvError::HeadsNotStated`] if the axis order has heads
/// and the layout does not. [`KvError::Sections`] if there are several sections other than K and V
/// in this order. [`KvError::NotJoined`], [`KvError::Split`], [`KvError::Sections`] or
/// [`KvError::NotWhole`] if strides cannot express the axis order.
pub fn kv_views(
    layout: &PhysicalLayout,
    axis_order: &KvAxisOrder,
    element: ElementType,
) -> Result<Vec<KvView>, KvError> {
    let geometry = layout.geometry();
    let axes = strides(geometry, axis_order, element)?;
    let sizes: Vec<u64> = axes.iter().map(|axis| axis.size).collect();
    let strides: Vec<u64> = axes.iter().map(|axis| axis.stride).collect();
    let shape = TensorShape::strided(element, &sizes, &strides)?;
    // One section, or K and V.
    let outers = if axis_order.has_outer() { 1 } else { geometry.section_count() };
    let mut views = Vec::new();
    for layer in 0..geometry.num_layers() {
        for outer in 0..outers {
            let name = match (outers, outer) {
                (1, _) => TensorName::Layer(layer),
                (_, 0) => TensorName::Key(layer),
                _ => TensorName::Value(layer),
            };
            let at = geometry.try_offset(0, layer, outer).map_err(LayoutError::from)?;
            let region = layout.regions().get(ByteCount::new(at.region.into()).to_usize());
            let out_of_bounds = |source| KvError::Export { tensor: name, source };
            let Some(region) = region else {
                return Err(out_of_bounds(ExportError::Layout(LayoutError::AddressOverflow {
                    part: terrane_layout::Part::Region(at.region),
                    offset: ByteCount::new(at.offset),
                })));
            };
            let region = region
                .view(ByteCount::new(at.offset), shape.bytes())
                .map_err(|error| out_of_bounds(error.into()))?;
            views.push(KvView { name, region, shape: shape.clone() });
        }
    }
    Ok(views)
}

/// Exports the tensors of an endpoint in the axis order of an engine, read-only or writable.
///
/// All blocks are held until the deleter of the last tensor has been called. Until then,
/// conflicting transfers are refused, or run after the hold if they name its
/// [`ticket`](TensorExport::ticket). These are transfers that write the blocks and, for a writable
/// export, transfers that read them.
///
/// # Errors
///
/// As for [`kv_views`], and [`KvError::Export`] if transfers use its blocks.
pub fn kv_tensors(
    endpoint: &Endpoint,
    axis_order: &KvAxisOrder,
    element: ElementType,
    access: Access,
) -> Result<Vec<TensorExport>, KvError> {
    let views = kv_views(endpoint.layout(), axis_order, element)?;
    let first = views.first().map_or(TensorName::Layer(0), |view| view.name);
    let held = HeldBlocks::new(endpoint, &blocks::all(endpoint), access)
        .map_err(|source| KvError::Export { tensor: first, source })?;
    let exports = views.into_iter().map(|KvView { name, region, shape }| {
        let export = TensorExport::build(region, shape)
            .map_err(|source| KvError::Export { tensor: name, source })?
            .held_by(&held);
        Ok(if access == Access::Read { export.read_only() } else { export })
    });
    exports.collect()
}
